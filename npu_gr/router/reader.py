"""Parses what one client sends into requests, and enforces the limits on heads and bodies.

What another parser could read differently is rejected, not repaired: two lengths, a length and chunks, a bare line
feed, a repeated host, user or length header. Nothing is read after such a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import httptools

from npu_gr.router.answers import Refused
from npu_gr.router.config import LimitsConfig
from npu_gr.router.exchange import Exchange
from npu_gr.router.request import NOT_PASSED_ON, PARTS, RequestHead, too_many_headers


class RequestReader:
    """The parser of one connection: it is in a head, in a body, or between two requests."""

    def __init__(
        self, limits: LimitsConfig, once: frozenset[bytes], on_head: Callable[[RequestHead], Exchange]
    ) -> None:
        self.is_last = False  # nothing is read after the request that is being read
        self.head: RequestHead | None = None  # that is being read
        self._limits = limits
        self._once = once
        self._max_parts = PARTS * limits.max_headers
        self._on_head = on_head
        self._exchange: Exchange | None = None  # whose body is being read
        self._head_bytes = 0
        self._num_trailers = 0
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Parse what has arrived.

        Raises:
            Refused: the request that is being read is rejected.
        """
        if self.is_last and self._exchange is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, Refused):
                raise
            raise error.__context__ from None
        except httptools.HttpParserUpgrade:
            self.is_last = True  # the router speaks HTTP/1.1 only: what follows an upgrade is not for it
        except httptools.HttpParserError as error:
            raise Refused(400, f"broken HTTP: {error}") from error
        else:
            if self.head is not None:
                self._head_bytes += len(data)
                if self._head_bytes > self._limits.max_header_bytes:
                    raise too_many_headers(self._limits)

    def drop(self) -> tuple[RequestHead | None, Exchange | None]:
        """Read nothing any more.

        Returns:
            What was being read: a head, or the body of a request, or neither.
        """
        dropped = (self.head, self._exchange)
        self.head = None
        self._exchange = None
        self.is_last = True
        return dropped

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        if self.is_last:
            raise Refused(400, "a request after the last one")
        self.head = RequestHead(began_at=time.monotonic())
        self._head_bytes = 0
        self._num_trailers = 0

    def on_url(self, url: bytes) -> None:
        assert self.head is not None
        self.head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        head = self.head
        if head is None:  # a trailer: counted, and not passed on
            self._num_trailers += 1
            if self._num_trailers > self._limits.max_headers:
                raise too_many_headers(self._limits)
            return
        low = name.lower()
        seen = head.seen
        if low in seen and low in self._once:
            raise Refused(400, f"{low.decode()}: given twice")
        seen[low] = value
        head.num_bytes += len(name) + len(value) + 4
        if low not in NOT_PASSED_ON:
            head.lines += (name, b": ", value, b"\r\n")
            if len(head.lines) > self._max_parts:
                raise too_many_headers(self._limits)

    def on_headers_complete(self) -> None:
        head = self.head
        assert head is not None
        self.head = None
        head.method = self._parser.get_method()
        head.is_http11 = self._parser.get_http_version() == "1.1"
        head.keeps_alive = head.is_http11 and self._parser.should_keep_alive()
        head.check(self._limits, self._once)
        self._exchange = self._on_head(head)
        if not head.keeps_alive:
            self.is_last = True

    def on_body(self, body: bytes) -> None:
        assert self._exchange is not None
        self._exchange.body.add(body, self._limits.max_body_bytes)

    def on_message_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.body.is_whole = True
            self._exchange = None
