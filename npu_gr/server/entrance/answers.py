"""Answers that no handler gives: made once, written as they are. Problem details of RFC 9457, as all errors."""

from __future__ import annotations

from http import HTTPStatus
from itertools import cycle

import msgspec

from npu_gr.admission.door import WHY
from npu_gr.core.errors import Forbidden, Overloaded, Refusal, Unauthorized
from npu_gr.server.entrance.framing import MAX_HEAD_BYTES
from npu_gr.server.headers import RETRY_AFTER_MS, RETRY_MS


def _answer(status: HTTPStatus, title: str, detail: str, *headers: str) -> bytes:
    table = {"type": "about:blank", "title": title, "status": status.value, "detail": detail}
    body = msgspec.json.encode({**table, "error": detail})  # for clients of the Open Inference Protocol
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/problem+json",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


_CLOSE = "Connection: close"
_ALL_OVERLOADED = {
    reason: [
        _answer(HTTPStatus.TOO_MANY_REQUESTS, Overloaded.title, detail, "Retry-After: 1", f"{RETRY_AFTER_MS}: {ms}")
        for ms in RETRY_MS
    ]
    for reason, detail in WHY.items()
}
_OVERLOADED = {reason: cycle(texts) for reason, texts in _ALL_OVERLOADED.items()}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
UNAUTHORIZED = _answer(
    HTTPStatus.UNAUTHORIZED,
    Unauthorized.title,
    "Authorization: needs `Bearer` and a valid API key",
    "WWW-Authenticate: Bearer",
    _CLOSE,
)
HEAD_TOO_LATE = _answer(
    HTTPStatus.REQUEST_TIMEOUT, "request timeout", "the headers did not arrive within server.header_timeout_s", _CLOSE
)
BODY_TOO_LATE = _answer(
    HTTPStatus.REQUEST_TIMEOUT,
    "request timeout",
    "the body did not arrive within the request's time budget or server.body_timeout_s",
    _CLOSE,
)
HEAD_TOO_LARGE = _answer(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "headers too large",
    f"the headers are over {MAX_HEAD_BYTES:,} bytes",
    _CLOSE,
)
BODY_TOO_LARGE = _answer(
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too large", "the body is over server.max_body_bytes", _CLOSE
)
TOO_MANY_BYTES = _answer(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "unavailable",
    "the bodies that arrive now are over server.max_receiving_bytes",
    "Retry-After: 1",
    _CLOSE,
)
TOO_MANY_CONNECTIONS = _answer(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "unavailable",
    "server.max_connections are open, and all of them are in use",
    "Retry-After: 1",
    _CLOSE,
)


def bad_request(detail: str) -> bytes:
    """Say what is wrong with a request that cannot be framed."""
    return _answer(HTTPStatus.BAD_REQUEST, "bad request", detail, _CLOSE)


def forbidden(detail: str) -> bytes:
    """Say what the key does not allow. The body was not read, so the connection ends."""
    return _answer(HTTPStatus.FORBIDDEN, Forbidden.title, detail, _CLOSE)


def over_rate(detail: str) -> bytes:
    """Refuse a request for the rate of its key."""
    return _answer(HTTPStatus.TOO_MANY_REQUESTS, Overloaded.title, detail, "Retry-After: 1")


def overloaded(reason: Refusal) -> bytes:
    """Refuse a request for load, for one of the reasons of the door; each time with another instant to come again."""
    return next(_OVERLOADED[reason])


def all_overloaded(reason: Refusal) -> list[bytes]:
    """List the answers that `overloaded` gives in turn."""
    return _ALL_OVERLOADED[reason]
