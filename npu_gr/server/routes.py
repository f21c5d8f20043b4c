"""The aiohttp application: routes, and one middleware around them all."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from urllib.parse import unquote

import msgspec
from aiohttp import web

from npu_gr import __version__
from npu_gr.core.errors import DeadlineExceeded, NotFound, NotTaken, Unprocessable
from npu_gr.core.kinds import Priority
from npu_gr.core.request import GenerateAnswer, MatchAnswer, ModelInfo, Outcome, RankAnswer, RecommendAnswer, UserKey
from npu_gr.metrics.exposition import expose
from npu_gr.metrics.pauses import noted_pauses
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.status import CONTENT_SECURITY_POLICY, page
from npu_gr.server.access_log import Journal
from npu_gr.server.auth import ApiKeys
from npu_gr.server.config import ServerConfig
from npu_gr.server.headers import budget_s
from npu_gr.server.middleware import ANSWER, ARRIVED_AT, ID, PARSED_AT, USER, around
from npu_gr.server.openapi import document
from npu_gr.server.run import probe_loop_lag
from npu_gr.server.service_protocol import Door
from npu_gr.server.status import status
from npu_gr.server.tracing import Tracing
from npu_gr.server.translate import (
    catalogue_change,
    catalogue_out,
    events,
    generate_out,
    generate_request,
    match_out,
    match_request,
    rank_out,
    rank_request,
    recommend_out,
    recommend_request,
    signal_out,
    signal_request,
    vectors_out,
)
from npu_gr.server.wire import (
    JSON,
    MSGPACK,
    CatalogueItemsBody,
    EventsBody,
    EventsOut,
    GenerateBody,
    MatchBody,
    RankBody,
    RecommendBody,
    SignalBody,
    decode,
    encode,
)

_X_CACHE = {
    Outcome.HBM_HIT: "hit-hbm",
    Outcome.DRAM_HIT: "hit-dram",
    Outcome.JOINED: "joined",
    Outcome.MISS_FULL: "miss",
    Outcome.DEGRADED: "degraded",
}


def build_web_app(
    door: Door, config: ServerConfig, metrics: Metrics, tracing: Tracing | None = None
) -> web.Application:
    """The HTTP door before a service. `tracing`: None = trace ids, and no spans.

    Raises:
        ConfigError: the key file cannot be used.
    """
    keys = ApiKeys(Path(config.api_keys_file) if config.api_keys_file else None)
    journal = Journal(config)
    metrics.observe_ready(door.is_ready)
    middleware = around(door, metrics, keys, journal, tracing or Tracing())
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[middleware])
    routes = _Routes(door, config, metrics, journal)
    app.add_routes(
        [
            web.post("/v1/signal", routes.signal),
            web.post("/v1/rank", routes.rank),
            web.post("/v1/generate", routes.generate),
            web.post("/v1/match", routes.match),
            web.get("/v1/match/vectors", routes.vectors),
            web.post("/v1/match/reload", routes.reload_vectors),
            web.post("/v1/match/rollback", routes.rollback_vectors),
            web.post("/v1/recommend", routes.recommend),
            web.get("/v1/catalog", routes.catalogue),
            web.post("/v1/catalog/items", routes.update_catalogue),
            web.post("/v1/catalog/reload", routes.reload_catalogue),
            web.post("/v1/catalog/rollback", routes.rollback_catalogue),
            web.post("/v1/events", routes.events),
            web.delete("/v1/users/{user_id:(?s:.+)}", routes.erase),
            web.get("/v1/models", routes.models),
            web.post("/v1/models/reload", routes.reload_models),
            web.get("/healthz", routes.live),
            web.get("/readyz", routes.ready),
            web.get("/", routes.page),
            web.get("/metrics", routes.metrics),
            web.get("/debug/status", routes.status),
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
        with noted_pauses(metrics.gc_paused) as drain:

            def every_period() -> None:
                keys.reload_if_changed()
                drain()

            async with probe_loop_lag(metrics.loop_lagged, every_period):
                yield

    app.cleanup_ctx.append(background)
    return app


class _Routes:
    """One method a route."""

    def __init__(self, door: Door, config: ServerConfig, metrics: Metrics, journal: Journal) -> None:
        self._door, self._config, self._metrics, self._journal = door, config, metrics, journal
        self._began_at = time.monotonic()
        self._page = page("/debug/status")

    def _left_s(self, request: web.Request) -> float:
        """The caller's budget less what reading the body took; the last thing before the service."""
        request[PARSED_AT] = now_at = time.monotonic()
        budget = budget_s(request.headers, self._config.default_budget_s, self._config.max_budget_s)
        left = budget - (now_at - request[ARRIVED_AT])
        if left <= 0:
            raise DeadlineExceeded(f"reading the request took the whole budget of {budget * 1e3:.0f} ms")
        return left

    async def signal(self, request: web.Request) -> web.Response:
        self._require_ready()
        self._door.check_room(Priority.SIGNAL)
        body = decode(await request.read(), request.content_type, SignalBody)
        request[USER] = body.user
        answer = await self._door.signal(signal_request(body, self._config), self._left_s(request))
        request[ANSWER] = answer
        return _answer(request, signal_out(answer, request[ID]), 202)

    async def rank(self, request: web.Request) -> web.Response:
        self._door.check_room(Priority.RANK)
        body = decode(await request.read(), request.content_type, RankBody)
        request[USER] = body.user
        answer = await self._door.rank(rank_request(body, self._config), self._left_s(request))
        request[ANSWER] = answer
        out = rank_out(answer, request[ID], _accepted(request))
        return _with_stages(_answer(request, out, 200), answer)

    async def generate(self, request: web.Request) -> web.Response:
        self._door.check_room(Priority.GENERATE)
        body = decode(await request.read(), request.content_type, GenerateBody)
        request[USER] = body.user
        answer = await self._door.generate(generate_request(body, self._config), self._left_s(request))
        request[ANSWER] = answer
        out = generate_out(answer, request[ID], _accepted(request))
        return _with_stages(_answer(request, out, 200), answer)

    async def match(self, request: web.Request) -> web.Response:
        self._door.check_room(Priority.GENERATE)
        body = decode(await request.read(), request.content_type, MatchBody)
        answer = await self._door.match(match_request(body, self._config), self._left_s(request))
        return _with_times(_answer(request, match_out(answer, request[ID], _accepted(request)), 200), answer)

    async def vectors(self, request: web.Request) -> web.Response:
        return _answer(request, vectors_out(self._door.vectors()), 200)

    async def reload_vectors(self, request: web.Request) -> web.Response:
        return _answer(request, vectors_out(await self._door.reload_vectors()), 200)

    async def rollback_vectors(self, request: web.Request) -> web.Response:
        return _answer(request, vectors_out(self._door.rollback_vectors()), 200)

    async def recommend(self, request: web.Request) -> web.Response:
        self._door.check_room(Priority.GENERATE)
        body = decode(await request.read(), request.content_type, RecommendBody)
        request[USER] = body.user
        answer = await self._door.recommend(recommend_request(body, self._config), self._left_s(request))
        request[ANSWER] = answer
        out = recommend_out(answer, request[ID], _accepted(request))
        return _with_stages(_answer(request, out, 200), answer)

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
        return _answer(request, EventsOut(request_id=request[ID], num_events=count), 200)

    async def erase(self, request: web.Request) -> web.Response:
        user, tenant = unquote(request.match_info["user_id"]), request.query.get("tenant", "")
        for name, text in (("user_id", user), ("tenant", tenant)):
            if len(text) > 128:
                raise Unprocessable(f"{name}: {len(text)} characters, the limit is 128")
        await self._door.erase_user(UserKey(tenant, user))
        return web.Response(status=204)

    async def models(self, _: web.Request) -> web.Response:
        return _json({"models": [asdict(model) for model in self._door.models()]})

    async def reload_models(self, _: web.Request) -> web.Response:
        return _json({"models": [asdict(model) for model in await self._door.reload_models()]})

    async def live(self, _: web.Request) -> web.Response:
        model = self._door.models()[0]
        return _json({"live": True, "device": model.device, "kernels": model.kernels, "ops": model.ops})

    async def ready(self, _: web.Request) -> web.Response:
        self._require_ready()
        return _json({"ready": True})

    async def page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def status(self, _: web.Request) -> web.Response:
        return _json(status(self._door, self._metrics, self._journal, time.monotonic() - self._began_at))

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = await expose(self._metrics, request.headers.get("Accept", ""))
        # zlib in a thread: a hundred kilobytes take it milliseconds
        response = web.Response(body=body, headers={"Content-Type": content_type}, zlib_executor_size=0)
        response.enable_compression()
        return response

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
            raise NotTaken(why)

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


def _with_stages(response: web.Response, answer: RankAnswer | GenerateAnswer | RecommendAnswer) -> web.Response:
    response.headers["X-Cache"] = _X_CACHE[answer.outcome] if answer.outcome else "none"
    return _with_times(response, answer)


def _with_times(
    response: web.Response, answer: RankAnswer | GenerateAnswer | MatchAnswer | RecommendAnswer
) -> web.Response:
    response.headers["Server-Timing"] = ", ".join(f"{k};dur={v * 1e3:.3f}" for k, v in answer.stages_s.items())
    return response


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=JSON)
