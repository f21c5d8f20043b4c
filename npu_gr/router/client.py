"""One connection of a client: reads requests, bounds them, answers them one after the other.

What another parser could read otherwise is refused, not repaired: two lengths, a length and chunks, a bare line feed,
a repeated host, user or length header. After such a request the connection is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from npu_gr.router.answers import CONTINUE, Refused
from npu_gr.router.exchange import BUDGET_HEADERS, Exchange, Incoming

if TYPE_CHECKING:
    from npu_gr.router.router import Router

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
    )
)
_OURS = frozenset(  # the router writes them itself
    (
        b"transfer-encoding",
        b"content-length",
        b"upgrade",
        b"expect",
        *(name.lower().encode() for name in BUDGET_HEADERS),
    )
)
_ONCE = frozenset((b"host", b"content-length", b"x-npugr-placement", b"x-npugr-service", b"x-request-id"))
_METHODS = (b"GET", b"POST", b"DELETE")
_MAX_PIPELINED = 16
_LINGER_S = 2.0  # for the client to read why it was refused


class Client(asyncio.Protocol):
    """`exchanges[0]` is being answered; the ones behind it were sent without waiting."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._exchanges: deque[Exchange] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: Incoming | None = None  # until its headers are complete
        self._receiving: Exchange | None = None  # until its body is complete
        self._head_bytes = 0
        self._num_trailers = 0
        self._is_last = False  # nothing after this request will be read
        self._refused_s = 0.0
        self._is_held = self._is_reading_paused = False
        self.busy_since_s = self.idle_since_s = time.monotonic()
        self.transport: asyncio.Transport | None = None

    # ---- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if not self._router.admit(self):
            self._is_last = True
            self._refuse(Refused(503, "the router is at its limit of connections"))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_last and self._receiving is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, Refused):
                raise
            self._refuse(error.__context__)
        except httptools.HttpParserUpgrade:
            self._is_last = True  # we speak HTTP/1.1 and nothing else; what follows is not ours to read
        except httptools.HttpParserError as error:
            self._refuse(Refused(400, f"broken HTTP: {error}"))
        else:
            if self._incoming is not None:
                self._head_bytes += len(data)
                if self._head_bytes > self._router.config.limits.max_header_bytes:
                    self._refuse(self._too_many())
        if self._exchanges:
            self._exchanges[0].push()
            if len(self._exchanges) > _MAX_PIPELINED:
                self.pause(True)

    def eof_received(self) -> bool:
        """See asyncio.Protocol."""
        return False  # a client that will not read its answer has left

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._router.forget(self)
        while self._exchanges:
            self._exchanges.popleft().cancel()
        self.transport = None

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_held = True
        if self._exchanges:
            self._exchanges[0].hold_answer(True)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_held = False
        if self._exchanges:
            self._exchanges[0].hold_answer(False)

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        """See httptools.HTTPProtocol."""
        if self._is_last:
            raise Refused(400, "a request after the last one")
        self._incoming = Incoming(began_at=time.monotonic())
        self._head_bytes = self._num_trailers = 0
        self.busy_since_s = self._incoming.began_at

    def on_url(self, url: bytes) -> None:
        """See httptools.HTTPProtocol."""
        assert self._incoming is not None
        self._incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools.HTTPProtocol."""
        incoming = self._incoming
        limits = self._router.config.limits
        if incoming is None:  # a trailer: counted, and not passed on
            self._num_trailers += 1
            if self._num_trailers > limits.max_headers:
                raise self._too_many()
            return
        low = name.lower()
        incoming.num_bytes += len(name) + len(value) + 4
        if low in incoming.seen and (low in _ONCE or low == self._router.user_header):
            raise Refused(400, f"{low.decode()}: given twice")
        incoming.seen[low] = value
        if low not in _HOP_BY_HOP and low not in _OURS:
            incoming.headers.append((name, value))
            if len(incoming.headers) > limits.max_headers:
                raise self._too_many()

    def on_headers_complete(self) -> None:
        """See httptools.HTTPProtocol."""
        incoming, limits = self._incoming, self._router.config.limits
        assert incoming is not None
        self._incoming = None
        incoming.method = self._parser.get_method()
        incoming.is_http11 = self._parser.get_http_version() == "1.1"
        incoming.keeps_alive = incoming.is_http11 and self._parser.should_keep_alive()
        if incoming.num_bytes + len(incoming.target) > limits.max_header_bytes:
            raise self._too_many()
        if incoming.method not in _METHODS:
            raise Refused(405, f"{incoming.method.decode()}: not a method of this service")
        if incoming.is_http11 and b"host" not in incoming.seen:
            raise Refused(400, "host: missing")
        if not incoming.target.startswith(b"/"):
            raise Refused(400, "the target is not a path")
        if int(incoming.seen.get(b"content-length", b"0")) > limits.max_body_bytes:
            raise Refused(413, f"body: {int(incoming.seen[b'content-length'])} bytes, limit {limits.max_body_bytes}")
        for name in incoming.seen.get(b"connection", b"").lower().split(b","):
            if name.strip() not in (b"", b"close", b"keep-alive"):
                incoming.headers = [pair for pair in incoming.headers if pair[0].lower() != name.strip()]
        if not incoming.keeps_alive:
            self._is_last = True
        self._receiving = Exchange(self._router, self, incoming)
        self._exchanges.append(self._receiving)
        if incoming.seen.get(b"expect", b"").lower() == b"100-continue" and len(self._exchanges) == 1:
            self.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        """See httptools.HTTPProtocol."""
        assert self._receiving is not None
        if not self._receiving.receive(body):
            raise Refused(413, f"body: over the limit of {self._router.config.limits.max_body_bytes} bytes")

    def on_message_complete(self) -> None:
        """See httptools.HTTPProtocol."""
        if self._receiving is not None:
            self._receiving.received()
            self._receiving = None

    # ---- the exchanges' calls

    def write(self, data: bytes) -> None:
        """To the client."""
        if self.transport is not None:
            self.transport.write(data)

    def pause(self, is_paused: bool) -> None:
        """Stop or go on reading; what is already here is kept."""
        if self.transport is not None and is_paused != self._is_reading_paused:
            self._is_reading_paused = is_paused
            (self.transport.pause_reading if is_paused else self.transport.resume_reading)()

    def is_turn_of(self, exchange: Exchange) -> bool:
        """Whether the one before it is answered."""
        return bool(self._exchanges) and self._exchanges[0] is exchange

    @property
    def is_held(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self._is_held

    def finished(self, exchange: Exchange, is_last: bool) -> None:
        """The first exchange has its whole answer; the next one's turn."""
        self._exchanges.popleft()
        if is_last:
            self._is_last = True
            self.end()
            return
        self.idle_since_s = time.monotonic()
        self.pause(False)
        if self._exchanges:
            self._exchanges[0].push()

    def end(self) -> None:
        """Close after what was written; requests that wait their turn are dropped."""
        while self._exchanges:
            self._exchanges.popleft().cancel()
        if self.transport is None:
            return
        if self._refused_s and self.transport.can_write_eof():
            self.transport.write_eof()  # closing now would reset the connection while the client still sends
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close at once: the answer cannot be finished."""
        if self.transport is not None:
            self.transport.abort()

    # ---- the router's calls

    @property
    def is_idle(self) -> bool:
        """No request, not even the beginning of one."""
        return not self._exchanges and self._incoming is None

    def sweep(self, now_at: float) -> None:
        """Once a second: end what takes too long."""
        config = self._router.config
        if self._refused_s and now_at - self._refused_s > _LINGER_S:
            self.abort()
        elif self._incoming is not None and now_at - self._incoming.began_at > config.header_timeout_s:
            self._refuse(Refused(408, f"headers: not complete after {config.header_timeout_s:g} s"))
        elif self.is_idle and now_at - self.idle_since_s > config.idle_s:
            self.end()

    def _refuse(self, error: Refused) -> None:
        """Answer in turn, then close."""
        incoming, self._incoming = self._incoming or Incoming(began_at=time.monotonic()), None
        self._is_last = True
        self._refused_s = time.monotonic()
        incoming.keeps_alive = False
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            exchange = Exchange(self._router, self, incoming)
            self._exchanges.append(exchange)
        exchange.refuse(error)
        if self.is_turn_of(exchange):
            exchange.push()

    def _too_many(self) -> Refused:
        limits = self._router.config.limits
        return Refused(431, f"headers: over {limits.max_header_bytes} bytes or {limits.max_headers} lines")
