"""Admission over HTTP: receive the body, ask the controller, answer 429 or call the handler.

Nothing is parsed before a request is admitted.

    head received --> body complete? -- yes --> admission --> handler
                          |                         ^
                          no: would be rejected? 429 |
                          '-- receive within budget -'

A request whose body is still arriving holds no place, only the bytes received so far. So a client
cannot occupy a place by announcing a body that it does not send. Where the bodies of all clients
are over `max_receiving_bytes`, the client that holds most of those still arriving loses one. It
gets 429, which the objectives do not count: it is over its own share.

A rejected client that retries at once would cost more than it gets. Rejections to clients that
connect directly are therefore delayed so that at most `REJECTIONS_PER_S` leave in a second. Proxies
get theirs at once: a proxy's connection carries other clients' requests, and its own queue paces
them. Proxies are `server.trusted_proxies`, and the addresses that ask HAProxy's agent-check.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import re
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from typing import Any

from aiohttp import web

from npu_gr.core.errors import (
    BodyTooSlow,
    NpuGrError,
    Overloaded,
    Rejection,
    TooLarge,
    Unavailable,
)
from npu_gr.core.health import Worker
from npu_gr.core.kinds import Kind
from npu_gr.handlers.base import AdmissionControl, HeldPermit
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.slo import is_promised
from npu_gr.server.admission.controller import MESSAGES
from npu_gr.server.config import ServerConfig

log = logging.getLogger(__name__)

REJECTIONS_PER_S = 1400  # to clients that connect directly
MAX_PAUSED = 2000  # rejections that are delayed at once; one more is answered at once
MAX_PAUSE_S = 0.25
LOG_S = 1.0  # between two lines about rejections
PIECE_BYTES = 4096  # of a chunked body that are read at once: its chunks may be of a byte
SEARCHED_BYTES = 2048  # at each end of a body, for the name of its tenant
# Fraction of the objective that the requests take which a proxy sends at once; most of the rest is
# for its own queue.
AGENT_SHARE = 0.12
AGENT_LIMITS = (2, 64)  # smallest and largest number of requests that a proxy sends at once
AGENT_MEMORY_S = 5.0  # an address counts as a proxy for so long; a proxy asks ten times a second
HOLDS_MOST = (
    "the bodies that this client sends hold most of server.max_receiving_bytes, and there is no "
    "room for more"
)
ENDED_AT = 0.0  # deadline of a body that made room for those of other clients
BODY = web.RequestKey("body", bytes)
COUNTED = web.RequestKey("counted", bool)  # the metrics have its end
COUNTED_BYTES = web.RequestKey("counted_bytes", int)  # of the body, in `Admission.receiving_bytes`
_JSON_TENANT = re.compile(rb'"tenant"\s*:\s*"([^"\\]{1,256})"')
# the key, and the msgpack header of its value
_MSGPACK_TENANT = re.compile(rb"\xa6tenant([\xa0-\xbf]|\xd9.)", re.DOTALL)


class Admission:
    """Receives and admits the requests of one instance. Event loop only."""

    def __init__(
        self, controller: AdmissionControl, config: ServerConfig, metrics: Metrics
    ) -> None:
        """Start empty."""
        self._controller = controller
        self._config = config
        self._metrics = metrics
        self._trusted = [ipaddress.ip_network(text) for text in config.trusted_proxies]
        self._asked_at: dict[str, float] = {}  # address -> instant of its last agent-check
        self._counts: Counter[str] = Counter()  # rejections by kind since the last log line
        self.receiving_bytes = 0  # bodies that arrive, are queued or are served
        # bytes of the bodies that still arrive, by client: the key's tenant, or an address
        self._arriving: defaultdict[str, dict[asyncio.Timeout, int]] = defaultdict(dict)
        self.paused = 0  # rejections that are delayed now
        metrics.admission.observe(
            controller.work, lambda: self.paused, lambda: self.receiving_bytes
        )

    async def receive(
        self,
        request: web.Request,
        kind: Kind[Any, Any] | None,
        tenant: str,
        granted_s: float,
        *,
        is_counted: bool = True,
        most_bytes: int = 0,
    ) -> None:
        """Receive the body of a request into `request[BODY]`; `release` gives its bytes back.

        Args:
            request: Request of which the head has been read.
            kind: Kind of the request; None = it needs no admission.
            tenant: Tenant of the API key; "" = the body names it.
            granted_s: The client's time limit in seconds.
            is_counted: Count the bytes against `max_receiving_bytes`. Operators' bodies are not
                counted, so that clients cannot lock operators out.
            most_bytes: Limit of the route; 0 = `max_body_bytes`.

        Raises:
            TooLarge: The body is over its limit.
            BodyTooSlow: The body did not arrive within the time limit or `body_timeout_s`.
            Unavailable: All bodies together are over `max_receiving_bytes`, and no client holds
                more than the others.
            Overloaded: The body has not arrived, and the request would be rejected if it had; or
                its client holds most of `max_receiving_bytes`, and there is no room.
        """
        limit = most_bytes or self._config.max_body_bytes
        of = "of this route" if most_bytes else "server.max_body_bytes"
        if (request.content_length or 0) > limit:
            raise TooLarge(
                f"the body has {request.content_length} bytes; the limit {of} is {limit}"
            )
        is_here = request.content.is_eof()
        if kind is not None and not is_here:
            now_at = time.monotonic()
            if self._controller.would_reject(kind.name, tenant, now_at, granted_s):
                await self._rejected(request, kind, granted_s, Rejection.LATE)
                raise Overloaded(MESSAGES[Rejection.LATE])
        timer = None if is_here else asyncio.timeout(min(granted_s, self._config.body_timeout_s))
        client = tenant or request.remote or ""
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with timer or nullcontext():
                while chunk := await _received(request):
                    chunks.append(chunk)
                    num_bytes += len(chunk)
                    self.receiving_bytes += len(chunk) * is_counted
                    if num_bytes > limit:
                        raise TooLarge(f"the body is larger than the limit {of}, {limit}")
                    if timer is not None and is_counted:
                        self._arriving[client][timer] = num_bytes
                    if (
                        is_counted
                        and self.receiving_bytes > self._config.max_receiving_bytes
                        and not self._makes_room(client)
                    ):
                        raise self._no_room(request, client, num_bytes if is_here else 0)
        except BaseException as error:
            self.receiving_bytes -= num_bytes * is_counted
            if not isinstance(error, TimeoutError):
                raise
            if timer is not None and timer.when() == ENDED_AT:
                raise Overloaded(HOLDS_MOST, reason=Rejection.SHARE) from None
            raise BodyTooSlow(
                "the body did not arrive within the request's time budget or server.body_timeout_s"
            ) from None
        finally:
            if timer is not None and client in self._arriving:
                self._arriving[client].pop(timer, None)
                if not self._arriving[client]:
                    del self._arriving[client]
        request[BODY] = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        request[COUNTED_BYTES] = num_bytes * is_counted

    def _no_room(self, request: web.Request, client: str, num_bytes: int) -> NpuGrError:
        """Return the error of a body for which there is no room; `num_bytes` have just arrived.

        A client that holds more than half of the room by itself is over its own share: that is no
        failure of the instance. A proxy holds the bodies of many clients.
        """
        limit = self._config.max_receiving_bytes
        held = sum(self._arriving.get(client, {}).values()) + num_bytes
        if held > limit / 2 and not self._is_of_many(request):
            return Overloaded(HOLDS_MOST, reason=Rejection.SHARE)
        return Unavailable(
            f"the bodies being received are over the limit server.max_receiving_bytes, {limit}"
        )

    def _makes_room(self, client: str) -> bool:
        """End the largest body of the client that holds most, unless it is this client.

        Returns:
            Whether one was ended; its bytes are free a moment later.
        """
        sizes = {
            name: {one: size for one, size in arriving.items() if is_open(one)}
            for name, arriving in self._arriving.items()
        }
        held = {name: sum(own.values()) for name, own in sizes.items()}
        most = max(held, key=held.__getitem__, default=client)
        if held.get(most, 0) <= held.get(client, 0):
            return False
        # in the past, so its `receive` raises at once
        max(sizes[most], key=sizes[most].__getitem__).reschedule(ENDED_AT)
        return True

    def release(self, request: web.Request) -> None:
        """Release the bytes of a body; later calls do nothing."""
        self.receiving_bytes -= request.get(COUNTED_BYTES, 0)
        request[COUNTED_BYTES] = 0
        request[BODY] = b""

    async def enter(
        self,
        request: web.Request,
        kind: Kind[Any, Any],
        tenant: str,
        arrived_at: float,
        budget_s: float,
    ) -> HeldPermit:
        """Wait until the request is admitted.

        Args:
            request: Request with its body in `request[BODY]`.
            kind: Kind of the request.
            tenant: Tenant of the API key; "" = the body names it.
            arrived_at: Instant at which the body was complete.
            budget_s: Seconds of the client's time limit that were left at that instant.

        Raises:
            Overloaded: The request would miss its SLO; it is counted in the metrics.
        """
        try:
            return await self._controller.enter(
                kind.name, tenant or named_tenant(request[BODY]), arrived_at, budget_s
            )
        except Overloaded as error:
            await self._rejected(request, kind, budget_s, error.reason)
            raise

    async def _rejected(
        self, request: web.Request, kind: Kind[Any, Any], budget_s: float, reason: Rejection
    ) -> None:
        promised = is_promised(budget_s, self._metrics.requests.objectives[kind.name].threshold_s)
        self._metrics.requests.rejected_at_admission(kind.name, 1, reason, is_promised=promised)
        self._counts[kind.plural] += 1
        request[COUNTED] = True
        await self.pause(request)

    async def pause(self, request: web.Request) -> None:
        """Delay a rejection unless it goes to a proxy; see the module's docstring."""
        self.release(request)
        if self.paused >= MAX_PAUSED or self._is_of_many(request):
            return
        self.paused += 1
        try:
            wait_s = min(MAX_PAUSE_S, (self.paused + self._controller.waiting) / REJECTIONS_PER_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))  # noqa: S311  (spread)
        finally:
            self.paused -= 1

    def _is_of_many(self, request: web.Request) -> bool:
        """Whether the address of a request sends those of many clients: a proxy of either kind."""
        asked_at = self._asked_at.get(request.remote or "", -AGENT_MEMORY_S)
        return time.monotonic() - asked_at < AGENT_MEMORY_S or self.is_proxy(request)

    def is_proxy(self, request: web.Request) -> bool:
        """Whether a request comes from one of `server.trusted_proxies`."""
        peer = None if request.transport is None else request.transport.get_extra_info("peername")
        if not self._trusted or not isinstance(peer, tuple):
            return False
        return any(ipaddress.ip_address(peer[0]) in network for network in self._trusted)

    def agent_asked(self, asker: str) -> None:
        """Note that a proxy has asked; rejections to its address are not delayed."""
        now_at = time.monotonic()
        if asker not in self._asked_at:  # drop old entries only when one is added
            self._asked_at = {
                one: at for one, at in self._asked_at.items() if now_at - at < AGENT_MEMORY_S
            }
        self._asked_at[asker] = now_at

    def agent_line(self, *, is_ready: bool) -> bytes:
        """Return the answer to HAProxy's agent-check: drain, or how many requests to send at once.

        HAProxy queues the requests over that limit itself. The limit follows the service-time
        estimate, so a slower instance gets fewer at once.
        """
        if not is_ready:
            return b"drain\n"
        return b"up ready maxconn:%d\n" % self._controller.work.proxy_limit(
            AGENT_SHARE, *AGENT_LIMITS
        )

    async def watch(self, worker: Worker) -> None:
        """Log rejections once a second, until cancelled."""
        async for _ in worker.turns(LOG_S):
            if self._counts:
                counts = ", ".join(f"{num} {plural}" for plural, num in self._counts.items())
                log.warning("admission control rejected %s in %.1f s", counts, LOG_S)
                self._counts.clear()


async def _received(request: web.Request) -> bytes:
    """Return more of a body; b"" = it has ended."""
    if request.content_length is not None:
        return await request.content.readany()
    # what a chunk costs does not depend on its length, so one turn of the loop takes a few thousand
    await asyncio.sleep(0)
    return await request.content.read(PIECE_BYTES)


def is_open(timer: asyncio.Timeout) -> bool:
    """Whether a body still arrives: its time is not over, and `_makes_room` has not ended it."""
    return not timer.expired() and timer.when() != ENDED_AT


def named_tenant(body: bytes) -> str:
    """Find the tenant that a body names by searching its first and last bytes, without parsing it.

    The result decides the tenant's turn in the queue and nothing else.

    Returns:
        The name, or "" where neither end of the body has it.
    """
    ends = (
        body if len(body) <= 2 * SEARCHED_BYTES else body[:SEARCHED_BYTES] + body[-SEARCHED_BYTES:]
    )
    if ends[:1] == b"{":
        found = _JSON_TENANT.search(ends)
        return found[1].decode(errors="replace") if found else ""
    found = _MSGPACK_TENANT.search(ends)
    if found is None:
        return ""
    num_bytes = found[1][-1] if found[1][0] == 0xD9 else found[1][0] & 0x1F
    return ends[found.end() : found.end() + num_bytes].decode(errors="replace")
