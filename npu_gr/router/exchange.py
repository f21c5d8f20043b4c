"""One request on its way: to an instance, once more if the first try failed and it may, and its answer back.

A rank may be tried again. A signal may if nobody has taken it: there was no connection, or the instance said so.

Every exchange ends in exactly one way: a whole answer, a connection that is cut because the answer broke off in the
middle, or a client that left. Its deadline runs from the request's first byte.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from npu_gr.core.errors import BadRequest, DeadlineExceeded, NpuGrError, Unavailable
from npu_gr.router.answers import BadGateway, Refused, plain, problem, status_line
from npu_gr.router.erase import verdict
from npu_gr.router.members import Check
from npu_gr.router.ring import Placement
from npu_gr.router.upstream import Headers, Upstream
from npu_gr.server.headers import NOT_TAKEN, budget_s

if TYPE_CHECKING:
    from npu_gr.router.client import Client
    from npu_gr.router.members import Choice
    from npu_gr.router.router import Router


class Kind(StrEnum):
    """What a request is to the router; the value of the `kind` metric label."""

    SIGNAL = "signal"  # by user; decides the pair; goes elsewhere only if nobody has taken it
    RANK = "rank"  # by user; follows its signal; may be tried again
    USER = "user"  # by user; sent once
    ERASE = "erase"  # to every instance
    ANY = "any"  # by load
    OWN = "own"  # answered here
    NONE = "none"  # not routed


_KINDS = {
    (b"POST", b"/v1/signal"): Kind.SIGNAL,
    (b"POST", b"/v1/rank"): Kind.RANK,
    (b"POST", b"/v1/generate"): Kind.RANK,
    (b"POST", b"/v1/match"): Kind.RANK,
    (b"POST", b"/v1/recommend"): Kind.RANK,
    (b"POST", b"/v1/events"): Kind.USER,
    (b"GET", b"/v1/models"): Kind.ANY,
    (b"GET", b"/v1/catalog"): Kind.ANY,
    (b"GET", b"/openapi.json"): Kind.ANY,
    (b"GET", b"/healthz"): Kind.OWN,
    (b"GET", b"/readyz"): Kind.OWN,
}
BUDGET_HEADERS = ("X-Request-Timeout-Ms", "x-envoy-expected-rq-timeout-ms", "grpc-timeout")
_RETRIED = (502, 503)
_NOT_TAKEN = NOT_TAKEN.lower().encode()
_DROPPED = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"proxy-connection"))


def kind_of(method: bytes, path: bytes) -> Kind:
    """What the request is; `NONE` is answered with 404."""
    if method == b"DELETE" and path.startswith(b"/v1/users/"):
        return Kind.ERASE
    if method == b"GET" and path.startswith(b"/v2"):
        return Kind.ANY
    return _KINDS.get((method, path), Kind.NONE)


@dataclass(slots=True)
class Incoming:
    """A request's head."""

    began_at: float
    target: bytes = b""
    method: bytes = b""
    is_http11: bool = True
    keeps_alive: bool = True
    num_bytes: int = 0
    headers: Headers = field(default_factory=list)  # to be passed on
    seen: dict[bytes, bytes] = field(default_factory=dict)  # lower-case name -> value, all of them


class Exchange:
    """Waiting (body not here yet, or not its turn), at an instance, answering, over."""

    def __init__(self, router: Router, client: Client, incoming: Incoming) -> None:
        self._router, self._client, self._in = router, client, incoming
        self.kind = kind_of(incoming.method, incoming.target.partition(b"?")[0])
        self._request_id = incoming.seen.get(b"x-request-id") or uuid.uuid4().hex.encode()
        self._error: NpuGrError | None = None
        self._body: list[bytes] = []  # as far as it must be kept
        self._body_bytes = self._num_sent = 0  # of the body: bytes received, pieces sent
        self._is_whole = self._is_started = self._is_over = self._is_answering = False
        self._is_chunked = self._answer_chunked = self._closes = False
        self._is_untaken = False  # a signal that no instance has begun
        self._tried: list[str] = []
        self._choice: Choice | None = None
        self._placement: Placement | None = None
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._sent_at = 0.0
        self._out: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._status = 0
        self._deadline_at = incoming.began_at + router.config.default_budget_s
        try:
            self._deadline_at = incoming.began_at + self._budget_s()
        except NpuGrError as error:
            self._error = error
        else:
            left_s = self._deadline_at - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._deadline_passed)

    def _budget_s(self) -> float:
        """What the caller grants; once read, the remaining time is passed on instead."""
        seen = self._in.seen
        given = {name: seen[low].decode("latin-1") for name in BUDGET_HEADERS if (low := name.lower().encode()) in seen}
        return budget_s(given, self._router.config.default_budget_s, self._router.config.max_budget_s)

    # ---- from the client

    def receive(self, body: bytes) -> bool:
        """Some of the body; False: it is too large."""
        self._body_bytes += len(body)
        if self._body_bytes > self._router.config.limits.max_body_bytes:
            return False
        if not self._is_over:
            self._body.append(body)
        return True

    def received(self) -> None:
        """The body is whole."""
        self._is_whole = True

    def refuse(self, error: NpuGrError) -> None:
        """It will be answered with this; what it did at an instance is dropped."""
        self._error = error
        self._in.keeps_alive = False

    def push(self) -> None:
        """Its turn, or more of its body has come: do what can be done."""
        if self._is_over:
            return
        if self._error is not None:
            self._fail(self._error)
        elif not self._is_started:
            if self._is_whole or self._body_bytes > self._router.config.limits.stream_over_bytes:
                self._start()
        elif self._upstream is not None and not self._is_answering:
            self._send_more()

    def hold_answer(self, is_held: bool) -> None:
        """The client reads too slowly, or fast enough again."""
        if self._upstream is not None:
            self._upstream.pause(is_held)

    def cancel(self) -> None:
        """The client left: so does the instance's work."""
        if self._is_over:
            return
        self._router.metrics.cancelled(self.kind).inc()
        self._end(499)

    # ---- to an instance

    def _start(self) -> None:
        self._is_started = True
        self._router.in_flight += 1
        try:
            if self.kind is Kind.NONE:
                raise Refused(404, "the router has no such route; ask an instance itself")
            if self.kind is Kind.OWN:
                self._answer_own()
                return
            self._router.check_room()
            if self.kind is Kind.ERASE:
                self._connecting = asyncio.get_running_loop().create_task(self._erase())
                return
            self._go(self._choose())
        except NpuGrError as error:
            self._router.metrics.refused(error.title).inc()
            self._fail(error)

    def _choose(self) -> Choice:
        seen, now_at, members = self._in.seen, time.monotonic(), self._router.members
        if self.kind is Kind.ANY or (self.kind is Kind.RANK and seen.get(b"x-npugr-service") == b"normal"):
            return members.for_any(now_at, self._tried)
        user = seen.get(self._router.user_header)
        if not user:
            raise BadRequest(f"{self._router.config.user_header}: missing; requests are routed by this header")
        if self.kind is Kind.SIGNAL:
            choice, self._placement = members.for_signal(user, now_at, self._tried)
            return choice
        brought = (
            Placement.decode(seen[b"x-npugr-placement"].decode("latin-1")) if b"x-npugr-placement" in seen else None
        )
        return members.for_rank(user, brought, now_at, self._tried)

    def _go(self, choice: Choice) -> None:
        self._choice = choice
        instance = choice.instance
        instance.in_flight += 1
        self._tried.append(instance.name)
        self._router.metrics.placed(instance.name, choice.how).inc()
        while instance.idle:
            upstream = instance.idle.pop()
            if not upstream.is_closed:
                self._send(upstream)
                return
        self._connecting = asyncio.get_running_loop().create_task(self._connect(choice))

    async def _connect(self, choice: Choice) -> None:
        try:
            upstream = await self._router.connect(choice.instance)
        except OSError:
            self._connecting = None
            self._is_untaken = self.kind is Kind.SIGNAL
            self._router.unreachable(choice.instance)
            self.lost("connect")
            return
        self._connecting = None
        self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._is_untaken = False
        self._sent_at = time.monotonic()
        self._is_chunked = not self._is_whole
        self._num_sent = 0
        upstream.send(self, self._head())
        self._send_more()

    def _head(self) -> bytes:
        """The request as the instance gets it: the remaining time instead of the granted one, no hop-by-hop header."""
        left_ms = max(1.0, (self._deadline_at - time.monotonic()) * 1e3)
        parts = [b"%s %s HTTP/1.1\r\n" % (self._in.method, self._in.target)]
        parts += [b"%s: %s\r\n" % pair for pair in self._in.headers]
        if b"x-request-id" not in self._in.seen:
            parts.append(b"X-Request-Id: %s\r\n" % self._request_id)
        if not self._in.is_http11 and b"host" not in self._in.seen:
            parts.append(b"Host: router\r\n")
        if self._is_chunked:
            parts.append(b"Transfer-Encoding: chunked\r\n")
        elif self._body_bytes or self._in.method == b"POST":
            parts.append(b"Content-Length: %d\r\n" % self._body_bytes)
        parts.append(b"X-Request-Timeout-Ms: %.3f\r\n\r\n" % left_ms)
        if self._is_chunked:
            return b"".join(parts)
        return b"".join(parts + self._body)  # in one write

    def _send_more(self) -> None:
        """The part of the body that has come since; kept for a second try if there can be one."""
        assert self._upstream is not None
        if self._is_chunked:
            new = b"".join(self._body[self._num_sent :])
            self._num_sent = len(self._body)
            if self.kind not in (Kind.RANK, Kind.SIGNAL):
                self._body.clear()
                self._num_sent = 0
            frame = b"%x\r\n%s\r\n" % (len(new), new) if new else b""
            self._upstream.send_more(frame + (b"0\r\n\r\n" if self._is_whole else b""))
        if self._is_whole and self._can_retry:
            self._arm_first_try()

    @property
    def _can_retry(self) -> bool:
        return (self.kind is Kind.RANK or self._is_untaken) and len(self._tried) < 2

    # ---- time

    def _arm_first_try(self) -> None:
        """Leave the second try some of the budget."""
        now_at = time.monotonic()
        wait_s = (self._deadline_at - now_at) * self._router.config.retry.first_try_ratio
        self._arm(wait_s, self._first_try_passed)

    def _arm(self, wait_s: float, call: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), call)  # type: ignore[arg-type]

    def _first_try_passed(self) -> None:
        self._arm(self._deadline_at - time.monotonic(), self._deadline_passed)
        if not self._is_answering:
            self._retry("timeout")

    def _deadline_passed(self) -> None:
        if self._is_over:
            return
        self._timer = None
        if not self._is_whole:
            self.refuse(Refused(408, "body: not complete within the time budget"))
        else:
            self._error = DeadlineExceeded("no answer within the time budget")
            if self._choice is not None:
                self._blame("timeout")
        if self._client.is_turn_of(self):
            self.push()

    # ---- from an instance

    def answer_head(self, status: int, headers: Headers) -> None:
        """See `Carried`."""
        assert self._choice is not None
        instance, now_at = self._choice.instance, time.monotonic()
        took_s = now_at - self._sent_at
        self._router.metrics.instance_s(instance.name).observe(took_s)
        if status in _RETRIED:
            if status == 503 and any(name.lower() == _NOT_TAKEN for name, _ in headers):
                self._is_untaken = self.kind is Kind.SIGNAL
                instance.checked(Check.UNREADY, now_at)
            if self._retry(str(status)):
                return
            self._blame(str(status))
        else:
            instance.answered(took_s, self.kind is Kind.RANK, now_at)
        self._is_answering, self._status = True, status
        out, has_length = [status_line(status)], status in (204, 304)
        for name, value in headers:
            low = name.lower()
            has_length = has_length or low == b"content-length"
            if low not in _DROPPED:
                out.append(b"%s: %s\r\n" % (name, value))
        self._answer_chunked = not has_length and self._in.is_http11
        if self._answer_chunked:
            out.append(b"Transfer-Encoding: chunked\r\n")
        if not has_length and not self._in.is_http11:
            self._in.keeps_alive = False
        out.append(b"X-NpuGr-Instance: %s\r\n" % instance.name.encode())
        if self._placement is not None:
            out.append(b"X-NpuGr-Placement: %s\r\n" % self._placement.encode().encode())
        self._closes = self._is_last
        if self._closes:
            out.append(b"Connection: close\r\n")
        out.append(b"\r\n")
        self._out += out
        if self._client.is_held:
            self.hold_answer(True)

    @property
    def _is_last(self) -> bool:
        return not self._in.keeps_alive or self._router.is_draining or not self._is_whole

    def answer_body(self, data: bytes) -> None:
        """See `Carried`."""
        self._out.append(b"%x\r\n%s\r\n" % (len(data), data) if self._answer_chunked else data)

    def answer_done(self) -> None:
        """See `Carried`."""
        if not self._is_answering:
            return
        if self._answer_chunked:
            self._out.append(b"0\r\n\r\n")
        self.answer_flush()
        upstream, self._upstream = self._upstream, None
        if upstream is not None and not upstream.is_closed:
            upstream.pause(False)
            self._router.keep(upstream, is_in_step=self._is_whole)
        self._end(self._status)
        self._client.finished(self, self._closes)

    def answer_flush(self) -> None:
        """See `Carried`."""
        if self._out:
            self._client.write(b"".join(self._out))
            self._out.clear()

    def lost(self, why: str) -> None:
        """See `Carried`."""
        self._upstream = None
        if self._is_answering:
            self._blame(why)
            self._cut(502)
            return
        if self._retry(why):
            return
        self._blame(why)
        if why == "connect":
            self._fail(Unavailable("the instance cannot be reached"))
        else:
            self._fail(BadGateway("the instance broke off"))

    def hold(self, is_full: bool) -> None:
        """See `Carried`."""
        self._client.pause(is_full)

    def _blame(self, why: str) -> None:
        assert self._choice is not None
        waited_s = time.monotonic() - self._sent_at if self._sent_at else 0.0
        if why != "timeout" or waited_s >= self._router.config.breaker.min_timeout_s:
            self._router.failed(self._choice.instance, why, self.kind is Kind.SIGNAL)

    def _retry(self, why: str) -> bool:
        """The successor takes it, as a miss; False: it may not be tried again, or there is nobody else."""
        if not (self._can_retry and self._is_whole and self._router.may_retry()):
            return False
        try:
            choice = self._choose()
        except NpuGrError:
            self._router.give_back_retry()
            return False
        self._blame(why)
        self._leave()
        self._router.metrics.retries(why).inc()
        self._arm(self._deadline_at - time.monotonic(), self._deadline_passed)
        self._go(choice)
        return True

    async def _erase(self) -> None:
        """At every instance, with a little less time than there is, so that the answer can say who had none."""
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._in.headers}
        given = {name: value for name, value in given.items() if name.lower() != "host"}
        given["X-Request-Id"] = self._request_id.decode("latin-1")
        left_s = 0.9 * (self._deadline_at - time.monotonic())
        given["X-Request-Timeout-Ms"] = f"{max(1.0, left_s * 1e3):.3f}"
        said = await self._router.erase(self._in.target.decode("latin-1"), given, left_s)
        self._connecting = None
        try:
            status, answer = verdict(said, self._is_last)
        except NpuGrError as error:
            self._fail(error)
        else:
            self._reply(status, answer)

    # ---- the end

    def _answer_own(self) -> None:
        is_ready, why = self._router.is_ready()
        if self._in.target.startswith(b"/readyz") and not is_ready:
            raise Unavailable(why)
        self._reply(200, plain(200, b"{}", [b"Content-Type: application/json"], self._is_last))

    def _fail(self, error: NpuGrError) -> None:
        if self._is_answering:
            self._cut(error.status)
        else:
            self._reply(error.status, problem(error, self._request_id, self._is_last))

    def _reply(self, status: int, answer: bytes) -> None:
        is_last = self._is_last
        self._client.write(answer)
        self._end(status)
        self._client.finished(self, is_last)

    def _cut(self, status: int) -> None:
        """Half an answer is out: only a cut tells the client."""
        self._end(status)
        self._client.abort()

    def _leave(self) -> None:
        """Give up what is going on at an instance."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None
        if self._choice is not None:
            self._choice.instance.in_flight -= 1
            self._choice = None

    def _end(self, status: int) -> None:
        self._leave()
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_started:
            self._router.in_flight -= 1
        self._router.finished(self.kind, status, time.monotonic() - self._in.began_at)
