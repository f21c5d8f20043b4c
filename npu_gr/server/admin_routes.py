"""Admin routes: served versions, reload, rollback, catalogue changes, health, status pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from aiohttp import web

from npu_gr.core.errors import TooLarge, Unavailable, Unprocessable
from npu_gr.core.names import FIRST_HASHED
from npu_gr.core.served import ModelInfo
from npu_gr.core.text_format import quoted
from npu_gr.metrics.status import CONTENT_SECURITY_POLICY, console, page
from npu_gr.server.admission.middleware import BODY
from npu_gr.server.config import ServerConfig
from npu_gr.server.debug.routes import DebugRoutes
from npu_gr.server.http import json_response, struct_response
from npu_gr.server.kind_routes import Reader
from npu_gr.server.openapi import document
from npu_gr.server.schemas.admin import (
    CHANGE_BYTES,
    CatalogueItemsBody,
    RollbackBody,
    ShadowBody,
    parse_catalogue_change,
    render_catalogue,
    render_vectors,
)
from npu_gr.server.schemas.fields import MOST_ITEMS, ItemOut, UserBody
from npu_gr.server.schemas.media import JSON, decode
from npu_gr.server.service_protocol import ServiceProtocol, require_ready
from npu_gr.server.status import DebugViews, config_text


class ModelRoutes:
    """The served models: list, reload, change by a delta, roll back; and a shadow of the ranker."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._show),
            web.post("/v1/models/delta", self._delta),
            web.post("/v1/models/reload", self._reload),
            web.post("/v1/models/rollback", self._rollback),
            web.get("/v1/models/shadow", self._show_shadow),
            web.post("/v1/models/shadow", self._open_shadow),
            web.delete("/v1/models/shadow", self._drop_shadow),
            web.post("/v1/models/shadow/promote", self._promote_shadow),
        ]

    async def _show(self, _: web.Request) -> web.Response:
        return _listing(self._service.models())

    async def _reload(self, _: web.Request) -> web.Response:
        return _listing(await self._service.reload_models())

    async def _rollback(self, request: web.Request) -> web.Response:
        body = request[BODY]
        wanted = decode(body, request.content_type, RollbackBody) if body else RollbackBody()
        return _listing(await self._service.rollback_models(wanted.delta))

    async def _delta(self, request: web.Request) -> web.Response:
        return _listing(await self._service.add_delta(request[BODY]))

    async def _show_shadow(self, request: web.Request) -> web.Response:
        return struct_response(request, self._service.shadow.info())

    async def _open_shadow(self, request: web.Request) -> web.Response:
        wanted = decode(request[BODY], request.content_type, ShadowBody)
        return struct_response(request, await self._service.shadow.open(wanted.path, wanted.share))

    async def _drop_shadow(self, request: web.Request) -> web.Response:
        return struct_response(request, await self._service.shadow.drop())

    async def _promote_shadow(self, request: web.Request) -> web.Response:
        return struct_response(request, await self._service.shadow.promote())


def _listing(models: Sequence[ModelInfo]) -> web.Response:
    return json_response({"models": [asdict(model) for model in models]})


class CatalogueRoutes:
    """The catalogue of semantic IDs; 404 where the instance does not generate."""

    def __init__(self, service: ServiceProtocol, config: ServerConfig, reader: Reader) -> None:
        self._service = service
        self._config = config
        self._reader = reader

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/catalog", self._show),
            web.post("/v1/catalog/items", self._update),
            web.post("/v1/catalog/reload", self._reload),
            web.post("/v1/catalog/rollback", self._rollback),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        return struct_response(request, render_catalogue(await self._service.catalogue.info()))

    async def _update(self, request: web.Request) -> web.Response:
        change = await self._reader.read(
            request,
            CatalogueItemsBody,
            lambda body: parse_catalogue_change(body, self._config, self._service.names),
            loose_bytes=CHANGE_BYTES,
        )
        return struct_response(
            request, render_catalogue(await self._service.catalogue.update(change))
        )

    async def _reload(self, request: web.Request) -> web.Response:
        return struct_response(request, render_catalogue(await self._service.catalogue.reload()))

    async def _rollback(self, request: web.Request) -> web.Response:
        return struct_response(request, render_catalogue(await self._service.catalogue.rollback()))


class VectorsRoutes:
    """The vectors of match; 404 where the instance does not match."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/match/vectors", self._show),
            web.post("/v1/match/reload", self._reload),
            web.post("/v1/match/rollback", self._rollback),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        return struct_response(request, render_vectors(await self._service.vectors.info()))

    async def _reload(self, request: web.Request) -> web.Response:
        return struct_response(request, render_vectors(await self._service.vectors.reload()))

    async def _rollback(self, request: web.Request) -> web.Response:
        return struct_response(request, render_vectors(await self._service.vectors.rollback()))


class ItemRoutes:
    """Translates item ids to names and names to ids."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/items", self._show)]

    async def _show(self, request: web.Request) -> web.Response:
        """Answer the items of `ids`, then those of `names`, in the order of the request."""
        asked = [_id(text) for text in _listed(request, "ids")]
        named = [*_listed(request, "names"), *request.query.getall("name", [])]
        if not 0 < (num := len(asked) + len(named)) <= MOST_ITEMS:
            raise (TooLarge if num else Unprocessable)(
                f"ids and names: {num} items; send 1 to {MOST_ITEMS}"
            )
        try:
            served = self._service.names
            ids = np.concatenate((np.array(asked, np.int64), served.item_ids(named)))
        except ValueError as error:
            raise Unprocessable(f"names: {error}") from None
        known, titles = served.items(ids), served.titles(ids)
        names = [*map(_known, known[: len(asked)]), *named]
        found = zip(ids.tolist(), names, titles, strict=True)
        return json_response(
            [ItemOut(id=one, name=name, title=title) for one, name, title in found]
        )


def _listed(request: web.Request, parameter: str) -> list[str]:
    """Split all values of a query parameter at commas; the parameter may be repeated."""
    return [text for value in request.query.getall(parameter, []) for text in value.split(",")]


def _id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63):
        raise Unprocessable(f"ids: {quoted(text)} is not an id; ids are 0 to 2^63 - 1")
    return int(text)


def _known(name: str | int) -> str | int | None:
    return None if isinstance(name, int) and name >= FIRST_HASHED else name


class HealthRoutes:
    """Liveness and readiness."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/healthz", self._live),
            web.get("/readyz", self._ready),
            web.get("/v2/health/live", self._live),
            web.get("/v2/health/ready", self._ready),
        ]

    async def _live(self, _: web.Request) -> web.Response:
        if why := self._service.why_dead():
            raise Unavailable(why)
        models = self._service.models()
        first = models[0]
        runs = [
            {
                "name": model.name,
                "version": model.version,
                "ops": model.ops,
                "attention": model.attention,
            }
            for model in models
        ]
        return json_response(
            {
                "live": True,
                "device": first.device,
                "kernels": first.kernels,
                "ops": first.ops,
                "models": runs,
            }
        )

    async def _ready(self, _: web.Request) -> web.Response:
        require_ready(self._service)
        return json_response({"ready": True})


class ObservabilityRoutes:
    """Status page, metrics, configuration, OpenAPI document and debug routes."""

    def __init__(
        self, service: ServiceProtocol, config: ServerConfig, debug_views: DebugViews
    ) -> None:
        self._service = service
        self._debug_views = debug_views
        self._has_keys = config.api_keys_file is not None
        self._page_text = page("/debug/status")
        self._console_text = console(
            "/debug/openapi", "https" if config.tls else "http", config.port
        )

    def routes(self) -> list[web.RouteDef]:
        debug_views = self._debug_views
        return [
            web.get("/", self._page),
            web.get("/metrics", self._expose_metrics),
            web.get("/debug/status", self._status),
            web.get("/debug/config", self._config),
            web.get("/openapi.json", self._openapi),
            web.get("/debug/openapi", self._console_document),
            web.get("/debug/console", self._console),
            *DebugRoutes(
                debug_views.bundle_texts, debug_views.stacks, debug_views.profile
            ).routes(),
        ]

    async def _page(self, _: web.Request) -> web.Response:
        return _html(self._page_text)

    async def _console(self, _: web.Request) -> web.Response:
        return _html(self._console_text)

    async def _status(self, _: web.Request) -> web.Response:
        return json_response(await self._debug_views.status())

    async def _expose_metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._debug_views.exposition(
            request.headers.get("Accept", ""), request.query.getall("name[]", [])
        )
        # compress in a thread: zlib takes milliseconds for a hundred kilobytes
        response = web.Response(
            body=body, headers={"Content-Type": content_type}, zlib_executor_size=0
        )
        response.enable_compression()
        return response

    async def _config(self, _: web.Request) -> web.Response:
        return web.Response(
            text=config_text(await self._service.effective_config()), content_type=JSON
        )

    async def _openapi(self, _: web.Request) -> web.Response:
        return json_response(document())

    async def _console_document(self, _: web.Request) -> web.Response:
        """Answer the document and, where no key is needed, a user to fill in."""
        user = None if self._has_keys else self._service.lookups.example_user()
        named = {} if user is None else {"x-user": {"user_id": user.user, "tenant": user.tenant}}
        return json_response(document() | named)


def _html(text: str) -> web.Response:
    """Make an HTML response whose page may not load anything from other hosts."""
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
    return web.Response(text=text, content_type="text/html", headers=headers)


class UserRoutes:
    """Which stores know a user. The user is in the body, since proxies log paths."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/debug/user", self._known)]

    async def _known(self, request: web.Request) -> web.Response:
        body = decode(request[BODY], request.content_type, UserBody)
        return json_response({"places": await self._service.knows(body.user)})
