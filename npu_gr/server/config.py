"""Settings of the HTTP door."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to listen, what to accept, who may ask."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080  # 0 = any free one
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 8_388_608
    max_candidates: Annotated[int, msgspec.Meta(ge=1)] = 10_000  # of one rank
    max_history_events: Annotated[int, msgspec.Meta(ge=1)] = 65_536  # on the wire; the model's window cuts further
    default_budget_s: Seconds = 1.0  # for a request that names no time limit
    max_budget_s: Seconds = 30.0
    drain_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 3.0  # unready but serving: two health checks or more
    shutdown_timeout_s: Seconds = 10.0  # for requests still in flight after that
    slow_request_s: Seconds = 0.5  # slower ones, and failed ones, are logged as warnings
    log_requests: Literal["all", "slow"] = "all"  # a JSON line each | for slow and failed ones only
    log_user_key_file: str | None = None  # with it the line has a keyed hash of the user; 16 to 64 bytes
    otlp_endpoint: str | None = None  # URL of an OTLP collector's traces over HTTP; needs the extra otel
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01  # of requests without a traceparent
    api_keys_file: str | None = None  # one key a line, # comments
    allow_unauthenticated: bool = False  # serve on a public address without keys

    def __post_init__(self) -> None:
        if not (_is_loopback(self.host) or self.api_keys_file or self.allow_unauthenticated):
            raise ValueError(f"host: {self.host} is not loopback: set api_keys_file, or allow_unauthenticated: true")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
