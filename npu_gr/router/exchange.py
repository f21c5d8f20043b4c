"""One request under way: from its head until its answer is written, cut off, or no longer wanted.

                   its turn                  enough of its body is here
       QUEUED ───────────────► WAITING ────────────────┬──────────────────► ERASING
          │                       │                    │                       │
          │                       │                    ▼    second try         │
          │                       │              AT_INSTANCE ◄────┐            │
          │                       │               │  │  └─────────┘            │
          │                       │   no answer   │  │ head of an answer       │
          │                       │               │  ▼                         │
          │                       │               │ ANSWERING                  │ every instance has answered,
          │ client left           │ rejected, or  │  │ whole, or broken off    │ or the time is over
          ▼                       ▼ answered here ▼  ▼                         ▼
       OVER ◄──────────────────────────────────────────────────────────────────┘

A request that may not be made, for its key or its rate or because there is no room for its body, is known to be so when
its head is complete. Nothing of its body is kept, and it is answered when it is its turn; an answer to one wrong key of
too many waits a while.

In every state the client may leave. In every state but QUEUED and OVER the deadline, which runs from the request's
first byte, ends the request; in QUEUED it is answered with the error once it is its turn. A request counts as in
flight in ERASING, AT_INSTANCE and ANSWERING.

A rank may be tried a second time: after a failure, or beside a first try that is late (a hedge); then the first that
answers wins, and the other one is dropped. A signal may be tried again if its instance has certainly not begun it
(there was no connection, or the instance said so), and beside an instance that answers nothing at all.

Every request ends in exactly one way: with a whole answer, with a connection that is cut because the answer broke off
in the middle, or with a client that left.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto

from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Unauthorized
from npu_gr.router.alarm import NEVER
from npu_gr.router.answers import Refused, problem
from npu_gr.router.attempt import Attempt, Downstream
from npu_gr.router.erase import verdict
from npu_gr.router.members import Choice
from npu_gr.router.request import RequestBody, RequestHead
from npu_gr.router.ring import Placement
from npu_gr.router.router import Router
from npu_gr.router.routes import Handling, route_of

# Names and tuples of members, here and below: in Python 3.11 `Handling.FOLLOW` costs four times as much as a name.
_AT_ONE_INSTANCE = (Handling.FOLLOW, Handling.SIGNAL, Handling.ONCE, Handling.BY_LOAD)
_HEDGED = (Handling.FOLLOW, Handling.SIGNAL)
_MAX_TRIES = 2
_LATE = "late"  # why a hedge is sent
_OVERLOAD = "429"
_CLIENT_LEFT = 499  # the status in metrics; nobody is sent it
_ERASE_RATIO = 0.9  # of the time that is left: the rest is for the answer that says which instances had too little


class Phase(Enum):
    """The state of a request; the module's docstring draws how it changes."""

    QUEUED = auto()  # earlier requests on its connection are not answered
    WAITING = auto()  # for its body, or with an error that is held back
    AT_INSTANCE = auto()  # an attempt is being made
    ERASING = auto()  # at all instances
    ANSWERING = auto()  # the head of an instance's answer is passed on
    OVER = auto()


_QUEUED, _WAITING, _AT_INSTANCE, _ERASING, _ANSWERING, _OVER = Phase
_NOT_STARTED = (_QUEUED, _WAITING)
_IN_FLIGHT = (_AT_INSTANCE, _ERASING, _ANSWERING)


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_attempts",
        "_erasing",
        "_error",
        "_hedge_at",
        "_hedge_s",
        "_held_until_at",
        "_route",
        "_router",
        "_tried",
        "body",
        "client",
        "deadline_at",
        "handling",
        "head",
        "phase",
    )

    def __init__(self, router: Router, client: Downstream, head: RequestHead) -> None:
        self.phase = _QUEUED
        self.head = head
        self.body = RequestBody(router.kept)
        self.client = client
        self._route = route_of(head.method, head.path)
        self.handling = self._route.handling
        self._router = router
        self._tried: list[str] = []  # names of instances
        self._attempts: list[Attempt] = []  # that are being made
        self._erasing: asyncio.Task[None] | None = None
        self._error: NpuGrError | None = None  # what the request will be answered with
        self._held_until_at = 0.0  # no error is told before
        self._hedge_at = NEVER  # when the first answer is late
        self._hedge_s = 0.0  # after so many seconds
        config = router.config
        budget_s = config.default_budget_s
        try:
            budget_s = head.budget_s(config.default_budget_s, config.max_budget_s)
        except NpuGrError as error:
            self._error = error
        self.deadline_at = head.began_at + budget_s
        client.wake(self.deadline_at)

    @property
    def is_last(self) -> bool:
        """Whether the client's connection is closed after the answer."""
        return not self.head.keeps_alive or not self.body.is_whole or self._router.is_leaving

    # ---- from the client

    def admit(self) -> bool:
        """Check the key, and count the bytes of the body before any of them is read.

        Returns:
            Whether the body is wanted.
        """
        router = self._router
        try:
            router.access.admit(self.head, self._route)
            if self._error is None and self.handling in _AT_ONE_INSTANCE:
                self.body.expect(int(self.head.seen.get(b"content-length", b"0")))
                return True
        except NpuGrError as error:
            self._error = error
            if isinstance(error, Unauthorized):
                self.head.keeps_alive = False
                self._held_until_at = time.monotonic() + router.access.throttle.hold_s()
            elif isinstance(error, Refused):
                router.metrics.refused.add(self.handling, error.title)
        self.body.close()
        return False

    def push(self) -> None:
        """Do what can be done: it is the request's turn, or more of its body has come."""
        phase = self.phase
        if phase is _OVER:
            return
        if self._error is not None:
            if time.monotonic() < self._held_until_at:
                self.phase = _WAITING
                self.client.wake(self._held_until_at)
            else:
                self.fail(self._error)
        elif phase in _NOT_STARTED:
            self.phase = _WAITING
            is_enough = self.body.is_whole or self.body.num_bytes > self._router.config.limits.stream_over_bytes
            if is_enough or self.handling not in _AT_ONE_INSTANCE:
                self._start()
        elif phase is _AT_INSTANCE:
            for attempt in self._attempts:
                attempt.send_more()

    def refuse(self, error: NpuGrError) -> None:
        """Answer with this error at the next `push`, and close the connection after it."""
        self._error = error
        self.head.keeps_alive = False

    def hold_answer(self, is_held: bool) -> None:
        """Stop reading the answer while the client reads too slowly, or (False) read on."""
        for attempt in self._attempts:
            attempt.hold_answer(is_held)

    def cancel(self) -> None:
        """End the request, and the instance's work for it: the client has left."""
        if self.phase is not _OVER:
            self._router.metrics.cancelled.add(self.handling)
            self._end(_CLIENT_LEFT)

    # ---- where it goes

    def _start(self) -> None:
        """Answer the request here, or send it on."""
        try:
            if self.handling in _AT_ONE_INSTANCE:
                self._router.begin()
                self.phase = _AT_INSTANCE
                self._try(*self._router.place(self.head, self.handling, self._tried))
            elif self.handling is Handling.EVERYWHERE:
                self._router.begin()
                self.phase = _ERASING
                self._erasing = asyncio.get_running_loop().create_task(self._erase())
            elif self.handling is Handling.OWN:
                self._reply(200, self._router.own_answer(self.head.path, self.is_last))
            else:
                raise Refused(404, "the router has no such route; ask an instance itself")
        except NpuGrError as error:
            self._router.metrics.refused.add(self.handling, error.title)
            self.fail(error)

    def _try(self, choice: Choice, placement: Placement | None) -> None:
        self._tried.append(choice.instance.name)
        attempt = Attempt(self, self._router, choice, placement)
        self._attempts.append(attempt)
        attempt.begin()

    async def _erase(self) -> None:
        left_s = self.deadline_at - time.monotonic()
        answers = await self._router.erase(self.head, _ERASE_RATIO * left_s)
        self._erasing = None
        try:
            status, answer = verdict(answers, self.is_last)
        except NpuGrError as error:
            self.fail(error)
        else:
            self._reply(status, answer)

    # ---- from the attempts

    def sent(self) -> None:
        """Let a second try go out beside the first one when that is late."""
        if self.handling in _HEDGED and len(self._tried) < _MAX_TRIES:
            now_at = time.monotonic()
            self._hedge_s = self._router.answer_times.after_s(self.head.path, self.deadline_at - now_at)
            self._hedge_at = now_at + self._hedge_s
            self.client.wake(self._hedge_at)

    def go_on(self, attempt: Attempt, why: str) -> bool:
        """Go on without an attempt that failed: with the one beside it, or with one at another instance.

        Args:
            attempt: it ends here, unless there is nothing to go on with.
            why: it failed; the metric label.

        Returns:
            False: the request may not be sent again, or there is no other instance. The attempt stays.
        """
        may_again = self.handling is Handling.FOLLOW or attempt.is_untaken
        if len(self._attempts) == 1 and not (may_again and self._try_again(why)):
            return False
        self._attempts.remove(attempt)
        if why != _OVERLOAD:
            attempt.blame(why)
        attempt.leave()
        return True

    def _try_again(self, why: str) -> bool:
        """Send the request to one more instance, where it is a miss. False: not possible."""
        router = self._router
        is_hedge = why in (_LATE, _OVERLOAD)
        if len(self._tried) >= _MAX_TRIES or not self.body.is_whole or not router.retries.take(is_hedge):
            return False
        try:
            placed = router.place(self.head, self.handling, self._tried, is_overflow=why == _OVERLOAD)
        except NpuGrError:
            router.retries.give_back()
            return False
        router.metrics.retries.add(why)
        self._hedge_at = NEVER
        self._try(*placed)
        return True

    def _hedge(self, now_at: float) -> None:
        """The first answer is late: ask a second instance as well, if that cannot make an overload worse."""
        first = self._attempts[0].instance
        may_hedge = self.handling is Handling.FOLLOW or first.is_silent(self._hedge_s, now_at)
        if may_hedge and self._router.members.may_hedge(self._hedge_s, now_at) and self._try_again(_LATE):
            return
        self._hedge_at = now_at + self._hedge_s  # perhaps then

    def answering(self, attempt: Attempt) -> None:
        """Pass this attempt's answer on and drop the other one: from now on an error can only cut the connection."""
        self.phase = _ANSWERING
        self._hedge_at = NEVER
        self.body.close()
        if len(self._tried) > 1:
            for other in self._attempts:
                if other is not attempt:
                    is_second = other.began_at < attempt.began_at
                    self._router.metrics.hedges.add("second" if is_second else "first")
                    if is_second:
                        other.blame("timeout")
                    other.leave()
            self._attempts = [attempt]
            if attempt.placement is not None:
                self._router.signalled(self.head, attempt.placement)

    def answered(self, status: int, is_last: bool) -> None:
        """End the request: its whole answer is written."""
        self._end(status)
        self.client.finished(is_last)

    def fail(self, error: NpuGrError) -> None:
        """End the request with an error; if half an answer is out, only a cut connection can tell the client."""
        if self.phase is _ANSWERING:
            self._end(error.status)
            self.client.abort()
        else:
            self._reply(error.status, problem(error, self.head.request_id, self.is_last))

    # ---- from the clock

    def tick(self, now_at: float) -> float:
        """Do what is due.

        Returns:
            The next instant at which something will be, of the monotonic clock.
        """
        if self.phase is _OVER:
            return NEVER
        if self._error is not None:
            if self.phase is _WAITING:
                self.push()
            return NEVER
        if now_at >= self.deadline_at:
            self._deadline_passed()
            return NEVER
        if now_at >= self._hedge_at and self.phase is _AT_INSTANCE:
            self._hedge(now_at)
        return min(self.deadline_at, self._hedge_at)

    def _deadline_passed(self) -> None:
        """End the request with 504, or with 408 if its body has not come; a queued one when it is its turn."""
        if not self.body.is_whole:
            self.refuse(Refused(408, "body: not complete within the time budget"))
        else:
            self._error = self._error or DeadlineExceeded("no answer within the time budget")
            for attempt in self._attempts:
                attempt.blame("timeout")
        if self.phase is not _QUEUED:
            self.push()

    # ---- the end

    def _reply(self, status: int, answer: bytes) -> None:
        is_last = self.is_last
        self.client.write(answer)
        self.answered(status, is_last)

    def _end(self, status: int) -> None:
        for attempt in self._attempts:
            attempt.leave()
        self._attempts = []
        if self._erasing is not None:
            self._erasing.cancel()
            self._erasing = None
        if self.phase in _IN_FLIGHT:
            self._router.in_flight -= 1
        self.phase = _OVER
        if not self.body.is_closed:
            self.body.close()
        self._router.finished(self.handling, status, time.monotonic() - self.head.began_at)
