"""What went wrong, as the errors of `npu_gr.core.errors`: one tree for a service in this process and one far away."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import msgspec

from npu_gr.core import errors
from npu_gr.core.words import cut
from npu_gr.server.headers import RETRY_AFTER_MS

_BY_STATUS: dict[int, type[errors.NpuGrError]] = {
    one.status: one
    for one in (
        errors.BadRequest,
        errors.Unauthorized,
        errors.Forbidden,
        errors.NotFound,
        errors.UnknownPrefix,
        errors.TooLarge,
        errors.UnsupportedMedia,
        errors.Unprocessable,
        errors.Overloaded,
        errors.Unavailable,
        errors.DeadlineExceeded,
    )
}
_MILLISECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?")
_FIELDS = (  # as our messages name one
    re.compile(r"unknown field ([^;\s]+)"),
    re.compile(r"Object missing required field `([^`]+)`"),
    re.compile(r"([A-Za-z_](?:[\w.-]|\[[^\]]*\])*): "),
)


class _Problem(msgspec.Struct, frozen=True):
    """The parts of RFC 9457 problem details that we read."""

    title: str
    detail: str
    request_id: str | None = None


def from_answer(status: int, headers: Mapping[str, str], body: bytes) -> errors.NpuGrError:
    """Make the error that an answer tells of.

    Args:
        status: of HTTP, not 2xx.
        headers: by any spelling of their names.
        body: problem details, or whatever a proxy writes.
    """
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = cut(" ".join(body.decode(errors="replace").split()), 200)
        problem = _Problem(title="", detail=f"the answer was {status}: {text}")
    cls = _BY_STATUS.get(status)
    if cls is None:
        cls = errors.RequestError if status < 500 else errors.Unavailable if status == 502 else errors.NpuGrError
    error = cls(problem.detail)
    error.retry_after_s = _retry_after_s(headers)
    error.status = status
    error.title = problem.title or cls.title
    error.field = _field(problem.detail)
    error.request_id = problem.request_id
    return error


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return how long the service asks to wait: milliseconds where it says them, or seconds, or until a date."""
    try:
        if _MILLISECONDS.fullmatch(text := headers.get(RETRY_AFTER_MS, "")):
            return float(text) * 1e-3
        text = headers.get("Retry-After", "")
        if re.fullmatch(r"\d{1,9}", text):
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0  # unreadable, as if it were not there


def _field(detail: str) -> str | None:
    for pattern in _FIELDS:
        if found := pattern.match(detail):
            return found[1]
    return None
