"""The Open Inference Protocol v2 over HTTP: JSON, followed by raw bytes of tensors.

The models are the kinds that score (`Kind.is_model`): rank, generate, ... An inference request is
the kind's request in another form, with the same admission and errors. Its JSON is skimmed first: a
tensor's `data` is decoded after the model has bounded its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from npu_gr import __version__
from npu_gr.core.errors import BadRequest, NotFound, TooLarge, Unprocessable
from npu_gr.core.kinds import KINDS
from npu_gr.core.text_format import cut, quoted
from npu_gr.metrics.registry.requests import AdmissionResult
from npu_gr.server.access_log import ServerCall
from npu_gr.server.admission.middleware import BODY
from npu_gr.server.http import json_response
from npu_gr.server.kind_routes import Reader, add_headers, ask, parse_body
from npu_gr.server.middleware import CALL, OCTETS, RequestLifecycle
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
from npu_gr.server.schemas.bulk import LOOSE_BYTES
from npu_gr.server.schemas.fields import ResponseFields
from npu_gr.server.schemas.media import JSON, decode, encode
from npu_gr.server.service_protocol import ServiceProtocol, require_ready
from npu_gr.server.status import DebugViews

NAME = "npu_gr"  # name of the server, and platform of its models
EXTENSIONS = ("binary_tensor_data", "statistics")
HEADER_LENGTH = "Inference-Header-Content-Length"  # length of the JSON before the raw bytes
# Parameter of a request: send outputs as raw bytes unless their own `binary_data` is false.
BINARY_OUTPUT = "binary_data_output"
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class InputParameters(_Read, frozen=True):
    """The parameters of an input."""

    binary_data_size: _Size | None = None  # length of its raw bytes; None = `data` holds it


class InputIn(_Read, frozen=True):
    """An input in a request."""

    name: str
    datatype: str
    shape: Annotated[
        list[Annotated[int, msgspec.Meta(ge=-1, le=2**40)]], msgspec.Meta(max_length=8)
    ]
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw = msgspec.Raw()


class OutputParameters(_Read, frozen=True):
    """The parameters of a requested output."""

    binary_data: bool | None = None  # send raw bytes; None = as the request's `binary_data_output`


class OutputIn(_Read, frozen=True):
    """A requested output."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferIn(_Read, frozen=True):
    """The JSON of an inference request; its parts are decoded after a check of their lengths."""

    inputs: msgspec.Raw
    model_name: str = ""  # KServe's client repeats the name of the URL
    id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    parameters: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()


class OutputOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output: elements in row-major order (null = NaN), or the length of its raw bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = None


class InferOut(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of an answer to an inference request."""

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Parameter]
    outputs: list[OutputOut]


def read(body: bytes, header_length: str | None, model: str) -> InferRequest:
    """Parse the body of an inference request; `data` of the inputs stays undecoded.

    Args:
        body: JSON, and raw bytes of tensors after it.
        header_length: Value of the header `HEADER_LENGTH`; None = the body is JSON only.
        model: Name of the model in the URL.

    Raises:
        BadRequest: The body cannot be parsed, or the lengths do not match.
        Unprocessable: A field is unknown, missing or out of range.
        TooLarge: There are too many tensors, or too many bytes outside of their data.
    """
    num_json = _json_bytes(body, header_length)
    skimmed = decode(body[:num_json], JSON, InferIn)
    if skimmed.model_name not in ("", model):
        raise Unprocessable(
            f"model_name: {quoted(skimmed.model_name)} differs from the model of the URL, {model}"
        )
    inputs_raw = bytes(skimmed.inputs)
    if (num := inputs_raw.count(b'"datatype"')) > MOST_TENSORS:
        raise TooLarge(f"inputs: {num} tensors, the limit is {MOST_TENSORS}")
    _check_loose("body", num_json - len(inputs_raw), "its inputs")
    inputs: list[InputIn] = _part(inputs_raw, "inputs", list[InputIn])
    _check_loose(
        "inputs", len(inputs_raw) - sum(len(bytes(one.data)) for one in inputs), "their data"
    )
    parameters = _part(bytes(skimmed.parameters) or b"{}", "parameters", dict[str, Parameter])
    outputs: list[OutputIn] = _part(bytes(skimmed.outputs) or b"[]", "outputs", list[OutputIn])
    if len(outputs) > MOST_TENSORS:
        raise TooLarge(f"outputs: {len(outputs)}, the limit is {MOST_TENSORS}")
    is_raw = parameters.pop(BINARY_OUTPUT, False)
    if not isinstance(is_raw, bool):
        raise Unprocessable(f"parameters: {BINARY_OUTPUT}: takes true or false")
    chosen = {one.name: one.parameters.binary_data for one in outputs}
    wanted = {name: is_raw if choice is None else choice for name, choice in chosen.items()}
    return InferRequest(skimmed.id, _tensors(inputs, body, num_json), parameters, wanted, is_raw)


def _json_bytes(body: bytes, header_length: str | None) -> int:
    """Return how many bytes of the body are JSON."""
    if header_length is None:
        return len(body)
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) <= 15):
        raise BadRequest(f"{HEADER_LENGTH}: expected 1 to 15 digits")
    if int(header_length) > len(body):
        raise BadRequest(
            f"{HEADER_LENGTH}: {int(header_length)}, but the body has {len(body)} bytes"
        )
    return int(header_length)


def _check_loose(what: str, num_bytes: int, outside_of: str) -> None:
    if num_bytes > LOOSE_BYTES:
        raise TooLarge(
            f"{what}: {num_bytes} bytes outside of {outside_of}, the limit is {LOOSE_BYTES}"
        )


def _part(raw: bytes, name: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise Unprocessable(f"{name}{path.rstrip('`')}: {cut(text, 100)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{name}: cannot be parsed") from error


def _tensors(inputs: Iterable[InputIn], body: bytes, at: int) -> list[Tensor]:
    """Give each input its values: `data`, or the next raw bytes after the JSON."""
    tensors = []
    for one in inputs:
        size = one.parameters.binary_data_size
        values: Any = one.data
        if size is not None:
            if bytes(one.data):
                raise Unprocessable(f"{cut(one.name)}: has both data and binary_data_size")
            if at + size > len(body):
                raise BadRequest(
                    f"{cut(one.name)}: binary_data_size {size}, but {len(body) - at} bytes are left"
                )
            values = body[at : at + size]
            at += size
        elif not bytes(one.data):
            raise Unprocessable(f"{cut(one.name)}: has neither data nor binary_data_size")
        tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), values))
    if at != len(body):
        raise BadRequest(f"body: {len(body) - at} bytes after its tensors")
    return tensors


def write(name: str, asked: InferRequest, answer: InferAnswer) -> tuple[bytes, int | None]:
    """Serialise the answer to an inference request.

    Returns:
        The body, and how many bytes of it are JSON; None = all.
    """
    outputs: list[OutputOut] = []
    raws: list[bytes] = []
    for tensor in answer.outputs:
        about: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if asked.outputs.get(tensor.name, asked.is_raw):
            raw = pack(tensor.values) if tensor.datatype == BYTES else tensor.values
            raws.append(raw)
            outputs.append(
                OutputOut(**about, parameters=InputParameters(binary_data_size=len(raw)))
            )
        else:
            dtype = DTYPES.get(tensor.datatype)
            listed = (
                tensor.values if dtype is None else np.frombuffer(tensor.values, dtype).tolist()
            )
            outputs.append(OutputOut(**about, data=listed))
    out = InferOut(
        model_name=name,
        model_version=answer.version,
        id=asked.id,
        parameters=answer.parameters,
        outputs=outputs,
    )
    head = encode(out, JSON)
    return (b"".join((head, *raws)), len(head)) if raws else (head, None)


# ---- the models


class Inference:
    """The models that a service currently has, over HTTP and gRPC."""

    def __init__(
        self,
        service: ServiceProtocol,
        lifecycle: RequestLifecycle,
        reader: Reader,
        debug_views: DebugViews,
    ) -> None:
        """Refer to the service.

        Args:
            service: Answers the requests.
            lifecycle: Steps that every request passes.
            reader: Bounds the event loop's time for decoding.
            debug_views: Gives the metrics for the statistics.
        """
        self.service = service
        self.lifecycle = lifecycle
        self._reader = reader
        self._debug_views = debug_views

    def find(self, name: str, version: str | None = None) -> tuple[Model, tuple[str, ...]]:
        """Find a model and its served versions.

        Raises:
            NotFound: The model or the version is not served.
        """
        versions = self.service.kind_versions().get(name)
        if name not in MODELS or versions is None:
            raise NotFound(
                f"model: {quoted(name)} is not served; served: {', '.join(self._names()) or 'none'}"
            )
        if version is not None and version not in versions:
            raise NotFound(
                f"version: {quoted(version)} of {name} is not served; served: {', '.join(versions)}"
            )
        return MODELS[name], versions

    def _names(self) -> list[str]:
        served = self.service.kind_versions()
        return [name for name in MODELS if name in served]

    def _tasks(self) -> tuple[str, ...]:
        models = self.service.models()
        return models[0].tasks if models else ()

    def metadata(self, name: str, version: str | None) -> dict[str, Any]:
        """Return the protocol's metadata of a model. Raises NotFound."""
        model, versions = self.find(name, version)
        return {
            "name": name,
            "versions": versions,
            "platform": NAME,
            "inputs": [
                {"name": one.name, "datatype": one.datatypes[0], "shape": one.shape}
                for one in model.inputs.values()
            ],
            "outputs": [one._asdict() for one in model.outputs(self._tasks())],
        }

    async def infer(
        self, call: ServerCall, model: Model, version: str | None, read: Callable[[], InferRequest]
    ) -> tuple[InferRequest, InferAnswer]:
        """Answer an inference request.

        Args:
            call: Call of the request.
            model: Result of `find`.
            version: Version that the request names; None = none.
            read: Parses the message; tensors are decoded after the model has bounded their lengths.
        """

        def parse() -> tuple[InferRequest, object, ResponseFields]:
            asked = read()
            model.check_outputs(asked.outputs, self._tasks())
            body = model.body(asked, version, self.lifecycle.config)
            return asked, *parse_body(call, body, model.codec, self.service, self.lifecycle)

        asked, parsed, response_fields = await self._reader.in_turn(parse, call.until_at)
        call.until_at = asked.waits_until(call, self.lifecycle.config.max_budget_s)
        answer = await ask(call, model.kind, parsed, self.service)
        return asked, model.answer(answer, call.request_id, response_fields, asked.outputs)

    async def statistics(self, name: str | None, version: str | None) -> list[dict[str, Any]]:
        """Return the protocol's statistics of a model, or of all models, since the start.

        The counts cover all versions. The time of rejected and failed requests, the writing of
        answers and batch sizes are not measured, and are 0 or empty.

        Raises:
            NotFound: The model is not served.
        """
        asked = [(one, self.find(one, version)[1]) for one in ([name] if name else self._names())]
        text, _ = await self._debug_views.exposition("", _NAMES)
        samples = [
            one
            for family in text_string_to_metric_families(text.decode())
            for one in family.samples
        ]
        return [
            _statistics(kind, version or next(iter(versions), ""), samples)
            for kind, versions in asked
        ]


# ---- the statistics extension

_ADMISSIONS = "npu_gr_admissions_total"
_DURATION = "npu_gr_request_duration_seconds"
_STAGES = "npu_gr_stage_duration_seconds"
_NAMES = (
    _ADMISSIONS,
    *(f"{family}_{part}" for family in (_DURATION, _STAGES) for part in ("count", "sum")),
)
# stages before the device pass, the protocol's compute_input
_BEFORE = frozenset({"http", "history", "lease", "preprocess"})


def _statistics(kind: str, version: str, samples: list[Sample]) -> dict[str, Any]:
    own = [one for one in samples if one.labels.get("kind") == kind]

    def times(family: str, stages: Iterable[str] = ("",)) -> dict[str, int]:
        """Sum the times of stages; the count is the largest among them."""
        named = [one for one in own if one.labels.get("stage", "") in stages]
        counts = [int(one.value) for one in named if one.name == f"{family}_count"]
        seconds = sum(one.value for one in named if one.name == f"{family}_sum")
        return {"count": max(counts, default=0), "ns": round(seconds * 1e9)}

    rejected = [one for one in own if one.name == _ADMISSIONS]
    rejected = [one for one in rejected if one.labels["verdict"] != AdmissionResult.ADMITTED.value]
    success = times(_DURATION)
    return {
        "name": kind,
        "version": version,
        "last_inference": 0,
        "inference_count": success["count"],
        "execution_count": success["count"],
        "inference_stats": {
            "success": success,
            "fail": {"count": sum(int(one.value) for one in rejected), "ns": 0},
            "queue": times(_STAGES, ("queue",)),
            "compute_input": times(_STAGES, _BEFORE),
            "compute_infer": times(_STAGES, frozenset(KINDS[kind].stages) - _BEFORE - {"queue"}),
            "compute_output": {"count": 0, "ns": 0},
        },
        "batch_stats": [],
    }


# ---- over HTTP


class InferenceRoutes:
    """Metadata, readiness, statistics and infer."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    def routes(self) -> list[web.RouteDef]:
        each = "/v2/models/{model}"
        return [
            web.get("/v2", self._server),
            web.get("/v2/models/stats", self._statistics),
            *(
                web.get(f"{path}{end}", handler)
                for path in (each, f"{each}/versions/{{version}}")
                for end, handler in (
                    ("", self._metadata),
                    ("/ready", self._ready),
                    ("/stats", self._statistics),
                )
            ),
            *(
                web.post(path, partial(self._infer, name))
                for name in MODELS
                for path in KINDS[name].paths[1:]
            ),
        ]

    async def _server(self, _: web.Request) -> web.Response:
        return json_response({"name": NAME, "version": __version__, "extensions": EXTENSIONS})

    async def _metadata(self, request: web.Request) -> web.Response:
        of = request.match_info
        return json_response(self._inference.metadata(of["model"], of.get("version")))

    async def _ready(self, request: web.Request) -> web.Response:
        model, _ = self._inference.find(
            request.match_info["model"], request.match_info.get("version")
        )
        require_ready(self._inference.service)
        return json_response({"name": model.kind.name, "ready": True})

    async def _statistics(self, request: web.Request) -> web.Response:
        of = request.match_info
        return json_response(
            {"model_stats": await self._inference.statistics(of.get("model"), of.get("version"))}
        )

    async def _infer(self, name: str, request: web.Request) -> web.Response:
        version = request.match_info.get("version")
        model, _ = self._inference.find(name, version)
        call = request[CALL]
        read_body = partial(read, request[BODY], request.headers.get(HEADER_LENGTH), name)
        asked, answer = await self._inference.infer(call, model, version, read_body)
        body, num_json = write(name, asked, answer)
        response = web.Response(body=body, content_type=JSON if num_json is None else OCTETS)
        if num_json is not None:
            response.headers[HEADER_LENGTH] = str(num_json)
        if call.answer is not None:
            add_headers(response, call.answer)
        return response
