"""Routes for operators: what is served, reload, rollback, changes of the catalogue."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from npu_gr.server.codec.admin import (
    CHANGE_BYTES,
    CatalogueItemsBody,
    parse_catalogue_change,
    render_catalogue,
    render_vectors,
)
from npu_gr.server.config import ServerConfig
from npu_gr.server.reading import Reader
from npu_gr.server.responses import json_response, struct_response
from npu_gr.server.service_protocol import ServiceProtocol


class ModelRoutes:
    """The models that an instance serves."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/models", self._show), web.post("/v1/models/reload", self._reload)]

    async def _show(self, _: web.Request) -> web.Response:
        return json_response({"models": [asdict(model) for model in self._service.models()]})

    async def _reload(self, _: web.Request) -> web.Response:
        return json_response({"models": [asdict(model) for model in await self._service.reload_models()]})


class CatalogueRoutes:
    """The catalogue of semantic IDs: 404 where the instance does not generate."""

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
            lambda body: parse_catalogue_change(body, self._config),
            loose_bytes=CHANGE_BYTES,
        )
        return struct_response(request, render_catalogue(await self._service.catalogue.update(change)))

    async def _reload(self, request: web.Request) -> web.Response:
        return struct_response(request, render_catalogue(await self._service.catalogue.reload()))

    async def _rollback(self, request: web.Request) -> web.Response:
        return struct_response(request, render_catalogue(await self._service.catalogue.rollback()))


class VectorsRoutes:
    """The vectors of match: 404 where the instance does not match."""

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
