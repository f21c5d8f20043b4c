"""Settings of the router: `configs/router.yaml` has every key with its meaning."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from npu_gr.router.ring import NAME

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]  # 0 = any free one
Name = Annotated[str, msgspec.Meta(pattern=f"^{NAME}$")]


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance. `name` is its identity on the ring and must outlive its address."""

    name: Name
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    weight: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    special: bool = True  # takes signals and their ranks, by user
    normal: bool = True  # takes what needs no prefix KV, by load

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class DNSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All addresses of one name; an instance is then named by its address."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of three."""

    instances: list[InstanceConfig] = []
    file: str | None = None  # YAML with a list `instances`, read again when it changes
    dns: DNSConfig | None = None
    period_s: Seconds = 2.0  # between looks at the file or the name

    def __post_init__(self) -> None:
        if sum((bool(self.instances), self.file is not None, self.dns is not None)) != 1:
            raise ValueError("needs exactly one of instances, file, dns")
        check_names(self.instances)


def check_names(instances: list[InstanceConfig]) -> None:
    """Raises ValueError: a name is given twice."""
    names = [instance.name for instance in instances]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"instances: the name {name!r} is given twice")


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active checks of every instance."""

    path: str = "/readyz"
    interval_s: Seconds = 0.5
    timeout_s: Seconds = 0.5
    fall: Count = 2  # failures in a row until an instance is down
    rise: Count = 1  # successes in a row until it is up


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an instance that passes its checks is taken out all the same, and how it comes back."""

    failures: Count = 5  # in a row: no connection, no answer in time, 502, 503 or 504
    min_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 0.1  # a shorter wait in vain is the caller's impatience
    slow_ratio: Annotated[float, msgspec.Meta(ge=1)] = 5.0  # median answer time over that of the others
    slow_intervals: Count = 2  # health intervals in a row that it must be so
    slow_min_requests: Count = 5  # in each of them
    open_s: Seconds = 2.0  # out for this long, doubled each time it fails again while it returns
    max_open_s: Seconds = 60.0
    return_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0  # its users come back over this time, not at once
    return_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1  # of its users at the beginning of it
    max_open_ratio: Ratio = 0.5  # of the instances that may be out at once by this


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the router takes on; beyond it a request is refused at once."""

    max_connections: Count = 10_000  # of clients
    max_inflight: Count = 4096  # requests in the router
    instance_inflight: Count = 512  # at one instance; a rank over it goes to another one as a miss
    instance_idle: Annotated[int, msgspec.Meta(ge=0)] = 256  # unused connections kept to one instance
    max_body_bytes: Count = 8_388_608
    stream_over_bytes: Count = 262_144  # a smaller body is read whole first, so that a slow client holds no instance
    max_header_bytes: Annotated[int, msgspec.Meta(ge=256)] = 16_384
    max_headers: Count = 100


class RetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Once, on the successor, without prefix KV. A signal only if nobody has taken it: no connection, or a drain."""

    ratio: Ratio = 0.2  # retries a rank, in the long run
    burst: Annotated[float, msgspec.Meta(ge=0)] = 100.0  # retries that may be saved up
    first_try_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5  # of the budget; what is left is the retry's


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pair of a signal and its ranks."""

    t_life_s: Seconds = 10.0  # a rank follows its signal for this long; as in the instances' configuration
    load_factor: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # 0 = strict; 1.25 = spill over 1.25 x the fair share
    max_remembered: Count = 1_000_000  # signals; the oldest is forgotten first


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a router is started with."""

    discovery: DiscoveryConfig
    host: str = "127.0.0.1"
    port: Port = 8090
    admin_host: str = "127.0.0.1"  # metrics, owners, drains: not for the public
    admin_port: Port = 8091
    user_header: str = "x-user-id"
    default_budget_s: Seconds = 1.0  # for a request that names no time limit
    max_budget_s: Seconds = 30.0
    connect_timeout_s: Seconds = 0.25
    header_timeout_s: Seconds = 10.0  # from a request's first byte to the end of its headers
    idle_s: Seconds = 75.0  # a client's connection without a request
    instance_idle_s: Seconds = 15.0  # an unused connection to an instance; less than its keep-alive time
    drain_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 3.0  # unready but serving, at SIGTERM
    shutdown_timeout_s: Seconds = 10.0  # for requests in flight after that
    health: HealthConfig = HealthConfig()
    breaker: BreakerConfig = BreakerConfig()
    limits: LimitsConfig = LimitsConfig()
    retry: RetryConfig = RetryConfig()
    relay: RelayConfig = RelayConfig()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9-]{1,64}", self.user_header):
            raise ValueError(f"user_header: {self.user_header!r} is not a lower-case header name")
        if not self.health.path.startswith("/"):
            raise ValueError(f"health.path: {self.health.path!r} does not begin with /")
