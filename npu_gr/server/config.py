"""Settings of the HTTP server."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec

from npu_gr.core.settings import Count, Seconds


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `server`: the address to listen on, limits of requests, time limits, logs, traces, API keys."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080  # 0 = any free one
    max_body_bytes: Count = 8_388_608
    max_candidates: Count = 10_000  # of one rank
    max_history_events: Count = 65_536  # of one request; the model may read fewer of them
    default_budget_s: Seconds = 1.0  # for a request that names no time limit
    max_budget_s: Seconds = 30.0
    drain_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 3.0  # unready, but serving: two health checks or more
    shutdown_timeout_s: Seconds = 10.0  # after the grace: for requests in flight
    slow_request_s: Seconds = 0.5  # slower requests are logged as warnings, as failed ones are
    log_requests: Literal["all", "slow"] = "all"  # which requests get a line in the access log
    log_user_key_file: str | None = None  # key of 16 to 64 bytes; with it a line has a keyed hash of the user
    otlp_endpoint: str | None = None  # URL of an OTLP collector (traces over HTTP); needs the extra otel
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
