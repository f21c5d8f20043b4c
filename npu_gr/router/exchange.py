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

In every state the client may leave. In every state but QUEUED and OVER the deadline, which runs from the request's
first byte, ends the request; in QUEUED it is answered with the error once it is its turn. A request counts as in
flight in ERASING, AT_INSTANCE and ANSWERING.

A rank may be tried a second time. A signal may if its instance has certainly not begun it: there was no connection,
or the instance said so. Every request ends in exactly one way: with a whole answer, with a connection that is cut
because the answer broke off in the middle, or with a client that left.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto

from npu_gr.core.errors import DeadlineExceeded, NpuGrError
from npu_gr.router.answers import Refused, problem
from npu_gr.router.attempt import Attempt, Downstream
from npu_gr.router.deadline import Deadline
from npu_gr.router.erase import verdict
from npu_gr.router.members import Choice
from npu_gr.router.request import RequestBody, RequestHead
from npu_gr.router.ring import Placement
from npu_gr.router.router import Router
from npu_gr.router.routes import Handling, handling_of

# Tuples of members, not comparisons with each: in Python 3.11 `Handling.FOLLOW` costs four times as much as a name.
_AT_ONE_INSTANCE = (Handling.FOLLOW, Handling.SIGNAL, Handling.ONCE, Handling.BY_LOAD)
_MAX_TRIES = 2
_CLIENT_LEFT = 499  # the status in metrics; nobody is sent it
_ERASE_RATIO = 0.9  # of the time that is left: the rest is for the answer that says which instances had too little


class Phase(Enum):
    """The state of a request; the module's docstring draws how it changes."""

    QUEUED = auto()  # earlier requests on its connection are not answered
    WAITING = auto()  # for its body
    AT_INSTANCE = auto()  # an attempt is being made
    ERASING = auto()  # at all instances
    ANSWERING = auto()  # the head of an instance's answer is passed on
    OVER = auto()


_NOT_STARTED = (Phase.QUEUED, Phase.WAITING)
_IN_FLIGHT = (Phase.AT_INSTANCE, Phase.ERASING, Phase.ANSWERING)


class Exchange:
    """One request and its answer."""

    def __init__(self, router: Router, client: Downstream, head: RequestHead) -> None:
        self.phase = Phase.QUEUED
        self.head = head
        self.body = RequestBody()
        self.client = client
        self.handling = handling_of(head.method, head.path)
        self.placement: Placement | None = None
        self._router = router
        self._tried: list[str] = []  # names of instances
        self._attempt: Attempt | None = None
        self._erasing: asyncio.Task[None] | None = None
        self._error: NpuGrError | None = None  # what the request will be answered with
        config = router.config
        try:
            budget_s = head.budget_s(config.default_budget_s, config.max_budget_s)
        except NpuGrError as error:
            self._error = error
            self.deadline = Deadline(head.began_at + config.default_budget_s)
        else:
            self.deadline = Deadline(head.began_at + budget_s)
            self.deadline.watch(self.deadline_passed)

    @property
    def is_last(self) -> bool:
        """Whether the client's connection is closed after the answer."""
        return not self.head.keeps_alive or self._router.is_draining or not self.body.is_whole

    # ---- from the client

    def push(self) -> None:
        """Do what can be done: it is the request's turn, or more of its body has come."""
        phase = self.phase
        if phase is Phase.OVER:
            return
        if self._error is not None:
            self.fail(self._error)
        elif phase in _NOT_STARTED:
            self.phase = Phase.WAITING
            if self.body.is_whole or self.body.num_bytes > self._router.config.limits.stream_over_bytes:
                self._start()
        elif phase is Phase.AT_INSTANCE and self._attempt is not None:
            self._attempt.send_more()

    def refuse(self, error: NpuGrError) -> None:
        """Answer with this error at the next `push`, and close the connection after it."""
        self._error = error
        self.head.keeps_alive = False

    def hold_answer(self, is_held: bool) -> None:
        """Stop reading the answer while the client reads too slowly, or (False) read on."""
        if self._attempt is not None:
            self._attempt.hold_answer(is_held)

    def cancel(self) -> None:
        """End the request, and the instance's work for it: the client has left."""
        if self.phase is not Phase.OVER:
            self._router.metrics.cancelled(self.handling).inc()
            self._end(_CLIENT_LEFT)

    # ---- where it goes

    def _start(self) -> None:
        """Answer the request here, or send it on."""
        try:
            if self.handling in _AT_ONE_INSTANCE:
                self._router.begin()
                self.phase = Phase.AT_INSTANCE
                self._try(*self._router.place(self.head, self.handling, self._tried))
            elif self.handling is Handling.EVERYWHERE:
                self._router.begin()
                self.phase = Phase.ERASING
                self._erasing = asyncio.get_running_loop().create_task(self._erase())
            elif self.handling is Handling.OWN:
                self._reply(200, self._router.own_answer(self.head.path, self.is_last))
            else:
                raise Refused(404, "the router has no such route; ask an instance itself")
        except NpuGrError as error:
            self._router.metrics.refused(error.title).inc()
            self.fail(error)

    def _try(self, choice: Choice, placement: Placement | None) -> None:
        self.placement = placement
        self._tried.append(choice.instance.name)
        self._attempt = Attempt(self, self._router, choice, is_first=len(self._tried) == 1)
        self._attempt.begin()

    async def _erase(self) -> None:
        answers = await self._router.erase(self.head, _ERASE_RATIO * self.deadline.left_s())
        self._erasing = None
        try:
            status, answer = verdict(answers, self.is_last)
        except NpuGrError as error:
            self.fail(error)
        else:
            self._reply(status, answer)

    # ---- from the attempt

    def retry(self, why: str) -> bool:
        """End the attempt and send the request to another instance, where it is a miss.

        Args:
            why: the attempt failed; the metric label.

        Returns:
            False: the request may not be sent again, or there is no other instance. The attempt stays.
        """
        attempt = self._attempt
        assert attempt is not None
        may_retry = self.handling is Handling.FOLLOW or attempt.is_untaken
        if not may_retry or len(self._tried) >= _MAX_TRIES or not self.body.is_whole:
            return False
        if not self._router.retries.take():
            return False
        try:
            placed = self._router.place(self.head, self.handling, self._tried)
        except NpuGrError:
            self._router.retries.give_back()
            return False
        attempt.blame(why)
        attempt.leave()
        self._router.metrics.retries(why).inc()
        self.deadline.watch(self.deadline_passed)
        self._try(*placed)
        return True

    def answering(self) -> None:
        """Note that the head of the answer is passed on: from now on an error can only cut the connection."""
        self.phase = Phase.ANSWERING

    def answered(self, status: int, is_last: bool) -> None:
        """End the request: its whole answer is written."""
        self._end(status)
        self.client.finished(is_last)

    def fail(self, error: NpuGrError) -> None:
        """End the request with an error; if half an answer is out, only a cut connection can tell the client."""
        if self.phase is Phase.ANSWERING:
            self._end(error.status)
            self.client.abort()
        else:
            self._reply(error.status, problem(error, self.head.request_id, self.is_last))

    def deadline_passed(self) -> None:
        """End the request with 504, or with 408 if its body has not come; a queued one when it is its turn."""
        if self.phase is Phase.OVER:
            return
        if not self.body.is_whole:
            self.refuse(Refused(408, "body: not complete within the time budget"))
        else:
            self._error = DeadlineExceeded("no answer within the time budget")
            if self._attempt is not None:
                self._attempt.blame("timeout")
        if self.phase is not Phase.QUEUED:
            self.push()

    # ---- the end

    def _reply(self, status: int, answer: bytes) -> None:
        is_last = self.is_last
        self.client.write(answer)
        self.answered(status, is_last)

    def _end(self, status: int) -> None:
        if self._attempt is not None:
            self._attempt.leave()
            self._attempt = None
        if self._erasing is not None:
            self._erasing.cancel()
            self._erasing = None
        if self.phase in _IN_FLIGHT:
            self._router.in_flight -= 1
        self.phase = Phase.OVER
        self.deadline.cancel()
        self.body.close()
        self._router.finished(self.handling, status, time.monotonic() - self.head.began_at)
