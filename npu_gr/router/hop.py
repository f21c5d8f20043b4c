"""How the instances are reached: in clear, or over TLS with the certificates in force."""

from __future__ import annotations

from typing import Any

from npu_gr.core.tls import ClientTls
from npu_gr.router.config import InstanceConfig, RouterConfig


class Hop:
    """The way from the router to its instances."""

    def __init__(self, config: RouterConfig) -> None:
        """Read the certificates.

        Raises:
            ConfigError: a file cannot be read, or they do not belong together.
        """
        self.tls = None if config.instances_tls is None else ClientTls(config.instances_tls, "instances_tls")
        # addresses that DNS gave are no names: their certificate has the name that was asked for
        self._looked_up = None if config.discovery.dns is None else config.discovery.dns.host

    def url(self, one: InstanceConfig) -> str:
        """Scheme, host and port; an IPv6 address is in brackets."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{one.host}]:{one.port}" if ":" in one.host else f"{scheme}://{one.host}:{one.port}"

    def options(self, one: InstanceConfig) -> dict[str, Any]:
        """Return what a new connection to an instance needs; aiohttp and asyncio call it the same."""
        if self.tls is None:
            return {}
        return {
            "ssl": self.tls.context,
            "server_hostname": self.tls.server_name or self._looked_up or one.host,
        }
