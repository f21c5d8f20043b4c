"""Settings of the router: `configs/router.yaml` has every key with its meaning."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from npu_gr.core import settings
from npu_gr.core.settings import Count, Seconds, SecondsOrZero, SomeBytes
from npu_gr.core.text_format import full_match
from npu_gr.core.tls import ClientTlsConfig, ServerTlsConfig
from npu_gr.server.auth.rules import is_loopback_name

# of an instance: HAProxy, Prometheus and the picker's ring all have it
NAME = r"[A-Za-z0-9\[](?:[A-Za-z0-9._:\[\]-]{0,126}[A-Za-z0-9\]])?"
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortOrNone = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses and role of one instance.

    `name` decides its users and must stay when an address changes.
    """

    name: Annotated[str, msgspec.Meta(pattern=full_match(NAME))]
    host: str
    port: Port
    admin_port: PortOrNone = 8081  # for `npu-gr fleet items` and `reload`; 0 = it has none
    # server.agent_port, where it tells how much it takes; 0 = limits.instance_inflight
    agent_port: PortOrNone = 0
    # its share of the users; 0 = drained
    weight: Annotated[float, msgspec.Meta(ge=0, le=2.5)] = 1.0
    special: bool = True  # takes signals and their ranks, by user
    normal: bool = True  # takes what needs no prefix KV, by load


class DNSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One DNS name with an address for each instance.

    An instance is then named after its address.
    """

    host: str
    port: Port
    admin_port: PortOrNone = 8081
    agent_port: PortOrNone = 0


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the list of instances comes from: exactly one of `instances`, `file` and `dns`."""

    instances: list[InstanceConfig] = []
    file: str | None = None  # YAML with a list `instances`
    dns: DNSConfig | None = None
    # between two looks at the file, the name, this configuration, keys and certificates
    period_s: Seconds = 2.0

    def __post_init__(self) -> None:
        if sum((bool(self.instances), self.file is not None, self.dns is not None)) != 1:
            raise ValueError("needs exactly one of instances, file, dns")
        check_names(self.instances)


def joined(host: str, port: int) -> str:
    """Join a host and a port; an address of IPv6 gets its brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


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
    """How an instance is found to be out, and how it comes back."""

    interval_s: Seconds = 0.5  # between two GET /readyz
    timeout_s: Seconds = 0.5
    fall: Count = 2  # failures in a row until an instance is down
    rise: Count = 1  # successes in a row until it is up
    failures: Count = 5  # requests in a row that fail, although the checks pass, until it is down
    slow_start_s: SecondsOrZero = 5.0  # its users come back over this time, not at once


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the router; a request over one of them is rejected."""

    max_connections: Count = 10_000  # of clients
    instance_inflight: Count = 64  # at one instance that has no agent_port; more wait in the queue
    instance_queue: Count = 64  # that wait for one instance
    max_body_bytes: SomeBytes = 8_388_608
    # a smaller body is read whole first: it can be sent again, and holds no instance
    buffer_bytes: SomeBytes = 65_536

    def __post_init__(self) -> None:
        if self.buffer_bytes < 16_384:
            raise ValueError(
                f"buffer_bytes: {self.buffer_bytes} is less than 16384, which headers may take"
            )


class PairConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a signal and its ranks are placed on one instance: the section `relay`."""

    # a rank follows its signal for this long; as in the instances' configuration
    t_life_s: Seconds = 10.0
    # 0 = strict; 1.25 = spill over 1.25 x the fair share
    load_factor: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_remembered: Count = 1_000_000  # signals


class PickerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The endpoint picker of a Kubernetes gateway: gRPC, where Envoy's external processing asks for each request."""

    host: str = "127.0.0.1"
    port: PortOrNone = 9002  # 0 = any free one
    # certificate and key of this address; None = those of the router's `tls`
    tls: ServerTlsConfig | None = None


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one router."""

    discovery: DiscoveryConfig
    host: str = "127.0.0.1"
    port: Port = 8090
    # HAProxy's metrics, and what changes every instance: not for the public
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8091
    threads: Count = 1  # of HAProxy: one carries tens of thousands of requests a second
    # name -> host:port of each router in front of the same instances, this one included
    peers: dict[str, str] = {}
    peer: str | None = None  # the name of this one in `peers`
    # the instances' own: a request without one of its keys gets no further
    api_keys_file: str | None = None
    allow_unauthenticated: bool = False  # serve on public addresses without keys
    user_header: str = "x-user-id"
    # of a rank, as slo.rank_s of the instances; a request waits for .7 of it, then 429
    objective_s: Seconds = 0.05
    max_budget_s: Seconds = 30.0  # the longest time for an answer
    # from a request's first byte to the end of its headers, and then of its body
    header_timeout_s: Seconds = 10.0
    idle_timeout_s: Seconds = (
        75.0  # a client's connection without a request is closed after this time
    )
    # after SIGTERM: how long the router is unready and still serves
    drain_grace_s: SecondsOrZero = 3.0
    # after the grace, and at a reload: how long requests in flight may take
    shutdown_timeout_s: Seconds = 10.0
    health: HealthConfig = HealthConfig()
    limits: LimitsConfig = LimitsConfig()
    relay: PairConfig = PairConfig()
    # choose instances for a gateway as well; needs the extra `picker`
    picker: PickerConfig | None = None
    tls: ServerTlsConfig | None = None  # certificate and key of the addresses; None = in clear
    instances_tls: ClientTlsConfig | None = None  # None = the instances are asked in clear

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9-]{1,64}", self.user_header):
            raise ValueError(f"user_header: {self.user_header!r} is not a lower-case header name")
        hosts = {"host": self.host, "admin_host": self.admin_host}
        if self.picker is not None:
            hosts["picker.host"] = self.picker.host
        for field, name in hosts.items():
            if not re.fullmatch(r"[A-Za-z0-9.:_-]{1,253}|\*", name):
                raise ValueError(f"{field}: {name!r} is neither an address nor a host name")
            if not (is_loopback_name(name) or self.api_keys_file or self.allow_unauthenticated):
                raise ValueError(
                    f"{field}: {name} is not loopback: set api_keys_file, or "
                    "allow_unauthenticated: true"
                )
        if (self.peer is None) != (not self.peers) or (
            self.peer is not None and self.peer not in self.peers
        ):
            raise ValueError(
                "peer, peers: `peer` is the name of this router in `peers`; give both or neither"
            )
        if self.instances_tls is not None and self.instances_tls.server_name is None:
            for one in self.discovery.instances:
                if re.fullmatch(r"[0-9.]+|\[?[0-9a-fA-F:]*:[0-9a-fA-F:]*\]?", one.host):
                    raise ValueError(
                        f"instances_tls.server_name: needed for {one.host}: HAProxy "
                        "compares names only"
                    )
        for name, address in self.peers.items():
            if not (
                re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)
                and re.fullmatch(r"[A-Za-z0-9.-]+:\d{1,5}", address)
            ):
                raise ValueError(f"peers: {name!r}: {address!r}: needs a plain name and host:port")


def load(path: Path, overrides: Sequence[str] = ()) -> RouterConfig:
    """Read a router's configuration file.

    Args:
        path: YAML.
        overrides: `section.key=value`, later ones win; they win over the environment, and that over
            the file.

    Raises:
        ConfigError: names the file, the field and the limit.
    """
    return settings.load(path, RouterConfig, overrides, os.environ)
