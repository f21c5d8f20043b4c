"""Health is progress: what the threads and tasks of an instance work on, and for how long.

    worker = health.add("device_0", is_vital=True)
    with worker.busy(limit_s):      outside of the block it waits for work, and is never late
        ...

A call that never returns raises no error, so a count of errors does not show it. A worker is late
once one of its works takes longer than its limit:

    late                            `npu_gr_work_late`, an alert, the status page
    late and vital                  `/readyz` answers 503 until the work ends
    vital, and takes over `DEAD_S`  `/healthz` answers 503, and the process drains and ends

A work that compiles says so by `compiles`: it is late after `UNKNOWN_S`, and dead after
`COMPILE_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

# A multiple of what a work usually takes, and not less than a pause of a busy machine.
TIMES, LEAST_S = 10.0, 2.0
DEAD_S = 30.0  # vital work that takes longer does not end
TASK_S = 10.0  # limit of one turn of a background task, which takes milliseconds
UNKNOWN_S = 30.0  # limit of work whose time is not known
COMPILE_S = 900.0  # work that compiles kernels is dead only after this
# Time of a part of the instance to stop; what it waits for may never end.
STOP_S = 3.0


def limit_s(usual_s: float) -> float:
    """Return the seconds after which work that usually takes `usual_s` is late."""
    return max(TIMES * usual_s, LEAST_S)


class Work:
    """One piece of work that has begun."""

    __slots__ = ("began_at", "dead_s", "limit_s")

    def __init__(self, began_at: float, limit_s: float, dead_s: float) -> None:
        self.began_at = began_at
        self.limit_s = limit_s
        self.dead_s = dead_s


_WORK: ContextVar[Work | None] = ContextVar("work", default=None)


def compiles() -> None:
    """Note that the work of this thread or task compiles kernels, or captures a graph, from now on.

    Call it where that begins. Without a work it does nothing.
    """
    if (work := _WORK.get()) is not None:
        work.limit_s = max(work.limit_s, UNKNOWN_S)
        work.dead_s = max(work.dead_s, COMPILE_S)


class Worker:
    """A thread or task, or several that share a name. Every method is for any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin idle.

        Args:
            clock: Monotonic clock, in seconds.
        """
        self.clock = clock
        self._works: set[Work] = set()

    def works(self) -> list[Work]:
        """Return what it works on now; empty = it waits for work."""
        return list(self._works)  # one step of the interpreter, so no lock

    @contextmanager
    def busy(self, limit_s: float, dead_s: float = 0.0) -> Iterator[None]:
        """Work on one thing while the block runs.

        Args:
            limit_s: Seconds after which it is late.
            dead_s: Seconds after which it is dead; not less than `limit_s` and `DEAD_S`.
        """
        work = Work(self.clock(), limit_s, max(limit_s, dead_s, DEAD_S))
        self._works.add(work)
        token = _WORK.set(work)
        try:
            yield
        finally:
            _WORK.reset(token)
            self._works.remove(work)

    async def turns(self, every_s: float) -> AsyncIterator[None]:
        """Yield every `every_s` to the body of a loop, which is late after `TASK_S`.

        A body that raises ends its task, so it stays late. One that ignores a cancellation, since
        it must end what it has begun, is the last.
        """
        task = asyncio.current_task()
        while task is None or not task.cancelling():
            await asyncio.sleep(every_s)
            self._works.add(work := Work(self.clock(), TASK_S, DEAD_S))
            yield
            self._works.remove(work)


class Late(NamedTuple):
    """A worker that is late."""

    name: str
    age_s: float  # seconds since the work began
    limit_s: float
    dead_s: float

    def __str__(self) -> str:
        return (
            f"{self.name} has not moved for {self.age_s:.1f} s, its limit is {self.limit_s:.1f} s"
        )


class Health:
    """The workers of an instance by name. Every method is for any thread."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._vital: dict[str, Worker] = {}
        self.fault = ""  # why scores may be wrong; it stays until a restart

    def add(self, name: str, worker: Worker | None = None, *, is_vital: bool = False) -> Worker:
        """Add a worker, and return it.

        Args:
            name: Name for messages, and a metric label.
            worker: The worker, if its owner has made it already.
            is_vital: Whether the instance can do nothing without it.
        """
        worker = Worker() if worker is None else worker
        self._workers[name] = worker
        if is_vital:
            self._vital[name] = worker
        return worker

    def ages_s(self) -> dict[str, float]:
        """Map each worker to the seconds of its oldest work; 0 = it waits for work."""
        return {
            name: max((worker.clock() - work.began_at for work in worker.works()), default=0.0)
            for name, worker in list(self._workers.items())
        }

    def late(self) -> dict[str, Late | None]:
        """Map each worker to what is late of it, if anything."""
        return {name: self._late(name, one) for name, one in list(self._workers.items())}

    def why_not_ready(self) -> str:
        """Say why a request would wait in vain, or have wrong scores; "" = it would not."""
        return self.fault or self.why_late()

    def why_late(self) -> str:
        """Say which vital worker is late; "" = none."""
        for name, worker in self._vital.items():
            if (late := self._late(name, worker)) is not None:
                return str(late)
        return ""

    def why_dead(self) -> str:
        """Say which vital worker does not move again; "" = none."""
        for name, worker in self._vital.items():
            late = self._late(name, worker)
            if late is not None and late.age_s > late.dead_s:
                return str(late)
        return ""

    def _late(self, name: str, worker: Worker) -> Late | None:
        works = worker.works()
        if not works:
            return None
        now_at = worker.clock()
        work = max(works, key=lambda one: now_at - one.began_at - one.limit_s)
        age_s = now_at - work.began_at
        if age_s <= work.limit_s:
            return None
        return Late(name, age_s, work.limit_s, work.dead_s)
