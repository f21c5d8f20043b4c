"""One try of a request at one instance: connect, send, and pass the instance's answer on."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from npu_gr.core.errors import NpuGrError, Unavailable
from npu_gr.router.answers import BadGateway, ForwardedAnswer
from npu_gr.router.instance import Check
from npu_gr.router.members import Choice
from npu_gr.router.request import RequestBody, RequestHead
from npu_gr.router.ring import Placement
from npu_gr.router.router import Router
from npu_gr.router.routes import Handling
from npu_gr.router.upstream import AnswerHead, Upstream

_FAILURES = (502, 503)
_OVERLOADED = 429
_SENT_AGAIN = (Handling.FOLLOW, Handling.SIGNAL)  # their bodies are kept for a second try


class Downstream(Protocol):
    """The client's connection, as a request under way uses it."""

    is_held: bool  # the client reads more slowly than it is written to

    def write(self, data: bytes) -> None:
        """Send to the client."""
        ...

    def pause(self, is_paused: bool) -> None:
        """Stop reading from the client, or (False) read on."""
        ...

    def wake(self, at: float) -> None:
        """Let the exchange look at the clock at this instant, or earlier."""
        ...

    def finished(self, is_last: bool) -> None:
        """The request in front is answered completely; `is_last`: close the connection."""
        ...

    def abort(self) -> None:
        """Close at once: the answer cannot be completed."""
        ...


class Attempted(Protocol):
    """The request that an attempt sends, and tells how it went."""

    head: RequestHead
    body: RequestBody
    deadline_at: float  # of the monotonic clock
    handling: Handling
    client: Downstream

    @property
    def is_last(self) -> bool:
        """Whether the client's connection is closed after the answer."""
        ...

    def go_on(self, attempt: Attempt, why: str) -> bool:
        """Go on without an attempt that failed. False: that is not possible, the attempt's end is the request's."""
        ...

    def sent(self) -> None:
        """The whole request is sent."""
        ...

    def answering(self, attempt: Attempt) -> None:
        """The head of this attempt's answer is there and is passed on: there is no way back."""
        ...

    def answered(self, status: int, is_last: bool) -> None:
        """The whole answer is passed on."""
        ...

    def fail(self, error: NpuGrError) -> None:
        """There is no answer, or no whole one."""
        ...


class Attempt:
    """One try. It is `Carried` by a connection to the instance, which tells it what arrives."""

    __slots__ = (
        "_answer",
        "_connecting",
        "_head_at",
        "_request",
        "_router",
        "_sent_at",
        "_upstream",
        "began_at",
        "instance",
        "is_untaken",
        "placement",
    )

    def __init__(self, request: Attempted, router: Router, choice: Choice, placement: Placement | None) -> None:
        """Count the request at its instance.

        Args:
            request: what is sent.
            router: the shared state.
            choice: where it goes.
            placement: of a signal; its answer tells the caller.
        """
        self.instance = choice.instance
        self.placement = placement
        self.began_at = time.monotonic()
        self.is_untaken = False  # a signal that the instance has certainly not begun
        self._request = request
        self._router = router
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None
        self._sent_at = 0.0  # 0: not yet
        self._head_at = 0.0  # when the answer's head came
        self._answer: ForwardedAnswer | None = None  # once its head is there
        self.instance.begun(self.began_at)
        router.metrics.placed.add(self.instance.name, choice.how)

    def begin(self) -> None:
        """Send the request on an idle connection, or connect first."""
        upstream = self.instance.pool.take()
        if upstream is not None:
            self._send(upstream)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            upstream = await self._router.connect(self.instance)
        except OSError:
            self._connecting = None
            self.is_untaken = self._request.handling is Handling.SIGNAL
            self.lost("connect")
            return
        self._connecting = None
        self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        request = self._request
        self._upstream = upstream
        self._sent_at = time.monotonic()
        body = request.body
        body.rewind()
        head = request.head.encode(body, request.deadline_at - self._sent_at)
        upstream.send(self, head, [] if body.is_chunked else body.pieces)
        if body.is_chunked:
            self.send_more()
        else:  # it went with the head
            body.is_sent = True
            request.sent()

    def send_more(self) -> None:
        """Send the part of the body that has arrived since the last call."""
        body = self._request.body
        if self._upstream is None or body.is_sent:
            return
        chunk = body.next_chunk(is_kept=self._request.handling in _SENT_AGAIN)
        if chunk:
            self._upstream.send_more(chunk)
        if body.is_sent:
            self._request.sent()

    def hold_answer(self, is_held: bool) -> None:
        """Stop reading the answer while the client reads too slowly, or (False) read on."""
        if self._upstream is not None:
            self._upstream.pause(is_held)

    def blame(self, why: str) -> None:
        """Record that the instance failed, unless its time was so short that the caller is to blame."""
        waited_s = time.monotonic() - self._sent_at if self._sent_at else 0.0
        if why != "timeout" or waited_s >= self._router.config.breaker.min_timeout_s:
            self._router.failed(self.instance, why, self._request.handling is Handling.SIGNAL)

    def leave(self) -> None:
        """End the attempt; what the instance still does for it is dropped. Call it once."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None
        self.instance.in_flight -= 1

    # ---- what the connection to the instance tells

    def answer_head(self, head: AnswerHead) -> None:
        """Pass the answer on, or go on without it."""
        request = self._request
        instance = self.instance
        status = head.status
        now_at = time.monotonic()
        took_s = now_at - self._sent_at
        self._head_at = now_at
        self._router.metrics.instance_s.observe(took_s, instance.name)
        if status in _FAILURES:
            if status == 503 and head.is_not_taken:
                self.is_untaken = request.handling is Handling.SIGNAL
                instance.checked(Check.UNREADY, now_at)
            if request.go_on(self, str(status)):
                return
            self.blame(str(status))
        elif status == _OVERLOADED:
            instance.refused(now_at)
            if request.go_on(self, "429"):
                return
        else:
            self._router.answered(instance, request.handling, request.head.path, took_s, now_at)
        added = instance.header
        if self.placement is not None:
            added += b"X-NpuGr-Placement: %s\r\n" % self.placement.encode().encode()
        self._answer = ForwardedAnswer(head, added, request.head.is_http11, request.is_last)
        request.answering(self)
        if request.client.is_held:
            self.hold_answer(True)

    def answer_body(self, data: bytes) -> None:
        """Add a piece to the answer."""
        if self._answer is not None:
            self._answer.add(data)

    def answer_done(self) -> None:
        """End the answer, and keep the connection for the next request if that is safe."""
        answer, request = self._answer, self._request
        if answer is None:
            return
        rest = answer.end()
        if rest:
            request.client.write(rest)
        upstream = self._upstream
        self._upstream = None
        if upstream is not None:
            # A body that was not sent to its end would be continued by the next request's first bytes.
            upstream.release(is_in_step=request.body.is_sent)
        added_s = self._sent_at - self.began_at + time.monotonic() - self._head_at
        self._router.metrics.added_s.observe(added_s, request.handling)
        request.answered(answer.status, answer.closes)

    def answer_flush(self) -> None:
        """Write to the client what has arrived."""
        if self._answer is not None:
            data = self._answer.take()
            if data:
                self._request.client.write(data)

    def lost(self, why: str) -> None:
        """Go on without the attempt, or fail."""
        self._upstream = None
        if self._answer is None and self._request.go_on(self, why):
            return
        self.blame(why)
        if why == "connect":
            self._request.fail(Unavailable("the instance cannot be reached"))
        else:
            self._request.fail(BadGateway("the instance broke off"))

    def hold(self, is_full: bool) -> None:
        """Hold the client back while the instance reads too slowly."""
        self._request.client.pause(is_full)
