"""Connections to one instance: each carries one request at a time and reads its answer as it comes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Protocol, cast

import httptools

from npu_gr.server.headers import NOT_TAKEN
from npu_gr.server.tls_listener import bound_read_ahead

# Statuses whose answers have no body, whatever their headers say.
BODILESS = (204, 304)
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"proxy-connection")
)
_NOT_TAKEN = NOT_TAKEN.lower().encode()
_JOINED_BYTES = 4096  # a longer body is not copied behind its head


class AnswerHead:
    """The status and the headers of an instance's answer."""

    __slots__ = ("has_length", "is_chunked", "is_not_taken", "lines", "status")

    def __init__(self) -> None:
        self.status = 0
        self.lines: list[bytes] = []  # headers that are passed on: name, colon, value, line end, name, ...
        self.has_length = False
        self.is_chunked = False
        self.is_not_taken = False  # the instance says that it has begun nothing


class Carried(Protocol):
    """What an upstream connection tells the request that it carries."""

    def answer_head(self, head: AnswerHead) -> None:
        """The status line and the headers are complete."""
        ...

    def answer_body(self, data: bytes) -> None:
        """A piece of the answer's body has arrived."""
        ...

    def answer_done(self) -> None:
        """The answer is complete. The connection no longer carries this request."""
        ...

    def answer_flush(self) -> None:
        """Everything that has arrived so far was reported: pass it on now."""
        ...

    def lost(self, why: str) -> None:
        """The connection was lost before the answer was complete."""
        ...

    def hold(self, is_full: bool) -> None:
        """The buffer towards the instance is full, or (False) has room again."""
        ...


class AnswerReader:
    """Parses the answers on one connection and reports each to the request that the connection carries."""

    def __init__(self) -> None:
        self.carried: Carried | None = None  # None: the connection is idle
        self.has_head = False
        self.is_delimited = False  # the answer says where it ends; otherwise it ends with the connection
        self.is_reusable = False  # of the last complete answer: another request may follow on this connection
        self._is_out_of_step = False  # this answer began before its request was sent
        self._head = AnswerHead()
        self._parser = httptools.HttpResponseParser(self)

    def expect(self, carried: Carried) -> None:
        """Report the next answer to this request."""
        self.carried = carried
        self.has_head = False
        self.is_delimited = False

    def feed(self, data: bytes) -> bool:
        """Parse what has arrived. False: it is no answer to one request."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a defect of ours, not of the instance
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return True

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        self._is_out_of_step = self.carried is None
        self._head = AnswerHead()

    def on_header(self, name: bytes, value: bytes) -> None:
        head = self._head
        low = name.lower()
        if low not in _HOP_BY_HOP:
            head.lines += (name, b": ", value, b"\r\n")
        if low == b"content-length":
            head.has_length = True
        elif low == b"transfer-encoding":
            head.is_chunked = True
        elif low == _NOT_TAKEN:
            head.is_not_taken = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self.carried is None:
            return
        self.has_head = True
        head = self._head
        head.status = status
        head.has_length = head.has_length or status in BODILESS
        self.is_delimited = head.has_length or head.is_chunked
        self.carried.answer_head(head)

    def on_body(self, body: bytes) -> None:
        if self.carried is not None:
            self.carried.answer_body(body)

    def on_message_complete(self) -> None:
        if not self.has_head or self.carried is None:
            return
        carried = self.carried
        self.carried = None
        self.is_reusable = self._parser.should_keep_alive() and not self._is_out_of_step
        carried.answer_done()


class Upstream(asyncio.Protocol):
    """One kept-alive connection: idle, carrying a request, or closed."""

    def __init__(self, pool: UpstreamPool) -> None:
        self.is_closed = False
        self.idle_since_at = 0.0
        self._is_paused = False
        self._pool = pool
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None

    def send(self, carried: Carried, head: bytes, body: list[bytes]) -> None:
        """Begin a request; its answer is reported to `carried`.

        Args:
            carried: the request.
            head: with the empty line at its end.
            body: the whole body, or nothing if it follows in chunks.
        """
        self._reader.expect(carried)
        assert self._transport is not None
        if sum(map(len, body)) > _JOINED_BYTES:
            self._transport.writelines([head, *body])
        else:
            self._transport.write(b"".join((head, *body)))

    def send_more(self, data: bytes) -> None:
        """Send more of the request's body."""
        assert self._transport is not None
        self._transport.write(data)

    def pause(self, is_paused: bool) -> None:
        """Stop reading while the client is slower than the instance, or (False) read on."""
        if self._transport is not None and not self.is_closed and is_paused != self._is_paused:
            self._is_paused = is_paused
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def release(self, is_in_step: bool) -> None:
        """Keep the connection for the next request if that is safe, otherwise close it.

        Args:
            is_in_step: the request was sent completely, so the next bytes that are sent begin another one. What of it
                the instance has not read would stay in memory.
        """
        if self.is_closed:
            return
        is_flushed = self._transport is not None and not self._transport.get_write_buffer_size()
        if not (is_in_step and is_flushed and self._reader.is_reusable):
            self.close()
            return
        if self._is_paused:
            self.pause(False)
        self.idle_since_at = time.monotonic()
        self._pool.keep(self)

    def close(self) -> None:
        """Drop the connection without telling the request that it carries: that one is answered otherwise."""
        self._reader.carried = None
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # ---- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        bound_read_ahead(transport)
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Parse a piece of an answer, and pass on what it completes in one write."""
        carried = self._reader.carried
        if carried is None:
            self.close()  # an answer to no request
        elif self._reader.feed(data):
            if self._reader.carried is carried:  # an answer that is done is written
                carried.answer_flush()
        else:
            self._lose("bad_answer")

    def eof_received(self) -> None:
        """End an answer that says nowhere how long it is: it is complete now."""
        carried = self._reader.carried
        if carried is not None and self._reader.has_head and not self._reader.is_delimited:
            self.close()
            carried.answer_done()
            carried.answer_flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request, or leave the pool."""
        self.is_closed = True
        if self._reader.carried is not None:
            self._lose("lost")
        else:
            self._pool.forget(self)

    def pause_writing(self) -> None:
        """Hold the request back: its instance reads too slowly."""
        if self._reader.carried is not None:
            self._reader.carried.hold(True)

    def resume_writing(self) -> None:
        """Let the request go on."""
        if self._reader.carried is not None:
            self._reader.carried.hold(False)

    def _lose(self, why: str) -> None:
        carried = self._reader.carried
        self.close()
        if carried is not None:
            carried.lost(why)


class UpstreamPool:
    """The idle connections to one instance."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._idle: deque[Upstream] = deque()  # the longest unused first

    def take(self) -> Upstream | None:
        """Take the most recently used idle connection. None: there is none."""
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.is_closed:
                return upstream
        return None

    async def connect(self, host: str, port: int, timeout_s: float, options: dict[str, Any]) -> Upstream:
        """Open a new connection, which is not idle.

        Args:
            host, port: of the instance.
            timeout_s: for the connection, TLS included.
            options: of `Hop`.

        Raises:
            OSError: nobody listens, or (TimeoutError) there was no connection in time.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, upstream = await loop.create_connection(lambda: Upstream(self), host, port, **options)
        return upstream

    def keep(self, upstream: Upstream) -> None:
        """Keep a connection for the next request, or close it if enough are idle."""
        if len(self._idle) < self._max_idle:
            self._idle.append(upstream)
        else:
            upstream.close()

    def forget(self, upstream: Upstream) -> None:
        """Drop a connection that was lost while it was idle."""
        if upstream in self._idle:
            self._idle.remove(upstream)

    def close_idle(self, before_at: float = float("inf")) -> None:
        """Close the connections that were last used before `before_at`."""
        while self._idle and self._idle[0].idle_since_at < before_at:
            self._idle.popleft().close()
