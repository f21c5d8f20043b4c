"""The Open Inference Protocol v2 over gRPC, and gRPC's health service.

The models are those of `server/oip`. The messages are those of the public protocols (`protos/`),
compiled by protoc to `compiled.binpb` (`make proto`). They are loaded into a descriptor pool of
their own, so that they do not clash with other copies in the process, such as those of Triton's
client.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from npu_gr import __version__
from npu_gr.core.errors import BadRequest, NotFound, TooLarge, Unprocessable
from npu_gr.core.kinds import Scope
from npu_gr.core.text_format import cut, quoted
from npu_gr.server.access_log import ServerCall
from npu_gr.server.grpc.calls import Work, begin, counted, status_of, waiting
from npu_gr.server.oip.models import (
    BYTES,
    MOST_TENSORS,
    InferAnswer,
    InferRequest,
    Parameter,
    Tensor,
    pack,
)
from npu_gr.server.oip.routes import EXTENSIONS, NAME, Inference
from npu_gr.server.schemas.fields import MOST_NAMES
from npu_gr.server.service_protocol import ServiceProtocol

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
LOOK_S = 0.25  # period of the checks whether health has changed
SERVING = 1
NOT_SERVING = 2
SERVICE_UNKNOWN = 3
_CONTENTS = {  # datatype -> field of `InferTensorContents`
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
    compiled = (
        resources.files("npu_gr.server.grpc").joinpath("protos", "compiled.binpb").read_bytes()
    )
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

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._lifecycle = inference.lifecycle

    def unary(self) -> dict[str, tuple[Scope | None, Work]]:
        """Map each method with one message to the scope that it needs and its handler."""
        return {
            "ServerLive": (None, self._live),
            "ServerReady": (None, self._server_ready),
            "ServerMetadata": (Scope.INFER, self._server),
            "ModelReady": (Scope.INFER, self._model_ready),
            "ModelMetadata": (Scope.INFER, self._metadata),
            "ModelInfer": (Scope.INFER, self.infer),
            "ModelStatistics": (Scope.OBSERVE, self._statistics),
        }

    async def _live(self, _call: ServerCall, _body: bytes) -> bytes:
        return _written("inference.ServerLiveResponse", live=not self._inference.service.why_dead())

    async def _server_ready(self, _call: ServerCall, _body: bytes) -> bytes:
        return _written(
            "inference.ServerReadyResponse", ready=self._inference.service.is_ready()[0]
        )

    async def _server(self, _call: ServerCall, _body: bytes) -> bytes:
        about = {"name": NAME, "version": __version__, "extensions": EXTENSIONS[1:]}
        return _written("inference.ServerMetadataResponse", **about)

    async def _model_ready(self, _call: ServerCall, body: bytes) -> bytes:
        asked = _read("inference.ModelReadyRequest", body)
        self._inference.find(asked.name, asked.version or None)
        return _written("inference.ModelReadyResponse", ready=self._inference.service.is_ready()[0])

    async def _metadata(self, _call: ServerCall, body: bytes) -> bytes:
        asked = _read("inference.ModelMetadataRequest", body)
        about = self._inference.metadata(asked.name, asked.version or None)
        return _written("inference.ModelMetadataResponse", **about)

    async def _statistics(self, _call: ServerCall, body: bytes) -> bytes:
        asked = _read("inference.ModelStatisticsRequest", body)
        found = await self._inference.statistics(asked.name, asked.version or None)
        return _written("inference.ModelStatisticsResponse", model_stats=found)

    async def infer(self, call: ServerCall, body: bytes) -> bytes:
        """Answer a serialised ModelInferRequest with a serialised ModelInferResponse.

        The service itself asks for admission, with what is left of the client's time limit.
        """
        message = _read("inference.ModelInferRequest", body)
        version = message.model_version or None
        model, _ = self._inference.find(message.model_name, version)
        call.kind = model.kind
        asked, answer = await self._inference.infer(call, model, version, lambda: asked_by(message))
        return _response(model.kind.name, asked.id, answer)

    async def stream(self, context: Any) -> None:
        """Answer the messages of a ModelStreamInfer in order; up to MOST_UNDER_WAY run at once.

        An error is sent as a message, and the stream continues.
        """
        under_way: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(MOST_UNDER_WAY)

        async def read(group: asyncio.TaskGroup) -> None:
            with suppress(TimeoutError):  # then the stream ends as if the client had ended it
                while isinstance(body := await _heard(context), bytes):
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
        call = begin(self._lifecycle, path, context)
        try:
            made = await counted(self._lifecycle, call, Scope.INFER, self.infer, context, body)
        except Exception as error:  # noqa: BLE001  (counted and logged)
            return _written(name, error_message=status_of(error, call)[1])
        return _written(
            name, infer_response=message("inference.ModelInferResponse").FromString(made)
        )


async def _heard(context: Any) -> object:
    async with waiting(None):
        return await context.read()


# Messages of a stream that run at once; the next is read when the oldest has been answered.
MOST_UNDER_WAY = 32


def asked_by(message: Any) -> InferRequest:
    """Convert a ModelInferRequest; the contents of its inputs are read later.

    Raises:
        TooLarge, Unprocessable: The message names the tensor or the parameter.
    """
    for name, given, most in (
        ("inputs", message.inputs, MOST_TENSORS),
        ("outputs", message.outputs, MOST_TENSORS),
        ("parameters", message.parameters, MOST_NAMES),
    ):
        if len(given) > most:
            raise TooLarge(f"{name}: {len(given)} entries, the limit is {most}")
    for one in message.outputs:
        if any(name != "binary_data" for name in one.parameters):  # contents are raw anyway
            raise Unprocessable(f"outputs: {cut(one.name)}: parameters are not supported")
    parameters: dict[str, Parameter] = {}
    for name, value in message.parameters.items():
        which = value.WhichOneof("parameter_choice")
        if which is None:
            raise Unprocessable(f"parameters: {quoted(name)} has no value")
        parameters[name] = getattr(value, which)
    wanted = {one.name: True for one in message.outputs}
    return InferRequest(message.id, _tensors(message), parameters, wanted)


def _tensors(message: Any) -> list[Tensor]:
    raws = message.raw_input_contents
    if raws and len(raws) != len(message.inputs):
        both = f"{len(raws)}, and there are {len(message.inputs)} inputs"
        raise Unprocessable(f"raw_input_contents: {both}; send all inputs raw, or none")
    tensors = []
    for index, one in enumerate(message.inputs):
        # KServe's client sends binary_data_size over gRPC too
        if any(name != "binary_data_size" for name in one.parameters):
            raise Unprocessable(
                f"{cut(one.name)}: parameters (such as shared memory) are not supported"
            )
        if raws and one.HasField("contents"):
            raise Unprocessable(f"{cut(one.name)}: has both contents and raw_input_contents")
        if len(one.shape) > 8:
            raise Unprocessable(f"{cut(one.name)}: shape has {len(one.shape)} dimensions; takes 1")
        # an unknown datatype is rejected later, with the name of the input
        field = _CONTENTS.get(one.datatype, "bytes_contents")
        values = raws[index] if raws else getattr(one.contents, field)
        tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), values))
    return tensors


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
        outputs=[
            {"name": one.name, "datatype": one.datatype, "shape": one.shape}
            for one in answer.outputs
        ],
        raw_output_contents=[
            pack(one.values) if one.datatype == BYTES else one.values for one in answer.outputs
        ],
    )


class HealthService:
    """`grpc.health.v1.Health`: readiness for probes and load balancing; needs no key."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    async def check(self, _call: ServerCall, body: bytes) -> bytes:
        """Answer with the status of a service. Raises NotFound for unknown services."""
        status = self._status(_read("grpc.health.v1.HealthCheckRequest", body).service)
        if status == SERVICE_UNKNOWN:
            raise NotFound(f"service: unknown service; there are {INFERENCE} and {HEALTH}")
        return _written("grpc.health.v1.HealthCheckResponse", status=status)

    async def watch(self, context: Any) -> None:
        """Send the status now and after every change, until the client cancels.

        Where very many clients watch, the oldest watch ends; its client asks again.
        """
        with suppress(TimeoutError):
            async with waiting(None):
                await self._watch(context)

    async def _watch(self, context: Any) -> None:
        body = await context.read()
        name = _read(
            "grpc.health.v1.HealthCheckRequest", body if isinstance(body, bytes) else b""
        ).service
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
