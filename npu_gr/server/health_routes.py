"""Health checks for balancers and orchestrators; those of the Open Inference Protocol v2 are the same."""

from __future__ import annotations

from aiohttp import web

from npu_gr.server.responses import json_response, require_ready
from npu_gr.server.service_protocol import ServiceProtocol


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
        models = self._service.models()
        first = models[0]
        runs = [
            {"name": model.name, "version": model.version, "ops": model.ops, "attention": model.attention}
            for model in models
        ]
        return json_response(
            {"live": True, "device": first.device, "kernels": first.kernels, "ops": first.ops, "models": runs}
        )

    async def _ready(self, _: web.Request) -> web.Response:
        require_ready(self._service)
        return json_response({"ready": True})
