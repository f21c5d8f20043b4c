"""`npu-gr demo`: the whole path on real users of MovieLens-100K, from the log to served scores.

The oldest 80 % of each user's events train the ranker and fill the history store. The rest is the traffic, in slices of
at most `SLICE` events of a user: one rank request mixes the items of a slice with items drawn from the catalogue; after
its answer the events of the slice are sent. MovieLens' own stamps are poor arrivals (half of the ratings share the
previous rating's second), so arrivals are Poisson; order, users, histories and labels are real. At the end comes the
cascade: a generator that was trained on the same events retrieves, the ranker ranks, and films are shown by title.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console

from npu_gr.core.errors import CheckpointError, ConfigError, Unavailable
from npu_gr.core.kinds import RANK
from npu_gr.features.interactions import Interactions, ItemValues, movielens_100k, read_interactions, read_item_features
from npu_gr.features.load import load_interactions
from npu_gr.features.store import open_store
from npu_gr.model.weights import Checkpoint, save
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.replay.convert import ModelVocabulary, from_ratings
from npu_gr.replay.files import write
from npu_gr.replay.log import QueryRecord
from npu_gr.replay.options import ReplayOptions
from npu_gr.replay.report import Report
from npu_gr.replay.run import replay
from npu_gr.service.config import Config, load
from npu_gr.tools import demo_cascade
from npu_gr.train.data import to_train_on
from npu_gr.train.progress import training_progress
from npu_gr.train.rank.train import DEMO, train_rank

SLICE = 20  # held-out events of a request
CANDIDATES = 100  # of a rank
FEATURES = ("class", "release_year")
RATE_PER_S = 30.0
SIGNAL_LEAD_S = 0.05
HBM_BYTES = 8_388_608  # only a few dozen users fit, so that the DRAM tier has work to do
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PreparedDemo:
    """Everything to serve the demo's model and send it the held-out traffic."""

    config_path: Path
    overrides: list[str]
    config: Config
    records: list[QueryRecord]
    folder: Path
    log: Interactions
    source: Path


async def run(config_path: Path, folder: Path, console: Console, limit: int | None = None) -> Report:
    """Train or reuse the models, load the store, serve, replay, report and stop.

    Args:
        config_path: of the service.
        folder: for everything that the demo makes; what is there is reused.
        console: to print on.
        limit: replay only so many records; None = all.

    Raises:
        ConfigError, DataError: says what the demo needs and does not find.
        Unavailable: the service did not start, or did not stop cleanly.
    """
    prepared = await prepare(config_path, folder, console, _free_port(), _free_port())
    async with served(prepared) as url:
        found = await replay(prepared.records, options(prepared, url, limit))
        console.print(found.render())
        cascade = await demo_cascade.show(url, admin_url(prepared), prepared.log, prepared.source, console)
    (folder / "report.json").write_text(json.dumps(found.as_dict() | {"cascade": cascade}, indent=2) + "\n")
    return found


async def prepare(config_path: Path, folder: Path, console: Console, port: int, admin_port: int) -> PreparedDemo:
    """Train or reuse the models, and fill a fresh history store.

    Args:
        config_path: of the service.
        folder: for everything that the demo makes.
        console: to print on.
        port: of the service.
        admin_port: of its admin address.

    Raises:
        ConfigError, DataError: as `run`.
    """
    source = movielens_100k()
    log = read_interactions(source)
    checkpoint = _checkpoint(
        folder / "checkpoint", log, read_item_features(source.with_suffix(".item"), FEATURES), console
    )
    trained = to_train_on(log.users, log.timestamps, DEMO.split)
    history = log[trained]
    heldout = log[~trained]
    with training_progress(console) as progress:
        cascade = demo_cascade.prepare(folder, history, console, progress)
    await asyncio.to_thread(_forget, folder)
    vocabulary = ModelVocabulary(item_ids=checkpoint.item_ids, action_values=checkpoint.action_values)
    records = from_ratings(heldout, vocabulary, slice_events=SLICE, num_candidates=CANDIDATES)
    write(folder / "traffic.jsonl.gz", records)
    overrides = [
        f"checkpoint={folder / 'checkpoint'}",
        f"features.path={folder / 'history.db'}",
        f"server.port={port}",
        f"server.admin_port={admin_port}",
        f"kv.hbm_bytes={HBM_BYTES}",
        *cascade,
    ]
    config = load(config_path, overrides)
    await _fill(config, history, checkpoint, console)
    console.print(
        f"replaying {sum(r.kind == RANK.name for r in records)} ranks of {len({r.user_id for r in records})} users"
    )
    return PreparedDemo(config_path, overrides, config, records, folder, log, source)


@asynccontextmanager
async def served(prepared: PreparedDemo) -> AsyncIterator[str]:
    """Run the service in a process of its own; yields its URL. At the end of the block it drains and stops."""
    config = prepared.config
    process = await _serve(prepared.config_path, prepared.overrides, config, prepared.folder / "service.log")
    try:
        yield f"http://{config.server.host}:{config.server.port}"
    finally:
        await _stop(process)


def admin_url(prepared: PreparedDemo) -> str:
    """The admin address of the service."""
    server = prepared.config.server
    return f"http://{server.admin_host}:{server.admin_port}"


def options(prepared: PreparedDemo, url: str, limit: int | None = None, seed: int = 0) -> ReplayOptions:
    """The options with which the traffic is replayed.

    Args:
        prepared: the objective counts as the SLO.
        url: of the service.
        limit: replay only so many records; None = all.
        seed: of the arrivals.
    """
    return ReplayOptions(
        base_url=url,
        admin_url=admin_url(prepared),
        rate=RATE_PER_S,
        signal_lead_s=SIGNAL_LEAD_S,
        slo_s=prepared.config.slo.objective_s("rank"),
        limit=limit,
        seed=seed,
    )


def _checkpoint(folder: Path, log: Interactions, features: list[ItemValues], console: Console) -> Checkpoint:
    """Load the ranker from the folder; if there is none, train it and save it there."""
    try:
        checkpoint = load_checkpoint(folder)
    except CheckpointError:
        pass
    else:
        console.print(f"reusing the ranker {checkpoint.version} in {folder}")
        return checkpoint
    with training_progress(console) as show:
        unseen_traffic = msgspec.structs.replace(DEMO, refit=False)  # the newest fifth is the demo's traffic
        checkpoint, evaluation = train_rank(log, features, unseen_traffic, show)
    console.print(evaluation.table())
    save(checkpoint, folder)
    return load_checkpoint(folder)


def _forget(folder: Path) -> None:
    """Delete the history store of an earlier run, which that run's traffic has changed."""
    for old in folder.glob("history.db*"):
        old.unlink()


async def _fill(config: Config, history: Interactions, checkpoint: Checkpoint, console: Console) -> None:
    """Fill a fresh history store with the events before the traffic."""
    store = await open_store(config.features)
    if store is None:
        raise ConfigError("features.kind: the demo needs a history store")
    try:
        began_at = time.perf_counter()
        loaded = await load_interactions(store, history, checkpoint.action_names)
        console.print(f"{loaded.num_added} earlier events loaded in {time.perf_counter() - began_at:.1f} s")
    finally:
        await store.close()


async def _serve(config_path: Path, overrides: list[str], config: Config, log: Path) -> asyncio.subprocess.Process:
    """Start the service in a process of its own, and wait until it is ready."""
    settings = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(config_path), *settings]
    with await asyncio.to_thread(log.open, "wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    url = f"http://{config.server.host}:{config.server.port}/readyz"
    ends_at = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < ends_at and process.returncode is None:
            try:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return process
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    await _end(process)
    raise Unavailable(f"the service did not start; its log: {log}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Let the service drain, and check that it ends well."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        code = await asyncio.wait_for(process.wait(), 30.0)
    except TimeoutError as error:
        await _end(process)
        raise Unavailable("the service did not stop within 30 s of SIGTERM") from error
    if code:
        raise Unavailable(f"the service ended with code {code}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
