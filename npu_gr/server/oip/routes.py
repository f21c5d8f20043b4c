"""The Open Inference Protocol v2 over HTTP: JSON, and behind it the raw bytes of tensors (binary tensor data).

Its models are the kinds that score (`Kind.is_model`): rank, generate, ... An infer is the kind's request in another
form, with the same admission and errors. Its JSON is skimmed first: of a tensor's `data` no object is made before the
model has said how much it may be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from npu_gr import __version__
from npu_gr.core.errors import BadRequest, NotFound, TooLarge, Unprocessable
from npu_gr.core.kinds import KINDS
from npu_gr.core.words import cut, quoted
from npu_gr.metrics.registry.requests import AdmissionResult
from npu_gr.server.auth.keys import KeyRing
from npu_gr.server.codec.bulk import LOOSE_BYTES
from npu_gr.server.codec.fields import Shown
from npu_gr.server.codec.media import JSON, decode, encode
from npu_gr.server.config import ServerConfig
from npu_gr.server.http import BUDGET_HEADERS, json_response
from npu_gr.server.kind_routes import Reader, add_headers, ask, parse_body, until
from npu_gr.server.middleware import ARRIVED_AT, ID, KEY, OCTETS, USER
from npu_gr.server.oip.models import (
    BYTES,
    DTYPES,
    MODELS,
    MOST_TENSORS,
    InferAnswer,
    InferRequest,
    Model,
    Parameter,
    Tensor,
    pack,
)
from npu_gr.server.service_protocol import ServiceProtocol, require_ready
from npu_gr.server.status import Insight

NAME = "npu_gr"  # of the server, and of the platform of its models
EXTENSIONS = ("binary_tensor_data", "statistics")
HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of JSON in front of the raw ones
BINARY_OUTPUT = "binary_data_output"  # a parameter: raw bytes of every output that does not say otherwise
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class InputParameters(_Read, frozen=True):
    """What may stand beside an input."""

    binary_data_size: _Size | None = None  # of the raw bytes that it has; None = `data` holds it


class InputIn(_Read, frozen=True):
    """An input."""

    name: str
    datatype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=-1, le=2**40)]], msgspec.Meta(max_length=8)]
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw = msgspec.Raw()


class OutputParameters(_Read, frozen=True):
    """What may stand beside a wanted output."""

    binary_data: bool | None = None  # raw bytes; None = as `binary_data_output` of the request says


class OutputIn(_Read, frozen=True):
    """An output that is wanted."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferIn(_Read, frozen=True):
    """The JSON of an infer; its parts are decoded once it is known how long they are."""

    inputs: msgspec.Raw
    model_name: str = ""  # KServe's client sends it beside the address
    id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    parameters: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()


class OutputOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output: its elements in row-major order, or how many raw bytes it has. null: not a number."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = None


class InferOut(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of an answer."""

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Parameter]
    outputs: list[OutputOut]


class HttpInfer(NamedTuple):
    """An infer as it was read, and which of its outputs are wanted as raw bytes."""

    infer: InferRequest
    raw_outputs: frozenset[str]
    is_raw: bool  # the others are
    model_name: str  # that the body names; "" = none


def read(body: bytes, header_length: str | None) -> HttpInfer:
    """Read the body of an infer; `data` stays as it came.

    Args:
        body: whole.
        header_length: the header `HEADER_LENGTH`; None = the body is JSON alone.

    Raises:
        BadRequest: it cannot be parsed, or the lengths do not fit. Unprocessable: a field is not as it should be.
        TooLarge: too many tensors, or too many bytes beside their data.
    """
    num_json = _json_bytes(body, header_length)
    skimmed = decode(body[:num_json], JSON, InferIn)
    inputs_raw = bytes(skimmed.inputs)
    if (num := inputs_raw.count(b'"datatype"')) > MOST_TENSORS:
        raise TooLarge(f"inputs: {num} tensors, the limit is {MOST_TENSORS}")
    _check_loose("body", num_json - len(inputs_raw), "its inputs")
    inputs: list[InputIn] = _part(inputs_raw, "inputs", list[InputIn])
    _check_loose("inputs", len(inputs_raw) - sum(len(bytes(one.data)) for one in inputs), "their data")
    parameters = _part(bytes(skimmed.parameters) or b"{}", "parameters", dict[str, Parameter])
    outputs: list[OutputIn] = _part(bytes(skimmed.outputs) or b"[]", "outputs", list[OutputIn])
    if len(outputs) > MOST_TENSORS:
        raise TooLarge(f"outputs: {len(outputs)}, the limit is {MOST_TENSORS}")
    is_raw = parameters.pop(BINARY_OUTPUT, False)
    if not isinstance(is_raw, bool):
        raise Unprocessable(f"parameters: {BINARY_OUTPUT}: takes true or false")
    chosen = {one.name: one.parameters.binary_data for one in outputs}
    return HttpInfer(
        InferRequest(skimmed.id, _tensors(inputs, body, num_json), parameters, tuple(chosen)),
        frozenset(name for name, choice in chosen.items() if (is_raw if choice is None else choice)),
        is_raw,
        skimmed.model_name,
    )


def _json_bytes(body: bytes, header_length: str | None) -> int:
    """How many bytes of the body are JSON."""
    if header_length is None:
        return len(body)
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) <= 15):
        raise BadRequest(f"{HEADER_LENGTH}: expected up to 15 digits")
    if int(header_length) > len(body):
        raise BadRequest(f"{HEADER_LENGTH}: {int(header_length)}, and the body has {len(body)} bytes")
    return int(header_length)


def _check_loose(what: str, num_bytes: int, beside: str) -> None:
    if num_bytes > LOOSE_BYTES:
        raise TooLarge(f"{what}: {num_bytes} bytes beside {beside}, the limit is {LOOSE_BYTES}")


def _part(raw: bytes, name: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise Unprocessable(f"{name}{path.rstrip('`')}: {cut(text, 100)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{name}: cannot be parsed") from error


def _tensors(inputs: Iterable[InputIn], body: bytes, at: int) -> list[Tensor]:
    """Give each input its bytes: those in `data`, or the next ones behind the JSON."""
    tensors = []
    for one in inputs:
        size = one.parameters.binary_data_size
        values: Any = one.data
        if size is not None:
            if bytes(one.data):
                raise Unprocessable(f"{cut(one.name)}: has data, and binary_data_size too")
            if at + size > len(body):
                raise BadRequest(f"{cut(one.name)}: binary_data_size {size}, and {len(body) - at} bytes are left")
            values = body[at : at + size]
            at += size
        elif not bytes(one.data):
            raise Unprocessable(f"{cut(one.name)}: has neither data nor binary_data_size")
        tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), values))
    if at != len(body):
        raise BadRequest(f"body: {len(body) - at} bytes behind its tensors")
    return tensors


def write(name: str, asked: HttpInfer, answer: InferAnswer) -> tuple[bytes, int | None]:
    """Write the answer of a model to an infer.

    Returns:
        The body, and how many bytes of it are JSON; None = all are.
    """
    outputs: list[OutputOut] = []
    behind: list[bytes] = []
    for tensor in answer.outputs:
        about: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        is_raw = tensor.name in asked.raw_outputs if asked.infer.outputs else asked.is_raw
        if is_raw:
            raw = pack(tensor.values) if tensor.datatype == BYTES else tensor.values
            behind.append(raw)
            outputs.append(OutputOut(**about, parameters=InputParameters(binary_data_size=len(raw))))
        else:
            dtype = DTYPES.get(tensor.datatype)
            listed = tensor.values if dtype is None else np.frombuffer(tensor.values, dtype).tolist()
            outputs.append(OutputOut(**about, data=listed))
    out = InferOut(
        model_name=name,
        model_version=answer.version,
        id=asked.infer.id,
        parameters=answer.parameters,
        outputs=outputs,
    )
    head = encode(out, JSON)
    return (b"".join((head, *behind)), len(head)) if behind else (head, None)


# ---- what is served


class ServedModels:
    """The models that a service has at this moment."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def find(self, name: str, version: str | None = None) -> tuple[Model, tuple[str, ...]]:
        """Find a model, and the versions of it that can be asked for.

        Raises:
            NotFound: there is none of that name, or none of that version.
        """
        versions = self._service.kind_versions().get(name)
        if name not in MODELS or versions is None:
            raise NotFound(f"model: {quoted(name)} is not served; {', '.join(self.names()) or 'none'} is")
        if version is not None and version not in versions:
            raise NotFound(f"version: {quoted(version)} of {name} is not served; {', '.join(versions)} is")
        return MODELS[name], versions

    def names(self) -> list[str]:
        """Name the models."""
        served = self._service.kind_versions()
        return [name for name in MODELS if name in served]

    def tasks(self) -> tuple[str, ...]:
        """Name the tasks of the ranker."""
        models = self._service.models()
        return models[0].tasks if models else ()

    def metadata(self, name: str, version: str | None) -> dict[str, Any]:
        """Describe a model as the protocol does. Raises NotFound."""
        model, versions = self.find(name, version)
        return {
            "name": name,
            "versions": versions,
            "platform": NAME,
            "inputs": [
                {"name": one.name, "datatype": one.datatypes[0], "shape": one.shape} for one in model.inputs.values()
            ],
            "outputs": [one._asdict() for one in model.outputs(self.tasks())],
        }


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
        return [
            web.get("/v2", self._server),
            web.get("/v2/models/stats", self._statistics),
            *(
                web.get(f"{path}{end}", handler)
                for path in (each, f"{each}/versions/{{version}}")
                for end, handler in (("", self._metadata), ("/ready", self._ready), ("/stats", self._statistics))
            ),
            *(web.post(path, self._infer(model)) for model in MODELS.values() for path in model.kind.paths[1:]),
        ]

    async def _server(self, _: web.Request) -> web.Response:
        return json_response({"name": NAME, "version": __version__, "extensions": EXTENSIONS})

    async def _metadata(self, request: web.Request) -> web.Response:
        of = request.match_info
        return json_response(self._models.metadata(of["model"], of.get("version")))

    async def _ready(self, request: web.Request) -> web.Response:
        model, _ = self._models.find(request.match_info["model"], request.match_info.get("version"))
        require_ready(self._service)
        return json_response({"name": model.kind.name, "ready": True})

    async def _statistics(self, request: web.Request) -> web.Response:
        of = request.match_info
        found = await statistics(self._insight, self._models, of.get("model"), of.get("version"))
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
            until_at = asked.infer.waits_until(request[ARRIVED_AT], until_at, max_s, is_named=is_named)
            answer: Any = await ask(request, kind, parsed, self._service, until_at)
            made = model.answer(answer, request[ID], shown, asked.infer.outputs)
            body, num_json = write(kind.name, asked, made)
            response = web.Response(body=body, content_type=JSON if num_json is None else OCTETS)
            if num_json is not None:
                response.headers[HEADER_LENGTH] = str(num_json)
            add_headers(response, answer)
            return response

        return handle


# ---- the statistics extension: what the metrics have counted since the start

_ADMISSIONS = "npu_gr_admissions_total"
_DURATION = "npu_gr_request_duration_seconds"
_STAGES = "npu_gr_stage_duration_seconds"
_NAMES = (_ADMISSIONS, *(f"{family}_{part}" for family in (_DURATION, _STAGES) for part in ("count", "sum")))
_BEFORE = frozenset({"door", "history", "lease", "preprocess"})  # stages that make the device's input


async def statistics(
    insight: Insight, models: ServedModels, name: str | None, version: str | None
) -> list[dict[str, Any]]:
    """Return the statistics of a model, or where none is named, of all, as the protocol has them.

    What is counted is of all versions. How long refused and failed requests took is not measured, nor the writing of
    answers, nor batches by their size.

    Raises:
        NotFound: there is no such model.
    """
    asked = [(one, models.find(one, version)[1]) for one in ([name] if name else models.names())]
    text, _ = await insight.exposition("", _NAMES)
    samples = [one for family in text_string_to_metric_families(text.decode()) for one in family.samples]

    def of_model(kind: str, versions: tuple[str, ...]) -> dict[str, Any]:
        own = [one for one in samples if one.labels.get("kind") == kind]

        def times(family: str, stages: Iterable[str] = ("",)) -> dict[str, int]:
            """Add the times of stages; their count is that of the one that was measured most often."""
            named = [one for one in own if one.labels.get("stage", "") in stages]
            counts = [int(one.value) for one in named if one.name == f"{family}_count"]
            seconds = sum(one.value for one in named if one.name == f"{family}_sum")
            return {"count": max(counts, default=0), "ns": round(seconds * 1e9)}

        refused = [one for one in own if one.name == _ADMISSIONS]
        refused = [one for one in refused if one.labels["verdict"] != AdmissionResult.ADMITTED.value]
        success = times(_DURATION)
        stats = {
            "success": success,
            "fail": {"count": sum(int(one.value) for one in refused), "ns": 0},
            "queue": times(_STAGES, ("queue",)),
            "compute_input": times(_STAGES, _BEFORE),
            "compute_infer": times(_STAGES, frozenset(KINDS[kind].stages) - _BEFORE - {"queue"}),
            "compute_output": {"count": 0, "ns": 0},
        }
        return {
            "name": kind,
            "version": version or next(iter(versions), ""),
            "last_inference": 0,
            "inference_count": success["count"],
            "execution_count": success["count"],
            "inference_stats": stats,
            "batch_stats": [],
        }

    return [of_model(kind, versions) for kind, versions in asked]
