"""The instances' addresses as a gateway knows them: `ip:port`, IPv6 in brackets. Names are looked up repeatedly."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Collection
from functools import lru_cache

from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.instance import InstanceState
from npu_gr.router.members import Members

log = logging.getLogger(__name__)


class Addresses:
    """The endpoint of every instance; one whose name has no address has none."""

    def __init__(self, config: RouterConfig, members: Members) -> None:
        self._period_s = config.discovery.period_s
        self._members = members
        self._of_host: dict[str, str] = {}  # a host that is no address -> the address that it had last
        self._instances: dict[str, InstanceState] = {}  # those of `_endpoints`
        self._endpoints: dict[str, str | None] = {}
        self._unknown: tuple[str, ...] = ()

    def endpoints(self) -> dict[str, str | None]:
        """The endpoints of all instances, by name; None: its address is not known."""
        instances = self._members.instances
        if instances is not self._instances:  # `Members` changes it by replacing it
            self._instances = instances
            self._endpoints = {name: self._of(one.config) for name, one in instances.items()}
            self._unknown = tuple(name for name, endpoint in self._endpoints.items() if endpoint is None)
        return self._endpoints

    def reach(self, allowed: set[str] | None) -> tuple[dict[str, str | None], Collection[str]]:
        """Find out where a gateway can be sent to.

        Args:
            allowed: the endpoints that the gateway lets the picker choose from; None = all of them.

        Returns:
            `endpoints`, and the names of the instances that the gateway cannot be sent to.
        """
        endpoints = self.endpoints()
        if allowed is None:
            return endpoints, self._unknown
        return endpoints, [name for name, endpoint in endpoints.items() if endpoint not in allowed]

    def _of(self, one: InstanceConfig) -> str | None:
        host = one.host if _is_address(one.host) else self._of_host.get(one.host)
        if host is None:
            return None
        return f"[{host}]:{one.port}" if ":" in host else f"{host}:{one.port}"

    async def look_up(self) -> None:
        """Look every name up once. A name that cannot be looked up keeps its address: that may be a fault of DNS."""
        hosts = {one.config.host for one in self._members.instances.values() if not _is_address(one.config.host)}
        found = await asyncio.gather(*map(_look_up, hosts))
        self._of_host = {
            host: address
            for host, new in zip(hosts, found, strict=True)
            if (address := new or self._of_host.get(host)) is not None
        }
        self._instances = {}

    async def keep_looking(self) -> None:
        """Look up every `discovery.period_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.look_up()


async def _look_up(host: str) -> str | None:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("discovery: %s: %s", host, error)
        return None
    return min(str(one[4][0]) for one in found)


@lru_cache(maxsize=4096)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
