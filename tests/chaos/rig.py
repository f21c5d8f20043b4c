"""Real instances with the configuration that ships, and what breaks them. Only paths and ports are overridden.

Every scene has a short form, which every run of the tests has, and a long one (`-m chaos`). Bounds are relative to the
quiet reference that the same test measures before the fault. A scene has three attempts: a defect breaks its bounds
each time, a neighbour on the machine does not. If a timer of the rig itself was late in all three, nothing was told.
"""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ParamSpec

import aiohttp
import numpy as np
import pytest

from benchmarks.loadgen import ClientReport, LoadStream, StreamCounts, drive
from benchmarks.servers import Traffic, free_port, write_bodies
from npu_gr.model.weights import load

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "cpu.yaml"
START_S = 90.0
ATTEMPTS = 3
BUSY_S = 0.03  # a timer that is so late at its P95 says nothing about objectives of 50 ms

P = ParamSpec("P")

NUM_USERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How long a scene is, and how far from the reference it may be."""

    name: str
    load_s: float  # of each load
    least_ratio: float  # goodput under a fault, of the reference in the same test
    most_failed: float  # share of requests that may fail where none should: what a busy machine costs


SHORT = Scale(name="short", load_s=2.0, least_ratio=0.6, most_failed=0.05)
LONG = Scale(name="long", load_s=30.0, least_ratio=0.85, most_failed=0.002)
each_scale = pytest.mark.parametrize(
    "scale",
    [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.chaos)],
)


def three_attempts(scene: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Run a scene until it keeps its bounds, three times at most; skip it if the machine was too busy each time."""

    @functools.wraps(scene)
    async def attempts(*args: P.args, **kwargs: P.kwargs) -> None:
        late_s: list[float] = []
        while True:
            with own_lateness() as lateness_s:
                try:
                    return await scene(*args, **kwargs)
                except AssertionError:
                    if len(late_s) == ATTEMPTS - 1 and min(*late_s, lateness_s()) <= BUSY_S:
                        raise
            late_s.append(lateness_s())
            if len(late_s) == ATTEMPTS:
                pytest.skip(f"the machine is too busy: a timer of the test itself was {min(late_s) * 1e3:.0f} ms late")

    return attempts


@contextmanager
def own_lateness() -> Iterator[Callable[[], float]]:
    """Measure how late a timer of 10 ms is in a thread of its own, while the block runs: its P95, in seconds."""
    late_s: list[float] = []
    is_over = threading.Event()

    def measure() -> None:
        while not is_over.is_set():
            due_at = time.monotonic() + 0.01
            is_over.wait(0.01)
            late_s.append(time.monotonic() - due_at)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield lambda: float(np.quantile(late_s, 0.95)) if late_s else 0.0
    finally:
        is_over.set()
        thread.join()


class Instance:
    """`npu-gr serve` with `configs/cpu.yaml`, in a process of its own."""

    def __init__(self, folder: Path, checkpoint: Path, *overrides: str) -> None:
        """Start nothing yet.

        Args:
            folder: where it makes one of its own for its store and its log.
            checkpoint: that it serves.
            overrides: `section.key=value`: paths, ports and where Redis is, nothing else.
        """
        folder = Path(tempfile.mkdtemp(dir=folder))
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_port = free_port()
        self.admin_url = f"http://127.0.0.1:{self.admin_port}"
        self.database = folder / "history.db"
        self.log = folder / "instance.log"
        settings = [
            f"server.port={self.port}",
            f"server.admin_port={self.admin_port}",
            f"checkpoint={checkpoint}",
            f"features.path={self.database}",
            *overrides,
        ]
        sets = [word for setting in settings for word in ("--set", setting)]
        self._command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(CONFIG), *sets]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, stdout: IO[bytes] | int = subprocess.DEVNULL, limits: Mapping[int, int] | None = None) -> None:
        """Start the process.

        Args:
            stdout: where its lines go.
            limits: `resource.RLIMIT_*` -> value.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=stdout, stderr=log, cwd=ROOT)
        for which, value in (limits or {}).items():
            self.limit(which, value)

    async def ready(self) -> None:
        """Wait until it accepts work."""
        async with aiohttp.ClientSession() as http:
            give_up_at = time.monotonic() + START_S
            while True:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < give_up_at, self.log.read_text()
                with suppress(aiohttp.ClientError, OSError):
                    async with http.get(f"{self.url}/readyz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def limit(self, which: int, value: int) -> None:
        """Set a resource limit of the process, soft only where it will be lifted again."""
        resource.prlimit(self.pid, which, (value, resource.prlimit(self.pid, which)[1]))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self, within_s: float = 30.0) -> int:
        """Wait for its end. Returns its exit status."""
        return await asyncio.to_thread(self.process.wait, within_s)

    @property
    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    async def metric(self, sample: str) -> float:
        """The value of a sample of /metrics, named with its labels; 0 if it is not there."""
        async with aiohttp.request("GET", f"{self.admin_url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found = [line for line in lines if line.startswith(f"{sample} ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    def end(self) -> None:
        """Kill it, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def running(instance: Instance, **launch: Any) -> AsyncIterator[Instance]:
    """Run an instance while the block runs; it is ready when the block begins."""
    try:
        instance.launch(**launch)
        await instance.ready()
        yield instance
    finally:
        instance.end()


@dataclass(frozen=True, slots=True)
class Bodies:
    """What is sent: ranks of users that bring their histories, as dicts and as the load generator reads them."""

    ranks: list[dict[str, Any]]
    path: Path

    @classmethod
    def make(cls, checkpoint: Path, path: Path, tenant: str = "", prefix: str = "user") -> Bodies:
        """Make one rank for each user.

        Args:
            checkpoint: whose items are asked for.
            path: of the file.
            tenant: of all users.
            prefix: of the users' names.
        """
        ranks = Traffic(num_users=NUM_USERS).bodies(load(checkpoint), tenant, seed=1, prefix=prefix)
        return cls(ranks, write_bodies(path, ranks))

    def without_history(self) -> list[dict[str, Any]]:
        """The same ranks of users whose history is in the store."""
        return [{name: value for name, value in rank.items() if name != "history"} for rank in self.ranks]


async def drive_all(instance: Instance, streams: Sequence[LoadStream], **more: Any) -> ClientReport:
    """Run the load generator, a process of its own, beside the event loop."""
    return await asyncio.to_thread(drive, instance.port, streams, watch=(instance.pid,), **more)


async def reference(instance: Instance, bodies: Bodies, for_s: float = 1.0) -> StreamCounts:
    """What four clients get that send again at once: what the machine can do at this moment.

    Raises:
        AssertionError: nearly nothing; then it cannot tell anything.
    """
    stream = LoadStream(name="reference", mode="closed", bodies=bodies.path, to_s=for_s, connections=4)
    counts = (await drive_all(instance, [stream])).stream("reference")
    assert counts.in_time > 10 * for_s, f"{counts.in_time} of {counts.due} ranks were in time on an idle instance"
    return counts


def answered_per_s(counts: StreamCounts) -> float:
    """Answers a second, in time or late."""
    return (counts.in_time + counts.late) / counts.span_s


def check_failures(counts: StreamCounts, scale: Scale) -> None:
    """Check that next to nobody was refused, failed or given up."""
    found = {name: getattr(counts, name) for name in ("refused", "other", "timeouts", "errors")}
    assert sum(found.values()) <= scale.most_failed * counts.due, (counts.due, found)
