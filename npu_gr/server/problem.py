"""The one translation of errors to HTTP: RFC 9457 problem details, without internals such as stack traces."""

from __future__ import annotations

import logging
import random

import msgspec
from aiohttp import web

from npu_gr.core.errors import NotTaken, NpuGrError, Overloaded, Refusal, Unauthorized
from npu_gr.server.codec.media import JSON, encode
from npu_gr.server.headers import NOT_TAKEN, RETRY_AFTER_MS, RETRY_MS

log = logging.getLogger(__name__)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9457 problem details. `error` is the detail again, for clients of the Open Inference Protocol."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    error: str | msgspec.UnsetType = msgspec.UNSET


def problem(status: int, title: str, detail: str, request_id: str, *, is_inference: bool = False) -> web.Response:
    """Make an answer of type application/problem+json.

    Args:
        status: of HTTP.
        title: names the kind of error, always with the same words.
        detail: names what is wrong with this request.
        request_id: under which the log has it.
        is_inference: the route is one of the Open Inference Protocol.
    """
    error = detail if is_inference else msgspec.UNSET
    body = Problem(type="about:blank", title=title, status=status, detail=detail, request_id=request_id, error=error)
    return web.Response(body=encode(body, JSON), status=status, content_type="application/problem+json")


def from_error(error: BaseException, request_id: str, *, is_inference: bool = False) -> web.Response:
    """Translate an exception of a handler. An exception that is not ours becomes a 500, and is logged."""
    if isinstance(error, NpuGrError):
        answer = problem(error.status, error.title, str(error), request_id, is_inference=is_inference)
        if isinstance(error, Overloaded):
            answer.headers["Retry-After"] = f"{max(1, round(error.retry_after_s))}"
            if error.reason is not Refusal.RATE:  # a rate does not end in milliseconds
                answer.headers[RETRY_AFTER_MS] = f"{random.choice(RETRY_MS)}"  # noqa: S311  (spread)
        elif error.status == 503:
            answer.headers["Retry-After"] = "1"
            if isinstance(error, NotTaken):
                answer.headers[NOT_TAKEN] = "1"
        elif isinstance(error, Unauthorized):
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer
    if isinstance(error, web.HTTPException):
        answer = problem(error.status, error.reason.lower(), error.reason, request_id, is_inference=is_inference)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    log.error("request %s failed", request_id, exc_info=error)
    told = "an unexpected error; the log has it under this request id"
    return problem(500, "internal error", told, request_id, is_inference=is_inference)
