"""A fleet of processes, an open-loop load of signal and rank pairs, a record of each request."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.models import events
from tests.ports import free_port
from tests.serving import columns, write_checkpoint

LEAD_S = 0.08
RETURN_S = 1.0
USERS = [f"user-{i}" for i in range(90)]
HISTORIES = [columns(events(48, seed)) for seed in range(len(USERS))]
HITS = ("hbm_hit", "joined", "dram_hit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    kind: str
    user: str
    due_at: float
    took_s: float
    status: int  # 0 = no answer
    instance: str = ""
    outcome: str = ""
    version: str = ""


class Process:
    """One `python -m` command."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        self._arguments = arguments
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as out:
            command = [sys.executable, "-m", *self._arguments]
            self._popen = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def signal(self, number: int) -> None:
        assert self._popen is not None
        self._popen.send_signal(number)

    async def ended(self) -> int:
        assert self._popen is not None
        return await asyncio.to_thread(self._popen.wait, 30)

    def end(self) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The time limits of a run.

    Those of the light run are long, as other work may load the machine.
    """

    budget_s: float = 1.0  # of a request
    slack_s: float = 0.5  # an answer later than the deadline and that is none
    check_s: float = 0.4  # an instance's, to answer a check
    t_life_s: float = 3.0
    waits: bool = False  # a rank for its signal's answer


LIGHT = Times(budget_s=4.0, slack_s=3.0, check_s=1.5, t_life_s=1.0, waits=True)


class Fleet:
    """Instances, the router in front of them, and the file that lists them for the router."""

    def __init__(self, folder: Path, is_light: bool) -> None:
        self._folder = folder
        self._is_light = is_light
        self.times = LIGHT if is_light else Times()
        self.port = free_port()
        self.admin_port = free_port()
        self.instances: dict[str, Process] = {}
        self._ports: dict[str, int] = {}
        self._agents: dict[str, int] = {}
        self.router = Process(
            folder / "router.log", "npu_gr", "route", "--config", str(folder / "router.yaml")
        )
        if not is_light:
            write_checkpoint(folder / "old")
            write_checkpoint(folder / "new", seed=1)

    def launch(self, name: str, checkpoint: str = "old") -> None:
        """Start an instance, or start it again."""
        port = self._ports.setdefault(name, free_port())
        log = self._folder / f"{name}.log"
        if self._is_light:
            self.instances[name] = Process(log, "tests.route.light", name, str(port), checkpoint)
            self.instances[name].start()
            return
        table = {
            "checkpoint": str(self._folder / checkpoint),
            "kv_cache": {"hbm_bytes": 64_000_000, "dram_bytes": 16_000_000},
            "history_store": {"kind": "none"},
            "trigger": {"min_prefix_tokens": 4, "policy": "always"},
            "relay": {"t_life_s": self.times.t_life_s},
            "server": {
                "port": port,
                "admin_port": 0,
                "agent_port": self._agents.setdefault(name, free_port()),
                "drain_grace_s": 4.0,
            },
            "service": {"selfcheck_ratio": 0.0},
        }
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(table))
        self.instances[name] = Process(log, "npu_gr", "serve", "--config", str(path))
        self.instances[name].start()

    def announce(self, *names: str) -> None:
        """Write the list of instances that the router reads."""
        rows = [
            {
                "name": name,
                "host": "127.0.0.1",
                "port": self._ports[name],
                "agent_port": self._agents.get(name, 0),
            }
            for name in names
        ]
        path = self._folder / "instances.yaml"
        path.with_suffix(".new").write_text(yaml.safe_dump({"instances": rows}))
        path.with_suffix(".new").replace(path)

    def configure(self, **more: Any) -> None:
        """Write the router's settings."""
        table = {
            "port": self.port,
            "admin_port": self.admin_port,
            "objective_s": 0.2 if self._is_light else 0.05,
            "discovery": {"file": str(self._folder / "instances.yaml"), "period_s": 0.2},
            "health": {
                "interval_s": 0.25,
                "timeout_s": self.times.check_s,
                "slow_start_s": RETURN_S,
            },
            "relay": {"t_life_s": self.times.t_life_s},
            **more,
        }
        path = self._folder / "router.yaml"
        path.with_suffix(".new").write_text(yaml.safe_dump(table))
        path.with_suffix(".new").replace(path)

    def start_router(self) -> None:
        self.configure()
        self.router.start()

    def num_reloads(self) -> int:
        """How often the router has said that HAProxy has reloaded."""
        return (self._folder / "router.log").read_text().count("reloaded HAProxy:")

    async def states(self) -> dict[str, str]:
        """The state of each instance as HAProxy's metrics have it, by name."""
        async with aiohttp.request("GET", f"http://127.0.0.1:{self.admin_port}/metrics") as answer:
            text = await answer.text()
        found = re.findall(
            r'^haproxy_server_status\{proxy="users",server="(\w+)",state="(\w+)"\} '
            r"1$",
            text,
            re.MULTILINE,
        )
        return dict(found)

    async def until(
        self, claim: Callable[[dict[str, str]], bool], timeout_s: float = 60.0
    ) -> float:
        """Wait until the router's view of the instances fulfils the claim.

        Returns the seconds that it took.
        """
        began_at = time.monotonic()
        while True:
            with suppress(aiohttp.ClientError, OSError):
                if claim(await self.states()):
                    return time.monotonic() - began_at
            if time.monotonic() - began_at > timeout_s:
                raise AssertionError(f"not within {timeout_s} s: {await self.states()}")
            await asyncio.sleep(0.05)

    async def whole(self, num: int) -> float:
        """Wait until `num` instances are up."""
        return await self.until(
            lambda states: sum(state == "UP" for state in states.values()) == num
        )

    def begun(self) -> Counter[str]:
        """How often light instances have begun each signal, by its id."""
        texts = [path.read_text() for path in self._folder.glob("?.log")]
        return Counter(
            line for text in texts for line in text.splitlines() if line.startswith("signal-")
        )

    def end(self) -> None:
        for process in (self.router, *self.instances.values()):
            process.end()


@asynccontextmanager
async def fleet(folder: Path, *names: str, is_light: bool) -> AsyncIterator[Fleet]:
    made = Fleet(folder, is_light)
    try:
        for name in names:
            made.launch(name)
        made.announce(*names)
        made.start_router()
        await made.whole(len(names))
        yield made
    finally:
        made.end()


class Load:
    """An open loop of pairs: a signal and, `LEAD_S` later, its rank.

    Each is sent when it is due.
    """

    def __init__(self, port: int, pairs_per_s: float, times: Times) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/"
        self._period_s = 1 / pairs_per_s
        self._times = times
        self._pairs: dict[asyncio.Task[None], float] = {}  # -> when it was due
        self.samples: list[Sample] = []

    async def window(self, from_at: float, to_at: float) -> Window:
        """Wait for the pairs that were due before `to_at`. Returns the requests of that time."""
        await asyncio.gather(*(pair for pair, due_at in self._pairs.items() if due_at < to_at))
        return Window(self, from_at, to_at)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            stop = asyncio.Event()
            task = asyncio.create_task(self._run(http, stop))
            try:
                yield
            finally:
                stop.set()
                await task

    async def _run(self, http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        due_at = time.monotonic()
        index = 0
        while not stop.is_set():
            await asyncio.sleep(due_at - time.monotonic())
            self._pairs[asyncio.create_task(self._pair(http, due_at, index % len(USERS)))] = due_at
            due_at, index = due_at + self._period_s, index + 1
        await asyncio.gather(*self._pairs)

    async def _pair(self, http: aiohttp.ClientSession, due_at: float, index: int) -> None:
        """Send one pair. In the long run the rank does not wait for its signal's answer."""
        user = USERS[index]
        history = HISTORIES[index]
        first = asyncio.create_task(self._send(http, "signal", user, due_at, {"history": history}))
        lead_s = max(0.0, due_at + LEAD_S - time.monotonic())
        await asyncio.wait([first], timeout=None if self._times.waits else lead_s)
        await asyncio.sleep(due_at + LEAD_S - time.monotonic())
        body = {"history": history, "candidates": [1000 + i for i in range(8)]}
        await self._send(http, "rank", user, due_at + LEAD_S, body)
        await first

    async def _send(
        self,
        http: aiohttp.ClientSession,
        kind: str,
        user: str,
        due_at: float,
        body: dict[str, Any],
    ) -> None:
        budget_ms = f"{self._times.budget_s * 1e3:.0f}"
        headers = {
            "X-User-Id": user,
            "X-Request-Timeout-Ms": budget_ms,
            "X-Request-Id": f"{kind}-{due_at}",
        }
        timeout = aiohttp.ClientTimeout(total=self._times.budget_s + self._times.slack_s)
        status = 0
        instance = ""
        answer: dict[str, Any] = {}
        try:
            url = self._url + kind
            async with http.post(
                url, json={"user_id": user, **body}, headers=headers, timeout=timeout
            ) as got:
                status, instance = got.status, got.headers.get("X-NpuGr-Instance", "")
                answer = await got.json(content_type=None) or {}
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        sample = Sample(
            kind=kind,
            user=user,
            due_at=due_at,
            took_s=time.monotonic() - due_at,
            status=status,
            instance=instance,
            outcome=str(answer.get("outcome", "")),
            version=str(answer.get("model_version", "")),
        )
        self.samples.append(sample)


class Window:
    """The requests that were under way at any time between two instants."""

    def __init__(self, load: Load, from_at: float, to_at: float) -> None:
        self.samples = [
            s for s in load.samples if from_at <= s.due_at + s.took_s and s.due_at < to_at
        ]

    @property
    def lost(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.status == 0]

    @property
    def errors(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.status not in (200, 202)]

    def of(self, users: set[str]) -> list[Sample]:
        return [sample for sample in self.samples if sample.user in users]

    def hit_ratio(self, users: set[str]) -> float:
        ranks = [sample for sample in self.of(users) if sample.kind == "rank"]
        return sum(sample.outcome in HITS for sample in ranks) / max(1, len(ranks))

    def line(self, name: str) -> str:
        took = sorted(sample.took_s for sample in self.samples if sample.kind == "rank")
        served = Counter(sample.instance for sample in self.samples if sample.kind == "rank")
        p50, p99 = (took[int(len(took) * q)] * 1e3 for q in (0.5, 0.99))
        errors = Counter(f"{sample.kind} {sample.status}" for sample in self.errors)
        return (
            f"{name:<26} {len(self.samples):5d} requests, rank p50 {p50:6.1f} p99 {p99:6.1f} ms, "
            f"hits {self.hit_ratio(set(USERS)):.3f}, errors {dict(errors)}, ranks at "
            f"{dict(sorted(served.items()))}"
        )
