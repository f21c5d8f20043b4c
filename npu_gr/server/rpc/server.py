"""The gRPC server of a process: it listens, serves in the event loop of HTTP, drains and stops with it.

All methods read their message themselves, so that none is read of a caller without a key.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from npu_gr.core.errors import ConfigError, NpuGrError
from npu_gr.core.kinds import Scope
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.server.config import ServerConfig
from npu_gr.server.insight import Insight
from npu_gr.server.rpc.calls import Calls, RpcCall, RpcShared, metadata_of, status_of
from npu_gr.server.rpc.health import HealthService
from npu_gr.server.rpc.inference import InferenceService
from npu_gr.server.rpc.kinds import SIGNALS, RecommenderService
from npu_gr.server.rpc.messages import HEALTH, INFERENCE, OURS
from npu_gr.server.rpc.stream import answered

log = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16_384  # of a call
MAX_STREAMS = 1024  # calls of a connection at once
KEEPALIVE_S = 30.0  # without a sign of life the other end is asked for one
LEAST_PING_S = 10.0  # between two questions of a client's; who asks more often is told to go
Work = Callable[[RpcCall, bytes], Awaitable[bytes]]


class RpcServer:
    """Event loop only."""

    def __init__(self, shared: RpcShared, insight: Insight) -> None:
        """Nothing listens yet.

        Args:
            shared: by all calls.
            insight: has the statistics.
        """
        self._shared = shared
        self._calls = Calls(shared)
        self._health = HealthService(self._calls)
        inference = InferenceService(self._calls, insight)
        ours = RecommenderService(self._calls)
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        services: tuple[tuple[str, dict[str, tuple[Scope | None, Work]]], ...] = (
            (INFERENCE, inference.unary()),
            (OURS, ours.unary()),
            (HEALTH, {"Check": (None, self._health.check)}),
        )
        for service, methods in services:
            for name, (scope, work) in methods.items():
                path = f"/{service}/{name}"
                self._handlers[path] = grpc.stream_unary_rpc_method_handler(partial(self._unary, path, scope, work))
        self._handlers[f"/{INFERENCE}/ModelStreamInfer"] = _stream(partial(self._stream, inference.streamed))
        self._handlers[f"/{OURS}/{SIGNALS}"] = _stream(partial(self._stream, ours.signalled))
        self._handlers[f"/{HEALTH}/Watch"] = _stream(self._watch)
        self._server: grpc.aio.Server | None = None
        self.port = 0  # while it listens

    async def listen(self, *, is_shared: bool = False) -> None:
        """Listen at `server.host` and `server.grpc_port`.

        Args:
            is_shared: other workers of this instance listen there, too.

        Raises:
            ConfigError: the address cannot be bound, or the certificate cannot be used.
        """
        config = self._shared.config
        server = grpc.aio.server(
            handlers=[_Handlers(self._handlers)],
            options=_options(config, is_shared=is_shared),
            maximum_concurrent_rpcs=config.max_connections,
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if config.tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, _credentials(config.tls))
        except RuntimeError as error:
            raise ConfigError(f"server.host, server.grpc_port: cannot listen on {address}: {error}") from error
        await server.start()
        self._server = server
        log.info("gRPC listening on %s:%d%s", config.host, self.port, "" if config.tls is None else ", TLS")

    async def stop(self) -> None:
        """Take no new call, and let those under way end within `server.shutdown_timeout_s`."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._shared.config.shutdown_timeout_s)

    async def _unary(self, path: str, scope: Scope | None, work: Work, _: Any, context: Any) -> bytes:
        return await self._calls.unary(path, scope, work, context)

    async def _stream(self, answer: Callable[[Any, bytes], Awaitable[bytes]], _: Any, context: Any) -> None:
        """Refuse the stream of a caller without a key before it is read; each message is looked at again."""
        path = f"/{OURS}/{SIGNALS}"
        call = RpcCall(path, metadata_of(context), None, self._shared)
        try:
            await self._calls.find_key(call, Scope.INFER)
        except NpuGrError as error:
            await context.abort(*status_of(error, call))
        await answered(context, answer)

    async def _watch(self, _: Any, context: Any) -> None:
        call = RpcCall(f"/{HEALTH}/Watch", metadata_of(context), None, self._shared)
        body = await context.read()
        try:
            await self._health.watch(call, body if isinstance(body, bytes) else b"", context)
        except NpuGrError as error:
            await context.abort(*status_of(error, call))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


def _stream(behaviour: Callable[[Any, Any], Awaitable[None]]) -> Any:
    return grpc.stream_stream_rpc_method_handler(behaviour)


def _options(config: ServerConfig, *, is_shared: bool) -> list[tuple[str, int]]:
    def ms(seconds: float) -> int:
        return round(seconds * 1e3)

    return [
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", ms(config.header_timeout_s)),
        ("grpc.max_connection_idle_ms", ms(config.idle_timeout_s)),
        ("grpc.keepalive_time_ms", ms(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", ms(config.write_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", ms(LEAST_PING_S)),
        ("grpc.so_reuseport", int(is_shared)),
    ]


def _credentials(config: ServerTlsConfig) -> grpc.ServerCredentials:
    """TLS as HTTP has it; new connections have what is in the files.

    Raises:
        ConfigError: a file cannot be read.
    """
    files = (config.certificate, config.key, config.client_ca)

    def read() -> list[bytes | None]:
        return [None if name is None else Path(name).read_bytes() for name in files]

    def configuration(content: list[bytes | None]) -> Any:
        certificate, key, client_ca = content
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)  # type: ignore[list-item]

    try:
        in_force = read()
    except OSError as error:
        raise ConfigError(f"server.tls: {error.filename}: {error.strerror}") from error

    def changed() -> Any:
        """Give gRPC other files, from a thread of its own, before a handshake; None = they are the same."""
        nonlocal in_force
        try:
            content = read()
        except OSError:
            return None  # `access/tls.py` follows the same files, and says so
        if content == in_force:
            return None
        in_force = content
        return configuration(content)

    return grpc.dynamic_ssl_server_credentials(configuration(in_force), changed, config.client_ca is not None)
