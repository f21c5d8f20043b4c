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
    """The section `server`: addresses, limits of requests, logs, traces, API keys."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080  # 0 = any free port
    # Address of the admin routes, which change the instance or show its state; for operators only.
    admin_host: str = "127.0.0.1"
    # 0 = any free port; the values of `host` and `port` = one address for both
    admin_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8081
    # port of gRPC at `host`, with the certificate of `tls` if set; 0 = any free port, None = no
    # gRPC; needs the extra grpc
    grpc_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    # port of HAProxy's agent-check at `host`, which answers how many requests to send at once;
    # 0 = any free port, None = no agent-check
    agent_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    # connections that the kernel queues until the event loop accepts them; connections that their
    # clients gave up meanwhile cost as much as others
    backlog: Count = 128
    max_receiving_bytes: Bytes = 268_435_456  # bodies of all unanswered requests together
    # largest body; the default is twice that of the longest lists. Larger ones block the event loop
    # longer.
    max_body_bytes: SomeBytes = 4_194_304
    body_timeout_s: Seconds = 10.0  # time for the body to arrive; the client's time limit holds too
    idle_timeout_s: Seconds = 75.0  # time between two requests of a connection
    # addresses or networks (CIDR) of proxies; rejections to them are not delayed
    trusted_proxies: list[str] = []
    max_candidates: Count = 10_000  # candidates of one rank
    max_history_events: Count = 65_536  # events of one request; the model may read fewer
    # feature values of all candidates of one rank, or of all events of one history, together
    max_feature_values: Count = 262_144
    default_budget_s: Seconds = 1.0  # time limit of a request that names none
    max_budget_s: Seconds = 30.0  # largest time limit; longer ones are cut to it
    # time between unready and closing the listener; at least two periods of the health checks
    drain_grace_s: SecondsOrZero = 3.0
    shutdown_timeout_s: Seconds = 10.0  # time for requests in flight after the grace
    # slower requests, and those over twice their kind's objective, are logged as warnings
    slow_request_s: Seconds = 0.5
    log_requests: Literal["all", "slow"] = "all"  # which requests get a line in the access log
    # file with a key of 16 to 64 bytes; with it the access log has a keyed hash of the user
    log_user_key_file: str | None = None
    # URL of an OTLP collector (traces over HTTP); needs the extra otel
    otlp_endpoint: SecretUrl | None = None
    # sampled fraction of the requests without a traceparent
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    api_keys_file: str | None = None  # written by `npu-gr keys`; None = clients need no key
    allow_unauthenticated: bool = False  # allow a public address without API keys
    tls: ServerTlsConfig | None = None  # certificate and key of the addresses; None = no TLS

    def __post_init__(self) -> None:
        if self.grpc_port and self.grpc_port in (self.port, self.admin_port):
            raise ValueError(
                f"grpc_port: {self.grpc_port} is also the port of HTTP; choose another"
            )
        if self.grpc_port is not None and self.tls is not None and self.tls.min_version == "1.3":
            raise ValueError("grpc_port: gRPC accepts TLS 1.2, which tls.min_version 1.3 excludes")
        for text in self.trusted_proxies:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f"trusted_proxies: {error}") from error
        for field, host in (("host", self.host), ("admin_host", self.admin_host)):
            if not (is_loopback_name(host) or self.api_keys_file or self.allow_unauthenticated):
                raise ValueError(
                    f"{field}: {host} is not a loopback address: set api_keys_file, or "
                    "allow_unauthenticated: true"
                )

    @property
    def has_one_address(self) -> bool:
        """Whether clients and operators share an address: `host`, `port` equal the admin ones."""
        return self.port != 0 and (self.admin_host, self.admin_port) == (self.host, self.port)
