"""`npu-gr demo`: the three commands on real users of MovieLens-100K, and what they are worth under traffic.

    npu-gr prepare ml-100k.inter --items ml-100k.item --out .demo/data
    npu-gr train all .demo/data --out .demo
    npu-gr serve --config .demo/serve.yaml

Training makes two models of each kind (`npu_gr/train/site/make.py`): one that has not seen the
newest events, to be measured, and one of all events, to be served. So the demo serves twice:

    .demo/evaluated.yaml  the newest fifth of each user's events is replayed as traffic, in slices of at most `SLICE`:
                          one rank mixes the items of a slice with items drawn from the catalogue;
                          after its answer the slice's events are sent. It measures time alone,
                          without labels: the models know most of these events. Then the cascade is
                          asked for the last event of some users, which no model has seen: the
                          generator was trained on all but the last two, the others on all but the
                          last
    .demo/serve.yaml      films by title for a few users: what the third command answers

MovieLens' own stamps are poor arrivals (half of the ratings share the previous rating's second), so
arrivals are Poisson; order, users and histories are real.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.core.kinds import RANK
from npu_gr.dataset.build import prepare, summary
from npu_gr.dataset.files import Dataset, is_dataset, read_dataset
from npu_gr.history_store.interactions import Interactions, movielens_100k
from npu_gr.history_store.load import load_interactions
from npu_gr.history_store.open import open_store
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.replay.convert import ModelVocabulary, from_ratings
from npu_gr.replay.files import write
from npu_gr.replay.log import QueryRecord
from npu_gr.replay.page import page
from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.report import Report, Study
from npu_gr.replay.run import replay
from npu_gr.replay.tally import HITS
from npu_gr.service.config import Config, load
from npu_gr.tools.evaluate import EvaluationClient, ServiceEvaluation, evaluate
from npu_gr.train.cascade import JUDGED_USERS, next_events
from npu_gr.train.data import to_train_on
from npu_gr.train.options import curl, serve
from npu_gr.train.site.folder import asked_at, examples, known_user, recommend
from npu_gr.train.site.make import train_command, train_site
from npu_gr.train.site.report import SiteReport

SLICE = 20  # held-out events of a request
CANDIDATES = 100  # of a rank
RATE_PER_S = 30.0
SIGNAL_LEAD_S = 0.05
HBM_BYTES = 8_388_608  # only a few dozen users fit, so that the DRAM tier has work to do
WITHOUT_RELAY = 600  # records that are replayed without the relay too, for comparison
START_TIMEOUT_S = 60.0
SHOWN_USERS = 3
SHOWN_ITEMS = 5


@dataclass(frozen=True, slots=True)
class MadeDemo:
    """The site on disk, and the events behind it."""

    folder: Path
    dataset: Dataset
    log: Interactions
    site: SiteReport


@dataclass(frozen=True, slots=True)
class PreparedDemo:
    """Everything to serve the evaluated models and send them the held-out traffic."""

    made: MadeDemo
    instance: Instance
    records: list[QueryRecord]
    history: Interactions  # the events before the traffic


@dataclass(frozen=True, slots=True)
class Instance:
    """One service: what it is started with, and where its log goes."""

    config_path: Path
    overrides: Sequence[str]
    log: Path

    @property
    def config(self) -> Config:
        """What it is started with, read."""
        return load(self.config_path, self.overrides)

    @property
    def admin_url(self) -> str:
        """Its admin address."""
        server = self.config.server
        return f"http://{server.admin_host}:{server.admin_port}"


def make(folder: Path, console: Console, overrides: Sequence[str], num_threads: int) -> MadeDemo:
    """Run the first two commands; what they have made before is reused.

    Args:
        folder: of the site.
        console: to print on.
        overrides: of training options, as `train all --set` has them.
        num_threads: for training.

    Raises:
        ConfigError, DataError: says what the demo needs and does not find.
    """
    source = movielens_100k()
    items = source.with_suffix(".item")
    data = folder / "data"
    words = ["npu-gr", "prepare", str(source), "--items", str(items), "--out", str(data)]
    console.print(f"$ {shlex.join(words)}", soft_wrap=True)
    if is_dataset(data):
        console.print(f"reusing {data}")
    else:
        console.print(
            summary(prepare(source, data, items=items).manifest, data),
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    console.print(
        f"$ {train_command(data, folder, 'full', overrides, num_threads)}", soft_wrap=True
    )
    dataset = read_dataset(data)
    site = train_site(data, folder, overrides, num_threads, console)
    return MadeDemo(folder, dataset, dataset.interactions(), site)


async def run(
    made: MadeDemo, console: Console, limit: int | None = None, longest: int | None = None
) -> Report:
    """Measure the evaluated models under traffic, show what the served ones recommend, and sum up.

    Args:
        made: the site.
        console: to print on.
        limit: replay only so many records; None = all.
        longest: as `prepare_traffic`.

    Raises:
        ConfigError, DataError: as `prepare_traffic`.
        Unavailable: a service did not start, or did not stop cleanly.
    """
    prepared = await prepare_traffic(made, console, free_port(), free_port(), longest)
    some = min(WITHOUT_RELAY, limit or WITHOUT_RELAY)
    async with served(prepared.instance, "relay.enabled=false") as url:
        without = await replay(prepared.records, options(prepared, url, some))
    await refill(prepared)
    async with served(prepared.instance) as url:
        found = await replay(prepared.records, options(prepared, url, limit))
        console.print(found.render())
        evaluation = await evaluated(url, prepared.instance.admin_url, made.log)
        console.print(evaluation.table())
    ports = [f"server.port={free_port()}", f"server.admin_port={free_port()}"]
    instance = Instance(made.folder / "serve.yaml", ports, made.folder / "service.log")
    await fill(instance.config, made.log)
    console.print(f"$ npu-gr serve --config {instance.config_path}", soft_wrap=True)
    async with served(instance) as url:
        await show(url, made.log, made.dataset.names, console)
    table = found.as_dict() | {"without_relay": without.as_dict(), "cascade": evaluation.as_dict()}
    (made.folder / "replay.json").write_text(json.dumps(table, indent=2) + "\n")
    (made.folder / "report.html").write_text(
        page(Study(runs=[found]), "npu-gr demo: MovieLens-100K")
    )
    names = made.dataset.names
    latency_ratio = prepared.instance.config.slo.latency_ratio
    for line in sum_up(
        made.folder, made.site, found, without, evaluation, made.log, names, latency_ratio
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return found


async def prepare_traffic(
    made: MadeDemo, console: Console, port: int, admin_port: int, longest: int | None = None
) -> PreparedDemo:
    """Make the traffic of the held-out events, and fill a fresh history store with the events before it.

    Args:
        made: the site.
        console: to print on.
        port: of the service.
        admin_port: of its admin address.
        longest: only of so many users, those with the longest histories; None = of all.

    Raises:
        ConfigError, DataError: the site cannot be served.
    """
    trained = to_train_on(made.log.users, made.log.timestamps, "user-time")
    checkpoint = load_checkpoint(made.folder / "ranker" / "evaluated")
    vocabulary = ModelVocabulary(
        item_ids=checkpoint.item_ids, action_values=checkpoint.action_values
    )
    made_of = from_ratings(
        made.log[~trained], vocabulary, slice_events=SLICE, num_candidates=CANDIDATES
    )
    users = None if longest is None else longest_users(made.log[trained], longest)
    records = [
        msgspec.structs.replace(record, labels={})
        for record in made_of
        if users is None or record.user_id in users
    ]
    write(made.folder / "traffic.jsonl.gz", records)
    overrides = [
        f"features.path={made.folder / 'replayed.db'}",
        f"server.port={port}",
        f"server.admin_port={admin_port}",
        f"kv.hbm_bytes={HBM_BYTES}",
    ]
    instance = Instance(made.folder / "evaluated.yaml", overrides, made.folder / "service.log")
    prepared = PreparedDemo(made, instance, records, made.log[trained])
    await refill(prepared)
    num_users = len({record.user_id for record in records})
    console.print(
        f"replaying {sum(record.kind == RANK.name for record in records)} ranks of "
        f"{num_users} users"
    )
    return prepared


def longest_users(history: Interactions, num: int) -> set[str]:
    """Name the users with the most events, of equal ones the first."""
    counts = np.bincount(history.users, minlength=len(history.user_names))
    return {history.user_names[user] for user in np.argsort(-counts, kind="stable")[:num]}


async def fill(config: Config, events: Interactions) -> None:
    """Load events into the history store of a configuration."""
    store = await open_store(config.features)
    if store is None:
        raise ConfigError("features.kind: the demo needs a history store")
    checkpoint = load_checkpoint(Path(str(config.checkpoint)))
    try:
        await load_interactions(store, events, checkpoint.action_names)
    finally:
        await store.close()


async def refill(prepared: PreparedDemo) -> None:
    """Put the events before the traffic into a fresh history store: earlier traffic has changed the old one."""
    config = prepared.instance.config
    await asyncio.to_thread(_forget, Path(config.features.path))
    await fill(config, prepared.history)


@asynccontextmanager
async def served(instance: Instance, *more: str) -> AsyncIterator[str]:
    """Run a service in a process of its own; yields its URL.

    At the end of the block it drains and stops.

    Args:
        instance: to start.
        more: further overrides.

    Raises:
        Unavailable: it did not start, or did not stop cleanly.
    """
    config = instance.config
    process = await _serve(instance, more)
    try:
        yield f"http://{config.server.host}:{config.server.port}"
    finally:
        await _stop(process)


def options(
    prepared: PreparedDemo, url: str, limit: int | None = None, seed: int = 0
) -> ReplayOptions:
    """The options with which the traffic is replayed.

    Args:
        prepared: the objective counts as the SLO.
        url: of the service.
        limit: replay only so many records; None = all.
        seed: of the arrivals.
    """
    return ReplayOptions(
        base_url=url,
        rate=RATE_PER_S,
        signal_lead_s=SIGNAL_LEAD_S,
        slo_s=prepared.instance.config.slo.objective_s("rank"),
        limit=limit,
        seed=seed,
    )


def free_port() -> int:
    """Find a port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _forget(store: Path) -> None:
    for old in store.parent.glob(f"{store.name}*"):
        old.unlink()


async def _serve(instance: Instance, more: Sequence[str]) -> asyncio.subprocess.Process:
    settings = [word for override in (*instance.overrides, *more) for word in ("--set", override)]
    command = [
        sys.executable,
        "-m",
        "npu_gr",
        "serve",
        "--config",
        str(instance.config_path),
        *settings,
    ]
    server = instance.config.server
    return await started(
        "the service", command, f"http://{server.host}:{server.port}/readyz", instance.log
    )


async def started(
    name: str, command: Sequence[str], url: str, log: Path
) -> asyncio.subprocess.Process:
    """Start a process, and wait until it answers 200 at a URL.

    Raises:
        Unavailable: it did not.
    """
    with await asyncio.to_thread(log.open, "wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    ends_at = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < ends_at and process.returncode is None:
            with suppress(aiohttp.ClientError):
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return process
            await asyncio.sleep(0.1)
    await _end(process)
    raise Unavailable(f"{name} did not start; its log: {log}")


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


async def evaluated(url: str, admin_url: str, log: Interactions) -> ServiceEvaluation:
    """Ask the evaluated models for the last event of some users, which no model has seen.

    Args:
        url: of their service.
        admin_url: its admin address.
        log: all events.
    """
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    return await evaluate(
        url, admin_url, next_events(log, known, JUDGED_USERS), np.unique(log.items).tolist()
    )


async def show(url: str, log: Interactions, names: ItemNames, console: Console) -> None:
    """Print what a service recommends to a few users whose histories are in its store.

    Args:
        url: of the service.
        log: all events.
        names: of the items.
        console: to print on.
    """
    counts = np.bincount(log.users, minlength=len(log.user_names))
    users = np.argsort(counts, kind="stable")[len(counts) // 4 :: max(1, len(counts) // 4)][
        :SHOWN_USERS
    ]
    async with EvaluationClient(url) as client:
        for user in users.tolist():
            own = log[log.users == user]
            body = recommend(log.user_names[user], timestamp=asked_at(log))
            answer, _ = await client.post("/v1/recommend", body)
            console.print(_user_table(log.user_names[user], own, names, answer))


def _user_table(user: str, own: Interactions, names: ItemNames, answer: dict[str, Any]) -> Table:
    """What one user watched, what is recommended, and how long the stages took."""
    last = own[-SHOWN_ITEMS:]
    watched = [
        f"{title or item} ({value:g})"
        for item, title, value in zip(
            last.items, names.titles(last.items), last.values, strict=True
        )
    ]
    offered = [
        title or str(item) for item, title in zip(answer["items"], answer["titles"], strict=True)
    ]
    table = Table("watched last (stars)", "recommended", title=f"user {user}, {len(own)} films")
    for row in range(max(len(watched), len(offered))):
        table.add_row(
            *(texts[row] if row < len(texts) else "" for texts in (watched[::-1], offered))
        )
    stages = ", ".join(
        f"{stage['stage']} "
        f"{stage['began_s'] * 1e3:.0f}-{(stage['began_s'] + stage['took_s']) * 1e3:.0f} ms"
        for stage in answer["stages"]
    )
    table.caption = (
        f"{sum(answer['stages_s'].values()) * 1e3:.0f} ms: {stages}; "
        f"{answer['num_candidates']} candidates; the rank read {answer['prefix_tokens']} of "
        f"{answer['history']['num_tokens']} history tokens from cached KV ({answer['outcome']})"
    )
    return table


def sum_up(
    folder: Path,
    site: SiteReport,
    found: Report,
    without: Report,
    evaluation: ServiceEvaluation,
    log: Interactions,
    names: ItemNames,
    latency_ratio: float,
) -> list[str]:
    """Sum a demo up in about ten lines.

    Args:
        folder: of the demo.
        site: what was trained.
        found: of the replayed traffic.
        without: of a part of it, replayed without the relay.
        evaluation: of the cascade.
        log: all events.
        names: of the items.
        latency_ratio: share of the ranks that should be in time.
    """
    hits = sum(found.hit_ratio(hit) for hit in HITS)
    kept = "kept" if found.attainment_ratio >= latency_ratio else "MISSED"
    late = (
        ("; the load generator was late, so these times are partly its own")
        if found.was_late
        else ""
    )
    ways = evaluation.as_dict()["ways"]
    others = ", ".join(
        f"{way} alone {row['hr_at_10']:.3f}" for way, row in ways.items() if way != "recommend"
    )
    return [
        "",
        f"trained   {', '.join(site.parts)} on {site.num_events:,} events of "
        f"{site.num_users:,} users",
        f"in time   {found.attainment_ratio:.1%} of {found.num_ranks} ranks within "
        f"{found.slo_s * 1e3:g} ms; objective {latency_ratio:.0%}: {kept}{late}",
        f"latency   {_times(found)}; without the relay {_times(without)} (the first "
        f"{without.num_ranks} of them)",
        f"relay     {hits:.1%} of the ranks found the user's KV ready, "
        f"{found.prefix_tokens_ratio:.1%} of the history "
        f"tokens were read from it{_device_times(found, without)}",
        f"quality   HR@10 of the last event of {len(evaluation.ranks['rank'])} users: recommend "
        f"{ways['recommend']['hr_at_10']:.3f}; {others} (evaluated models, which had not seen it)",
        f"          {evaluation.why}",
        f"left      {folder}: models of all events, {folder / 'serve.yaml'}; "
        f"{folder / 'report.html'} has the plots",
        f"serve     {serve(folder / 'serve.yaml')}",
        f"ask       {curl('/v1/recommend', known_user(examples(log, names)))}",
        f"more      {folder / 'README.md'} has calls for a new user and a new item; long "
        "histories, where the relay pays: npu-gr demo --longest 100, python -m benchmarks relay",
    ]


def _times(report: Report) -> str:
    return (
        f"P50 {report.latency_ms('rank', 'p50'):.1f} ms, P99 "
        f"{report.latency_ms('rank', 'p99'):.1f} ms"
    )


def _device_times(found: Report, without: Report) -> str:
    """What the relay spares the device: its share of a latency that other work is a part of."""
    ours, other = (report.stages_p50_ms.get("device") for report in (found, without))
    if ours is None or other is None:
        return ""
    return f"; P50 of a rank on the device {ours:.1f} ms, without the relay {other:.1f} ms"
