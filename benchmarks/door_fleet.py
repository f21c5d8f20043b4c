"""The part `fleet` of `benchmarks door`: faults of one of three instances behind HAProxy.

The load is an open loop at a rate that two of the three can serve. A rank fails if its answer has
no scores.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.frame import Line, compared, tell
from benchmarks.loadgen import LoadStream, StreamCounts, drive
from benchmarks.servers import Process, behind, proxy, running

SIZE = 3
PER_S = 100.0
AT_S = 1.0  # instant of the event
AFTER_S = 4.0  # duration of the load after the event
FROZEN_S = 2.0
READY_S = 1.0  # until the proxy detects that an instance is ready


def lines(
    checkpoint: Path, folder: Path, overrides: Sequence[str], bodies: Path, goal_s: float, seed: int
) -> Iterator[Line]:
    """Yield the number of failed ranks for each event.

    Args:
        checkpoint: Checkpoint of the instances.
        folder: Folder for files and logs.
        overrides: Overridden settings of every instance.
        bodies: File with the bodies of the ranks.
        goal_s: SLO of an answer.
        seed: Random seed of the arrivals.

    Raises:
        ConfigError: HAProxy is not installed.
        Unavailable: A process does not start.
    """
    made = [behind(f"of fleet {n}", checkpoint, folder, overrides) for n in range(SIZE)]
    with ExitStack() as stack:
        for one in made:
            stack.enter_context(running(one.name, one))
        front = proxy("fleet", made, folder)
        stack.enter_context(running("fleet", front))
        time.sleep(READY_S)
        victim = made[0]

        def killed() -> None:
            victim.signal(signal.SIGKILL)
            victim.ended()

        def joined() -> None:
            victim.start()
            victim.wait()

        def frozen() -> None:
            victim.signal(signal.SIGSTOP)
            time.sleep(FROZEN_S)
            victim.signal(signal.SIGCONT)

        def rolled() -> None:
            for one in made:
                _restart(one)

        def reloaded() -> None:
            file = folder / "fleet.yaml"
            file.write_text(json.dumps({**json.loads(file.read_text()), "idle_timeout_s": 74.0}))
            front.signal(signal.SIGHUP)

        events: list[tuple[str, Callable[[], None]]] = [
            ("one is killed", killed),
            ("one joins", joined),
            (f"one is frozen for {FROZEN_S:g} s", frozen),
            ("all are restarted in turn", rolled),
            ("HAProxy reads its file again", reloaded),
        ]
        for name, event in events:
            counts = _during_load(front.port, bodies, goal_s, seed, event)
            failed = counts.due - counts.answered
            case = (
                f"fleet of {SIZE}, {name}: {counts.rejected} rejected, {counts.unanswered} lost, "
                f"{counts.late} late of "
                f"{counts.due} ranks at {PER_S:.0f}/s, P99 {counts.answered_ms.p99:.0f} ms"
            )
            tell("door", case)
            yield compared(
                "door", case, failed, "failed ranks", "due", counts.due, float(not failed), 1.0
            )


def _restart(one: Process) -> None:
    """Restart an instance as a rolling update does."""
    one.signal(signal.SIGTERM)
    one.ended()
    one.start()
    one.wait()
    time.sleep(READY_S)


def _during_load(
    port: int, bodies: Path, goal_s: float, seed: int, event: Callable[[], None]
) -> StreamCounts:
    """Run an event during the load; repeat the client's run until the event has ended."""
    total: list[StreamCounts] = []
    thread = threading.Thread(target=event)
    stream = LoadStream(
        name="load",
        mode="poisson",
        bodies=bodies,
        to_s=AT_S + AFTER_S,
        connections=64,
        rate_per_s=PER_S,
    )

    def one_run() -> None:
        total.append(drive(port, [stream], seed=seed + len(total), goal_s=goal_s).stream("load"))

    beginning = threading.Thread(target=one_run)
    beginning.start()
    time.sleep(AT_S)
    thread.start()
    beginning.join()
    while thread.is_alive():
        one_run()
    thread.join()
    return _sum(total)


def _sum(parts: Sequence[StreamCounts]) -> StreamCounts:
    """Add the counts of several runs; times are those of the run with the worst P99."""
    worst = max(parts, key=lambda counts: counts.answered_ms.p99)
    names = ("due", "unsent", "in_time", "late", "rejected", "other", "timeouts", "errors")
    return msgspec.structs.replace(
        worst, **{name: sum(getattr(one, name) for one in parts) for name in names}
    )
