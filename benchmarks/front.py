"""`python -m benchmarks front`: what HTTP costs the process that feeds the device, with front workers and without.

Real server processes and a client in C on one machine, ranks whose prefixes are cached. CPU time is the kernel's
(`/proc/PID/task/*/schedstat`) and is read for each process by itself, so that it says the same on a busy machine and on
a quiet one; ranks a second need as many free cores as there are processes.

    stub     the ranker answers zeros at once: what is left is everything but the model
    model    the ranker computes
    bodies   two callers send histories of 16,384 events, and two others 4 MB of what is no JSON, while ranks go on:
             how late the timers of the engine's event loop are
    calls    Python functions that a cached rank calls on the engine's event loop: `front_calls.py`
"""

from __future__ import annotations

import http.client
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.door_client import LoadStream, drive
from benchmarks.door_servers import Server, Traffic, ask, free_port, place_checkpoint, process, write_bodies
from benchmarks.front_calls import calls_a_rank
from benchmarks.line import Line
from npu_gr.core.errors import ConfigError
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.service.config import load as load_config

PARTS = ("stub", "model", "bodies", "calls")
CLIENTS = 16
LONG_EVENTS = 16_384
GARBAGE_BYTES = 4_000_000
TARGET_MS = {"stub": 0.15, "model": 0.20}  # CPU of the engine a cached rank, beyond the model's pass
TARGET_GAIN = 1.5  # ranks a second of two workers with a stub, against one process
TARGET_LATE_MS = 0.5  # that long bodies move the engine's loop by
MOST_LATE_S = 0.0005  # an edge of the histogram of the loop's lateness
_OFF = ("admission.enabled=false", "brownout.enabled=false")  # costs are compared at a fixed number of callers


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """What `python -m benchmarks front` is asked for."""

    config: Path  # of the instance, as it ships
    checkpoint: Path | None = None  # None: an untrained model is made
    workers: Sequence[int] = (1, 2)
    seconds: float = 5.0
    seed: int = 0
    parts: Sequence[str] = PARTS
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one load cost."""

    ranks_per_s: float
    cpu_ms: dict[str, float]  # role -> CPU a rank, of all its processes
    loop_ms: float  # of it, on the event loop that feeds the device
    late_ratio: float  # share of that loop's timers that were over MOST_LATE_S late
    late_ms: float  # their mean lateness


def lines(options: FrontOptions) -> Iterator[Line]:
    """Run the parts.

    Raises:
        ConfigError: an unknown part, or the client cannot be compiled. Unavailable: a server does not start.
    """
    if wrong := [part for part in options.parts if part not in PARTS]:
        raise ConfigError(f"{wrong[0]!r} is none of {', '.join(PARTS)}")
    with TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = place_checkpoint(options.checkpoint, folder / "checkpoint", 2, 256, options.seed)
        bodies = options.traffic.bodies(load_checkpoint(checkpoint), "", options.seed)
        write_bodies(folder / "ranks", bodies)
        _write_long(folder, bodies)
        for part in ("stub", "model"):
            if part in options.parts:
                yield from _costs(part, options, checkpoint, folder, bodies)
        if "bodies" in options.parts:
            yield from _lateness(options, checkpoint, folder, bodies)
        if "calls" in options.parts:
            settings = (f"checkpoint={checkpoint}", f"features.path={folder / 'calls.db'}", *_OFF)
            calls = calls_a_rank(load_config(options.config, settings), bodies)
            yield _line("calls of the engine's event loop a rank", calls, "calls", "the same", None, None)


def _write_long(folder: Path, bodies: Sequence[dict[str, Any]]) -> None:
    """Write the long bodies: ranks of many events, and bytes that are no JSON."""
    random = np.random.default_rng(0)
    items = bodies[0]["candidates"]
    history = {
        "items": random.choice(items, LONG_EVENTS).tolist(),
        "actions": random.integers(0, 5, LONG_EVENTS).tolist(),
        "timestamps": (1_600_000_000 + np.arange(LONG_EVENTS)).tolist(),
    }
    write_bodies(folder / "long", [{**bodies[0], "user_id": f"long-{n}", "history": history} for n in range(4)])
    (folder / "garbage").write_text("[" * GARBAGE_BYTES + "\n")


# ---- CPU a rank


def _costs(
    part: str, options: FrontOptions, checkpoint: Path, folder: Path, bodies: list[dict[str, Any]]
) -> Iterator[Line]:
    alone = _cost(part, 0, options, checkpoint, folder, bodies)
    yield _line(f"{part}, one process: CPU ms a rank", sum(alone.cpu_ms.values()), "ms", "the same", None, None)
    for num in options.workers:
        cost = _cost(part, num, options, checkpoint, folder, bodies)
        named = f"{part}, {num} workers"
        yield _line(f"{named}: engine's CPU ms a rank", cost.cpu_ms["engine"], "ms", "one process", alone, None)
        engine_ms = cost.cpu_ms["engine"] if part == "stub" else cost.loop_ms
        what = "engine" if part == "stub" else "engine's event loop"
        yield _target(f"{named}: {what}, ms a rank beyond the pass", engine_ms, TARGET_MS[part])
        yield _line(f"{named}: workers' CPU ms a rank", cost.cpu_ms["worker"], "ms", "one process", alone, None)
        gain = cost.ranks_per_s / alone.ranks_per_s
        target = TARGET_GAIN if part == "stub" and num == 2 else None
        yield Line(
            bench="front",
            case=f"{named}: ranks a second",
            ours=cost.ranks_per_s,
            unit="1/s",
            baseline="one process",
            baseline_value=alone.ranks_per_s,
            ratio=gain,
            target=target,
            ok=None if target is None else gain >= target,
        )


def _cost(
    part: str, num: int, options: FrontOptions, checkpoint: Path, folder: Path, bodies: list[dict[str, Any]]
) -> Cost:
    ranks = LoadStream(name="ranks", mode="closed", bodies=folder / "ranks", to_s=options.seconds, connections=CLIENTS)
    with _served(part == "stub", num, options, checkpoint, folder) as (server, admin_port):
        ask(server.port, bodies)  # everybody's prefix is cached, and every path is warm
        return _measured(server, admin_port, [ranks], options.seed)


def _measured(server: Server, admin_port: int, streams: Sequence[LoadStream], seed: int) -> Cost:
    roles = {pid: _role(pid) for pid in server.pids}
    main = next(pid for pid, role in roles.items() if role in ("engine", "main"))
    late = _lateness_of(admin_port)
    cpu = {pid: _cpu_s(pid) for pid in roles}
    loop_s = _cpu_s(main, main)
    report = drive(server.port, streams, seed=seed, goal_s=1.0, deadline_s=5.0)
    gained: dict[str, float] = {}
    for pid, role in roles.items():
        gained[role] = gained.get(role, 0.0) + _cpu_s(pid) - cpu[pid]
    loop_s = _cpu_s(main, main) - loop_s
    after = _lateness_of(admin_port)
    ranks = report.stream("ranks")
    num = max(ranks.in_time + ranks.late, 1)
    timers = max(after[0] - late[0], 1.0)
    return Cost(
        ranks_per_s=num / ranks.span_s,
        cpu_ms={role: seconds / num * 1e3 for role, seconds in gained.items()},
        loop_ms=loop_s / num * 1e3,
        late_ratio=1.0 - (after[1] - late[1]) / timers,
        late_ms=(after[2] - late[2]) / timers * 1e3,
    )


# ---- long bodies


def _lateness(options: FrontOptions, checkpoint: Path, folder: Path, bodies: list[dict[str, Any]]) -> Iterator[Line]:
    quiet = LoadStream(name="ranks", mode="closed", bodies=folder / "ranks", to_s=options.seconds, connections=2)
    for num in (0, *options.workers):
        named = "one process" if num == 0 else f"{num} workers"
        with _served(True, num, options, checkpoint, folder) as (server, admin_port):
            ask(server.port, bodies[:64])
            before = _measured(server, admin_port, [quiet], options.seed)
            for what in ("long", "garbage"):
                beside = LoadStream(name=what, mode="closed", bodies=folder / what, to_s=options.seconds, connections=2)
                cost = _measured(server, admin_port, [quiet, beside], options.seed)
                case = f"{named}: loop's mean lateness beside {what} bodies, more than quiet"
                moved_ms = max(cost.late_ms - before.late_ms, 0.0)
                yield (
                    _target(case, moved_ms, TARGET_LATE_MS)
                    if num
                    else _line(case, moved_ms, "ms", "the same", None, None)
                )
                yield _line(
                    f"{named}: timers over {MOST_LATE_S * 1e3:g} ms late beside {what} bodies",
                    cost.late_ratio,
                    "share",
                    "quiet",
                    None,
                    before.late_ratio,
                )


def _lateness_of(admin_port: int) -> tuple[float, float, float]:
    """Timers of the engine's loop until now: how many, how many were at most MOST_LATE_S late, their lateness."""
    connection = http.client.HTTPConnection("127.0.0.1", admin_port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    name = "npu_gr_event_loop_lag_seconds"

    def value(sample: str) -> float:
        found = re.search(rf"^{re.escape(name + sample)} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0

    return value("_count"), value(f'_bucket{{le="{MOST_LATE_S}"}}'), value("_sum")


# ---- processes


@contextmanager
def _served(
    is_stub: bool, num_workers: int, options: FrontOptions, checkpoint: Path, folder: Path
) -> Iterator[tuple[Server, int]]:
    port, admin_port = free_port(), free_port()
    settings = [
        f"server.port={port}",
        f"server.admin_port={admin_port}",
        f"server.workers={num_workers}",
        "server.log_requests=slow",
        f"server.max_body_bytes={2 * GARBAGE_BYTES}",
        f"checkpoint={checkpoint}",
        f"features.path={folder / f'history-{time.monotonic_ns()}.db'}",
        *_OFF,
    ]
    if is_stub:
        command = [sys.executable, "-m", "benchmarks.front_stub", str(options.config), *settings]
    else:
        command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(options.config)]
        command += [word for setting in settings for word in ("--set", setting)]
    name = f"{'stub' if is_stub else 'model'} with {num_workers} workers"
    with process(name, command, port, folder, ready="/readyz") as server:
        yield server, admin_port


def _role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    if "engine" in words:
        return "engine"
    if "worker" in words:
        return "worker"
    has_children = bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())
    return "supervisor" if has_children else "main"


def _cpu_s(pid: int, thread: int | None = None) -> float:
    """CPU time of a process, or of one of its threads."""
    tasks = Path(f"/proc/{pid}/task")
    chosen = list(tasks.iterdir()) if thread is None else [tasks / str(thread)]
    return sum(int((one / "schedstat").read_text().split()[0]) for one in chosen) * 1e-9


# ---- lines


def _line(case: str, ours: float, unit: str, baseline: str, alone: Cost | None, value: float | None) -> Line:
    base = value if value is not None else (ours if alone is None else sum(alone.cpu_ms.values()))
    return Line(
        bench="front",
        case=case,
        ours=ours,
        unit=unit,
        baseline=baseline,
        baseline_value=base,
        ratio=base / ours if ours else 1.0,
        target=None,
        ok=None,
    )


def _target(case: str, ours: float, target: float) -> Line:
    return Line(
        bench="front",
        case=case,
        ours=ours,
        unit="ms",
        baseline="target",
        baseline_value=target,
        ratio=target / max(ours, 1e-6),
        target=1.0,
        ok=ours <= target,
    )
