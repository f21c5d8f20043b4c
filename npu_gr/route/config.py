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

# pattern of an instance's name, which HAProxy, Prometheus and the picker's ring use
NAME = r"[A-Za-z0-9\[](?:[A-Za-z0-9._:\[\]-]{0,126}[A-Za-z0-9\]])?"
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortOrNone = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, addresses and role of one instance.

    `name` determines its users, so it must stay the same when an address changes.
    """

    name: Annotated[str, msgspec.Meta(pattern=full_match(NAME))]
    host: str
    port: Port
    admin_port: PortOrNone = 8081  # for `npu-gr fleet items` and `reload`; 0 = none
    # its server.agent_port, whose agent-check sets its limit; 0 = limits.instance_inflight
    agent_port: PortOrNone = 0
    # relative share of the users; 0 = drained
    weight: Annotated[float, msgspec.Meta(ge=0, le=2.5)] = 1.0
    special: bool = True  # serves signals and their ranks, routed by user
    normal: bool = True  # serves requests without prefix KV, routed by load


class DNSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A DNS name that resolves to the addresses of all instances, which become their names."""

    host: str
    port: Port
    admin_port: PortOrNone = 8081
    agent_port: PortOrNone = 0


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of the list of instances: exactly one of `instances`, `file` and `dns`."""

    instances: list[InstanceConfig] = []
    file: str | None = None  # YAML with a list `instances`
    dns: DNSConfig | None = None
    # period of the checks for changes of the file, DNS name, configuration, keys and certificates
    period_s: Seconds = 2.0

    def __post_init__(self) -> None:
        if sum((bool(self.instances), self.file is not None, self.dns is not None)) != 1:
            raise ValueError("needs exactly one of instances, file, dns")
        check_names(self.instances)


def joined(host: str, port: int) -> str:
    """Join host and port; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_names(instances: list[InstanceConfig]) -> None:
    """Raise ValueError if two instances have the same name."""
    names = [instance.name for instance in instances]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"instances: the name {name!r} appears twice")


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Health checks of the instances."""

    interval_s: Seconds = 0.5  # period of GET /readyz
    timeout_s: Seconds = 0.5
    fall: Count = 2  # consecutive failed checks until an instance is down
    rise: Count = 1  # consecutive successful checks until it is up
    failures: Count = 5  # consecutive failed requests until it is down, even if the checks succeed
    slow_start_s: SecondsOrZero = 5.0  # slow start: its users return over this time


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the router; requests over a limit are rejected."""

    max_connections: Count = 10_000  # client connections
    instance_inflight: Count = 64  # concurrent requests at an instance without agent_port
    instance_queue: Count = 64  # queued requests per instance
    max_body_bytes: SomeBytes = 8_388_608
    # smaller bodies are received completely before they are forwarded, so they can be retried
    buffer_bytes: SomeBytes = 65_536

    def __post_init__(self) -> None:
        if self.buffer_bytes < 16_384:
            raise ValueError(
                f"buffer_bytes: {self.buffer_bytes} is below 16384, the largest size of headers"
            )


class PairConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routing of a signal and its ranks to the same instance: the section `relay`."""

    # a rank follows its signal for this time; equal to relay.t_life_s of the instances
    t_life_s: Seconds = 10.0
    # 0 = always the owner; 1.25 = another instance if the owner has over 1.25 x its fair share
    load_factor: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_remembered: Count = 1_000_000  # remembered signals


class PickerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The endpoint picker of a Kubernetes gateway: gRPC for Envoy's external processing."""

    host: str = "127.0.0.1"
    port: PortOrNone = 9002  # 0 = any free port
    # certificate and key of this address; None = those of the router's `tls`
    tls: ServerTlsConfig | None = None


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a router."""

    discovery: DiscoveryConfig
    host: str = "127.0.0.1"
    port: Port = 8090
    # address of HAProxy's metrics and of changes at all instances; for operators only
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8091
    threads: Count = 1  # threads of HAProxy; one handles tens of thousands of requests a second
    # name -> host:port of each router in front of the same instances, this one included
    peers: dict[str, str] = {}
    peer: str | None = None  # name of this router in `peers`
    # key file of the instances; requests without one of its keys are rejected
    api_keys_file: str | None = None
    allow_unauthenticated: bool = False  # allow public addresses without API keys
    user_header: str = "x-user-id"
    # latency objective of a rank, equal to slo.rank_s of the instances; a request is queued for
    # 0.7 of it, then rejected with 429
    objective_s: Seconds = 0.05
    max_budget_s: Seconds = 30.0  # longest time for an answer
    # time for the headers of a request, and again for its body
    header_timeout_s: Seconds = 10.0
    idle_timeout_s: Seconds = 75.0  # idle client connections are closed after this time
    # time after SIGTERM during which the router is unready and still serves
    drain_grace_s: SecondsOrZero = 3.0
    # time for requests in flight after the grace, and at a reload
    shutdown_timeout_s: Seconds = 10.0
    health: HealthConfig = HealthConfig()
    limits: LimitsConfig = LimitsConfig()
    relay: PairConfig = PairConfig()
    # endpoint picker for a gateway; needs the extra `picker`
    picker: PickerConfig | None = None
    tls: ServerTlsConfig | None = None  # certificate and key of the addresses; None = no TLS
    instances_tls: ClientTlsConfig | None = None  # TLS to the instances; None = no TLS

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
                    f"{field}: {name} is not a loopback address: set api_keys_file, or "
                    "allow_unauthenticated: true"
                )
        if (self.peer is None) != (not self.peers) or (
            self.peer is not None and self.peer not in self.peers
        ):
            raise ValueError(
                "peer, peers: set both or neither; `peer` is the name of this router in `peers`"
            )
        if self.instances_tls is not None and self.instances_tls.server_name is None:
            for one in self.discovery.instances:
                if re.fullmatch(r"[0-9.]+|\[?[0-9a-fA-F:]*:[0-9a-fA-F:]*\]?", one.host):
                    raise ValueError(
                        f"instances_tls.server_name: is required for {one.host}: HAProxy does "
                        "not compare IP addresses with certificates"
                    )
        for name, address in self.peers.items():
            if not (
                re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)
                and re.fullmatch(r"[A-Za-z0-9.-]+:\d{1,5}", address)
            ):
                raise ValueError(
                    f"peers: {name!r}: {address!r}: expected a plain name and host:port"
                )


def load(path: Path, overrides: Sequence[str] = ()) -> RouterConfig:
    """Read a router's configuration file.

    Args:
        path: YAML file.
        overrides: Settings `section.key=value`; later ones win. They take precedence over the
            environment, which takes precedence over the file.

    Raises:
        ConfigError: The file or a field is invalid; the message names the field and the limit.
    """
    return settings.load(path, RouterConfig, overrides, os.environ)
