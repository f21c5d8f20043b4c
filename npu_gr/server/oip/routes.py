"""The Open Inference Protocol v2 over HTTP: JSON, and behind it the raw bytes of tensors (binary tensor data).

Its models are the kinds that score (`Kind.is_model`): rank, generate, ... An infer is the kind's
request in another form, with the same admission and errors. Its JSON is skimmed first: of a
tensor's `data` no object is made before the model has said how much it may be.
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
from npu_gr.server.middleware import CALL, OCTETS, Course
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
from npu_gr.server.status import Insight

NAME = "npu_gr"  # of the server, and of the platform of its models
EXTENSIONS = ("binary_tensor_data", "statistics")
HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of JSON in front of the raw ones
# a parameter: raw bytes of every output that does not say otherwise
BINARY_OUTPUT = "binary_data_output"
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
    shape: Annotated[
        list[Annotated[int, msgspec.Meta(ge=-1, le=2**40)]], msgspec.Meta(max_length=8)
    ]
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


def read(body: bytes, header_length: str | None, model: str) -> InferRequest:
    """Read the body of an infer; `data` stays as it came.

    Args:
        body: whole.
        header_length: the header `HEADER_LENGTH`; None = the body is JSON alone.
        model: that the address names.

    Raises:
        BadRequest: it cannot be parsed, or the lengths do not fit. Unprocessable: a field is not as
            it should be.
        TooLarge: too many tensors, or too many bytes beside their data.
    """
    num_json = _json_bytes(body, header_length)
    skimmed = decode(body[:num_json], JSON, InferIn)
    if skimmed.model_name not in ("", model):
        raise Unprocessable(
            f"model_name: {quoted(skimmed.model_name)}, and the address names {model}"
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
    """How many bytes of the body are JSON."""
    if header_length is None:
        return len(body)
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) <= 15):
        raise BadRequest(f"{HEADER_LENGTH}: expected up to 15 digits")
    if int(header_length) > len(body):
        raise BadRequest(
            f"{HEADER_LENGTH}: {int(header_length)}, and the body has {len(body)} bytes"
        )
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
                raise BadRequest(
                    f"{cut(one.name)}: binary_data_size {size}, and {len(body) - at} bytes are left"
                )
            values = body[at : at + size]
            at += size
        elif not bytes(one.data):
            raise Unprocessable(f"{cut(one.name)}: has neither data nor binary_data_size")
        tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), values))
    if at != len(body):
        raise BadRequest(f"body: {len(body) - at} bytes behind its tensors")
    return tensors


def write(name: str, asked: InferRequest, answer: InferAnswer) -> tuple[bytes, int | None]:
    """Write the answer of a model to an infer.

    Returns:
        The body, and how many bytes of it are JSON; None = all are.
    """
    outputs: list[OutputOut] = []
    behind: list[bytes] = []
    for tensor in answer.outputs:
        about: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if asked.outputs.get(tensor.name, asked.is_raw):
            raw = pack(tensor.values) if tensor.datatype == BYTES else tensor.values
            behind.append(raw)
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
    return (b"".join((head, *behind)), len(head)) if behind else (head, None)


# ---- what is served


class Inference:
    """The models that a service has at this moment, whichever way they are asked."""

    def __init__(
        self, service: ServiceProtocol, course: Course, reader: Reader, insight: Insight
    ) -> None:
        """Ask nothing yet.

        Args:
            service: answers.
            course: of every request.
            reader: lets long requests take turns.
            insight: has the metrics.
        """
        self.service = service
        self.course = course
        self._reader = reader
        self._insight = insight

    def find(self, name: str, version: str | None = None) -> tuple[Model, tuple[str, ...]]:
        """Find a model, and the versions of it that can be asked for.

        Raises:
            NotFound: there is none of that name, or none of that version.
        """
        versions = self.service.kind_versions().get(name)
        if name not in MODELS or versions is None:
            raise NotFound(
                f"model: {quoted(name)} is not served; {', '.join(self._names()) or 'none'} is"
            )
        if version is not None and version not in versions:
            raise NotFound(
                f"version: {quoted(version)} of {name} is not served; {', '.join(versions)} is"
            )
        return MODELS[name], versions

    def _names(self) -> list[str]:
        served = self.service.kind_versions()
        return [name for name in MODELS if name in served]

    def _tasks(self) -> tuple[str, ...]:
        models = self.service.models()
        return models[0].tasks if models else ()

    def metadata(self, name: str, version: str | None) -> dict[str, Any]:
        """Describe a model as the protocol does. Raises NotFound."""
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
        """Answer an infer.

        Args:
            call: of it.
            model: that it asks.
            version: that it names.
            read: makes the infer of its message; its tensors are read once the model has bounded
                them.
        """

        def parse() -> tuple[InferRequest, object, ResponseFields]:
            asked = read()
            model.check_outputs(asked.outputs, self._tasks())
            body = model.body(asked, version, self.course.config)
            return asked, *parse_body(call, body, model.codec, self.service, self.course)

        asked, parsed, shown = await self._reader.in_turn(parse, call.until_at)
        call.until_at = asked.waits_until(call, self.course.config.max_budget_s)
        answer = await ask(call, model.kind, parsed, self.service)
        return asked, model.answer(answer, call.request_id, shown, asked.outputs)

    async def statistics(self, name: str | None, version: str | None) -> list[dict[str, Any]]:
        """Return what metrics have counted since the start of a model, or where none is named, of all.

        What is counted is of all versions. How long rejected and failed requests took is not
        measured, nor the writing of answers, nor batches by their size.

        Raises:
            NotFound: there is no such model.
        """
        asked = [(one, self.find(one, version)[1]) for one in ([name] if name else self._names())]
        text, _ = await self._insight.exposition("", _NAMES)
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
# stages that make the device's input
_BEFORE = frozenset({"http", "history", "lease", "preprocess"})


def _statistics(kind: str, version: str, samples: list[Sample]) -> dict[str, Any]:
    own = [one for one in samples if one.labels.get("kind") == kind]

    def times(family: str, stages: Iterable[str] = ("",)) -> dict[str, int]:
        """Add the times of stages; their count is that of the one that was measured most often."""
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
