"""One kept-alive connection to an instance. Carries one request at a time and reads its answer as it comes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol, cast

import httptools

if TYPE_CHECKING:
    from npu_gr.router.members import Instance

Headers = list[tuple[bytes, bytes]]


class Carried(Protocol):
    """The request that a connection carries now, as the connection sees it."""

    def answer_head(self, status: int, headers: Headers) -> None:
        """The status line and the headers are complete."""
        ...

    def answer_body(self, data: bytes) -> None:
        """Some of the body."""
        ...

    def answer_done(self) -> None:
        """The answer is whole; the connection is no longer this request's."""
        ...

    def answer_flush(self) -> None:
        """All that has arrived was told."""
        ...

    def lost(self, why: str) -> None:
        """No answer, or no whole one: the connection is gone."""
        ...

    def hold(self, is_full: bool) -> None:
        """The connection's buffer is full, or is no longer."""
        ...


class Upstream(asyncio.Protocol):
    """Idle (`carried` is None), carrying, or closed."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.idle_since_s = 0.0
        self.is_closed = False
        self._carried: Carried | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._has_head = self._is_delimited = self._is_out_of_step = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def send(self, carried: Carried, data: bytes) -> None:
        """Begin a request."""
        assert self._transport is not None
        self._carried = carried
        self._has_head = self._is_delimited = False
        self._transport.write(data)

    def send_more(self, data: bytes) -> None:
        """More of its body."""
        assert self._transport is not None
        self._transport.write(data)

    def pause(self, is_paused: bool) -> None:
        """Stop or go on reading: the client is slower than the instance."""
        if self._transport is not None and not self.is_closed:
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def close(self) -> None:
        """Drop it, and tell nobody: what it carried has been answered otherwise."""
        self._carried = None
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # ---- the transport's calls

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._carried is None:
            self.close()  # nobody asked
            return
        carried = self._carried
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._lose("bad_answer")
            return
        carried.answer_flush()

    def eof_received(self) -> None:
        """See asyncio.Protocol."""
        if self._carried is not None and self._has_head and not self._is_delimited:
            carried = self._carried
            self.close()
            carried.answer_done()
            carried.answer_flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_closed = True
        if self._carried is not None:
            self._lose("lost")
        elif self in self.instance.idle:
            self.instance.idle.remove(self)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._carried is not None:
            self._carried.hold(True)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._carried is not None:
            self._carried.hold(False)

    def _lose(self, why: str) -> None:
        carried = self._carried
        self.close()
        if carried is not None:
            carried.lost(why)

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        """See httptools.HTTPProtocol."""
        self._is_out_of_step = self._carried is None
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools.HTTPProtocol."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """See httptools.HTTPProtocol."""
        status = self._parser.get_status_code()
        if status < 200 or self._carried is None:
            return
        self._has_head = True
        names = {name.lower() for name, _ in self._headers}
        self._is_delimited = status in (204, 304) or b"content-length" in names or b"transfer-encoding" in names
        self._carried.answer_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        """See httptools.HTTPProtocol."""
        if self._carried is not None:
            self._carried.answer_body(body)

    def on_message_complete(self) -> None:
        """See httptools.HTTPProtocol."""
        if not self._has_head or self._carried is None:
            return
        carried, self._carried = self._carried, None
        if self._parser.should_keep_alive() and not self._is_out_of_step:
            self.idle_since_s = time.monotonic()
        else:
            self.close()
        carried.answer_done()
