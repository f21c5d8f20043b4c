"""The Open Inference Protocol v2 over HTTP. Its models are the kinds that score (`Kind.is_model`): rank, generate, ...

An infer is the kind's request in another form: it comes through the same door, and gets the same errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from npu_gr import __version__
from npu_gr.core.errors import Unprocessable
from npu_gr.core.request import Answer
from npu_gr.core.words import quoted
from npu_gr.server.auth.key_ring import KeyRing
from npu_gr.server.codec.base import Shown
from npu_gr.server.codec.media import JSON
from npu_gr.server.config import ServerConfig
from npu_gr.server.headers import BUDGET_HEADERS
from npu_gr.server.insight import Insight
from npu_gr.server.kind_routes import add_headers, ask, parse_body, until
from npu_gr.server.middleware import ARRIVED_AT, ID, KEY, OCTETS, USER
from npu_gr.server.oip.http import HEADER_LENGTH, HttpInfer, read, write
from npu_gr.server.oip.models import MODELS, Model, ServedModels, waits_until
from npu_gr.server.oip.statistics import ModelStatistics, statistics
from npu_gr.server.reading import Reader
from npu_gr.server.responses import json_response, require_ready
from npu_gr.server.service_protocol import ServiceProtocol

NAME = "npu_gr"  # of the server, and of the platform of its models
EXTENSIONS = ("binary_tensor_data", "statistics")


class InferenceRoutes:
    """Metadata, readiness, statistics and infer."""

    def __init__(
        self, service: ServiceProtocol, config: ServerConfig, reader: Reader, keys: KeyRing, insight: Insight
    ) -> None:
        self._service = service
        self._config = config
        self._reader = reader
        self._keys = keys
        self._insight = insight
        self._models = ServedModels(service)

    def routes(self) -> list[web.RouteDef]:
        each = "/v2/models/{model}"
        version = f"{each}/versions/{{version}}"
        return [
            web.get("/v2", self._server),
            web.get("/v2/models/stats", self._all_statistics),
            web.get(each, self._metadata),
            web.get(f"{each}/ready", self._ready),
            web.get(f"{each}/stats", self._statistics),
            web.get(version, self._metadata),
            web.get(f"{version}/ready", self._ready),
            web.get(f"{version}/stats", self._statistics),
            *(web.post(path, self._infer(model)) for model in MODELS.values() for path in model.kind.paths[1:]),
        ]

    def _asked(self, request: web.Request) -> tuple[Model, tuple[str, ...]]:
        return self._models.find(request.match_info["model"], request.match_info.get("version"))

    async def _server(self, _: web.Request) -> web.Response:
        return json_response({"name": NAME, "version": __version__, "extensions": EXTENSIONS})

    async def _metadata(self, request: web.Request) -> web.Response:
        model, versions = self._asked(request)
        inputs = [{"name": one.name, "datatype": one.datatypes[0], "shape": one.shape} for one in model.inputs.values()]
        outputs = [one._asdict() for one in model.outputs(self._models.tasks())]
        about = {"name": model.kind.name, "versions": versions, "platform": NAME}
        return json_response({**about, "inputs": inputs, "outputs": outputs})

    async def _ready(self, request: web.Request) -> web.Response:
        model, _ = self._asked(request)
        require_ready(self._service)
        return json_response({"name": model.kind.name, "ready": True})

    async def _all_statistics(self, _: web.Request) -> web.Response:
        return await self._of([(name, self._version(name)) for name in self._models.names()])

    async def _statistics(self, request: web.Request) -> web.Response:
        model, versions = self._asked(request)
        version = request.match_info.get("version") or next(iter(versions), "")
        return await self._of([(model.kind.name, version)])

    def _version(self, name: str) -> str:
        return next(iter(self._models.find(name)[1]), "")

    async def _of(self, models: list[tuple[str, str]]) -> web.Response:
        found: list[ModelStatistics] = await statistics(self._insight, models)
        return json_response({"model_stats": found})

    def _infer(self, model: Model) -> Callable[[web.Request], Awaitable[web.Response]]:
        kind = model.kind

        async def handle(request: web.Request) -> web.Response:
            version = request.match_info.get("version")
            self._models.find(kind.name, version)

            def parse(body: bytes) -> tuple[HttpInfer, object, Shown]:
                asked = read(body, request.headers.get(HEADER_LENGTH))
                if asked.model_name not in ("", kind.name):
                    raise Unprocessable(f"model_name: {quoted(asked.model_name)}, and the address names {kind.name}")
                model.check_outputs(asked.infer.outputs, self._models.tasks())
                made = model.body(asked.infer, version, self._config)
                is_about = partial(request.__setitem__, USER)
                key = request[KEY]
                return asked, *parse_body(key, made, model.codec, self._service, self._config, self._keys, is_about)

            until_at = until(request, self._config)
            asked, parsed, shown = await self._reader.read_whole(request, parse, until_at)
            is_named = any(name in request.headers for name in BUDGET_HEADERS)
            max_s = self._config.max_budget_s
            until_at = waits_until(asked.infer, request[ARRIVED_AT], until_at, max_s, is_named=is_named)
            answer: Answer = await ask(request, kind, parsed, shown, self._service, until_at)
            made = model.answer(answer, request[ID], shown, asked.infer.outputs)
            body, num_json = write(kind.name, asked, made)
            response = web.Response(body=body, content_type=JSON if num_json is None else OCTETS)
            if num_json is not None:
                response.headers[HEADER_LENGTH] = str(num_json)
            add_headers(response, answer)
            return response

        return handle
