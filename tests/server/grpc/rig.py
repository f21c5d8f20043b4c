"""A service without models behind gRPC and HTTP, and a client's calls without generated code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from aiohttp.test_utils import TestClient

from npu_gr.metrics.registry import Metrics
from npu_gr.server.config import ServerConfig
from npu_gr.server.grpc.inference import INFERENCE, message
from npu_gr.server.grpc.server import RPC, RpcServer
from npu_gr.server.routes import build_web_app
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds
from tests.server.oip.inputs import infer_message, inputs_of
from tests.serving import InstanceServer

INFER = f"/{INFERENCE}/ModelInfer"


@dataclass
class Rig:
    """What a test sees of it."""

    service: FakeService
    metrics: Metrics
    rpc: RpcServer
    http: TestClient[Any, Any]
    channel: Any  # `grpc.aio.Channel`; its stubs want serializers everywhere

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc.port}"

    def count(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"npu_gr_{name}", labels)

    async def infer(
        self,
        model: str,
        body: dict[str, Any],
        key: str | None = None,
        timeout: float | None = 10.0,  # noqa: ASYNC109  (gRPC's)
        **more: Any,
    ) -> Any:
        """Infer what a body of /v1 asks for."""
        asked = infer_message(model, inputs_of(body), **more)
        return await call(self.channel, INFER, asked, "inference.ModelInferResponse", key, timeout)

    async def inference(self, method: str, asked: Any = None, key: str | None = None) -> Any:
        """Call a method of the Open Inference Protocol."""
        asked = message(f"inference.{method}Request")() if asked is None else asked
        answer = f"inference.{method}Response"
        return await call(self.channel, f"/{INFERENCE}/{method}", asked, answer, key)


async def call(
    channel: Any,
    path: str,
    asked: Any,
    answer: str,
    key: str | None = None,
    timeout: float | None = 10.0,  # noqa: ASYNC109  (gRPC's)
) -> Any:
    """Call a method; `asked` may be bytes."""
    stub = channel.unary_unary(
        path,
        request_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
        response_deserializer=message(answer).FromString,
    )
    return await stub(asked, timeout=timeout, metadata=metadata(key))


def metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    return () if key is None else (("authorization", key),)


@asynccontextmanager
async def serving_rpc(
    service: FakeService | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    service = service or FakeService({name: one.answer for name, one in EXAMPLES.items()})
    metrics = metrics_of_all_kinds()
    app = build_web_app(
        service, ServerConfig(**{"grpc_port": 0, "shutdown_timeout_s": 5.0, **settings}), metrics
    )
    async with TestClient(InstanceServer(app)) as http:
        rpc = app[RPC]
        await rpc.listen()
        address = f"127.0.0.1:{rpc.port}"
        channel = (
            grpc.aio.insecure_channel(address)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials)
        )
        try:
            async with channel:
                yield Rig(service, metrics, rpc, http, channel)
        finally:
            await rpc.stop()
