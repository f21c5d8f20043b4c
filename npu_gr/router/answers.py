"""The answers that the router writes: RFC 9457 problem details, its own answers, and those of instances, rewritten."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from npu_gr.core.errors import NpuGrError, Overloaded, Unauthorized
from npu_gr.router.routes import METHODS
from npu_gr.router.upstream import AnswerHead

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_ALLOW = b"Allow: " + b", ".join(METHODS)


class BadGateway(NpuGrError):
    """The instance sent something that is no answer, or broke off in the middle of one."""

    status = 502
    title = "bad gateway"


class Refused(NpuGrError):
    """The request itself cannot be routed; `status` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.title = REASONS[status].decode().lower()


def status_line(status: int) -> bytes:
    """The first line of an answer, with the status's reason phrase."""
    return b"HTTP/1.1 %d %s\r\n" % (status, REASONS.get(status, b""))


_STATUS_LINES = {status: status_line(status) for status in REASONS}


def problem(error: NpuGrError, request_id: bytes, is_last: bool) -> bytes:
    """Write the complete answer for an error.

    Args:
        error: gives the status, the title and the detail.
        request_id: repeated in the header and in the body.
        is_last: the connection is closed after the answer.
    """
    body, lines = problem_parts(error, request_id)
    return plain(error.status, body, lines, is_last)


def problem_parts(error: NpuGrError, request_id: bytes) -> tuple[bytes, list[bytes]]:
    """Write the body of the answer for an error, and its headers, each `Name: value` without its line end."""
    detail = {"type": "about:blank", "title": error.title, "status": error.status, "detail": str(error)}
    detail["request_id"] = request_id.decode("latin-1")
    lines = [b"Content-Type: application/problem+json", b"X-Request-Id: " + request_id]
    if isinstance(error, Overloaded):
        lines.append(b"Retry-After: %d" % max(1, round(error.retry_after_s)))
    elif error.status == 503:
        lines.append(b"Retry-After: 1")
    elif isinstance(error, Unauthorized):
        lines.append(b"WWW-Authenticate: Bearer")
    elif error.status == 405:
        lines.append(_ALLOW)
    return msgspec.json.encode(detail), lines


def plain(status: int, body: bytes, lines: list[bytes], is_last: bool) -> bytes:
    """Write a complete answer.

    Args:
        status: 204 has no body and no length.
        body: its length is written as a header.
        lines: more headers, each `Name: value` without its line end.
        is_last: the connection is closed after the answer.
    """
    if is_last:
        lines = [*lines, b"Connection: close"]
    head = status_line(status) + (b"" if status == 204 else b"Content-Length: %d\r\n" % len(body))
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


class ForwardedAnswer:
    """An instance's answer as it is passed on to the client: rewritten, and collected until the next `take`."""

    __slots__ = ("_is_chunked", "_out", "closes", "status")

    def __init__(self, head: AnswerHead, added: bytes, is_http11: bool, is_last: bool) -> None:
        """Rewrite the head.

        Args:
            head: of the instance's answer.
            added: headers that the router adds, each with its line end.
            is_http11: the client speaks HTTP/1.1, so an answer without a length is sent in chunks; an older client
                sees its end as the connection closes.
            is_last: the connection is closed after the answer in any case.
        """
        self.status = head.status
        self.closes = is_last or not (head.has_length or is_http11)
        self._is_chunked = not head.has_length and is_http11
        out = [_STATUS_LINES.get(head.status) or status_line(head.status), *head.lines]
        if self._is_chunked:
            out.append(b"Transfer-Encoding: chunked\r\n")
        out.append(added)
        out.append(b"Connection: close\r\n\r\n" if self.closes else b"\r\n")
        self._out = out

    def add(self, data: bytes) -> None:
        """Add a piece of the body."""
        self._out.append(b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self) -> bytes:
        """Add the body's end, and take the rest."""
        if self._is_chunked:
            self._out.append(b"0\r\n\r\n")
        return b"".join(self._out)

    def take(self) -> bytes:
        """Everything that was added since the last call."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data
