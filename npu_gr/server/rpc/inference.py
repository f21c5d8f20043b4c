"""The Open Inference Protocol v2 over gRPC, `inference.GRPCInferenceService`, and gRPC's own health service.

The models are those of `server/oip`. Messages are the public protocols' (`protos/`). What protoc makes of them,
`compiled.binpb` (`make proto`), is read into a pool of descriptors of its own: in a process that has other copies
of these protocols, a client of Triton's for one, the two do not meet.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from npu_gr import __version__
from npu_gr.core.errors import BadRequest, NotFound, NpuGrError, TooLarge, Unprocessable
from npu_gr.core.kinds import Scope
from npu_gr.core.words import cut, quoted
from npu_gr.server.codec.fields import MOST_NAMES
from npu_gr.server.kind_routes import parse_body
from npu_gr.server.oip.models import (
    BYTES,
    MOST_TENSORS,
    InferAnswer,
    InferRequest,
    Parameter,
    Tensor,
    pack,
)
from npu_gr.server.oip.routes import EXTENSIONS, NAME, ServedModels, statistics
from npu_gr.server.rpc.calls import UNEXPECTED, Calls, RpcCall, Work
from npu_gr.server.status import Insight

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
LOOK_S = 0.25  # between two looks whether health has changed
SERVING = 1
NOT_SERVING = 2
SERVICE_UNKNOWN = 3
_CONTENTS = {  # datatype -> the field of `InferTensorContents` that has it
    "BOOL": "bool_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


@cache
def message(name: str) -> Any:
    """Return the class of a message by its full name. Raises KeyError where there is none."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def _pool() -> Any:
    compiled = resources.files("npu_gr.server.rpc").joinpath("protos", "compiled.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        pool.Add(file)
    return pool


_POOL = _pool()  # at import: reading the file would block the event loop


def _read(name: str, body: bytes) -> Any:
    try:
        return message(name).FromString(body)
    except DecodeError:
        raise BadRequest("the message cannot be parsed") from None


def _written(name: str, /, **fields: Any) -> bytes:
    made: bytes = message(name)(**fields).SerializeToString()
    return made


class InferenceService:
    """The methods of the Open Inference Protocol."""

    def __init__(self, calls: Calls, insight: Insight) -> None:
        self._calls = calls
        self._service = calls.service
        self._insight = insight
        self._models = ServedModels(self._service)

    def unary(self) -> dict[str, tuple[Scope | None, Work]]:
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

    async def _live(self, _call: RpcCall, _body: bytes) -> bytes:
        return _written("inference.ServerLiveResponse", live=True)

    async def _server_ready(self, _call: RpcCall, _body: bytes) -> bytes:
        return _written("inference.ServerReadyResponse", ready=self._service.is_ready()[0])

    async def _server(self, _call: RpcCall, _body: bytes) -> bytes:
        about = {"name": NAME, "version": __version__, "extensions": EXTENSIONS[1:]}
        return _written("inference.ServerMetadataResponse", **about)

    async def _model_ready(self, _call: RpcCall, body: bytes) -> bytes:
        asked = _read("inference.ModelReadyRequest", body)
        self._models.find(asked.name, asked.version or None)
        return _written("inference.ModelReadyResponse", ready=self._service.is_ready()[0])

    async def _metadata(self, _call: RpcCall, body: bytes) -> bytes:
        asked = _read("inference.ModelMetadataRequest", body)
        about = self._models.metadata(asked.name, asked.version or None)
        return _written("inference.ModelMetadataResponse", **about)

    async def _statistics(self, _call: RpcCall, body: bytes) -> bytes:
        asked = _read("inference.ModelStatisticsRequest", body)
        found = await statistics(self._insight, self._models, asked.name, asked.version or None)
        return _written("inference.ModelStatisticsResponse", model_stats=found)

    async def infer(self, call: RpcCall, body: bytes) -> bytes:
        """Answer a ModelInferRequest with a ModelInferResponse; both are bytes.

        Admission is the service's: it asks the door itself, with what is left of the caller's time.
        """
        asked = _read("inference.ModelInferRequest", body)
        version = asked.model_version or None
        model, _ = self._models.find(asked.model_name, version)
        kind = model.kind
        call.kind = kind
        config = self._calls.config
        outputs = _outputs(asked)
        infer = InferRequest(asked.id, inputs_of(asked), _parameters(asked), outputs)
        model.check_outputs(outputs, self._models.tasks())
        max_s = config.max_budget_s
        is_named = call.names_limit
        call.until_at = infer.waits_until(call.arrived_at, call.until_at, max_s, is_named=is_named)
        made = model.body(infer, version, config)
        parsed, shown = parse_body(call.key, made, model.codec, self._service, config, self._calls.keys, call.is_about)
        answer = await self._service.serve(kind, parsed, call.left_s())
        call.answer = answer
        return _response(kind.name, asked.id, model.answer(answer, call.request_id, shown, outputs))

    async def stream(self, context: Any) -> None:
        """Answer the messages of a ModelStreamInfer in their order, several of them under way at once.

        An error is a message, too, and the stream goes on.
        """
        under_way: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(MOST_UNDER_WAY)

        async def read(group: asyncio.TaskGroup) -> None:
            while isinstance(body := await context.read(), bytes):
                await under_way.put(group.create_task(self._streamed(context, body)))
            await under_way.put(None)

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read(group))
            while (answer := await under_way.get()) is not None:
                await context.write(await answer)
            await reading

    async def _streamed(self, context: Any, body: bytes) -> bytes:
        path = f"/{INFERENCE}/ModelStreamInfer"
        name = "inference.ModelStreamInferResponse"
        try:
            made = await self._calls.message(path, Scope.INFER, self.infer, context, body)
        except NpuGrError as error:
            return _written(name, error_message=str(error))
        except Exception:  # noqa: BLE001  (counted and logged)
            return _written(name, error_message=UNEXPECTED)
        return _written(name, infer_response=message("inference.ModelInferResponse").FromString(made))


MOST_UNDER_WAY = 32  # messages of a stream: the caller waits for the oldest before another one is read


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


def _parameters(asked: Any) -> dict[str, Parameter]:
    if len(asked.parameters) > MOST_NAMES:
        raise TooLarge(f"parameters: {len(asked.parameters)} entries, the limit is {MOST_NAMES}")
    read: dict[str, Parameter] = {}
    for name, value in asked.parameters.items():
        which = value.WhichOneof("parameter_choice")
        if which is None:
            raise Unprocessable(f"parameters: {quoted(name)} has no value")
        read[name] = getattr(value, which)
    return read


def _response(name: str, sent_id: str, answer: InferAnswer) -> bytes:
    fields = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return _written(
        "inference.ModelInferResponse",
        model_name=name,
        model_version=answer.version,
        id=sent_id,
        parameters={
            name: message("inference.InferParameter")(**{fields[type(value)]: value})
            for name, value in answer.parameters.items()
        },
        outputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in answer.outputs],
        raw_output_contents=[pack(one.values) if one.datatype == BYTES else one.values for one in answer.outputs],
    )


class HealthService:
    """`grpc.health.v1.Health`: whether new work is welcome, for probes and load balancing. No key."""

    def __init__(self, calls: Calls) -> None:
        self._service = calls.service

    async def check(self, _call: RpcCall, body: bytes) -> bytes:
        """Answer with the status. Raises NotFound where there is no such service."""
        status = self._status(_read("grpc.health.v1.HealthCheckRequest", body).service)
        if status == SERVICE_UNKNOWN:
            raise NotFound(f"service: there is no such one here; {INFERENCE}, {HEALTH} are")
        return _written("grpc.health.v1.HealthCheckResponse", status=status)

    async def watch(self, context: Any) -> None:
        """Write the status now, and again whenever it changes, until the caller leaves."""
        body = await context.read()
        name = _read("grpc.health.v1.HealthCheckRequest", body if isinstance(body, bytes) else b"").service
        last = None
        while True:
            if (status := self._status(name)) != last:
                await context.write(_written("grpc.health.v1.HealthCheckResponse", status=status))
                last = status
            await asyncio.sleep(LOOK_S)

    def _status(self, service: str) -> int:
        if service not in ("", INFERENCE, HEALTH):
            return SERVICE_UNKNOWN
        return SERVING if self._service.is_ready()[0] else NOT_SERVING
