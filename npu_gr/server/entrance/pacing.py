"""Connections that were refused and retry at once: they are not read for a moment, so TCP holds their next request.

No refusal is cheap enough for a client that sends again at once: at 11 us each, 64 such clients retry 47,000 times a
second and take the whole event loop. A connection whose next request came within `RETRY_S` of a refusal is paused for
so long that the refusals of all of them together take `SHARE` of a core, by what a refusal takes here and now. As soon
as nobody waits and a place is free, the paused are read at once.

A lone refusal pauses nobody, and a proxy never is: its connections carry other callers' requests.

A pause helps where the caller waits for the answer before it asks again. An open loop does not: a pause only makes its
requests older. After a standstill all connections of such a caller are in use, each sends its next request at once, and
they look like those of one that retries, until their queue has drained. So only a run of such requests that lasts
`RUN_S` is a retry; four times that, and four times again, where many hung up in a pause, and half of it `FORGETS_S`
later. A caller on a busy machine is late at times: that shortens its run, and does not end it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Protocol

SHARE = 0.05  # of a core, for refusals
BESIDE = 10.0  # what a refusal and its pause cost over what is timed of it: the kernel and the event loop take the rest
GUESS_S = 7e-6  # what is timed of one, until there was one
WEIGHT = 1 / 32  # of one more
MOST_S = 0.5  # the longest pause, before its spread
RUN_S = 0.5  # of requests that come at once, before one is a retry: in it the queue of a standstill of .1 s drains
MOST_RUN_S = 64.0
IMPATIENT = 1 / 8  # of the paused hang up: pauses age an open loop's requests, and bring no fewer of them
OVER = 1 / 64  # weight of one more that was paused
LEARNS_S = 1.0  # from one time that this is found to the next
FORGETS_S = 10.0
LATE = 2.0  # times its lateness is what a request that did not come at once takes off a run
RETRY_S = 0.01  # by when the request reached the kernel; an open loop, which no pause can hold, comes later
SPREAD = 0.5  # of the pause, up and down: they do not all come back at once


class Paced(Protocol):
    """A connection that can be paused."""

    refused_at: float  # when it was refused last
    at_once_since_at: float  # since when its requests have come within `RETRY_S` of the answer before, see `late`

    def pause(self) -> None:
        """Stop reading."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...


class Pacer:
    """The paused connections of an instance. Event loop only."""

    def __init__(
        self,
        clock: Callable[[], float],
        call_at: Callable[[float, Callable[[], None]], object],
        num_waiting: Callable[[], int],
    ) -> None:
        """Nobody is paused yet.

        Args:
            clock: seconds that never go back.
            call_at: calls a function at an instant of that clock.
            num_waiting: requests that wait at the door.
        """
        self._clock = clock
        self._call_at = call_at
        self._num_waiting = num_waiting
        self._heap: list[tuple[float, int, Paced]] = []  # (when it is read again, number, connection)
        self._paused: dict[Paced, int] = {}  # its number in the heap
        self._numbers = itertools.count()
        self._wakes_at = float("inf")
        self._took_s = GUESS_S
        self._hung_up = 0.0  # share of the paused
        self._impatient_at = float("-inf")  # when it was found too large
        self._impatient_run_s = RUN_S  # how long a run had to be from then on

    def __len__(self) -> int:
        return len(self._paused)

    def refused(self, connection: Paced, arrived_at: float) -> None:
        """Note a refusal, and pause the connection if the refused request was sent at once after another refusal.

        Args:
            connection: that is refused.
            arrived_at: when its request reached the kernel.
        """
        now_at = self._clock()
        is_at_once = arrived_at - connection.refused_at <= RETRY_S
        retried = is_at_once and now_at - connection.at_once_since_at > self.run_s
        connection.refused_at = now_at
        if retried:
            self.pause(connection)

    def pause(self, connection: Paced) -> None:
        """Pause a connection whose caller retries at once."""
        now_at = self._clock()
        pause_s = min((len(self._paused) + self._num_waiting() + 1) / self.refusals_per_s, MOST_S)
        resume_at = now_at + pause_s * random.uniform(1 - SPREAD, 1 + SPREAD)  # noqa: S311  (spread)
        number = self._paused[connection] = next(self._numbers)
        heapq.heappush(self._heap, (resume_at, number, connection))
        connection.pause()
        if resume_at < self._wakes_at:
            self._wakes_at = resume_at
            self._call_at(resume_at, self._wake)

    @property
    def run_s(self) -> float:
        """For how long a caller's requests must have come at once for one to be a retry."""
        halves = min((self._clock() - self._impatient_at) / FORGETS_S, 64.0)
        return float(max(RUN_S, self._impatient_run_s * 0.5**halves))

    def late(self, since_at: float, answered_at: float, came_at: float) -> float:
        """Say since when a caller's requests have come at once, now that one has not.

        Args:
            since_at: what it was before.
            answered_at: the request before.
            came_at: the request.
        """
        since_at = max(since_at, answered_at - 2 * self.run_s)  # an old run is over as soon as another
        return min(came_at, since_at + LATE * (came_at - answered_at))

    @property
    def refusals_per_s(self) -> float:
        """How many refusals a second take `SHARE` of a core."""
        return SHARE / (BESIDE * self._took_s)

    def took(self, seconds: float) -> None:
        """Learn what a refusal takes, from its first byte to its answer."""
        self._took_s += WEIGHT * (min(seconds, 8 * self._took_s) - self._took_s)

    def resumed(self, *, has_hung_up: bool) -> None:
        """Learn whether callers wait for us, when a request of a connection that was paused is read.

        Args:
            has_hung_up: its caller did not wait for the answer.
        """
        self._hung_up += OVER * (has_hung_up - self._hung_up)
        now_at = self._clock()
        if self._hung_up > IMPATIENT and now_at - self._impatient_at >= LEARNS_S:
            self._impatient_run_s = min(4 * self.run_s, MOST_RUN_S)
            self._impatient_at = now_at

    def forget(self, connection: Paced) -> None:
        """Forget a connection that is closed."""
        self._paused.pop(connection, None)

    def release(self, places: int) -> None:
        """Read as many connections again as there are places for, those first whose pause is nearly over."""
        while places > 0 and self._heap:
            places -= self._resume_first()

    def _wake(self) -> None:
        now_at = self._clock()
        while self._heap and self._heap[0][0] <= now_at:
            self._resume_first()
        self._wakes_at = float("inf")
        if self._heap:
            self._wakes_at = self._heap[0][0]
            self._call_at(self._wakes_at, self._wake)

    def _resume_first(self) -> int:
        """Take the first place of the heap; returns how many connections are read again for it."""
        _, number, connection = heapq.heappop(self._heap)
        if self._paused.get(connection) != number:
            return 0
        del self._paused[connection]
        connection.resume()
        return 1
