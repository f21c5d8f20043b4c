"""The gRPC server of an application, where its extra is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from npu_gr.core.errors import ConfigError
from npu_gr.metrics.registry import Metrics
from npu_gr.server.access_log import AccessLog
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.entrance import Entrance
from npu_gr.server.insight import Insight
from npu_gr.server.reading import Reader
from npu_gr.server.service_protocol import ServiceProtocol
from npu_gr.server.tracing import Tracing

if TYPE_CHECKING:
    from npu_gr.server.rpc.server import RpcServer

RPC: web.AppKey[RpcServer] = web.AppKey("rpc")


def open_rpc(
    service: ServiceProtocol,
    config: ServerConfig,
    metrics: Metrics,
    entrance: Entrance,
    access_log: AccessLog,
    tracing: Tracing,
    reader: Reader,
    insight: Insight,
) -> RpcServer:
    """Make the gRPC server beside the HTTP of a service; it does not listen yet.

    Args:
        service, config, metrics: of the application.
        entrance: has the keys, and counts bytes that arrive and keys that are wrong.
        access_log, tracing: of the application.
        reader: whose pieces of work messages are.
        insight: has the statistics.

    Raises:
        ConfigError: the extra `grpc` is not installed.
    """
    try:
        from npu_gr.server.rpc.calls import RpcShared
        from npu_gr.server.rpc.server import RpcServer
    except ImportError as error:
        raise ConfigError(f"server.grpc_port: needs the extra npu_gr[grpc]: {error}") from error
    shared = RpcShared(
        service=service,
        config=config,
        metrics=metrics,
        keys=entrance.keys,
        access_log=access_log,
        tracing=tracing,
        wrong_keys=entrance.wrong_keys,
        listener=entrance.listeners[0],
        pieces=reader.pieces,
    )
    return RpcServer(shared, insight)
