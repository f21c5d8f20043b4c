"""HTTP headers and errors: request id, time limit, media type, problem details (RFC 9457)."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping
from functools import lru_cache

import msgspec
from aiohttp import web

from npu_gr.core.errors import (
    BadRequest,
    DeadlineExceeded,
    NotTaken,
    NpuGrError,
    Overloaded,
    Rejection,
    Unauthorized,
)
from npu_gr.core.logs import random_id
from npu_gr.server.schemas.media import JSON, MSGPACK, encode

UNEXPECTED = "an unexpected error; the server's log has the traceback under this request id"
REQUEST_ID = "X-Request-Id"
RETRY_AFTER_MS = "Retry-After-Ms"  # in addition to Retry-After, which has whole seconds
# Wait of a rejected client before it retries, in ms; drawn at random so that retries spread out.
RETRY_MS = range(20, 96, 5)
# Set on a 503 that began no work: the router may send the request to another instance.
NOT_TAKEN = "X-NpuGr-Not-Taken"
_VALID_ID = re.compile(r"[!-~]{1,128}")
_GRPC_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
TIMEOUT_MS = "X-Request-Timeout-Ms"
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")  # weight of a media type in `Accept`
_MS_HEADERS = (TIMEOUT_MS, "x-envoy-expected-rq-timeout-ms")
BUDGET_HEADERS = (*_MS_HEADERS, "grpc-timeout")


def request_id(headers: Mapping[str, str]) -> str:
    """Return the client's id if it is 1 to 128 printable ASCII characters, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _VALID_ID.fullmatch(given) else random_id(128)


def budget_s(
    headers: Mapping[str, str], default_s: float, max_s: float, deadline_s: float | None = None
) -> float:
    """Return the client's time limit in seconds: the smallest of those that it sends.

    Args:
        headers: X-Request-Timeout-Ms, x-envoy-expected-rq-timeout-ms and grpc-timeout are read.
        default_s: Time limit of a request that names none.
        max_s: Upper limit of the result.
        deadline_s: Deadline of gRPC, which parses its own header; None = there is none.

    Raises:
        BadRequest: A header cannot be parsed.
        DeadlineExceeded: The time limit is 0.
    """
    budgets = [] if deadline_s is None else [deadline_s]
    for name in _MS_HEADERS:
        if (text := headers.get(name)) is not None:
            if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text):
                raise BadRequest(f"{name}: expected a number of milliseconds, got {text[:32]!r}")
            budgets.append(float(text) * 1e-3)
    if (text := headers.get("grpc-timeout")) is not None:
        match = _GRPC_TIMEOUT.fullmatch(text)
        if not match:
            raise BadRequest(f"grpc-timeout: expected 1 to 8 digits and a unit, got {text[:32]!r}")
        budgets.append(int(match[1]) * _GRPC_UNITS_S[match[2]])
    budget = min([*budgets, max_s] if budgets else [default_s, max_s])
    if budget <= 0:
        raise DeadlineExceeded("the client's time limit was over before the request arrived")
    return budget


def accepted_media(request: web.Request) -> str:
    """Choose msgpack where the client's `Accept` prefers it, else JSON (RFC 9110, section 12.5.1).

    Of two with the same quality the one that is named first counts.
    """
    return _preferred(", ".join(request.headers.getall("Accept", ())))


@lru_cache(128)
def _preferred(accept: str) -> str:
    ranges: dict[str, tuple[float, int]] = {}  # media range -> (quality, - its place)
    for place, part in enumerate(accept.split(",")):
        media, *parameters = (text.strip().lower() for text in part.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        ranges.setdefault(media, (float(quality) if _QUALITY.fullmatch(quality) else 0.0, -place))

    def preference(media: str) -> tuple[float, int]:
        names = (media, "application/*", "*/*")  # the most specific one counts
        return next((ranges[name] for name in names if name in ranges), (0.0, 0))

    return MSGPACK if preference(MSGPACK) > max(preference(JSON), (0.0, 0)) else JSON


def struct_response(request: web.Request, body: msgspec.Struct, status: int = 200) -> web.Response:
    """Answer a Struct in the media type that the client accepts."""
    media = accepted_media(request)
    return web.Response(body=encode(body, media), status=status, content_type=media)


def json_response(body: object) -> web.Response:
    """Answer plain values as JSON, whatever the client accepts."""
    return web.Response(body=msgspec.json.encode(body), content_type=JSON)


log = logging.getLogger(__name__)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Problem details as of RFC 9457.

    `error` repeats the detail for clients of the Open Inference Protocol.
    """

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    error: str | msgspec.UnsetType = msgspec.UNSET


def problem(
    status: int, title: str, detail: str, request_id: str, *, is_inference: bool = False
) -> web.Response:
    """Make an answer of type application/problem+json.

    Args:
        status: HTTP status.
        title: The kind of error, always in the same words.
        detail: What is wrong with this request.
        request_id: Id of the request in the log.
        is_inference: Whether the route belongs to the Open Inference Protocol.
    """
    error = detail if is_inference else msgspec.UNSET
    body = Problem(
        type="about:blank",
        title=title,
        status=status,
        detail=detail,
        request_id=request_id,
        error=error,
    )
    return web.Response(
        body=encode(body, JSON), status=status, content_type="application/problem+json"
    )


def from_error(
    error: BaseException, request_id: str, *, is_inference: bool = False, remark: str = ""
) -> web.Response:
    """Translate an exception of a handler into a response.

    `remark` says what to send instead, where aiohttp found no route. An exception that is neither
    NpuGrError nor aiohttp's is logged and becomes a 500.
    """
    if isinstance(error, NpuGrError):
        answer = problem(
            error.status, error.title, str(error), request_id, is_inference=is_inference
        )
        if isinstance(error, Overloaded):
            answer.headers["Retry-After"] = f"{max(1, round(error.retry_after_s))}"
            if error.reason is not Rejection.RATE:  # a rate limit lasts longer than milliseconds
                answer.headers[RETRY_AFTER_MS] = f"{random.choice(RETRY_MS)}"  # noqa: S311  (spread)
        elif error.status == 503:
            answer.headers["Retry-After"] = "1"
            if isinstance(error, NotTaken):
                answer.headers[NOT_TAKEN] = "1"
        elif isinstance(error, Unauthorized):
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer
    if isinstance(error, web.HTTPException):
        detail = f"{error.reason}{remark}"
        answer = problem(
            error.status, error.reason.lower(), detail, request_id, is_inference=is_inference
        )
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    log.error("request %s failed", request_id, exc_info=error)
    return problem(500, "internal error", UNEXPECTED, request_id, is_inference=is_inference)
