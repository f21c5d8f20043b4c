"""A client's request as the router has read it: its head, how the head is rewritten, and its body.

What another parser could read differently is rejected, not repaired; here that is a repeated host, length, user or
request-ID header, and a request without a host.
"""

from __future__ import annotations

import os
from itertools import count

from npu_gr.router.answers import Refused
from npu_gr.router.config import LimitsConfig, RouterConfig
from npu_gr.router.kept import KeptBytes
from npu_gr.router.routes import METHODS
from npu_gr.server.http import budget_s

_BUDGET_HEADERS = {
    name.lower().encode(): name for name in ("X-Request-Timeout-Ms", "x-envoy-expected-rq-timeout-ms", "grpc-timeout")
}
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
        *_BUDGET_HEADERS,
    )
)
NOT_PASSED_ON = _HOP_BY_HOP | _OURS
ONCE = frozenset(  # read by the router, or by an instance as the first of several: nothing may be in them twice
    (b"host", b"content-length", b"authorization", b"x-npugr-placement", b"x-npugr-service", b"x-request-id")
)
_LAST_CHUNK = b"0\r\n\r\n"
_SMALL_BYTES = 512  # a smaller piece of a body is joined to the one before: each costs 50 bytes beside what is in it
PARTS = 4  # of a header in `RequestHead.lines`
_ID_PREFIX = os.urandom(10).hex().encode()  # of this process; with the count an ID is as unique as a random one
_ids = count()


def headers_read(config: RouterConfig) -> frozenset[bytes]:
    """Lower-case names of the headers that decide what becomes of a request; its user may stand in the body instead."""
    return ONCE | _BUDGET_HEADERS.keys() | {b"content-type", config.user_header.encode(), config.tenant_header.encode()}


def too_many_headers(limits: LimitsConfig) -> Refused:
    """The error for a head over its limits."""
    return Refused(431, f"headers: over {limits.max_header_bytes} bytes or {limits.max_headers} lines")


class RequestHead:
    """The request line and the headers."""

    __slots__ = (
        "_request_id",
        "began_at",
        "is_http11",
        "keeps_alive",
        "lines",
        "method",
        "num_bytes",
        "path",
        "seen",
        "target",
        "user",
    )

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at  # when its first byte came
        self.target = b""
        self.path = b""  # the target without its query; once the head is complete
        self.method = b""
        self.is_http11 = True
        self.keeps_alive = True  # the client may send another request after it
        self.num_bytes = 0  # of the headers, with their line ends
        self.lines: list[bytes] = []  # headers to be passed on: name, colon, value, line end, name, ...
        self.seen: dict[bytes, bytes] = {}  # lower-case name -> value, all of them
        self.user = b""  # tenant and user, as requests are placed by them; once the request is admitted
        self._request_id = b""

    @property
    def request_id(self) -> bytes:
        """The client's ID for the request, or a new one."""
        if not self._request_id:
            self._request_id = self.seen.get(b"x-request-id") or b"%s%012x" % (_ID_PREFIX, next(_ids))
        return self._request_id

    def check(self, limits: LimitsConfig, never_dropped: frozenset[bytes]) -> None:
        """Complete the head: check it, and drop the headers that `Connection` names.

        Args:
            limits: of the router.
            never_dropped: lower-case names of headers that are passed on whatever `Connection` says.

        Raises:
            Refused: the request cannot be routed, or is over a limit.
        """
        self.path = self.target.partition(b"?")[0]
        if self.num_bytes + len(self.target) > limits.max_header_bytes:
            raise too_many_headers(limits)
        if self.method not in METHODS:
            raise Refused(405, f"{self.method[:16].decode('latin-1')}: not a method of this service")
        if self.is_http11 and b"host" not in self.seen:
            raise Refused(400, "host: missing")
        if not self.target.startswith(b"/"):
            raise Refused(400, "the target is not a path")
        length = int(self.seen.get(b"content-length", b"0"))
        if length > limits.max_body_bytes:
            raise Refused(413, f"body: {length} bytes, limit {limits.max_body_bytes}")
        if b"connection" in self.seen:
            named = {name.strip() for name in self.seen[b"connection"].lower().split(b",")}
            named -= {b"", b"close", b"keep-alive", *never_dropped}
            if named:
                kept = [pair for pair in self._pairs() if pair[0].lower() not in named]
                self.lines = [part for name, value in kept for part in (name, b": ", value, b"\r\n")]

    def budget_s(self, default_s: float, max_s: float) -> float:
        """The time that the client grants, in seconds from the request's first byte.

        Raises:
            BadRequest: a header cannot be read.
            DeadlineExceeded: the client grants no time.
        """
        if self.seen.keys().isdisjoint(_BUDGET_HEADERS):
            return min(default_s, max_s)
        given = {name: self.seen[low].decode("latin-1") for low, name in _BUDGET_HEADERS.items() if low in self.seen}
        return budget_s(given, default_s, max_s)

    def encode(self, body: RequestBody, left_s: float) -> bytes:
        """Write the head for an instance: no hop-by-hop header, the remaining time instead of the granted time.

        Args:
            body: if it is not complete, it is announced as chunked.
            left_s: seconds until the deadline.
        """
        parts = [self.method, b" ", self.target, b" HTTP/1.1\r\n", *self.lines]
        if b"x-request-id" not in self.seen:
            parts += (b"X-Request-Id: ", self.request_id, b"\r\n")
        if not self.is_http11 and b"host" not in self.seen:
            parts.append(b"Host: router\r\n")
        if body.is_chunked:
            parts.append(b"Transfer-Encoding: chunked\r\n")
        elif body.num_bytes or self.method == b"POST":
            parts.append(b"Content-Length: %d\r\n" % body.num_bytes)
        parts.append(b"X-Request-Timeout-Ms: %.3f\r\n\r\n" % max(1.0, left_s * 1e3))
        return b"".join(parts)

    def fields(self, left_s: float) -> dict[str, str]:
        """The headers for an instance as `encode` writes them, without `Host` and the body's length."""
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._pairs()}
        given = {name: value for name, value in given.items() if name.lower() != "host"}
        given["X-Request-Id"] = self.request_id.decode("latin-1")
        given["X-Request-Timeout-Ms"] = f"{max(1.0, left_s * 1e3):.3f}"
        return given

    def _pairs(self) -> list[tuple[bytes, bytes]]:
        return list(zip(self.lines[0::PARTS], self.lines[2::PARTS], strict=True))


class RequestBody:
    """The part of the body that has arrived, kept for as long as the request may have to be sent again."""

    __slots__ = (
        "_kept",
        "_num_counted",
        "_num_sent",
        "is_chunked",
        "is_closed",
        "is_sent",
        "is_whole",
        "num_bytes",
        "pieces",
    )

    def __init__(self, kept: KeptBytes) -> None:
        self.pieces: list[bytes] = []
        self.num_bytes = 0  # that have arrived
        self.is_whole = False  # all of it has arrived
        self.is_chunked = False  # it is sent in chunks, as it was not whole when sending it began
        self.is_sent = False  # all of it is sent, with its end
        self.is_closed = False  # nothing of it is kept any more
        self._kept = kept
        self._num_counted = 0  # bytes of `kept` that are for this body
        self._num_sent = 0  # pieces

    def expect(self, num_bytes: int) -> None:
        """Count the bytes that the head announces.

        Raises:
            Refused: there is no room for them.
        """
        self._kept.take(num_bytes)
        self._num_counted = num_bytes

    def add(self, piece: bytes, max_bytes: int) -> None:
        """Add a piece.

        Raises:
            Refused: the body is over its limit, or there is no room for the piece; it is not kept.
        """
        self.num_bytes += len(piece)
        if self.num_bytes > max_bytes:
            raise Refused(413, f"body: over the limit of {max_bytes} bytes")
        if self.is_closed:
            return
        if self.num_bytes > self._num_counted:  # it came without a length
            self._kept.take(self.num_bytes - self._num_counted)
            self._num_counted = self.num_bytes
        pieces = self.pieces
        if len(piece) < _SMALL_BYTES and len(pieces) > self._num_sent and len(pieces[-1]) < _SMALL_BYTES:
            pieces[-1] += piece
        else:
            pieces.append(piece)

    def rewind(self) -> None:
        """Begin to send the body to another instance."""
        self.is_chunked = not self.is_whole
        self.is_sent = False
        self._num_sent = 0

    def next_chunk(self, is_kept: bool) -> bytes:
        """Frame what has arrived since the last call, and the body's end if it is whole; the body is chunked.

        Args:
            is_kept: keep what is sent, so that it can be sent again.

        Returns:
            What is to be written.
        """
        new = b"".join(self.pieces[self._num_sent :])
        if is_kept:
            self._num_sent = len(self.pieces)
        else:
            self.pieces.clear()
        self.is_sent = self.is_whole
        frame = b"%x\r\n%s\r\n" % (len(new), new) if new else b""
        return frame + _LAST_CHUNK if self.is_whole else frame

    def close(self) -> None:
        """Drop the body: nobody needs it any more. What still arrives of it is not kept."""
        self.is_closed = True
        self.pieces.clear()
        self._kept.give_back(self._num_counted)
        self._num_counted = 0
