"""The gRPC server of a process: it listens, serves in the event loop of HTTP, drains and stops with it.

Needs the extra `grpc`, which is imported where the server is made. All methods read their message
themselves, so that none is read of a caller without a key; whatever method is not here, gRPC
answers with UNIMPLEMENTED.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import Scope
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.server.config import ServerConfig
from npu_gr.server.oip.routes import Inference

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16_384  # of a call
MAX_STREAMS = 1024  # calls of a connection at once
MAX_CALLS = 4096  # at once
HANDSHAKE_S = 5.0
KEEPALIVE_TIMEOUT_S = 10.0  # for a client to answer a ping
KEEPALIVE_S = 30.0  # without a sign of life the other end is asked for one
LEAST_PING_S = 10.0  # between two questions of a client's; who asks more often is told to go


class RpcServer:
    """Event loop only."""

    def __init__(self, inference: Inference) -> None:
        """Make the server of the models of an instance; it listens to nobody yet.

        Raises:
            ConfigError: the extra `grpc` is not installed.
        """
        try:
            import grpc

            from npu_gr.server.grpc.calls import stream, unary
            from npu_gr.server.grpc.inference import (
                HEALTH,
                INFERENCE,
                HealthService,
                InferenceService,
            )
        except ImportError as error:
            raise ConfigError(f"server.grpc_port: needs the extra npu_gr[grpc]: {error}") from error

        self._config = inference.course.config
        health = HealthService(inference.service)
        infers = InferenceService(inference)
        course = inference.course
        with_one = {f"/{INFERENCE}/{name}": method for name, method in infers.unary().items()}
        with_one[f"/{HEALTH}/Check"] = (None, health.check)
        with_many = {
            f"/{INFERENCE}/ModelStreamInfer": (Scope.INFER, infers.stream),
            f"/{HEALTH}/Watch": (None, health.watch),
        }
        self._handlers: dict[str, Any] = {
            **{
                path: grpc.stream_unary_rpc_method_handler(
                    partial(unary, course, path, scope, work)
                )
                for path, (scope, work) in with_one.items()
            },
            **{
                path: grpc.stream_stream_rpc_method_handler(
                    partial(stream, course, path, scope, answer)
                )
                for path, (scope, answer) in with_many.items()
            },
        }
        self._server: grpc.aio.Server | None = None
        self.port = 0  # while it listens

    async def listen(self) -> None:
        """Listen at `server.host` and `server.grpc_port`.

        Raises:
            ConfigError: the address cannot be bound, or the certificate cannot be used.
        """
        import grpc

        class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
            def service(_, details: Any) -> Any:  # noqa: N805  (`self` is the server's)
                return self._handlers.get(details.method)

        config = self._config
        server = grpc.aio.server(
            handlers=[Handlers()],
            options=_options(config),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if config.tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, _credentials(config.tls))
        except RuntimeError as error:
            where = "server.host, server.grpc_port"
            raise ConfigError(f"{where}: cannot listen on {address}: {error}") from error
        await server.start()
        self._server = server
        is_tls = "" if config.tls is None else ", TLS"
        log.info("gRPC listening on %s:%d%s", config.host, self.port, is_tls)

    async def stop(self) -> None:
        """Take no new call, and let those under way end within `server.shutdown_timeout_s`."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._config.shutdown_timeout_s)


RPC: web.AppKey[RpcServer] = web.AppKey("rpc", RpcServer)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    seconds = {  # milliseconds to gRPC
        "grpc.server_handshake_timeout_ms": HANDSHAKE_S,
        "grpc.max_connection_idle_ms": config.idle_timeout_s,
        "grpc.keepalive_time_ms": KEEPALIVE_S,
        "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_S,
        "grpc.http2.min_ping_interval_without_data_ms": LEAST_PING_S,
    }
    return [
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
        *((name, round(value * 1e3)) for name, value in seconds.items()),
    ]


def _credentials(config: ServerTlsConfig) -> grpc.ServerCredentials:
    """TLS as HTTP has it; new connections have what is in the files.

    Raises ConfigError: a file cannot be read.
    """
    import grpc

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
            return None  # `core/tls.py` follows the same files, and says so
        if content == in_force:
            return None
        in_force = content
        return configuration(content)

    return grpc.dynamic_ssl_server_credentials(
        configuration(in_force), changed, config.client_ca is not None
    )
