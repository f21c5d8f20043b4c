"""The aiohttp application: routes, and one middleware around them all."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from npu_gr import __version__
from npu_gr.admission.limiter import Priority
from npu_gr.errors import DeadlineExceeded, NotFound, Unavailable, Unprocessable
from npu_gr.metrics.catalogue import Metrics
from npu_gr.request import GenerateAnswer, MatchAnswer, ModelInfo, Outcome, RankAnswer, UserKey
from npu_gr.server.auth import ApiKeys
from npu_gr.server.config import ServerConfig
from npu_gr.server.door import Door
from npu_gr.server.headers import REQUEST_ID, budget_s, request_id, traceparent
from npu_gr.server.openapi import document
from npu_gr.server.problem import from_error
from npu_gr.server.run import probe_loop_lag
from npu_gr.server.wire import (
    JSON,
    MSGPACK,
    CatalogueItemsBody,
    EventsBody,
    EventsOut,
    GenerateBody,
    MatchBody,
    RankBody,
    SignalBody,
    catalogue_change,
    catalogue_out,
    decode,
    encode,
    events,
    generate_out,
    generate_request,
    match_out,
    match_request,
    rank_out,
    rank_request,
    signal_out,
    signal_request,
    vectors_out,
)

log = logging.getLogger("npu_gr.request")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PUBLIC = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
_X_CACHE = {
    Outcome.HBM_HIT: "hit-hbm",
    Outcome.DRAM_HIT: "hit-dram",
    Outcome.JOINED: "joined",
    Outcome.MISS_FULL: "miss",
    Outcome.DEGRADED: "degraded",
}
_ID = web.RequestKey("request_id", str)
_ARRIVED_S = web.RequestKey("arrived_s", float)


def build_web_app(door: Door, config: ServerConfig, metrics: Metrics) -> web.Application:
    """The HTTP door before a service.

    Raises:
        ConfigError: the key file cannot be used.
    """
    keys = ApiKeys(Path(config.api_keys_file) if config.api_keys_file else None)
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_around(door, config, metrics, keys)])
    routes = _Routes(door, config)
    app.add_routes(
        [
            web.post("/v1/signal", routes.signal),
            web.post("/v1/rank", routes.rank),
            web.post("/v1/generate", routes.generate),
            web.post("/v1/match", routes.match),
            web.get("/v1/match/vectors", routes.vectors),
            web.post("/v1/match/reload", routes.reload_vectors),
            web.post("/v1/match/rollback", routes.rollback_vectors),
            web.get("/v1/catalog", routes.catalogue),
            web.post("/v1/catalog/items", routes.update_catalogue),
            web.post("/v1/catalog/reload", routes.reload_catalogue),
            web.post("/v1/catalog/rollback", routes.rollback_catalogue),
            web.post("/v1/events", routes.events),
            web.delete("/v1/users/{user_id:(?s:.+)}", routes.erase),
            web.get("/v1/models", routes.models),
            web.get("/healthz", routes.live),
            web.get("/readyz", routes.ready),
            web.get("/metrics", make_aiohttp_handler(metrics.registry)),
            web.get("/debug/config", routes.config),
            web.get("/openapi.json", routes.openapi),
            web.get("/v2", routes.oip_server),
            web.get("/v2/health/live", routes.live),
            web.get("/v2/health/ready", routes.ready),
            web.get("/v2/models/{model}", routes.oip_model),
            web.get("/v2/models/{model}/ready", routes.oip_ready),
            web.get("/v2/models/{model}/versions/{version}", routes.oip_model),
            web.get("/v2/models/{model}/versions/{version}/ready", routes.oip_ready),
        ]
    )

    async def background(_: web.Application) -> AsyncIterator[None]:
        async with probe_loop_lag(metrics.loop_lag_s.observe, keys.reload_if_changed):
            yield

    app.cleanup_ctx.append(background)
    return app


def _around(door: Door, config: ServerConfig, metrics: Metrics, keys: ApiKeys) -> Any:
    """Id, authorisation, errors, counting and the log line of every request."""

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        arrived_s = request[_ARRIVED_S] = time.monotonic()
        identity = request[_ID] = request_id(request.headers)
        metrics.in_flight.inc()
        try:
            if request.path not in _PUBLIC:
                keys.check(request.headers.get("Authorization"))
            answer = await handler(request)
        except Exception as error:  # noqa: BLE001  (the one translation of errors)
            answer = from_error(error, identity)
        finally:
            metrics.in_flight.dec()
        route = request.match_info.route.resource
        metrics.requests.labels(route.canonical if route else "none", answer.status).inc()
        answer.headers[REQUEST_ID] = identity
        trace = traceparent(request.headers)
        if trace:
            answer.headers["traceparent"] = trace
        if not door.is_ready()[0]:
            answer.force_close()  # draining: let the balancer's connections go
        took_s = time.monotonic() - arrived_s
        if answer.status >= 500 or took_s > config.slow_request_s:
            _log(request, answer, took_s, trace)
        return answer

    return around


def _log(request: web.Request, answer: web.StreamResponse, took_s: float, trace: str | None) -> None:
    """One canonical line; no user, no history, no key."""
    route = request.match_info.route.resource
    line = {
        "request_id": request[_ID],
        "method": request.method,
        "route": route.canonical if route else "none",
        "status": answer.status,
        "duration_s": round(took_s, 6),
        "cache": answer.headers.get("X-Cache"),
        "trace_id": trace.split("-")[1] if trace else None,
    }
    log.warning(json.dumps(line))


class _Routes:
    """One method a route."""

    def __init__(self, door: Door, config: ServerConfig) -> None:
        self._door, self._config = door, config

    def _left_s(self, request: web.Request) -> float:
        """The caller's budget less what reading the body took."""
        budget = budget_s(request.headers, self._config.default_budget_s, self._config.max_budget_s)
        left = budget - (time.monotonic() - request[_ARRIVED_S])
        if left <= 0:
            raise DeadlineExceeded(f"reading the request took the whole budget of {budget * 1e3:.0f} ms")
        return left

    async def signal(self, request: web.Request) -> web.Response:
        ready, why = self._door.is_ready()
        if not ready:
            raise Unavailable(why)
        self._door.check_room(Priority.SIGNAL)
        body = decode(await request.read(), request.content_type, SignalBody)
        answer = await self._door.signal(signal_request(body, self._config), self._left_s(request))
        return _answer(request, signal_out(answer, request[_ID]), 202)

    async def rank(self, request: web.Request) -> web.Response:
        self._door.check_room(Priority.RANK)
        body = decode(await request.read(), request.content_type, RankBody)
        answer = await self._door.rank(rank_request(body, self._config), self._left_s(request))
        out = rank_out(answer, request[_ID], _accepted(request))
        return _with_stages(_answer(request, out, 200), answer)

    async def generate(self, request: web.Request) -> web.Response:
        self._door.check_room(Priority.GENERATE)
        body = decode(await request.read(), request.content_type, GenerateBody)
        answer = await self._door.generate(generate_request(body, self._config), self._left_s(request))
        out = generate_out(answer, request[_ID], _accepted(request))
        return _with_stages(_answer(request, out, 200), answer)

    async def match(self, request: web.Request) -> web.Response:
        self._door.check_room(Priority.GENERATE)
        body = decode(await request.read(), request.content_type, MatchBody)
        answer = await self._door.match(match_request(body, self._config), self._left_s(request))
        return _with_times(_answer(request, match_out(answer, request[_ID], _accepted(request)), 200), answer)

    async def vectors(self, request: web.Request) -> web.Response:
        return _answer(request, vectors_out(self._door.vectors()), 200)

    async def reload_vectors(self, request: web.Request) -> web.Response:
        return _answer(request, vectors_out(await self._door.reload_vectors()), 200)

    async def rollback_vectors(self, request: web.Request) -> web.Response:
        return _answer(request, vectors_out(self._door.rollback_vectors()), 200)

    async def catalogue(self, request: web.Request) -> web.Response:
        return _answer(request, catalogue_out(self._door.catalogue()), 200)

    async def update_catalogue(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), request.content_type, CatalogueItemsBody)
        change = catalogue_change(body, self._config)
        return _answer(request, catalogue_out(await self._door.update_catalogue(change)), 200)

    async def reload_catalogue(self, request: web.Request) -> web.Response:
        return _answer(request, catalogue_out(await self._door.reload_catalogue()), 200)

    async def rollback_catalogue(self, request: web.Request) -> web.Response:
        return _answer(request, catalogue_out(self._door.rollback_catalogue()), 200)

    async def events(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), request.content_type, EventsBody)
        new = events(body.events, "events", self._config.max_history_events)
        count = await self._door.append_events(body.user, new, self._left_s(request))
        return _answer(request, EventsOut(request_id=request[_ID], num_events=count), 200)

    async def erase(self, request: web.Request) -> web.Response:
        user, tenant = unquote(request.match_info["user_id"]), request.query.get("tenant", "")
        for name, text in (("user_id", user), ("tenant", tenant)):
            if len(text) > 128:
                raise Unprocessable(f"{name}: {len(text)} characters, the limit is 128")
        await self._door.erase_user(UserKey(tenant, user))
        return web.Response(status=204)

    async def models(self, _: web.Request) -> web.Response:
        return _json({"models": [asdict(model) for model in self._door.models()]})

    async def live(self, _: web.Request) -> web.Response:
        model = self._door.models()[0]
        return _json({"live": True, "device": model.device, "kernels": model.kernels})

    async def ready(self, _: web.Request) -> web.Response:
        self._require_ready()
        return _json({"ready": True})

    async def config(self, _: web.Request) -> web.Response:
        return _json(self._door.effective_config())

    async def openapi(self, _: web.Request) -> web.Response:
        return _json(document())

    async def oip_server(self, _: web.Request) -> web.Response:
        return _json({"name": "npu_gr", "version": __version__, "extensions": []})

    async def oip_model(self, request: web.Request) -> web.Response:
        model = self._model(request)
        column = {"datatype": "INT64", "shape": [-1]}
        return _json(
            {
                "name": model.name,
                "versions": [model.version],
                "platform": "npu_gr",
                "inputs": [{"name": name, **column} for name in ("items", "actions", "timestamps", "candidates")],
                "outputs": [{"name": task, "datatype": "FP32", "shape": [-1]} for task in model.tasks],
            }
        )

    async def oip_ready(self, request: web.Request) -> web.Response:
        model = self._model(request)
        self._require_ready()
        return _json({"name": model.name, "ready": True})

    def _require_ready(self) -> None:
        ready, why = self._door.is_ready()
        if not ready:
            raise Unavailable(why)

    def _model(self, request: web.Request) -> ModelInfo:
        name, version = request.match_info["model"], request.match_info.get("version")
        for model in self._door.models():
            if model.name == name and version in (None, model.version):
                return model
        raise NotFound("no such model or version")


def _accepted(request: web.Request) -> str:
    return MSGPACK if request.headers.get("Accept", "").startswith(MSGPACK) else JSON


def _answer(request: web.Request, body: msgspec.Struct, status: int) -> web.Response:
    media = _accepted(request)
    return web.Response(body=encode(body, media), status=status, content_type=media)


def _with_stages(response: web.Response, answer: RankAnswer | GenerateAnswer) -> web.Response:
    response.headers["X-Cache"] = _X_CACHE[answer.outcome]
    return _with_times(response, answer)


def _with_times(response: web.Response, answer: RankAnswer | GenerateAnswer | MatchAnswer) -> web.Response:
    response.headers["Server-Timing"] = ", ".join(f"{k};dur={v * 1e3:.3f}" for k, v in answer.stages_s.items())
    return response


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=JSON)
