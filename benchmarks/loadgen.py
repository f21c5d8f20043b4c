"""The load generator: compiles it, describes its streams, runs it, reads its counts.

It is a small C program (`loadgen.c`), because a client in Python is itself late at 7,000 requests a
second. It is compiled on first use into `build/`.
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
BIN_S = 0.05  # `BIN_NS` of loadgen.c
PATIENCE_S = 30.0  # after the end of the streams; then the client is considered stuck


class LoadStream(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind, between two instants of a run."""

    name: str
    mode: Literal["closed", "poisson", "bursts"]
    bodies: Path  # one request a line, see `servers.write_bodies`; drawn at random
    from_s: float = 0.0  # since the start of the run
    to_s: float
    connections: int
    rate_per_s: float = 0.0  # mode poisson
    burst_size: int = 0  # mode bursts
    every_s: float = 0.0  # mode bursts

    def moved(self, name: str, from_s: float, to_s: float) -> LoadStream:
        """Return the same requests under another name, between other instants.

        Args:
            name: Name of the new stream.
            from_s, to_s: Seconds since the start of the run.
        """
        return msgspec.structs.replace(self, name=name, from_s=from_s, to_s=to_s)

    def argument(self) -> str:
        """Return the stream as an argument of the client."""
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
    """A pause of a process, which the client stops with SIGSTOP and continues."""

    pid: int
    at_s: float  # since the start of the run
    for_s: float


class ClientTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles in milliseconds, each within 3 %."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


class StreamCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of one stream's requests, by the client's clock. Each is counted once."""

    name: str
    span_s: float
    server_cpu_s: float  # CPU time of all watched processes, while the stream ran
    due: int
    unsent: int  # timeouts for which no connection was free
    in_time: int  # answered within the goal
    late: int  # answered after the goal, before the deadline; also 504
    rejected: int  # 429
    other: int  # another status
    timeouts: int
    errors: int  # the connection failed or closed in the middle
    answered_ms: ClientTimes  # latency from the due instant, of all answers
    # counts by due instant, 50 ms each: in_time, late, rejected, other, timeouts, errors
    bins: list[tuple[int, int, int, int, int, int]]

    @property
    def good_per_s(self) -> float:
        """Answers within the goal, a second."""
        return self.in_time / self.span_s

    @property
    def rejected_per_s(self) -> float:
        """Rejections, a second."""
        return self.rejected / self.span_s

    @property
    def answered(self) -> int:
        """Answers with scores, including late ones."""
        return self.in_time + self.late

    @property
    def lost(self) -> int:
        """Requests that were not answered within the goal."""
        return self.due - self.in_time

    @property
    def unanswered(self) -> int:
        """Requests that got neither an answer nor a rejection."""
        return self.timeouts + self.errors + self.other


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the client."""

    cpu_s: float  # CPU time of the client
    ran_s: float
    late_tick_ms: ClientTimes  # lateness of the client's own 10 ms timer
    streams: list[StreamCounts]

    def stream(self, name: str) -> StreamCounts:
        """Return the counts of a stream."""
        return next(stream for stream in self.streams if stream.name == name)


def compiled(build: Path = Path("build")) -> Path:
    """Compile the client, unless the same source was compiled before.

    Raises:
        ConfigError: There is no C compiler, or it failed.
    """
    program = build / f"loadgen-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if program.exists():
        return program.absolute()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ConfigError("bench: the load generator needs a C compiler: cc, gcc or clang")
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
        port: Port of the server, on loopback.
        streams: Requests to send.
        watch: Processes whose CPU time is read at both ends of every stream.
        pause: Pause of a process; None = none.
        seed: Random seed of the arrivals and the order of the bodies.
        goal_s: SLO of an answer, from the due instant.
        deadline_s: Timeout of requests without a budget of their own.
        path: Path of the POST.

    Raises:
        ConfigError: The client cannot be compiled, or it failed.
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
