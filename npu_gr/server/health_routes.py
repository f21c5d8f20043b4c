"""Health checks for balancers and orchestrators, and the metadata routes of the Open Inference Protocol v2."""

from __future__ import annotations

from aiohttp import web

from npu_gr import __version__
from npu_gr.core.errors import NotFound
from npu_gr.core.served import ModelInfo
from npu_gr.server.responses import json_response, require_ready
from npu_gr.server.service_protocol import ServiceProtocol


class HealthRoutes:
    """Liveness, readiness, and metadata of the served models."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        model = "/v2/models/{model}"
        version = f"{model}/versions/{{version}}"
        return [
            web.get("/healthz", self._live),
            web.get("/readyz", self._ready),
            web.get("/v2", self._server),
            web.get("/v2/health/live", self._live),
            web.get("/v2/health/ready", self._ready),
            web.get(model, self._model),
            web.get(f"{model}/ready", self._model_ready),
            web.get(version, self._model),
            web.get(f"{version}/ready", self._model_ready),
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

    async def _server(self, _: web.Request) -> web.Response:
        return json_response({"name": "npu_gr", "version": __version__, "extensions": []})

    async def _model(self, request: web.Request) -> web.Response:
        model = self._find_model(request)
        column = {"datatype": "INT64", "shape": [-1]}
        return json_response(
            {
                "name": model.name,
                "versions": [model.version],
                "platform": "npu_gr",
                "inputs": [{"name": name, **column} for name in ("items", "actions", "timestamps", "candidates")],
                "outputs": [{"name": task, "datatype": "FP32", "shape": [-1]} for task in model.tasks],
            }
        )

    async def _model_ready(self, request: web.Request) -> web.Response:
        model = self._find_model(request)
        require_ready(self._service)
        return json_response({"name": model.name, "ready": True})

    def _find_model(self, request: web.Request) -> ModelInfo:
        name = request.match_info["model"]
        version = request.match_info.get("version")
        for model in self._service.models():
            if model.name == name and version in (None, model.version):
                return model
        raise NotFound("no such model or version")
