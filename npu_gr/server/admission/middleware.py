"""Admission over HTTP: receive the body, ask the controller before anything is parsed, answer 429 or call the handler.

    head is here --> its whole body, too? -- yes --> admission --> handler
                          |                            ^
                          no: would it be rejected? 429 |
                          '-- receive, in its time -----'

A request whose body is still on its way holds no place, only the bytes that have come. So no limit
is held by what a client says, only by what it has sent.

A rejected client that retries at once would cost more than it gets. So rejections to clients that
connect directly wait for so long that all of them together leave at most `REJECTIONS_PER_S` times a
second. A proxy's connections carry other clients' requests and are answered at once; its own queue
paces. Proxies are `server.trusted_proxies`, and who asks the agent how many requests fit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import re
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

from aiohttp import web

from npu_gr.core.errors import BodyTooSlow, Overloaded, Rejection, TooLarge, Unavailable
from npu_gr.core.kinds import Kind
from npu_gr.handlers.base import AdmissionControl, HeldPermit
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.slo import is_promised
from npu_gr.server.admission.controller import MESSAGES
from npu_gr.server.config import ServerConfig

log = logging.getLogger(__name__)

REJECTIONS_PER_S = 1400  # to clients that connect directly
MAX_PAUSED = 2000  # rejections that wait at once; one more is answered at once
MAX_PAUSE_S = 0.25
LOG_S = 1.0  # between two lines about rejections
SEARCHED_BYTES = 2048  # of each end of a body, for its tenant
# of the objective: what a proxy sends at once; its own queue takes most of the rest
AGENT_SHARE = 0.12
AGENT_LIMITS = (2, 64)  # requests
AGENT_MEMORY_S = 5.0  # a proxy asks ten times a second
BODY = web.RequestKey("body", bytes)
REJECTED = web.RequestKey("rejected", bool)  # by admission, which has counted it
COUNTED_BYTES = web.RequestKey("counted_bytes", int)  # of the body, in `Admission.receiving_bytes`
_JSON_TENANT = re.compile(rb'"tenant"\s*:\s*"([^"\\]{1,256})"')
# and the head of its value
_MSGPACK_TENANT = re.compile(rb"\xa6tenant([\xa0-\xbf]|\xd9.)", re.DOTALL)


class Admission:
    """What the requests of one instance pass before they are parsed. Event loop only."""

    def __init__(
        self, controller: AdmissionControl, config: ServerConfig, metrics: Metrics
    ) -> None:
        """Start empty.

        Args:
            controller: decides.
            config: bounds bodies and budgets.
            metrics: where rejections are counted.
        """
        self._controller = controller
        self._config = config
        self._metrics = metrics
        self._trusted = [ipaddress.ip_network(text) for text in config.trusted_proxies]
        self._asked_at: dict[str, float] = {}  # address -> when it last asked the agent
        self._counts: Counter[str] = Counter()  # rejections by kind, since the last line of the log
        self.receiving_bytes = 0  # of bodies that arrive, wait or are served
        self.paused = 0  # rejections that wait
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
    ) -> None:
        """Receive the body of a request into `request[BODY]`; `release` gives its bytes back.

        Args:
            request: whose head is here.
            kind: that needs admission; None = none.
            tenant: of the key; "" = the body names it.
            granted_s: the time budget of the client.
            is_counted: its bytes count against `max_receiving_bytes`; those of operators do not, so
                that clients cannot shut them out.

        Raises:
            TooLarge: it is over `max_body_bytes`. BodyTooSlow: it did not come within the budget or
                `body_timeout_s`.
            Unavailable: all bodies together are over `max_receiving_bytes`.
            Overloaded: it is not here yet, and the request would be rejected if it were.
        """
        limit = self._config.max_body_bytes
        if (request.content_length or 0) > limit:
            raise TooLarge(
                f"the body is over server.max_body_bytes: {request.content_length} bytes of {limit}"
            )
        is_here = request.content.is_eof()
        if kind is not None and not is_here:
            now_at = time.monotonic()
            if self._controller.would_reject(kind.name, tenant, now_at, granted_s):
                await self._rejected(request, kind, granted_s, Rejection.LATE)
                raise Overloaded(MESSAGES[Rejection.LATE])
        timer = (
            nullcontext()
            if is_here
            else asyncio.timeout(min(granted_s, self._config.body_timeout_s))
        )
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with timer:
                while chunk := await request.content.readany():
                    chunks.append(chunk)
                    num_bytes += len(chunk)
                    self.receiving_bytes += len(chunk) * is_counted
                    if num_bytes > limit:
                        raise TooLarge(
                            f"the body is over server.max_body_bytes: more than {limit} bytes"
                        )
                    if is_counted and self.receiving_bytes > self._config.max_receiving_bytes:
                        raise Unavailable(
                            "the bodies that arrive now are over server.max_receiving_bytes"
                        )
        except BaseException as error:
            self.receiving_bytes -= num_bytes * is_counted
            if not isinstance(error, TimeoutError):
                raise
            raise BodyTooSlow(
                "the body did not arrive within the request's time budget or server.body_timeout_s"
            ) from None
        request[BODY] = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        request[COUNTED_BYTES] = num_bytes * is_counted

    def release(self, request: web.Request) -> None:
        """Give the bytes of a body back; later calls do nothing."""
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
            request: whose body is here.
            kind: of it.
            tenant: of the key; "" = the body names it.
            arrived_at: instant at which its body was here.
            budget_s: what is left of the client's budget at that instant.

        Raises:
            Overloaded: it could not be answered in time; the metrics have it.
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
        request[REJECTED] = True
        await self.pause(request)

    async def pause(self, request: web.Request) -> None:
        """Let a rejection wait for its turn, where its client connects directly."""
        self.release(request)
        asked_at = self._asked_at.get(request.remote or "", -AGENT_MEMORY_S)
        if (
            self.paused >= MAX_PAUSED
            or self.is_proxy(request)
            or time.monotonic() - asked_at < AGENT_MEMORY_S
        ):
            return
        self.paused += 1
        try:
            wait_s = min(MAX_PAUSE_S, (self.paused + self._controller.waiting) / REJECTIONS_PER_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))  # noqa: S311  (spread)
        finally:
            self.paused -= 1

    def is_proxy(self, request: web.Request) -> bool:
        """Whether a request comes from one of `server.trusted_proxies`, which carry other clients' requests."""
        peer = None if request.transport is None else request.transport.get_extra_info("peername")
        if not self._trusted or not isinstance(peer, tuple):
            return False
        return any(ipaddress.ip_address(peer[0]) in network for network in self._trusted)

    def agent_line(self, asker: str, *, is_ready: bool) -> bytes:
        """Return what HAProxy's agent-check is told: how many requests to send at once, or to send none.

        HAProxy keeps those over the limit in its own queue. The limit follows the learnt service
        time, so a slower core is sent fewer at once.

        Args:
            asker: the address of the proxy; rejections to it are not delayed.
            is_ready: the instance accepts work.
        """
        now_at = time.monotonic()
        if asker not in self._asked_at:  # the only time at which it grows
            self._asked_at = {
                one: at for one, at in self._asked_at.items() if now_at - at < AGENT_MEMORY_S
            }
        self._asked_at[asker] = now_at
        if not is_ready:
            return b"drain\n"
        return b"up ready maxconn:%d\n" % self._controller.work.proxy_limit(
            AGENT_SHARE, *AGENT_LIMITS
        )

    async def watch(self) -> None:
        """Log rejections once a second, until cancelled."""
        while True:
            await asyncio.sleep(LOG_S)
            if self._counts:
                counts = ", ".join(f"{num} {plural}" for plural, num in self._counts.items())
                log.warning("admission rejected %s in %.1f s", counts, LOG_S)
                self._counts.clear()


def named_tenant(body: bytes) -> str:
    """Find the tenant that a body names, without parsing it; "" = it names none, or not at either end.

    It decides whose turn a request takes, and nothing else.
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
