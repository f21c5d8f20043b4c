"""The gRPC server of an instance; it shares the event loop of HTTP, and drains and stops with it.

Needs the extra `grpc`, which is imported in the constructor. The methods read their messages
themselves, after the check of the key. gRPC answers unknown methods with UNIMPLEMENTED.
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

MAX_METADATA_BYTES = 16_384  # metadata of one call
MAX_STREAMS = 1024  # concurrent calls of one connection
HANDSHAKE_S = 5.0  # time limit of the TLS handshake
KEEPALIVE_TIMEOUT_S = 10.0  # time for a client to answer a ping
KEEPALIVE_S = 30.0  # idle time of a connection before the server pings the client
LEAST_PING_S = 10.0  # shortest period of a client's pings; gRPC closes connections that ping faster


class RpcServer:
    """The gRPC server of an instance. Event loop only."""

    def __init__(self, inference: Inference) -> None:
        """Register the methods; `listen` opens the port.

        Raises:
            ConfigError: The extra `grpc` is not installed.
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

        self._config = inference.lifecycle.config
        health = HealthService(inference.service)
        infers = InferenceService(inference)
        lifecycle = inference.lifecycle
        with_one = {f"/{INFERENCE}/{name}": method for name, method in infers.unary().items()}
        with_one[f"/{HEALTH}/Check"] = (None, health.check)
        with_many = {
            f"/{INFERENCE}/ModelStreamInfer": (Scope.INFER, infers.stream),
            f"/{HEALTH}/Watch": (None, health.watch),
        }
        self._handlers: dict[str, Any] = {
            **{
                path: grpc.stream_unary_rpc_method_handler(
                    partial(unary, lifecycle, path, scope, work)
                )
                for path, (scope, work) in with_one.items()
            },
            **{
                path: grpc.stream_stream_rpc_method_handler(
                    partial(stream, lifecycle, path, scope, answer)
                )
                for path, (scope, answer) in with_many.items()
            },
        }
        self._server: grpc.aio.Server | None = None
        self.port = 0  # while it listens

    async def listen(self) -> None:
        """Listen at `server.host` and `server.grpc_port`.

        Raises:
            ConfigError: The address cannot be bound, or the certificate cannot be used.
        """
        import grpc

        class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
            def service(_, details: Any) -> Any:  # noqa: N805  (`self` is the server's)
                return self._handlers.get(details.method)

        config = self._config
        server = grpc.aio.server(
            handlers=[Handlers()],
            options=_options(config),  # `calls.MAX_CALLS` bounds the calls: gRPC would not count
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
        """Reject new calls, and let running ones end within `server.shutdown_timeout_s`."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._config.shutdown_timeout_s)


RPC: web.AppKey[RpcServer] = web.AppKey("rpc", RpcServer)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    seconds = {  # converted to milliseconds below
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
    """Make credentials that read the certificate files again for new connections.

    Raises ConfigError where a file cannot be read.
    """
    import grpc

    files = (config.certificate, config.key, config.client_ca)

    def read() -> list[bytes | None]:
        return [None if name is None else Path(name).read_bytes() for name in files]

    def configuration(content: list[bytes | None]) -> Any:
        certificate, key, client_ca = content
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)  # type: ignore[list-item]

    try:
        current = read()
    except OSError as error:
        raise ConfigError(f"server.tls: {error.filename}: {error.strerror}") from error

    def changed() -> Any:
        """Return the new files before a handshake, from a thread of gRPC; None = unchanged."""
        nonlocal current
        try:
            content = read()
        except OSError:
            return None  # `core/tls.py` watches the same files, and logs the error
        if content == current:
            return None
        current = content
        return configuration(content)

    return grpc.dynamic_ssl_server_credentials(
        configuration(current), changed, config.client_ca is not None
    )
