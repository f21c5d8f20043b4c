"""Keeps the members up to date: reads the list of instances again, and checks the health of each."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from npu_gr.core.errors import ConfigError
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.discovery import find
from npu_gr.router.hop import Hop
from npu_gr.router.instance import Check, InstanceState
from npu_gr.router.members import Members, ring_of
from npu_gr.router.metrics import RouterMetrics

log = logging.getLogger(__name__)
_SETTLE_S = 0.02  # between a failed request and the check that it causes: when many fail at once, one check is enough


class Watcher:
    """Discovery and health checks of one router."""

    def __init__(self, config: RouterConfig, members: Members, metrics: RouterMetrics, hop: Hop) -> None:
        self._config = config
        self._hop = hop
        self._untrusted: dict[str, str] = {}  # instance -> why TLS to it failed last; one line in the log for each
        self._members = members
        self._metrics = metrics
        self._listed: list[InstanceConfig] | None = None  # as they were read last
        self._check_soon = asyncio.Event()

    def check_soon(self) -> None:
        """Check all instances now instead of at the next interval."""
        self._check_soon.set()

    async def discover(self) -> None:
        """Read the list of instances once, and replace the members if it has changed.

        Raises:
            ConfigError: the list cannot be read.
        """
        listed = await find(self._config.discovery)
        if listed == self._listed:
            return
        self._listed = listed
        ring = await asyncio.to_thread(ring_of, listed)
        for gone in self._members.replace(listed, ring):
            gone.pool.close_idle()
            if gone.name not in self._members.instances:
                self._metrics.forget(gone.name)
        log.info("%d instances, ring %s", len(listed), ring.epoch)
        self._check_soon.set()

    async def keep_discovering(self) -> None:
        """Read the list every `discovery.period_s`, where it can change."""
        while self._config.discovery.file is not None or self._config.discovery.dns is not None:
            await asyncio.sleep(self._config.discovery.period_s)
            try:
                await self.discover()
            except ConfigError as error:
                log.error("instances as before: %s", error)

    async def check(self, http: aiohttp.ClientSession) -> None:
        """Check the health of every instance once."""
        instances = list(self._members.instances.values())
        checks = await asyncio.gather(*(self._check_one(http, instance) for instance in instances))
        now_at = time.monotonic()
        for instance, check in zip(instances, checks, strict=True):
            instance.checked(check, now_at)

    async def keep_checking(self, http: aiohttp.ClientSession) -> None:
        """Check every `health.interval_s`, and soon after a request has failed; compare the instances' speeds."""
        while True:
            self._check_soon.clear()
            try:
                await asyncio.wait_for(self._check_soon.wait(), self._config.health.interval_s)
                await asyncio.sleep(_SETTLE_S)
            except TimeoutError:
                self._members.compare(time.monotonic())
            await self.check(http)

    async def _check_one(self, http: aiohttp.ClientSession, instance: InstanceState) -> Check:
        url = f"{self._hop.url(instance.config)}{self._config.health.path}"
        try:
            async with http.get(url, **self._hop.options(instance.config)) as answer:
                self._untrusted.pop(instance.name, None)
                return Check.READY if answer.status == 200 else Check.UNREADY
        except aiohttp.ClientConnectorDNSError:
            return Check.GONE
        except aiohttp.ClientSSLError as error:
            if self._untrusted.get(instance.name) != str(error):
                log.error("instance %s: TLS failed: %s", instance.name, error)
                self._untrusted[instance.name] = str(error)
            return Check.FAILED
        except aiohttp.ClientConnectorError as error:
            return Check.GONE if isinstance(error.os_error, ConnectionRefusedError) else Check.FAILED
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return Check.FAILED
