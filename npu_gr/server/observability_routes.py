"""Routes that show what an instance does: status page, metrics, effective configuration, OpenAPI document."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from npu_gr.core.redact import redacted
from npu_gr.metrics.exposition import expose
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.status import CONTENT_SECURITY_POLICY, StatusReport, page
from npu_gr.server.access_log import AccessLog
from npu_gr.server.codec.media import JSON
from npu_gr.server.debug.routes import DebugRoutes
from npu_gr.server.openapi import document
from npu_gr.server.responses import json_response
from npu_gr.server.service_protocol import ServiceProtocol
from npu_gr.server.status import status


class ObservabilityRoutes:
    """Pages and documents for operators, Prometheus and generators of clients."""

    def __init__(self, service: ServiceProtocol, metrics: Metrics, access_log: AccessLog) -> None:
        self._service = service
        self._metrics = metrics
        self._access_log = access_log
        self._began_at = time.monotonic()
        self._page_text = page("/debug/status")

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page),
            web.get("/metrics", self._expose_metrics),
            web.get("/debug/status", self._status),
            web.get("/debug/config", self._config),
            web.get("/openapi.json", self._openapi),
            *DebugRoutes(self._bundle_texts).routes(),
        ]

    async def _page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
        return web.Response(text=self._page_text, content_type="text/html", headers=headers)

    async def _status(self, _: web.Request) -> web.Response:
        return json_response(self._status_report())

    def _status_report(self) -> StatusReport:
        uptime_s = time.monotonic() - self._began_at
        return status(self._service, self._metrics, self._access_log, uptime_s)

    async def _expose_metrics(self, request: web.Request) -> web.Response:
        body, content_type = await expose(
            self._metrics, request.headers.get("Accept", ""), request.query.getall("name[]", [])
        )
        # compress in a thread: zlib takes milliseconds for a hundred kilobytes
        response = web.Response(body=body, headers={"Content-Type": content_type}, zlib_executor_size=0)
        response.enable_compression()
        return response

    async def _config(self, _: web.Request) -> web.Response:
        return web.Response(text=self._config_text(), content_type=JSON)

    def _config_text(self) -> str:
        return redacted(msgspec.json.encode(self._service.effective_config()).decode())

    async def _bundle_texts(self) -> dict[str, str]:
        exposition, _ = await expose(self._metrics, "")
        return {
            "config.json": self._config_text(),
            "status.json": msgspec.json.encode(self._status_report()).decode(),
            "metrics.txt": exposition.decode(),
            "requests.jsonl": "".join(f"{line}\n" for line in self._access_log.newest()),
        }

    async def _openapi(self, _: web.Request) -> web.Response:
        return json_response(document())
