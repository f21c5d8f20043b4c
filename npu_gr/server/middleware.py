"""The one middleware: id, trace, authorisation, errors, counting and the log line of every request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from npu_gr.core.errors import NpuGrError
from npu_gr.core.request import GenerateAnswer, RankAnswer, RecommendAnswer, UserKey
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.trace import CURRENT
from npu_gr.server.access_log import Answer, Journal
from npu_gr.server.auth import ApiKeys
from npu_gr.server.headers import REQUEST_ID, request_id
from npu_gr.server.problem import from_error
from npu_gr.server.service_protocol import Door
from npu_gr.server.tracing import Tracing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)
PARSED_AT = web.RequestKey("parsed_at", float)  # set by the handlers of the three kinds, as the next two
USER = web.RequestKey("user", UserKey)
ANSWER: web.RequestKey[Answer] = web.RequestKey("answer", object)  # type: ignore[arg-type]

KINDS = {"/v1/rank": "rank", "/v1/signal": "signal", "/v1/generate": "generate", "/v1/recommend": "recommend"}
PUBLIC = ("/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
ABANDONED = 499  # the status of a request whose caller hung up, as nginx counts them


def around(door: Door, metrics: Metrics, keys: ApiKeys, journal: Journal, tracing: Tracing) -> Any:
    """The middleware around every handler."""

    @web.middleware
    async def watched(request: web.Request, handler: Handler) -> web.StreamResponse:
        arrived_at = request[ARRIVED_AT] = time.monotonic()
        identity = request[ID] = request_id(request.headers)
        route = _route(request)
        trace, span = tracing.begin(f"{request.method} {route}", request.headers.get("traceparent"))
        CURRENT.set(trace)
        metrics.in_flight.inc()
        status, failed = ABANDONED, None
        try:
            if request.path not in PUBLIC:
                keys.check(request.headers.get("Authorization"))
            answer = await handler(request)
            status = answer.status
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (the one translation of errors)
            answer = from_error(error, identity)
            status, failed = answer.status, error
        finally:
            metrics.in_flight.dec()
            took_s = time.monotonic() - arrived_at
            kind = KINDS.get(request.path) if request.method == "POST" else None
            told = request.get(ANSWER)
            served = told if isinstance(told, RankAnswer | GenerateAnswer | RecommendAnswer) else None
            stages_s = served.stages_s if served else {}
            metrics.request_done(kind, route, status, took_s, stages_s)
            facts = {
                "request_id": identity,
                "method": request.method,
                "route": route,
                "status": status,
                "duration_s": round(took_s, 6),
                "error": failed.title if isinstance(failed, NpuGrError) else None,
            }
            journal.write(kind, trace, facts, told, request.get(USER))
            if span is not None:
                attributes: dict[str, str | int] = {
                    "http.request.method": request.method,
                    "http.route": route,
                    "http.response.status_code": status,
                    "npu_gr.request_id": identity,
                }
                if served is not None:
                    outcome = served.outcome.value if served.outcome else "none"
                    attributes |= {"npu_gr.outcome": outcome, "npu_gr.prefix_tokens": served.prefix_tokens}
                tracing.end(span, stages_s, arrived_at, request.get(PARSED_AT), attributes)
        answer.headers[REQUEST_ID] = identity
        answer.headers["traceparent"] = trace.header
        if not door.is_ready()[0]:
            answer.force_close()  # draining: let the balancer's connections go
        return answer

    return watched


def _route(request: web.Request) -> str:
    """The path's pattern: of bounded number, and without what a caller put into it."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "none"
