"""The server processes that benchmarks measure over HTTP, and their requests.

An instance is started as in the README, with the shipped configuration; only ports and paths are
overridden. FastAPI serves the same checkpoint (`cold.py`). Every server's scores are compared with
the reference model before anything is timed.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
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

from benchmarks.cold import ColdRanker
from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.core.request import Outcome
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, save
from npu_gr.model.weights import load as load_checkpoint
from tests.ports import free_port

# Switches admission off, for the baseline.
ADMISSION_OFF = ("admission.enabled=false", "brownout.enabled=false")
START_S = 90.0  # timeout of a server's start
TOLERANCE = 1e-4  # tolerance of a score, in standard deviations of the scores
ASK_S = 10.0  # timeout of a rank on an idle server
ROUND_S = 5.0  # time for one rank of each user, before the hits are counted
SAMPLE = 64  # number of ranks whose hits are counted
NUM_ITEMS = 1_682  # items of an untrained model, as in MovieLens-100K
FIRST_ID = 100_000
# variables of this process, which the servers must not inherit
OUR_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ROOT = Path(__file__).parents[1]

# ---- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The shape of the ranks."""

    history_tokens: int = 60
    num_candidates: int = 100
    num_users: int = 256  # returning users; few enough for their prefixes to stay in HBM
    num_tenants: int = 0  # number of tenants of the users, if no tenant is given

    def bodies(
        self, checkpoint: Checkpoint, tenant: str, seed: int, prefix: str = "user"
    ) -> list[dict[str, Any]]:
        """Make one rank for each user, with a constant history, so that the prefix is reused.

        Args:
            checkpoint: Checkpoint with the items.
            tenant: Tenant of all users; "" = see `num_tenants`.
            seed: Random seed of histories and candidates.
            prefix: Prefix of the users' names.
        """
        random = np.random.default_rng(seed)
        ids = checkpoint.item_ids
        made = []
        for number in range(self.num_users):
            times = 1_600_000_000 + np.cumsum(random.integers(1, 100_000, self.history_tokens))
            history = {
                "items": random.choice(ids, self.history_tokens).tolist(),
                "actions": random.integers(
                    0, len(checkpoint.model.config.actions), self.history_tokens
                ).tolist(),
                "timestamps": times.tolist(),
            }
            made.append(
                {
                    "user_id": f"{prefix}-{number}",
                    "tenant": f"tenant-{number % self.num_tenants}"
                    if self.num_tenants and not tenant
                    else tenant,
                    "history": history,
                    "candidates": random.choice(ids, self.num_candidates).tolist(),
                    "timestamp": int(times[-1]) + 60,
                }
            )
        return made


def write_bodies(
    path: Path,
    bodies: Sequence[dict[str, Any]],
    budgets_ms: tuple[float, float] | None = None,
    copies: int = 8,
) -> Path:
    """Write the requests for the load generator, one a line. Returns the path.

    Args:
        path: Path of the file.
        bodies: Bodies of ranks.
        budgets_ms: Range of the random time budgets, which are sent with the other headers of our
            client; None = without headers.
        copies: Number of copies of each body, with different budgets.
    """
    random = np.random.default_rng(len(bodies))
    with path.open("w") as file:
        for body in bodies:
            text = json.dumps(body) + "\n"
            if budgets_ms is None:
                file.write(text)
                continue
            who = f"X-User-Id: {body['user_id']}\tX-Tenant-Id: {body['tenant']}\t"
            for budget_ms in random.uniform(*budgets_ms, copies):
                file.write(f"{who}X-Request-Timeout-Ms: {budget_ms:.3f}\t{text}")
    return path


def make_checkpoint(folder: Path, num_layers: int, max_history_tokens: int, seed: int) -> None:
    """Save an untrained ranker of the demo's shape; speed does not depend on training.

    Args:
        folder: Folder of the checkpoint.
        num_layers: Number of layers.
        max_history_tokens: Longest history.
        seed: Random seed of the weights.
    """
    torch.manual_seed(seed)
    shape = HSTUConfig(
        num_items=NUM_ITEMS,
        actions=tuple(map(str, range(5))),  # names are indices, which the other servers read
        tasks=("click", "like"),
        num_layers=num_layers,
        max_history_tokens=max_history_tokens,
    )
    ids = np.arange(FIRST_ID, FIRST_ID + NUM_ITEMS)
    save(Checkpoint(model=HSTU(shape).eval(), item_ids=ids, name="untrained"), folder)


def place_checkpoint(given: Path | None, folder: Path, seed: int) -> Path:
    """Save a ranker whose actions are named by their indices, as in the requests.

    Args:
        given: Trained checkpoint; None = an untrained one of the demo's shape.
        folder: Folder of the new checkpoint.
        seed: Random seed of an untrained one.

    Returns:
        The folder.
    """
    if given is None:
        make_checkpoint(folder, 2, 256, seed)
    else:
        found = load_checkpoint(given)
        indices = tuple(map(str, range(len(found.model.config.actions))))
        save(replace(found, action_names=indices), folder)
    return folder


# ---- processes


class Process:
    """A server that can be started, stopped and started again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        folder: Path,
        ready: str,
        root: Path = ROOT,
    ) -> None:
        """Prepare a process; `start` starts it.

        Args:
            name: Name in errors, and of the log file.
            command: Command line.
            port: Port on loopback.
            folder: Folder of the log file.
            ready: Path that responds with 200 when the server is ready.
            root: Checkout of its code.
        """
        self.name = name
        self.port = port
        self.agent_port = 0  # HAProxy's agent-check
        self.log = folder / f"{slug(name)}.log"
        self._command = list(command)
        self._ready = ready
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the main process."""
        assert self._process is not None
        return self._process.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the main process and all its descendants."""
        return tuple(_tree(self.pid))

    def start(self) -> None:
        """Start the process; `wait` waits until it is ready."""
        inherited = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                self._command,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=self._root,
                env={**inherited, "PYTHONPATH": str(self._root)},
            )

    def wait(self) -> None:
        """Wait until the server is ready.

        Raises:
            Unavailable: The process ended, or took too long.
        """
        assert self._process is not None
        ends_at = time.monotonic() + START_S
        while not answers(self.port, self._ready):
            if self._process.poll() is not None or time.monotonic() > ends_at:
                last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
                raise Unavailable(f"bench: {self.name} did not start: {' '.join(last)}")
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        """Send a signal to the main process."""
        os.kill(self.pid, number)

    def ended(self, within_s: float = 30.0) -> int:
        """Wait for the end of the process; return its exit status."""
        assert self._process is not None
        return self._process.wait(within_s)

    def end(self) -> None:
        """Kill the process and its descendants, if they still run."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A measured server: its port, and its processes."""

    name: str
    port: int
    processes: tuple[Process, ...]  # the instance first, then its proxy

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all processes, the instance's main process first."""
        return tuple(pid for process in self.processes for pid in process.pids)


@contextmanager
def running(name: str, *processes: Process) -> Iterator[Server]:
    """Run processes during the block; requests go to the last one.

    Raises:
        Unavailable: A process does not start.
    """
    try:
        for process in processes:
            process.start()
            process.wait()
        yield Server(name=name, port=processes[-1].port, processes=processes)
    finally:
        for process in processes:
            process.end()


def instance(
    name: str,
    checkpoint: Path,
    folder: Path,
    overrides: Sequence[str] = (),
    config: Path | None = None,
    root: Path = ROOT,
) -> Process:
    """Make an instance that is started as in the README.

    Args:
        name: Name in lines, and of the log file.
        checkpoint: Checkpoint to serve.
        folder: Folder of its store and log.
        overrides: Overridden settings, `section.key=value`.
        config: Configuration file; None = the shipped `configs/cpu.yaml`.
        root: Checkout of its code.
    """
    port = free_port()
    file = (config or root / "configs" / "cpu.yaml").absolute()
    # the name until 0.2, of a checkout of older code
    is_old = re.search(r"^features:", file.read_text(), re.MULTILINE)
    store = "features" if is_old else "history_store"
    settings = [
        f"server.port={port}",
        "server.admin_port=0",
        f"checkpoint={checkpoint}",
        f"{store}.path={folder / f'{slug(name)}.db'}",
        *overrides,
    ]
    command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(file)]
    command += [word for setting in settings for word in ("--set", setting)]
    return Process(name, command, port, folder, "/readyz", root)


def fastapi(checkpoint: Path, folder: Path, backend: str = "cpu") -> Process:
    """Make a FastAPI server with the same ranker on a backend."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.cold", str(checkpoint), str(port), backend]
    return Process("FastAPI", command, port, folder, "/openapi.json")


def has_fastapi() -> bool:
    """Return whether FastAPI and uvicorn are installed."""
    return all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn"))


def behind(
    name: str,
    checkpoint: Path,
    folder: Path,
    overrides: Sequence[str] = (),
    config: Path | None = None,
) -> Process:
    """Make an instance that reports its concurrency limit to a proxy; arguments as `instance`."""
    agent_port = free_port()
    made = instance(
        name, checkpoint, folder, (*overrides, f"server.agent_port={agent_port}"), config
    )
    made.agent_port = agent_port
    return made


def proxy(name: str, instances: Sequence[Process], folder: Path) -> Process:
    """Make a HAProxy in front of instances, with the configuration of `npu-gr route`.

    Args:
        name: Name of its files.
        instances: Results of `behind`, including those that start later.
        folder: Folder of its files.

    Raises:
        ConfigError: HAProxy is not installed.
    """
    if shutil.which("haproxy") is None:
        raise ConfigError("bench: haproxy is not installed")
    port = free_port()
    listed = [
        {
            "name": f"gr-{at}",
            "host": "127.0.0.1",
            "port": one.port,
            "admin_port": 0,
            "agent_port": one.agent_port,
        }
        for at, one in enumerate(instances)
    ]
    settings = {"port": port, "admin_port": free_port(), "discovery": {"instances": listed}}
    file = folder / f"{slug(name)}.yaml"
    file.write_text(json.dumps(settings))
    return Process(
        name,
        [sys.executable, "-m", "npu_gr", "route", "--config", str(file)],
        port,
        folder,
        "/readyz",
    )


def _tree(pid: int) -> list[int]:
    """List a process and all its descendants."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    return found


def answers(port: int, path: str) -> bool:
    """Return whether a server responds to a GET with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# ---- responses


def ask(port: int, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank one body after the other over one connection.

    A rejection, e.g. after a stall, is retried for `ASK_S`.

    Raises:
        Unavailable: An idle server did not respond with 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    found = []
    try:
        for body in bodies:
            ends_at = time.monotonic() + ASK_S
            status = 429
            text = b""
            while status == 429 and time.monotonic() < ends_at:
                connection.request(
                    "POST", "/v1/rank", json.dumps(body), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                status = response.status
                text = response.read()
            if status != 200:
                raise Unavailable(f"bench: an idle server answered {status}: {text[:200]!r}")
            found.append(json.loads(text))
    finally:
        connection.close()
    return found


def check(server: Server, checkpoint: Path, bodies: Sequence[dict[str, Any]]) -> None:
    """Compare a server's scores, cold and with a cached prefix, with the reference model's.

    Raises:
        AssertionError: They differ; nothing was timed.
    """
    reference = ColdRanker(checkpoint, "reference")
    wanted = [reference.scores(body) for body in bodies]
    for given in (ask(server.port, bodies), ask(server.port, bodies)):
        for want, got in zip(wanted, given, strict=True):
            for task, column in want.items():
                drift = np.abs(np.array(got["scores"][task]) - np.array(column)).max() / max(
                    np.std(column), 1e-6
                )
                assert drift <= TOLERANCE, (
                    f"{server.name}: {task} differs by {drift:.1e} standard deviations"
                )


def hit_ratio(server: Server, bodies: Sequence[dict[str, Any]], seed: int) -> float:
    """Rank each user once, for at most `ROUND_S`, then measure the HBM hit ratio of random users.

    Args:
        server: Instance without other clients.
        bodies: One body a user.
        seed: Random seed of the users.
    """
    ends_at = time.monotonic() + ROUND_S
    for at in range(0, len(bodies), SAMPLE):
        if time.monotonic() < ends_at:
            ask(server.port, bodies[at : at + SAMPLE])
    drawn = np.random.default_rng(seed).integers(0, len(bodies), SAMPLE)
    outcomes = [answer["outcome"] for answer in ask(server.port, [bodies[at] for at in drawn])]
    return outcomes.count(Outcome.HBM_HIT.value) / len(outcomes)


def slug(name: str) -> str:
    """Convert a name to a part of a file name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
