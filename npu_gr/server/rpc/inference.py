"""`inference.GRPCInferenceService`: the Open Inference Protocol v2 over gRPC. Its models are those of `server/oip`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from npu_gr import __version__
from npu_gr.core.errors import TooLarge, Unprocessable
from npu_gr.core.kinds import Scope
from npu_gr.core.words import cut, quoted
from npu_gr.server.codec.base import Shown
from npu_gr.server.codec.fields import MOST_NAMES
from npu_gr.server.insight import Insight
from npu_gr.server.kind_routes import parse_body
from npu_gr.server.oip.http import MOST_TENSORS
from npu_gr.server.oip.models import InferAnswer, InferRequest, Parameter, ServedModels, waits_until
from npu_gr.server.oip.routes import EXTENSIONS, NAME
from npu_gr.server.oip.statistics import statistics
from npu_gr.server.oip.tensors import BYTES, Tensor, pack
from npu_gr.server.rpc.calls import Calls, RpcCall, told
from npu_gr.server.rpc.messages import INFERENCE, message

_CONTENTS = {  # datatype -> the field of `InferTensorContents` that has it
    "BOOL": "bool_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


class InferenceService:
    """The calls of the service."""

    def __init__(self, calls: Calls, insight: Insight) -> None:
        self._calls = calls
        self._service = calls.shared.service
        self._insight = insight
        self._models = ServedModels(self._service)

    def unary(self) -> dict[str, tuple[Scope | None, Callable[[RpcCall, bytes], Awaitable[bytes]]]]:
        """Name the methods with one message: the scope that each needs, and its work."""
        return {
            "ServerLive": (None, self._live),
            "ServerReady": (None, self._server_ready),
            "ServerMetadata": (Scope.INFER, self._server),
            "ModelReady": (Scope.INFER, self._model_ready),
            "ModelMetadata": (Scope.INFER, self._metadata),
            "ModelInfer": (Scope.INFER, self.infer),
            "ModelStatistics": (Scope.OBSERVE, self._statistics),
        }

    # ---- what is served

    async def _live(self, _call: RpcCall, _body: bytes) -> bytes:
        return _written("ServerLiveResponse", live=True)

    async def _server_ready(self, _call: RpcCall, _body: bytes) -> bytes:
        return _written("ServerReadyResponse", ready=self._service.is_ready()[0])

    async def _server(self, _call: RpcCall, _body: bytes) -> bytes:
        return _written("ServerMetadataResponse", name=NAME, version=__version__, extensions=EXTENSIONS[1:])

    async def _model_ready(self, call: RpcCall, body: bytes) -> bytes:
        asked = await self._decoded(call, "ModelReadyRequest", body)
        self._models.find(asked.name, asked.version or None)
        return _written("ModelReadyResponse", ready=self._service.is_ready()[0])

    async def _metadata(self, call: RpcCall, body: bytes) -> bytes:
        asked = await self._decoded(call, "ModelMetadataRequest", body)
        model, versions = self._models.find(asked.name, asked.version or None)
        inputs = [{"name": one.name, "datatype": one.datatypes[0], "shape": one.shape} for one in model.inputs.values()]
        outputs = [one._asdict() for one in model.outputs(self._models.tasks())]
        about: dict[str, Any] = {"name": model.kind.name, "versions": versions, "platform": NAME}
        return _written("ModelMetadataResponse", **about, inputs=inputs, outputs=outputs)

    async def _statistics(self, call: RpcCall, body: bytes) -> bytes:
        asked = await self._decoded(call, "ModelStatisticsRequest", body)
        names = [asked.name] if asked.name else self._models.names()
        models = [(name, self._models.find(name, asked.version or None)[1]) for name in names]
        found = await statistics(self._insight, [(name, next(iter(versions), "")) for name, versions in models])
        stats = [
            {
                "name": one.name,
                "version": one.version,
                "inference_count": one.inference_count,
                "execution_count": one.execution_count,
                "inference_stats": {
                    name: {"count": times.count, "ns": times.ns} for name, times in one.inference_stats.items()
                },
            }
            for one in found
        ]
        return _written("ModelStatisticsResponse", model_stats=stats)

    # ---- infer

    async def infer(self, call: RpcCall, body: bytes) -> bytes:
        """Answer a ModelInferRequest with a ModelInferResponse; both are bytes."""
        asked = await self._decoded(call, "ModelInferRequest", body)
        model, _ = self._models.find(asked.model_name, asked.model_version or None)
        call.kind = model.kind
        parameters = _parameters(asked.parameters, "parameters")
        shared = self._calls.shared
        wanted: list[tuple[str, ...]] = []

        def parse() -> tuple[Any, Shown]:
            infer = InferRequest(asked.id, inputs_of(asked), parameters, _outputs(asked))
            model.check_outputs(infer.outputs, self._models.tasks())
            max_s = shared.config.max_budget_s
            call.until_at = waits_until(infer, call.arrived_at, call.until_at, max_s, is_named=call.names_limit)
            made = model.body(infer, asked.model_version or None, shared.config)
            wanted.append(infer.outputs)
            assert call.key is not None
            return parse_body(call.key, made, model.codec, self._service, shared.config, shared.keys, call.is_about)

        def write(answer: Any, shown: Shown) -> bytes:
            made = model.answer(answer, call.request_id, shown, wanted[0])
            return _response(model.kind.name, asked.id, made)

        tenant = parameters.get("tenant", "")
        return await self._calls.ask(call, model.kind, str(tenant), parse, write)

    async def streamed(self, context: Any, body: bytes) -> bytes:
        """Answer a message of ModelStreamInfer: an error is a message, too, and the stream goes on."""
        try:
            made = await self._calls.message(f"/{INFERENCE}/ModelStreamInfer", Scope.INFER, self.infer, context, body)
        except Exception as error:  # noqa: BLE001  (counted and logged; the caller is told)
            return _written("ModelStreamInferResponse", error_message=told(error))
        answer = message("inference.ModelInferResponse").FromString(made)
        return _written("ModelStreamInferResponse", infer_response=answer)

    async def _decoded(self, call: RpcCall, name: str, body: bytes) -> Any:
        return await self._calls.decoded(call, message(f"inference.{name}"), body)


def inputs_of(asked: Any) -> list[Tensor]:
    """Take the inputs of a message; their contents are not read yet."""
    num = len(asked.inputs)
    if num > MOST_TENSORS:
        raise TooLarge(f"inputs: {num} tensors, the limit is {MOST_TENSORS}")
    raws = asked.raw_input_contents
    if raws and len(raws) != num:
        raise Unprocessable(f"raw_input_contents: {len(raws)}, and there are {num} inputs: all are raw, or none is")
    tensors = []
    for index, one in enumerate(asked.inputs):
        if any(name != "binary_data_size" for name in one.parameters):  # KServe's client sends it here, too
            raise Unprocessable(f"{cut(one.name)}: parameters: an input has none here (no shared memory)")
        if raws and one.HasField("contents"):
            raise Unprocessable(f"{cut(one.name)}: has contents, and raw_input_contents too")
        field = _CONTENTS.get(one.datatype, "bytes_contents")  # a datatype that nothing takes is refused by its name
        values = raws[index] if raws else getattr(one.contents, field)
        if len(one.shape) > 8:
            raise Unprocessable(f"{cut(one.name)}: shape has {len(one.shape)} dimensions; takes 1")
        tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), values))
    return tensors


def _outputs(asked: Any) -> tuple[str, ...]:
    if len(asked.outputs) > MOST_TENSORS:
        raise TooLarge(f"outputs: {len(asked.outputs)}, the limit is {MOST_TENSORS}")
    for one in asked.outputs:
        if any(name != "binary_data" for name in one.parameters):  # contents are raw anyway
            raise Unprocessable(f"outputs: {cut(one.name)}: parameters: an output has none here")
    return tuple(one.name for one in asked.outputs)


def _parameters(given: Any, what: str) -> dict[str, Parameter]:
    if len(given) > MOST_NAMES:
        raise TooLarge(f"{what}: {len(given)} entries, the limit is {MOST_NAMES}")
    read: dict[str, Parameter] = {}
    for name, value in given.items():
        which = value.WhichOneof("parameter_choice")
        if which is None:
            raise Unprocessable(f"{what}: {quoted(name)} has no value")
        read[name] = getattr(value, which)
    return read


def _response(name: str, sent_id: str, answer: InferAnswer) -> bytes:
    outputs = [{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in answer.outputs]
    raws = [pack(one.values) if one.datatype == BYTES else one.values for one in answer.outputs]
    return _written(
        "ModelInferResponse",
        model_name=name,
        model_version=answer.version,
        id=sent_id,
        parameters={name: _parameter(value) for name, value in answer.parameters.items()},
        outputs=outputs,
        raw_output_contents=raws,
    )


def _parameter(value: Parameter) -> Any:
    cls = message("inference.InferParameter")
    if isinstance(value, bool):
        return cls(bool_param=value)
    if isinstance(value, int):
        return cls(int64_param=value)
    return cls(double_param=value) if isinstance(value, float) else cls(string_param=value)


def _written(kind: str, /, **fields: Any) -> bytes:
    made: bytes = message(f"inference.{kind}")(**fields).SerializeToString()
    return made
