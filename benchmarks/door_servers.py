"""The servers of `python -m benchmarks door`, each a process of its own, and what is sent to them.

Ours is started as the README says, with the configuration file as it is; only ports and paths are overridden. The peers
run the same checkpoint. Every server's scores are compared with the reference model before anything is timed.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.door_cold import ColdRanker
from npu_gr.core.errors import Unavailable
from npu_gr.core.request import Outcome
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, save
from npu_gr.model.weights import load as load_checkpoint

# How admission is switched off, for the baseline: it stands only here.
ADMISSION_OFF = ("admission.enabled=false", "brownout.enabled=false")
PEERS = {"FastAPI": "fastapi", "LitServe": "litserve"}  # name -> its package; its program is door_<package>.py
START_S = 90.0  # a server must be ready within it
TOLERANCE = 1e-4  # of a score, in standard deviations of the scores
ASK_S = 10.0  # for one rank while nobody else asks
ROUND_S = 5.0  # for one rank of everybody, before the hits are counted
SAMPLE = 64  # ranks whose hits are counted
NUM_ITEMS = 1_682  # of a model made here, as MovieLens-100K has
FIRST_ID = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What ranks look like."""

    history_tokens: int = 60
    num_candidates: int = 100
    num_users: int = 256  # who come again and again; few enough for their prefixes to stay in HBM

    def bodies(self, checkpoint: Checkpoint, tenant: str, seed: int, prefix: str = "user") -> list[dict[str, Any]]:
        """Make one rank for each user: always with the same history, so that the prefix is found.

        Args:
            checkpoint: whose items are asked for.
            tenant: of all users.
            seed: of histories and candidates.
            prefix: of the users' names.
        """
        random = np.random.default_rng(seed)
        ids = checkpoint.item_ids
        made = []
        for number in range(self.num_users):
            times = 1_600_000_000 + np.cumsum(random.integers(1, 100_000, self.history_tokens))
            history = {
                "items": random.choice(ids, self.history_tokens).tolist(),
                "actions": random.integers(0, len(checkpoint.model.config.actions), self.history_tokens).tolist(),
                "timestamps": times.tolist(),
            }
            made.append(
                {
                    "user_id": f"{prefix}-{number}",
                    "tenant": tenant,
                    "history": history,
                    "candidates": random.choice(ids, self.num_candidates).tolist(),
                    "timestamp": int(times[-1]) + 60,
                }
            )
        return made


def write_bodies(path: Path, bodies: Sequence[dict[str, Any]]) -> Path:
    """Write the bodies as the load generator reads them: one a line. Returns the path."""
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def make_checkpoint(folder: Path, num_layers: int, max_history_tokens: int, seed: int) -> None:
    """Save an untrained ranker of the demo's shape; speed does not depend on training.

    Args:
        folder: where.
        num_layers: of the ranker.
        max_history_tokens: that it reads.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    shape = HSTUConfig(
        num_items=NUM_ITEMS,
        actions=tuple(map(str, range(5))),  # a name is its index: the other servers read indices
        tasks=("click", "like"),
        num_layers=num_layers,
        max_history_tokens=max_history_tokens,
    )
    ids = np.arange(FIRST_ID, FIRST_ID + NUM_ITEMS)
    save(Checkpoint(model=HSTU(shape).eval(), item_ids=ids, name="untrained"), folder)


def place_checkpoint(given: Path | None, folder: Path, num_layers: int, max_history_tokens: int, seed: int) -> Path:
    """Put a ranker into a folder whose actions are named by their indices, as traffic and the other servers name them.

    Args:
        given: a trained one; None = an untrained one of the demo's shape.
        folder: where.
        num_layers, max_history_tokens, seed: of an untrained one.

    Returns:
        The folder.
    """
    if given is None:
        make_checkpoint(folder, num_layers, max_history_tokens, seed)
    else:
        found = load_checkpoint(given)
        indices = tuple(map(str, range(len(found.model.config.actions))))
        save(replace(found, action_names=indices), folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server, with the processes that work for it."""

    name: str
    port: int
    pids: tuple[int, ...]  # its main process first


@contextmanager
def our_server(
    name: str, config: Path, checkpoint: Path, folder: Path, overrides: Sequence[str] = ()
) -> Iterator[Server]:
    """Run an instance as the README starts it.

    Args:
        name: in lines and of its log.
        config: its file, as it ships.
        checkpoint: that it serves.
        folder: for its store and its log.
        overrides: `section.key=value`.

    Raises:
        Unavailable: it does not start.
    """
    port = free_port()
    settings = [
        f"server.port={port}",
        "server.admin_port=0",
        f"checkpoint={checkpoint}",
        f"features.path={folder / f'{_slug(name)}.db'}",
        *overrides,
    ]
    command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(config)]
    command += [word for setting in settings for word in ("--set", setting)]
    with process(name, command, port, folder, ready="/readyz") as server:
        yield server


@contextmanager
def peer_server(name: str, checkpoint: Path, folder: Path) -> Iterator[Server]:
    """Run a peer with the same checkpoint.

    Args:
        name: a key of `PEERS`.
        checkpoint: that it serves.
        folder: for its log.

    Raises:
        Unavailable: it does not start.
    """
    port = free_port()
    command = [sys.executable, "-m", f"benchmarks.door_{PEERS[name]}", str(checkpoint), str(port)]
    with process(name, command, port, folder, ready="/openapi.json") as server:
        yield server


def missing_peers() -> list[str]:
    """The peers whose package is not installed here."""
    return [name for name, package in PEERS.items() if importlib.util.find_spec(package) is None]


@contextmanager
def process(name: str, command: Sequence[str], port: int, folder: Path, ready: str) -> Iterator[Server]:
    """Run a server and what it starts, until the block ends. Raises Unavailable where it does not become ready."""
    log = folder / f"{_slug(name)}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        ends_at = time.monotonic() + START_S
        while not _answers(port, ready):
            if process.poll() is not None or time.monotonic() > ends_at:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise Unavailable(f"bench door: {name} did not start: {' '.join(last)}")
            time.sleep(0.1)
        yield Server(name=name, port=port, pids=tuple(_tree(process.pid)))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group: a peer has workers of its own
        process.wait()


def _tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _tree(int(child))
    return found


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def ask(port: int, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank one body after the other over one connection. A refusal, as after a stall, is asked again for `ASK_S`.

    Raises:
        Unavailable: one was not answered with 200, although nobody else asks.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    answers = []
    try:
        for body in bodies:
            ends_at = time.monotonic() + ASK_S
            status = 429
            text = b""
            while status == 429 and time.monotonic() < ends_at:
                connection.request("POST", "/v1/rank", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                status = response.status
                text = response.read()
            if status != 200:
                raise Unavailable(f"bench door: an idle server answered {status}: {text[:200]!r}")
            answers.append(json.loads(text))
    finally:
        connection.close()
    return answers


def check(server: Server, checkpoint: Path, bodies: Sequence[dict[str, Any]]) -> None:
    """Compare a server's scores, cold and from a cached prefix, with those of the reference model.

    Raises:
        AssertionError: they differ; nothing was timed.
    """
    reference = ColdRanker(checkpoint, "reference")
    wanted = [reference.scores(body) for body in bodies]
    for answers in (ask(server.port, bodies), ask(server.port, bodies)):
        for want, got in zip(wanted, answers, strict=True):
            for task, column in want.items():
                drift = np.abs(np.array(got["scores"][task]) - np.array(column)).max() / max(np.std(column), 1e-6)
                assert drift <= TOLERANCE, f"{server.name}: {task} differs by {drift:.1e} standard deviations"


def hit_ratio(server: Server, bodies: Sequence[dict[str, Any]], seed: int) -> float:
    """Rank everybody once, as far as `ROUND_S` goes; then the share of ranks of random users that find HBM warm.

    Args:
        server: ours; nobody else asks it.
        bodies: one a user.
        seed: of the users.
    """
    ends_at = time.monotonic() + ROUND_S
    for at in range(0, len(bodies), SAMPLE):
        if time.monotonic() < ends_at:
            ask(server.port, bodies[at : at + SAMPLE])
    drawn = np.random.default_rng(seed).integers(0, len(bodies), SAMPLE)
    outcomes = [answer["outcome"] for answer in ask(server.port, [bodies[at] for at in drawn])]
    return outcomes.count(Outcome.HBM_HIT.value) / len(outcomes)


def free_port() -> int:
    """A port on loopback that nobody has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)
