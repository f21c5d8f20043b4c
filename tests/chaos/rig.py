"""Real instances with the configuration that ships, and what breaks them.

Only paths and ports are overridden.

Every scene has a short form, which every run of the tests has, and a long one (`-m chaos`). The
short form asks what holds on any machine: nothing is lost, every status is one that the scene
allows, everything is well again afterwards. A busy machine may reject (429). The long form, alone
on a machine, compares with its own quiet reference.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import pytest

from benchmarks.loadgen import ClientReport, LoadStream, drive
from benchmarks.servers import Traffic, write_bodies
from npu_gr.model.weights import load
from tests.chaos.open_loop import Answers
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "cpu.yaml"
START_S = 90.0

NUM_USERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How long a scene is, and how far from the reference it may be."""

    name: str
    load_s: float  # of each load
    # share of requests that may fail where none should: what a busy machine costs
    most_failed: float


SHORT = Scale(name="short", load_s=2.0, most_failed=0.05)
LONG = Scale(name="long", load_s=30.0, most_failed=0.002)
each_scale = pytest.mark.parametrize(
    "scale",
    [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.chaos)],
)


class Instance:
    """`npu-gr serve` with `configs/cpu.yaml`, in a process of its own."""

    module = "npu_gr"  # that is run

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
        self.headers: dict[str, str] = {}  # of who reads its metrics
        settings = [
            f"server.port={self.port}",
            f"server.admin_port={self.admin_port}",
            f"checkpoint={checkpoint}",
            f"history_store.path={self.database}",
            *overrides,
        ]
        sets = [word for setting in settings for word in ("--set", setting)]
        self._command = [
            *(sys.executable, "-m", self.module, "serve", "--config", str(CONFIG)),
            *sets,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(
        self, stdout: IO[bytes] | int = subprocess.DEVNULL, limits: Mapping[int, int] | None = None
    ) -> None:
        """Start the process.

        Args:
            stdout: where its lines go.
            limits: `resource.RLIMIT_*` -> value.
        """
        with self.log.open("ab") as log:
            environment = {**os.environ, "HURT": str(self.folder)}
            self._process = subprocess.Popen(
                self._command, stdout=stdout, stderr=log, cwd=ROOT, env=environment
            )
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
        url = f"{self.admin_url}/metrics"
        async with aiohttp.request("GET", url, headers=self.headers) as answer:
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
    """Ranks that bring their histories, as dicts and as the load generator reads them."""

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
        return [
            {name: value for name, value in rank.items() if name != "history"}
            for rank in self.ranks
        ]


async def drive_all(instance: Instance, streams: Sequence[LoadStream], **more: Any) -> ClientReport:
    """Run the load generator, a process of its own, beside the event loop."""
    return await asyncio.to_thread(drive, instance.port, streams, watch=(instance.pid,), **more)


def check(hurt: Answers, quiet: Answers, scale: Scale, *allowed: int) -> None:
    """Check that nobody noticed who need not: allowed failures alone.

    In the long form few, and nearly as fast.
    """
    if scale is SHORT:
        for answers in (quiet, hurt):
            assert set(answers.statuses) <= {200, 202, 429, *allowed}, answers.failed[:3]
            assert answers.statuses[200], answers.failed[:3]
        return
    quiet.check(scale.most_failed)
    hurt.check(scale.most_failed, *allowed)
    assert hurt.quantile_s(0.95) <= 3 * quiet.quantile_s(0.95) + 0.05
