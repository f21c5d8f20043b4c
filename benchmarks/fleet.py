"""The part `fleet` of `benchmarks door`: three instances behind HAProxy, and what happens to one of them.

An open loop at a rate that two of the three bear. A rank that fails is one that is not answered
with its scores.
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
AT_S = 1.0  # something happens then
AFTER_S = 4.0  # and so long the load goes on
FROZEN_S = 2.0
READY_S = 1.0  # until the proxy has seen that an instance is ready


def lines(
    checkpoint: Path, folder: Path, overrides: Sequence[str], bodies: Path, goal_s: float, seed: int
) -> Iterator[Line]:
    """One line an event: ranks that failed.

    Args:
        checkpoint: that the instances serve.
        folder: for files and logs.
        overrides: of every instance.
        bodies: of the ranks.
        goal_s: an answer is in time within it.
        seed: of arrivals.

    Raises:
        ConfigError: HAProxy is not installed.
        Unavailable: something does not start.
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
            counts = _beside(front.port, bodies, goal_s, seed, event)
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
    """End an instance as a roll does, and start it again."""
    one.signal(signal.SIGTERM)
    one.ended()
    one.start()
    one.wait()
    time.sleep(READY_S)


def _beside(
    port: int, bodies: Path, goal_s: float, seed: int, event: Callable[[], None]
) -> StreamCounts:
    """Let something happen while ranks come: one run of the client after the other until it is over, and once more."""
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
    """The counts of several runs together; times are of the one whose P99 is the worst."""
    worst = max(parts, key=lambda counts: counts.answered_ms.p99)
    names = ("due", "unsent", "in_time", "late", "rejected", "other", "timeouts", "errors")
    return msgspec.structs.replace(
        worst, **{name: sum(getattr(one, name) for one in parts) for name in names}
    )
