"""The load generator: compile it, describe its streams, run it, read its counts.

It is a small C program (`loadgen.c` beside this file), because at 7,000 requests a second a client
in Python is late by itself. It is compiled on first use into `build/`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from npu_gr.core.errors import ConfigError

SOURCE = Path(__file__).with_name("loadgen.c")
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
BIN_S = 0.05  # `BIN_NS` there
PATIENCE_S = 30.0  # beside the streams' own time; then the client hangs


class LoadStream(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one sort, between two instants of a run."""

    name: str
    mode: Literal["closed", "poisson", "bursts"]
    bodies: Path  # one request a line, as `servers.write_bodies` makes them; drawn at random
    from_s: float = 0.0  # since the run began
    to_s: float
    connections: int
    rate_per_s: float = 0.0  # of poisson
    burst_size: int = 0  # of bursts
    every_s: float = 0.0  # of bursts

    def moved(self, name: str, from_s: float, to_s: float) -> LoadStream:
        """The same requests under another name, between other instants.

        Args:
            name: of the new stream.
            from_s, to_s: since the run began.
        """
        return msgspec.structs.replace(self, name=name, from_s=from_s, to_s=to_s)

    def argument(self) -> str:
        """Write it as the client reads it."""
        words = {
            "name": self.name,
            "mode": self.mode,
            "conns": self.connections,
            "from": self.from_s,
            "to": self.to_s,
            "bodies": self.bodies,
        }
        if self.mode == "poisson":
            words["rate"] = self.rate_per_s
        if self.mode == "bursts":
            words |= {"size": self.burst_size, "every": self.every_s}
        return ",".join(f"{key}={value}" for key, value in words.items())


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """The client stops a process once, with SIGSTOP, and lets it go on."""

    pid: int
    at_s: float  # since the run began
    for_s: float


class ClientTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles in milliseconds, each within 3 %."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


class StreamCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one stream's requests, by the client's clock. Each request is counted once."""

    name: str
    span_s: float
    server_cpu_s: float  # of all watched processes, while the stream ran
    due: int
    unsent: int  # of the timeouts: no connection was free
    in_time: int
    late: int  # answered after the goal, before the deadline; 504 too
    rejected: int  # 429
    other: int  # another status
    timeouts: int
    errors: int  # the connection failed or closed in the middle
    answered_ms: ClientTimes  # in time or late, from the due instant
    # by when due, 50 ms each: in_time, late, rejected, other, ...
    bins: list[tuple[int, int, int, int, int, int]]

    @property
    def good_per_s(self) -> float:
        """Answers in time, a second."""
        return self.in_time / self.span_s

    @property
    def rejected_per_s(self) -> float:
        """Rejections, a second."""
        return self.rejected / self.span_s

    @property
    def answered(self) -> int:
        """Answers with scores, in time or late."""
        return self.in_time + self.late

    @property
    def lost(self) -> int:
        """Requests that were not answered in time."""
        return self.due - self.in_time

    @property
    def unanswered(self) -> int:
        """Requests that got neither an answer nor a rejection."""
        return self.timeouts + self.errors + self.other


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the client."""

    cpu_s: float  # of the client
    ran_s: float
    late_tick_ms: ClientTimes  # how late the client's own timer of 10 ms was
    streams: list[StreamCounts]

    def stream(self, name: str) -> StreamCounts:
        """The counts of the stream of that name."""
        return next(stream for stream in self.streams if stream.name == name)


def compiled(build: Path = Path("build")) -> Path:
    """Compile the client, unless this very source was compiled before.

    Raises:
        ConfigError: there is no C compiler, or it failed.
    """
    program = build / f"loadgen-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if program.exists():
        return program.absolute()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ConfigError("bench: the load generator is in C and there is no cc, gcc or clang here")
    build.mkdir(parents=True, exist_ok=True)
    fresh = program.with_name(f"{program.name}.{os.getpid()}")
    done = subprocess.run(
        [compiler, *FLAGS, "-o", str(fresh), str(SOURCE), "-lm"], capture_output=True, text=True
    )
    if done.returncode:
        raise ConfigError(f"bench: {compiler} failed: {done.stderr.strip()}")
    fresh.replace(program)
    return program.absolute()


def drive(
    port: int,
    streams: Sequence[LoadStream],
    *,
    watch: Sequence[int] = (),
    pause: Pause | None = None,
    seed: int = 0,
    goal_s: float = 0.05,
    deadline_s: float = 1.0,
    path: str = "/v1/rank",
) -> ClientReport:
    """Run the client once.

    Args:
        port: of the server, on loopback.
        streams: what it sends.
        watch: processes whose CPU time is read at both ends of every stream.
        pause: of a process.
        seed: of arrivals and of the order of the bodies.
        goal_s: an answer is in time within it, from the due instant.
        deadline_s: the client gives up after it, unless the request names its own budget.
        path: of the POST.

    Raises:
        ConfigError: the client cannot be compiled, or it failed.
    """
    command = [str(compiled()), "--port", str(port), "--path", path, "--seed", str(seed)]
    command += ["--goal-ms", str(goal_s * 1e3), "--deadline-ms", str(deadline_s * 1e3)]
    for stream in streams:
        command += ["--stream", stream.argument()]
    if watch:
        command += ["--watch", ",".join(map(str, watch))]
    if pause is not None:
        command += ["--pause", f"{pause.pid},{pause.at_s},{pause.for_s}"]
    most_s = max(stream.to_s for stream in streams) + deadline_s + PATIENCE_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=most_s)
    if done.returncode:
        raise ConfigError(
            f"bench: {done.stderr.strip() or f'the client ended with {done.returncode}'}"
        )
    return msgspec.json.decode(done.stdout, type=ClientReport)
