"""The router's own answers, as bytes: RFC 9457 problem details, and how it is."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from npu_gr.core.errors import NpuGrError, Overloaded

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class BadGateway(NpuGrError):
    """The instance answered with something that is no answer, or broke off."""

    status, title = 502, "bad gateway"


class Refused(NpuGrError):
    """The request itself cannot be routed; `status` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.title = REASONS[status].decode().lower()


def status_line(status: int) -> bytes:
    """With its reason phrase."""
    return b"HTTP/1.1 %d %s\r\n" % (status, REASONS.get(status, b""))


def problem(error: NpuGrError, request_id: bytes, is_last: bool) -> bytes:
    """A whole answer for an error; `is_last`: the connection is closed after it."""
    detail = {"type": "about:blank", "title": error.title, "status": error.status, "detail": str(error)}
    detail["request_id"] = request_id.decode("latin-1")
    lines = [b"Content-Type: application/problem+json", b"X-Request-Id: " + request_id]
    if isinstance(error, Overloaded):
        lines.append(b"Retry-After: %d" % max(1, round(error.retry_after_s)))
    elif error.status == 503:
        lines.append(b"Retry-After: 1")
    elif error.status == 405:
        lines.append(b"Allow: GET, POST, DELETE")
    return plain(error.status, msgspec.json.encode(detail), lines, is_last)


def plain(status: int, body: bytes, lines: list[bytes], is_last: bool) -> bytes:
    """A whole answer."""
    if is_last:
        lines = [*lines, b"Connection: close"]
    head = status_line(status) + (b"" if status == 204 else b"Content-Length: %d\r\n" % len(body))
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body
