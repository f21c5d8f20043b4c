"""What all connections of one router share: settings, instances, limits, and the work that goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from npu_gr.core.errors import ConfigError, Overloaded
from npu_gr.router.client import Client
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.discovery import find
from npu_gr.router.erase import ask_all
from npu_gr.router.exchange import Kind
from npu_gr.router.members import Check, Health, Instance, Members, ring_of
from npu_gr.router.metrics import RouterMetrics
from npu_gr.router.upstream import Upstream

log = logging.getLogger(__name__)


class Router:
    """Made once by `run.py`; `running()` keeps it informed."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.config, self.metrics = config, metrics
        self.user_header = config.user_header.encode()
        self.members = Members(config)
        self.members.observe(lambda name, why: metrics.opened(name, why).inc())
        self.clients: set[Client] = set()
        self.in_flight = 0
        self.is_draining = False
        self._tokens = config.retry.burst
        self._found: list[InstanceConfig] | None = None
        self._look_again = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None  # while running

    # ---- the exchanges' calls

    def admit(self, client: Client) -> bool:
        """One more connection; False: it is one too many."""
        self.clients.add(client)
        return len(self.clients) <= self.config.limits.max_connections

    def forget(self, client: Client) -> None:
        """A connection is gone."""
        self.clients.discard(client)

    def check_room(self) -> None:
        """Raises Overloaded: as many requests as allowed are in the router."""
        if self.in_flight > self.config.limits.max_inflight:
            raise Overloaded(f"the router serves {self.config.limits.max_inflight} requests already")

    def may_retry(self) -> bool:
        """Take one retry off the budget, if there is one: a retry must not double the load of a failing fleet."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give_back_retry(self) -> None:
        """It was not used."""
        self._tokens += 1

    async def connect(self, instance: Instance) -> Upstream:
        """A new connection. Raises OSError (a TimeoutError is one): there is none in time."""
        loop, config = asyncio.get_running_loop(), instance.config
        async with asyncio.timeout(self.config.connect_timeout_s):
            _, upstream = await loop.create_connection(lambda: Upstream(instance), config.host, config.port)
        return upstream

    def keep(self, upstream: Upstream, is_in_step: bool) -> None:
        """For the next request, if that is safe."""
        idle = upstream.instance.idle
        if is_in_step and len(idle) < self.config.limits.instance_idle:
            idle.append(upstream)
        else:
            upstream.close()

    async def erase(self, target: str, headers: Mapping[str, str], timeout_s: float) -> dict[str, str]:
        """What every instance says to it, by name; see `erase.py`."""
        assert self._http is not None
        instances = [one.config for one in self.members.instances.values()]
        return await ask_all(self._http, instances, target, headers, timeout_s)

    def unreachable(self, instance: Instance) -> None:
        """Nobody listens there: as good as a failed check, and a reason for the next one."""
        instance.checked(Check.FAILED, time.monotonic())
        self._look_again.set()

    def failed(self, instance: Instance, why: str, is_signal: bool) -> None:
        """It failed a request."""
        self.metrics.failures(instance.name, why).inc()
        if why == "503" and is_signal:
            self._look_again.set()  # it may be draining; the check will say
        else:
            self.members.failed(instance, time.monotonic())

    def finished(self, kind: Kind, status: int, took_s: float) -> None:
        """A request is over."""
        if kind is Kind.RANK:
            self._tokens = min(self.config.retry.burst, self._tokens + self.config.retry.ratio)
        self.metrics.requests(kind, str(status)).inc()
        self.metrics.duration_s(kind).observe(took_s)

    def is_ready(self) -> tuple[bool, str]:
        """Whether requests are welcome, and if not, why."""
        if self.is_draining:
            return False, "draining"
        now_at = time.monotonic()
        if not any(one.health is Health.UP and one.takes_ranks(now_at) for one in self.members.instances.values()):
            return False, "no instance is up"
        return True, ""

    async def quiet(self) -> None:
        """Wait until no client has a request here."""
        while not all(client.is_idle for client in self.clients):  # noqa: ASYNC110  (once in a router's life)
            await asyncio.sleep(0.02)

    # ---- what goes on by itself

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Instances found and looked at once; then kept up to date until the block ends.

        Raises:
            ConfigError: the instances cannot be found.
        """
        timeout = aiohttp.ClientTimeout(total=self.config.health.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            self._http = http
            await self._find()
            await self._look(http)
            tasks = [asyncio.create_task(work) for work in (self._watch(), self._check(http), self._sweep())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for instance in self.members.instances.values():
                    instance.close_idle()

    async def _find(self) -> None:
        found = await find(self.config.discovery)
        if found == self._found:
            return
        self._found = found
        ring = await asyncio.to_thread(ring_of, found)
        for gone in self.members.replace(found, ring):
            gone.close_idle()
            if gone.name not in self.members.instances:
                self.metrics.forget(gone.name)
        log.info("%d instances, ring %s", len(found), ring.epoch)
        self._look_again.set()

    async def _watch(self) -> None:
        while self.config.discovery.file is not None or self.config.discovery.dns is not None:
            await asyncio.sleep(self.config.discovery.period_s)
            try:
                await self._find()
            except ConfigError as error:
                log.error("instances as before: %s", error)

    async def _check(self, http: aiohttp.ClientSession) -> None:
        while True:
            self._look_again.clear()
            try:
                await asyncio.wait_for(self._look_again.wait(), self.config.health.interval_s)
                await asyncio.sleep(_PAUSE_S)  # many requests fail at once, one look is enough
            except TimeoutError:
                self.members.compare(time.monotonic())
            await self._look(http)

    async def _look(self, http: aiohttp.ClientSession) -> None:
        instances = list(self.members.instances.values())
        checks = await asyncio.gather(*(self._look_at(http, instance) for instance in instances))
        now_at = time.monotonic()
        for instance, check in zip(instances, checks, strict=True):
            instance.checked(check, now_at)

    async def _look_at(self, http: aiohttp.ClientSession, instance: Instance) -> Check:
        try:
            async with http.get(f"{instance.config.url}{self.config.health.path}") as answer:
                return Check.READY if answer.status == 200 else Check.UNREADY
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return Check.FAILED

    async def _sweep(self) -> None:
        """Once a second: close what is unused or takes too long, bring the gauges up to date."""
        while True:
            await asyncio.sleep(1.0)
            now_at = time.monotonic()
            for client in list(self.clients):
                client.sweep(now_at)
            for instance in self.members.instances.values():
                instance.close_idle(now_at - self.config.instance_idle_s)

    def observe(self) -> None:
        """Bring the gauges up to date, before they are read."""
        now_at = time.monotonic()
        for name, one in self.members.instances.items():
            self.metrics.up(name).set(one.health is Health.UP and not one.is_drained)
            self.metrics.share(name).set(one.breaker.share(now_at) if one.takes_ranks(now_at) else 0.0)
            self.metrics.instance_in_flight(name).set(one.in_flight)
        self.metrics.in_flight.set(self.in_flight)
        self.metrics.connections.set(len(self.clients))


_PAUSE_S = 0.02
