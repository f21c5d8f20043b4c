"""Finds the instances: from a list in the configuration, a file, or a DNS name."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec

from npu_gr.core import settings
from npu_gr.core.errors import ConfigError
from npu_gr.route.config import DiscoveryConfig, DNSConfig, InstanceConfig, check_names, joined


class InstancesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file `discovery.file`."""

    instances: list[InstanceConfig]

    def __post_init__(self) -> None:
        check_names(self.instances)


async def find(config: DiscoveryConfig) -> list[InstanceConfig]:
    """Read the current list of instances.

    Raises:
        ConfigError: The file cannot be read or is invalid, or the DNS name has no address.
    """
    if config.file is not None:
        return (await asyncio.to_thread(settings.load, Path(config.file), InstancesFile)).instances
    if config.dns is not None:
        return await _resolve(config.dns)
    return config.instances


async def _resolve(dns: DNSConfig) -> list[InstanceConfig]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            dns.host, dns.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise ConfigError(f"discovery.dns.host: {dns.host}: {error}") from error
    hosts = sorted({str(address[4][0]) for address in found})
    return [
        InstanceConfig(
            name=joined(host, dns.port),
            host=host,
            port=dns.port,
            admin_port=dns.admin_port,
            agent_port=dns.agent_port,
        )
        for host in hosts
    ]


async def addresses(instances: list[InstanceConfig], before: dict[str, str]) -> dict[str, str]:
    """Resolve the host of every instance with the system's resolver (/etc/hosts included).

    Args:
        instances: Instances to resolve.
        before: Previous result. A host that cannot be resolved keeps its address, since DNS may
            have failed.

    Returns:
        Name of the instance -> IP address; without instances that never had an address.
    """
    hosts = {one.host.strip("[]") for one in instances}
    found = dict(zip(hosts, await asyncio.gather(*map(_look_up, hosts)), strict=True))
    known = {one.name: found[one.host.strip("[]")] or before.get(one.name) for one in instances}
    return {name: address for name, address in known.items() if address is not None}


async def _look_up(host: str) -> str | None:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return min(str(one[4][0]) for one in found)
