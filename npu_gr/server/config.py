"""Settings of the HTTP server."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec

from npu_gr.core.secret import SecretUrl
from npu_gr.core.settings import Bytes, Count, Seconds, SecondsOrZero, SomeBytes
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.server.auth.rules import is_loopback_name


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `server`: the addresses to listen on, limits of requests, time limits, logs, traces, API keys."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080  # 0 = any free one
    # serves what changes the instance or shows how it does: operators alone may reach it
    admin_host: str = "127.0.0.1"
    # 0 = any free one; host and port = one for both
    admin_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8081
    # gRPC at `host`, in clear or with the certificate of `tls`: 0 = any free one, None = no gRPC;
    # needs the extra grpc
    grpc_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    # HAProxy's agent-check at `host`: how many requests the instance takes at once; 0 = any free
    # one, None = no agent
    agent_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    # connections that the kernel accepts before the event loop does; given-up ones cost as much
    backlog: Count = 128
    max_receiving_bytes: Bytes = 268_435_456  # of bodies that have arrived and are not answered
    # twice what the longest lists take; a larger one stops the event loop longer
    max_body_bytes: SomeBytes = 4_194_304
    body_timeout_s: Seconds = 10.0  # for the body; the request's own time budget holds too
    idle_timeout_s: Seconds = 75.0  # between two requests of a connection
    # addresses or networks of proxies: a rejection to them is never delayed
    trusted_proxies: list[str] = []
    max_candidates: Count = 10_000  # of one rank
    max_history_events: Count = 65_536  # of one request; the model may read fewer of them
    # of all candidates of one rank, or all events of one history, together
    max_feature_values: Count = 262_144
    default_budget_s: Seconds = 1.0  # for a request that names no time limit
    max_budget_s: Seconds = 30.0
    drain_grace_s: SecondsOrZero = 3.0  # unready, but serving: two health checks or more
    shutdown_timeout_s: Seconds = 10.0  # after the grace: for requests in flight
    slow_request_s: Seconds = 0.5  # slower requests are logged as warnings, as failed ones are
    log_requests: Literal["all", "slow"] = "all"  # which requests get a line in the access log
    # key of 16 to 64 bytes; with it a line has a keyed hash of the user
    log_user_key_file: str | None = None
    # URL of an OTLP collector (traces over HTTP); needs the extra otel
    otlp_endpoint: SecretUrl | None = None
    # of requests without a traceparent
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    api_keys_file: str | None = None  # as `npu-gr keys` writes it; None = callers need no key
    allow_unauthenticated: bool = False  # serve on a public address without keys
    tls: ServerTlsConfig | None = None  # certificate and key of the addresses; None = in clear

    def __post_init__(self) -> None:
        if self.grpc_port and self.grpc_port in (self.port, self.admin_port):
            raise ValueError(f"grpc_port: {self.grpc_port} is the port of HTTP too")
        if self.grpc_port is not None and self.tls is not None and self.tls.min_version == "1.3":
            raise ValueError("grpc_port: gRPC takes TLS 1.2 too, and tls.min_version is 1.3")
        for text in self.trusted_proxies:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f"trusted_proxies: {error}") from error
        for field, host in (("host", self.host), ("admin_host", self.admin_host)):
            if not (is_loopback_name(host) or self.api_keys_file or self.allow_unauthenticated):
                raise ValueError(
                    f"{field}: {host} is not loopback: set api_keys_file, or "
                    "allow_unauthenticated: true"
                )

    @property
    def has_one_address(self) -> bool:
        """Whether callers and operators share an address: that is chosen by naming the same one twice."""
        return self.port != 0 and (self.admin_host, self.admin_port) == (self.host, self.port)
