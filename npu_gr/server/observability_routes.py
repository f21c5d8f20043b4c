"""Routes that show what an instance does: status page, metrics, effective configuration, OpenAPI document."""

from __future__ import annotations

from aiohttp import web

from npu_gr.metrics.status import CONTENT_SECURITY_POLICY, console, page
from npu_gr.server.codec.media import JSON
from npu_gr.server.config import ServerConfig
from npu_gr.server.debug.routes import DebugRoutes
from npu_gr.server.insight import Insight, config_text
from npu_gr.server.openapi import document
from npu_gr.server.responses import json_response
from npu_gr.server.service_protocol import ServiceProtocol


class ObservabilityRoutes:
    """Pages and documents for operators, Prometheus and generators of clients."""

    def __init__(self, service: ServiceProtocol, config: ServerConfig, insight: Insight) -> None:
        self._service = service
        self._insight = insight
        self._page_text = page("/debug/status")
        self._console_text = console("/debug/openapi", "https" if config.tls else "http", config.port)

    def routes(self) -> list[web.RouteDef]:
        insight = self._insight
        return [
            web.get("/", self._page),
            web.get("/metrics", self._expose_metrics),
            web.get("/debug/status", self._status),
            web.get("/debug/config", self._config),
            web.get("/openapi.json", self._openapi),
            web.get("/debug/openapi", self._openapi),
            web.get("/debug/console", self._console),
            *DebugRoutes(insight.bundle_texts, insight.stacks, insight.profile).routes(),
        ]

    async def _page(self, _: web.Request) -> web.Response:
        return _html(self._page_text)

    async def _console(self, _: web.Request) -> web.Response:
        return _html(self._console_text)

    async def _status(self, _: web.Request) -> web.Response:
        return json_response(await self._insight.status())

    async def _expose_metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._insight.exposition(
            request.headers.get("Accept", ""), request.query.getall("name[]", [])
        )
        # compress in a thread: zlib takes milliseconds for a hundred kilobytes
        response = web.Response(body=body, headers={"Content-Type": content_type}, zlib_executor_size=0)
        response.enable_compression()
        return response

    async def _config(self, _: web.Request) -> web.Response:
        return web.Response(text=config_text(await self._service.effective_config()), content_type=JSON)

    async def _openapi(self, _: web.Request) -> web.Response:
        return json_response(document())


def _html(text: str) -> web.Response:
    """A page that loads nothing from elsewhere."""
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
    return web.Response(text=text, content_type="text/html", headers=headers)
