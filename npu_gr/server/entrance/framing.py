"""Where one HTTP/1.1 request ends, and the few words of its head that the door needs.

This is no parser: aiohttp parses every request after the door. What is framed here is handed to it byte for byte, so
a request that the two see differently ends as a 400 of aiohttp's.
"""

from __future__ import annotations

import re

import msgspec

from npu_gr.core.errors import BadRequest, DeadlineExceeded
from npu_gr.server.headers import BUDGET_HEADERS, budget_s

MAX_HEAD_BYTES = 65_536  # request line and headers; aiohttp's own limit of one line is smaller
HEAD_END = b"\r\n\r\n"
MAX_DIGITS = 15  # of a Content-Length
MAX_CHUNKS = 8192  # of a body, and lines of its trailer: what they cost does not depend on how little is in them
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,10}")
_BUDGETS = [(name, f"\r\n{name.lower()}:".encode()) for name in BUDGET_HEADERS]
_AUTHORIZATION = b"\r\nauthorization:"
_SEARCHED_BYTES = 2048  # of each end of a body
_MSGPACK_TENANT = b"\xa6tenant"
_JSON_TENANT = re.compile(rb'"tenant"\s*:\s*"([^"\\]{1,256})"')


class Head(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the door reads of a head."""

    num_bytes: int  # with the empty line that ends it
    method: bytes
    path: bytes  # as it was sent, without the query
    body_bytes: int  # 0 for a chunked body
    is_chunked: bool
    waits_for_continue: bool
    closes: bool  # the connection, after the answer
    lower: bytes  # the headers in lower case, each after a line end
    authorization: bytes | None  # the value of that header as it was sent; None = there is none


def parse_head(data: bytes | bytearray, num_bytes: int) -> Head:
    """Read the head.

    Args:
        data: begins with it.
        num_bytes: of the head, with the empty line.

    Raises:
        BadRequest: it is no HTTP/1.1 head.
    """
    line_end = data.find(b"\r\n")
    words = data[:line_end].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        raise BadRequest("the request line is not METHOD PATH HTTP/1.1")
    lower = bytes(data[line_end : num_bytes - 2]).lower()
    body_bytes = 0
    length = field(lower, b"\r\ncontent-length:")
    if length is not None:
        if not length.isdigit() or len(length) > MAX_DIGITS:
            raise BadRequest(f"Content-Length: expected up to {MAX_DIGITS} digits")
        body_bytes = int(length)
    is_chunked = b"\r\ntransfer-encoding:" in lower
    if is_chunked and length is not None:
        raise BadRequest("Content-Length and Transfer-Encoding exclude each other")
    closes = words[2] == b"HTTP/1.0"
    if b"\r\nconnection:" in lower:
        connection = field(lower, b"\r\nconnection:") or b""
        closes = b"close" in connection or (words[2] == b"HTTP/1.0" and b"keep-alive" not in connection)
    path, _, _ = words[1].partition(b"?")
    return Head(
        num_bytes=num_bytes,
        method=bytes(words[0]),
        path=bytes(path),
        body_bytes=body_bytes,
        is_chunked=is_chunked,
        waits_for_continue=b"\r\nexpect:" in lower,
        closes=closes,
        lower=lower,
        authorization=_authorization(data, line_end, lower) if _AUTHORIZATION in lower else None,
    )


def _authorization(data: bytes | bytearray, line_end: int, lower: bytes) -> bytes:
    """Cut out the value of the header with the key, which is there.

    Args:
        data: begins with the head.
        line_end: index in it at which `lower` begins.
        lower: of a `Head`.

    Raises:
        BadRequest: the header is there twice, so that two readers might see two keys.
    """
    begin = lower.index(_AUTHORIZATION) + len(_AUTHORIZATION)
    if lower.find(_AUTHORIZATION, begin) >= 0:
        raise BadRequest("Authorization: given twice")
    end = lower.find(b"\r\n", begin)
    return bytes(data[line_end + begin : line_end + (end if end >= 0 else len(lower))]).strip()


def field(lower: bytes, name: bytes) -> bytes | None:
    """Find the value of the first header of that name; None = there is none.

    Args:
        lower: of a `Head`.
        name: in lower case, between a line end and a colon.
    """
    at = lower.find(name)
    if at < 0:
        return None
    begin = at + len(name)
    end = lower.find(b"\r\n", begin)
    return lower[begin : end if end >= 0 else None].strip()


def granted_s(head: Head, default_s: float, max_s: float) -> float:
    """Read what the caller grants, in seconds: 0 where nothing is left, which the handler will refuse.

    The default where it cannot be read, which the handler will refuse, too.
    """
    if b"timeout" not in head.lower:
        return min(default_s, max_s)
    given = {name: value.decode("latin-1") for name, mark in _BUDGETS if (value := field(head.lower, mark)) is not None}
    try:
        return budget_s(given, default_s, max_s)
    except DeadlineExceeded:
        return 0.0
    except BadRequest:
        return min(default_s, max_s)


def tenant_of(request: bytes | bytearray, begins_at: int) -> str:
    """Guess the tenant that a body names, without parsing it; "" where none is found.

    It decides whose turn a request takes while it waits at the door, and nothing else. Of a long body it reads both
    ends: a history in between takes longer to search than the request takes to refuse.

    Args:
        request: head and body.
        begins_at: index of the body's first byte.
    """
    if len(request) - begins_at > 2 * _SEARCHED_BYTES:
        body = request[begins_at : begins_at + _SEARCHED_BYTES] + request[-_SEARCHED_BYTES:]
    else:
        body = request[begins_at:]
    if body[:1] == b"{":
        found = _JSON_TENANT.search(body)
        return found[1].decode(errors="replace") if found else ""
    at = body.find(_MSGPACK_TENANT)
    if at < 0:
        return ""
    begin = at + len(_MSGPACK_TENANT)
    marker = body[begin : begin + 2]
    if marker and 0xA0 <= marker[0] <= 0xBF:
        return bytes(body[begin + 1 : begin + 1 + (marker[0] & 0x1F)]).decode(errors="replace")
    if len(marker) == 2 and marker[0] == 0xD9:
        return bytes(body[begin + 2 : begin + 2 + marker[1]]).decode(errors="replace")
    return ""


class Chunks:
    """Finds the end of a chunked body while it arrives."""

    def __init__(self, begins_at: int) -> None:
        """Begin after the head.

        Args:
            begins_at: index of the body's first byte.
        """
        self._at = begins_at  # index of the next line: a chunk's size, or of the trailer
        self._in_trailer = False
        self._num_lines = 0

    def end(self, data: bytes | bytearray) -> int | None:
        """Find the index after the last byte of the body; None = more of it must come.

        Args:
            data: the same bytes as before, and more.

        Raises:
            BadRequest: a chunk's size cannot be read, or there are too many.
        """
        while True:
            line_end = data.find(b"\r\n", self._at)
            if line_end < 0:
                if len(data) - self._at > MAX_HEAD_BYTES:
                    raise BadRequest("a chunk's size does not end")
                return None
            self._num_lines += 1
            if self._num_lines > MAX_CHUNKS:
                raise BadRequest(f"the body has over {MAX_CHUNKS:,} chunks")
            if self._in_trailer:
                is_last = line_end == self._at
                self._at = line_end + 2
                if is_last:
                    return self._at
                continue
            size = bytes(data[self._at : line_end]).partition(b";")[0].strip()
            if not _CHUNK_SIZE.fullmatch(size):
                raise BadRequest(f"a chunk's size is not hexadecimal of up to 10 digits: {size[:16]!r}")
            num_bytes = int(size, 16)
            if num_bytes == 0:
                self._in_trailer = True
                self._at = line_end + 2
            elif len(data) < line_end + 2 + num_bytes + 2:
                self._num_lines -= 1  # it is read again
                return None
            else:
                self._at = line_end + 2 + num_bytes + 2
