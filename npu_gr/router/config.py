"""Settings of the router: `configs/router.yaml` has every key with its meaning."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from npu_gr.core import settings
from npu_gr.core.setting_types import IN_BYTES
from npu_gr.core.settings import Count, Seconds, SecondsOrZero, SomeBytes
from npu_gr.core.tls import ClientTlsConfig, ServerTlsConfig
from npu_gr.core.words import whole
from npu_gr.router.ring import NAME
from npu_gr.server.auth.browsers import is_loopback_name

NoneOrMore = Annotated[int, msgspec.Meta(ge=0)]
NoneOrSome = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
ShareOrNone = Annotated[float, msgspec.Meta(ge=0, le=1)]
ListenPort = Annotated[int, msgspec.Meta(ge=0, le=65535)]  # 0 = any free one
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address and role of one instance. `name` is its identity on the ring and must stay when the address changes."""

    name: Annotated[str, msgspec.Meta(pattern=whole(NAME))]
    host: str
    port: Port
    weight: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    special: bool = True  # takes signals and their ranks, by user
    normal: bool = True  # takes what needs no prefix KV, by load


class DNSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One DNS name with an address for each instance. An instance is then named after its address."""

    host: str
    port: Port


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the list of instances comes from: exactly one of `instances`, `file` and `dns`."""

    instances: list[InstanceConfig] = []
    file: str | None = None  # YAML with a list `instances`, read again when it changes
    dns: DNSConfig | None = None
    period_s: Seconds = 2.0  # between two reads of the file, or two look-ups of the name

    def __post_init__(self) -> None:
        if sum((bool(self.instances), self.file is not None, self.dns is not None)) != 1:
            raise ValueError("needs exactly one of instances, file, dns")
        check_names(self.instances)


def check_names(instances: list[InstanceConfig]) -> None:
    """Check that every name is given once.

    Raises:
        ValueError: a name is given twice.
    """
    names = [instance.name for instance in instances]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"instances: the name {name!r} is given twice")


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active health checks of every instance."""

    path: str = "/readyz"
    interval_s: Seconds = 0.5
    timeout_s: Seconds = 0.5
    fall: Count = 2  # failures in a row until an instance is down
    rise: Count = 1  # successes in a row until it is up
    panic_ratio: ShareOrNone = 0.5  # if fewer are well, those that do not answer or fail get requests too; 0 = never


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The circuit breaker of every instance: when it opens although the health checks pass, and how it closes."""

    failures: Count = 5  # in a row: no connection, no answer in time, 502, 503 or 504
    min_timeout_s: SecondsOrZero = 0.1  # a timeout after a shorter wait is no failure: the caller was impatient
    slow_ratio: Annotated[float, msgspec.Meta(ge=1)] = 5.0  # median answer time over that of the others
    slow_intervals: Count = 2  # health intervals in a row in which it is that slow
    slow_min_requests: Count = 5  # in each of them
    open_s: Seconds = 2.0  # out for this long, doubled each time it fails again while it returns
    max_open_s: Seconds = 60.0
    return_s: SecondsOrZero = 5.0  # its users come back over this time, not at once
    return_share: Share = 0.1  # the share of its users that come back first
    max_open_ratio: ShareOrNone = 0.5  # at most this share of the instances is out at the same time


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the router; a request over one of them is rejected at once."""

    max_connections: Count = 10_000  # of clients
    max_inflight: Count = 4096  # requests in the router
    instance_inflight: Count = 512  # at one instance; a rank over it goes to another one as a miss
    instance_idle: NoneOrMore = 256  # unused connections kept to one instance
    max_body_bytes: SomeBytes = 8_388_608
    max_kept_bytes: SomeBytes = 134_217_728  # of all bodies that arrive or are kept; counted before they are read
    stream_over_bytes: SomeBytes = 262_144  # a smaller body is read whole first: a slow client holds no instance
    max_header_bytes: Annotated[int, msgspec.Meta(ge=256, extra_json_schema=IN_BYTES)] = 16_384
    max_headers: Count = 100

    def __post_init__(self) -> None:
        if self.max_kept_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_kept_bytes: {self.max_kept_bytes} is less than max_body_bytes: {self.max_body_bytes}"
            )


class RetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One second try, on the successor, without prefix KV: after a failure, or beside a first try that is late.

    A signal has one only if no instance has begun it (there was no connection, or the instance drains), or if its
    instance answers nothing at all.
    """

    ratio: ShareOrNone = 0.2  # second tries a rank, in the long run
    burst: NoneOrSome = 100.0  # that may be saved up; the last half is not for hedges
    hedge_ratio: Share = 0.2  # share of the time budget after which an answer is late; 1 = no hedges
    hedge_factor: Annotated[float, msgspec.Meta(ge=1)] = 4.0  # late is also this many times the P99 of the last answers
    hedge_min_s: SecondsOrZero = 0.02  # but an answer is never late before this time


class PairConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a signal and its ranks are placed on one instance: the section `relay`."""

    t_life_s: Seconds = 10.0  # a rank follows its signal for this long; as in the instances' configuration
    load_factor: NoneOrSome = 0.0  # 0 = strict; 1.25 = spill over 1.25 x the fair share
    max_remembered: Count = 1_000_000  # signals; the oldest is forgotten first


class PickerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The endpoint picker of a Kubernetes gateway: gRPC, where Envoy's external processing asks for each request."""

    host: str = "127.0.0.1"
    port: ListenPort = 9002
    tls: ServerTlsConfig | None = None  # certificate and key of this address; None = those of the router's `tls`


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one router."""

    discovery: DiscoveryConfig
    host: str = "127.0.0.1"
    port: ListenPort = 8090
    admin_host: str = "127.0.0.1"  # metrics, owners, drains: not for the public
    admin_port: ListenPort = 8091
    api_keys_file: str | None = None  # the instances' own: the key that a caller sends is passed on to them
    allow_unauthenticated: bool = False  # serve on public addresses without keys
    user_header: str = "x-user-id"
    tenant_header: str = "x-tenant-id"  # names the tenant where the key is for every tenant
    default_budget_s: Seconds = 1.0  # for a request that names no time limit
    max_budget_s: Seconds = 30.0
    connect_timeout_s: Seconds = 0.25
    header_timeout_s: Seconds = 10.0  # from a request's first byte to the end of its headers
    idle_s: Seconds = 75.0  # a client's connection without a request is closed after this time
    instance_idle_s: Seconds = 15.0  # the same for a connection to an instance; less than the instance's keep-alive
    drain_grace_s: SecondsOrZero = 3.0  # after SIGTERM: how long the router is unready and still serves
    shutdown_timeout_s: Seconds = 10.0  # after the grace: how long it waits for requests in flight
    health: HealthConfig = HealthConfig()
    breaker: BreakerConfig = BreakerConfig()
    limits: LimitsConfig = LimitsConfig()
    retry: RetryConfig = RetryConfig()
    relay: PairConfig = PairConfig()
    picker: PickerConfig | None = None  # choose instances for a gateway as well; needs the extra `picker`
    tls: ServerTlsConfig | None = None  # certificate and key of the addresses; None = in clear
    instances_tls: ClientTlsConfig | None = None  # None = the instances are asked in clear

    def __post_init__(self) -> None:
        for field in ("user_header", "tenant_header"):
            name = getattr(self, field)
            if not re.fullmatch(r"[a-z0-9-]{1,64}", name):
                raise ValueError(f"{field}: {name!r} is not a lower-case header name")
        hosts = {"host": self.host, "admin_host": self.admin_host}
        if self.picker is not None:
            hosts["picker.host"] = self.picker.host
        for field, name in hosts.items():
            if not (is_loopback_name(name) or self.api_keys_file or self.allow_unauthenticated):
                raise ValueError(f"{field}: {name} is not loopback: set api_keys_file, or allow_unauthenticated: true")
        if not self.health.path.startswith("/"):
            raise ValueError(f"health.path: {self.health.path!r} does not begin with /")


def load(path: Path, overrides: Sequence[str] = ()) -> RouterConfig:
    """Read a router's configuration file.

    Args:
        path: YAML.
        overrides: `section.key=value`, later ones win; they win over the environment, and that over the file.

    Raises:
        ConfigError: names the file, the field and the limit.
    """
    return settings.load(path, RouterConfig, overrides, os.environ)
