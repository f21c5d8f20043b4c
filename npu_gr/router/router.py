"""What all requests of one router share: settings, metrics, instances, limits, and the tasks in the background.

This module knows nothing of connections or of requests under way; `client.py` and `exchange.py` know this one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import aiohttp

from npu_gr.core.errors import BadRequest, Overloaded, Unavailable
from npu_gr.core.tls import following
from npu_gr.router.access import Access
from npu_gr.router.again import AnswerTimes, RetryBudget
from npu_gr.router.answers import plain
from npu_gr.router.config import RouterConfig
from npu_gr.router.connections import Connections
from npu_gr.router.erase import ask_all
from npu_gr.router.hop import Hop
from npu_gr.router.instance import Check, InstanceState
from npu_gr.router.kept import KeptBytes
from npu_gr.router.members import Choice, Members
from npu_gr.router.metrics import RouterMetrics
from npu_gr.router.request import ONCE, RequestHead
from npu_gr.router.ring import Placement
from npu_gr.router.routes import READINESS, Handling
from npu_gr.router.upstream import Upstream
from npu_gr.router.watcher import Watcher

_SWEEP_S = 1.0
# Names of members: in Python 3.11 `Handling.FOLLOW` costs four times as much.
_SIGNAL = Handling.SIGNAL
_FOLLOW = Handling.FOLLOW
_BY_LOAD = Handling.BY_LOAD


class Router:
    """The shared state of one router. `running()` keeps it up to date."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.access = Access(config, metrics)
        self.once = ONCE | {config.user_header.encode(), config.tenant_header.encode()}  # headers
        self.kept = KeptBytes(config.limits.max_kept_bytes)
        self.members = Members(config)
        self.members.observe(lambda name, why: metrics.opened.add(name, why))
        self.connections = Connections(config.limits.max_connections)
        self.retries = RetryBudget(config.retry)
        self.answer_times = AnswerTimes(config.retry)
        self.in_flight = 0
        self.is_draining = False
        self.taken_over = asyncio.Event()  # another router has this one's listening sockets
        self.hop = Hop(config)
        self._watcher = Watcher(config, self.members, metrics, self.hop)
        if self.hop.tls is not None:
            metrics.observe_certificate("client", self.hop.tls.expiry)
        self._http: aiohttp.ClientSession | None = None  # while running

    # ---- a request's course

    def begin(self) -> None:
        """Count a request as in flight.

        Raises:
            Overloaded: as many requests as allowed are in flight; this one is not counted.
        """
        if self.in_flight >= self.config.limits.max_inflight:
            raise Overloaded(f"the router serves {self.config.limits.max_inflight} requests already")
        self.in_flight += 1

    def place(
        self, head: RequestHead, handling: Handling, tried: Collection[str], is_overflow: bool = False
    ) -> tuple[Choice, Placement | None]:
        """Choose the instance for a request.

        Args:
            head: admitted; its headers name the signal's placement and the service.
            handling: SIGNAL, FOLLOW, ONCE or BY_LOAD.
            tried: names of instances that have failed the request.
            is_overflow: the last of them refused it for load.

        Returns:
            The choice, and for a signal the placement that its answer tells the caller.

        Raises:
            BadRequest: the user header is missing.
            Unavailable: no instance is left.
            Overloaded: all that are left are at their limits.
        """
        now_at = time.monotonic()
        seen = head.seen
        if is_overflow:
            return self.members.for_overflow(now_at, tried), None
        if handling is _BY_LOAD or (handling is _FOLLOW and seen.get(b"x-npugr-service") == b"normal"):
            return self.members.for_any(now_at, tried), None
        user = head.user
        if not user:
            raise BadRequest(f"{self.config.user_header}: missing; requests are routed by this header")
        if handling is _SIGNAL:
            return self.members.for_signal(user, now_at, tried)
        given = seen.get(b"x-npugr-placement")
        brought = Placement.decode(given.decode("latin-1")) if given is not None else None
        return self.members.for_rank(user, brought, now_at, tried), None

    def signalled(self, head: RequestHead, placement: Placement) -> None:
        """Let the ranks of a user follow the signal that was answered, whatever other one was sent."""
        self.members.remember(head.user, placement.instance, time.monotonic())

    async def connect(self, instance: InstanceState) -> Upstream:
        """Open a new connection to an instance.

        Raises:
            OSError: nobody listens there, or there was no connection in time. The instance is checked soon.
        """
        config = instance.config
        try:
            options = self.hop.options(config)
            return await instance.pool.connect(config.host, config.port, self.config.connect_timeout_s, options)
        except OSError as error:
            is_gone = isinstance(error, (ConnectionRefusedError, socket.gaierror))
            instance.checked(Check.GONE if is_gone else Check.FAILED, time.monotonic())
            self._watcher.check_soon()
            raise

    async def erase(self, head: RequestHead, left_s: float) -> dict[str, str]:
        """Send an erase request to every instance, and forget where the user was; `ask_all` says what is returned."""
        assert self._http is not None
        instances = [one.config for one in self.members.instances.values()]
        target = head.target.decode("latin-1")
        try:
            return await ask_all(self._http, self.hop, instances, target, head.fields(left_s), left_s)
        finally:
            self.members.forget(head.user)

    def own_answer(self, path: bytes, is_last: bool) -> bytes:
        """The whole answer to a question about the router's health.

        Raises:
            Unavailable: whether it is ready was asked, and it is not.
        """
        is_ready, why = self.is_ready()
        if path in READINESS and not is_ready:
            raise Unavailable(why)
        return plain(200, b"{}", [b"Content-Type: application/json"], is_last)

    def failed(self, instance: InstanceState, why: str, is_signal: bool) -> None:
        """Record that an instance failed a request.

        Args:
            instance: the one that failed.
            why: the metric label: "connect", "timeout", "lost", "bad_answer" or a status.
            is_signal: a signal's 503 may be a drain. The breaker does not count it; a health check tells soon.
        """
        self.metrics.failures.add(instance.name, why)
        if why == "503" and is_signal:
            self._watcher.check_soon()
        else:
            self.members.failed(instance, time.monotonic())

    def finished(self, handling: Handling, status: int, took_s: float) -> None:
        """Record the end of a request.

        Args:
            handling: how it was treated.
            status: that the client was sent; 499 if the client left.
            took_s: seconds from the request's first byte.
        """
        if handling is _FOLLOW:
            self.retries.earn()
        self.metrics.requests.add(handling, status)
        self.metrics.duration_s.observe(took_s, handling)

    def answered(self, one: InstanceState, handling: Handling, path: bytes, took_s: float, now_at: float) -> None:
        """Record an answer that is no failure.

        Args:
            one: the instance.
            handling: of the request.
            path: of the request.
            took_s: from sending the request to the answer's head.
            now_at: the instant, of the monotonic clock.
        """
        is_rank = handling is _FOLLOW
        one.answered(took_s, is_rank, now_at)
        if is_rank:
            self.answer_times.answered(path, took_s)

    def is_ready(self) -> tuple[bool, str]:
        """Whether the router wants requests, and the reason if it does not."""
        if self.is_draining:
            return False, "draining"
        now_at = time.monotonic()
        if not self.members.is_served(now_at):
            return False, "no instance is up"
        return True, ""

    @property
    def is_leaving(self) -> bool:
        """Whether a client's next request should come on a new connection."""
        return self.is_draining or self.taken_over.is_set()

    # ---- in the background

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Find and check the instances once; then keep that up to date until the block ends.

        Raises:
            ConfigError: the instances cannot be found.
        """
        timeout = aiohttp.ClientTimeout(total=self.config.health.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with following(self.hop.tls), aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            self._http = http
            await self._watcher.discover()
            await self._watcher.check(http)
            work = [self._watcher.keep_discovering(), self._watcher.keep_checking(http), self._keep_sweeping()]
            if self.access.ring.has_keys:
                work.append(self.access.ring.follow())
            tasks = [asyncio.create_task(one) for one in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for instance in self.members.instances.values():
                    instance.pool.close_idle()

    async def _keep_sweeping(self) -> None:
        """Close connections that are unused, or whose requests take too long."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_at = time.monotonic()
            self.connections.sweep(now_at)
            for instance in self.members.instances.values():
                instance.pool.close_idle(now_at - self.config.instance_idle_s)

    def observe(self) -> None:
        """Bring the gauges up to date; call it before they are read."""
        now_at = time.monotonic()
        for name, one in self.members.instances.items():
            self.metrics.up.set(name, one.takes_signals(now_at))
            self.metrics.gone.set(name, one.is_gone)
            self.metrics.share.set(name, one.breaker.share(now_at) if one.takes_ranks(now_at) else 0.0)
            self.metrics.instance_in_flight.set(name, one.in_flight)
        self.metrics.in_flight.set(self.in_flight)
        self.metrics.panic.set(self.members.trust(now_at).is_panic)
        self.metrics.keys.set(len(self.access.ring))
        self.metrics.keys_stale.set(self.access.ring.is_stale)
        self.metrics.kept_bytes.set(self.kept.num_bytes)
        self.metrics.max_kept_bytes.set(self.config.limits.max_kept_bytes)
        self.metrics.connections.set(len(self.connections))
        self.metrics.max_connections.set(self.config.limits.max_connections)
