"""One try of a request at one instance: connect, send, and pass the instance's answer on."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from npu_gr.core.errors import NpuGrError, Unavailable
from npu_gr.router.answers import BadGateway, ForwardedAnswer
from npu_gr.router.deadline import Deadline
from npu_gr.router.instance import Check
from npu_gr.router.members import Choice
from npu_gr.router.request import RequestBody, RequestHead
from npu_gr.router.ring import Placement
from npu_gr.router.router import Router
from npu_gr.router.routes import Handling
from npu_gr.router.upstream import Headers, Upstream
from npu_gr.server.headers import NOT_TAKEN

_RETRIED = (502, 503)
_NOT_TAKEN = NOT_TAKEN.lower().encode()
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
    deadline: Deadline
    handling: Handling
    client: Downstream
    placement: Placement | None  # of a signal

    @property
    def is_last(self) -> bool:
        """Whether the client's connection is closed after the answer."""
        ...

    def retry(self, why: str) -> bool:
        """End this attempt and try another instance. False: that is not possible, this attempt stays."""
        ...

    def deadline_passed(self) -> None:
        """The deadline has passed."""
        ...

    def answering(self) -> None:
        """The answer's head is there and is passed on: there is no way back."""
        ...

    def answered(self, status: int, is_last: bool) -> None:
        """The whole answer is passed on."""
        ...

    def fail(self, error: NpuGrError) -> None:
        """There is no answer, or no whole one."""
        ...


class Attempt:
    """One try. It is `Carried` by a connection to the instance, which tells it what arrives."""

    def __init__(self, request: Attempted, router: Router, choice: Choice, is_first: bool) -> None:
        self.is_untaken = False  # a signal that the instance has certainly not begun
        self._request = request
        self._router = router
        self._instance = choice.instance
        self._is_first = is_first
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None
        self._sent_at = 0.0  # 0: not yet
        self._answer: ForwardedAnswer | None = None  # once its head is there
        self._instance.in_flight += 1
        router.metrics.placed(self._instance.name, choice.how).inc()

    def begin(self) -> None:
        """Send the request on an idle connection, or connect first."""
        upstream = self._instance.pool.take()
        if upstream is not None:
            self._send(upstream)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            upstream = await self._router.connect(self._instance)
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
        request.body.rewind()
        upstream.send(self, request.head.encode(request.body, request.deadline.left_s()))
        self.send_more()

    def send_more(self) -> None:
        """Send the part of the body that has arrived since the last call."""
        body = self._request.body
        if self._upstream is None or body.is_sent:
            return
        chunk = body.next_chunk(is_kept=self._request.handling in _SENT_AGAIN)
        if chunk:
            self._upstream.send_more(chunk)
        if body.is_sent and self._is_first and self._request.handling is Handling.FOLLOW:
            # Leave the second try some of the time.
            ratio = self._router.config.retry.first_try_ratio
            self._request.deadline.watch(self._first_try_passed, ratio)

    def _first_try_passed(self) -> None:
        if self._answer is not None or not self._request.retry("timeout"):
            self._request.deadline.watch(self._request.deadline_passed)

    def hold_answer(self, is_held: bool) -> None:
        """Stop reading the answer while the client reads too slowly, or (False) read on."""
        if self._upstream is not None:
            self._upstream.pause(is_held)

    def blame(self, why: str) -> None:
        """Record that the instance failed, unless its time was so short that the caller is to blame."""
        waited_s = time.monotonic() - self._sent_at if self._sent_at else 0.0
        if why != "timeout" or waited_s >= self._router.config.breaker.min_timeout_s:
            self._router.failed(self._instance, why, self._request.handling is Handling.SIGNAL)

    def leave(self) -> None:
        """End the attempt; what the instance still does for it is dropped. Call it once."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None
        self._instance.in_flight -= 1

    # ---- what the connection to the instance tells

    def answer_head(self, status: int, headers: Headers) -> None:
        """Pass the answer on, or try another instance."""
        request = self._request
        instance = self._instance
        now_at = time.monotonic()
        took_s = now_at - self._sent_at
        self._router.metrics.instance_s(instance.name).observe(took_s)
        if status in _RETRIED:
            if status == 503 and any(name.lower() == _NOT_TAKEN for name, _ in headers):
                self.is_untaken = request.handling is Handling.SIGNAL
                instance.checked(Check.UNREADY, now_at)
            if request.retry(str(status)):
                return
            self.blame(str(status))
        else:
            instance.answered(took_s, request.handling is Handling.FOLLOW, now_at)
        added = [b"X-NpuGr-Instance: %s\r\n" % instance.name.encode()]
        if request.placement is not None:
            added.append(b"X-NpuGr-Placement: %s\r\n" % request.placement.encode().encode())
        self._answer = ForwardedAnswer(status, headers, added, request.head.is_http11, request.is_last)
        request.answering()
        if request.client.is_held:
            self.hold_answer(True)

    def answer_body(self, data: bytes) -> None:
        """Add a piece to the answer."""
        if self._answer is not None:
            self._answer.add(data)

    def answer_done(self) -> None:
        """End the answer, and keep the connection for the next request if that is safe."""
        answer = self._answer
        if answer is None:
            return
        answer.end()
        self.answer_flush()
        upstream = self._upstream
        self._upstream = None
        if upstream is not None:
            # A body that was not sent to its end would be continued by the next request's first bytes.
            upstream.release(is_in_step=self._request.body.is_sent)
        self._request.answered(answer.status, answer.closes)

    def answer_flush(self) -> None:
        """Write to the client what has arrived."""
        if self._answer is not None:
            data = self._answer.take()
            if data:
                self._request.client.write(data)

    def lost(self, why: str) -> None:
        """Try another instance, or fail."""
        self._upstream = None
        if self._answer is None and self._request.retry(why):
            return
        self.blame(why)
        if why == "connect":
            self._request.fail(Unavailable("the instance cannot be reached"))
        else:
            self._request.fail(BadGateway("the instance broke off"))

    def hold(self, is_full: bool) -> None:
        """Hold the client back while the instance reads too slowly."""
        self._request.client.pause(is_full)
