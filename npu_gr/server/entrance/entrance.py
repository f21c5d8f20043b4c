"""What all connections of an instance share: the door, its pacing, and the limits of connections and bytes."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import ipaddress
import logging
import resource
import time
from enum import StrEnum, auto
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from npu_gr.admission.door import Door
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.door import Ended
from npu_gr.metrics.registry.requests import ABANDONED
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance import answers
from npu_gr.server.entrance.pacing import Paced, Pacer

log = logging.getLogger(__name__)


class State(StrEnum):
    """Where a connection is with its present request."""

    IDLE = auto()  # nothing of a request is here
    RECEIVING = auto()  # a part of one is
    WAITING = auto()  # a whole one waits at the door
    SERVED = auto()  # aiohttp has it; the answer is not written yet


class Visitor(Paced, Protocol):
    """A connection, as the entrance sees it."""

    transport: asyncio.Transport | None
    state: State
    began_at: float  # when the present request began; while idle, since when it is idle
    served: int  # requests that were answered
    is_paced: bool

    @property
    def has_unread_answer(self) -> bool:
        """Whether an answer was written that its caller has not read."""
        ...

    def limit_at(self) -> tuple[float, bytes | None]:
        """Say until when it may be as it is, and with which answer it ends then."""
        ...

    def end(self, answer: bytes) -> None:
        """Write an answer and close."""
        ...

    def abort(self) -> None:
        """Close at once, whatever has not left."""
        ...


SWEEP_S = 0.25  # between two looks for connections whose time is over
KEPT_FILES = 128  # descriptors that are not for connections: stores, logs, listeners, models while they load


class Entrance:
    """Event loop only."""

    def __init__(self, config: ServerConfig, door: Door, metrics: Metrics) -> None:
        """Nobody is connected yet.

        Args:
            config: the section `server`.
            door: admission control.
            metrics: where connections and refusals are counted.
        """
        loop = asyncio.get_running_loop()
        self.config = config
        self.door = door
        self.kinds: dict[tuple[bytes, bytes], Kind[Any, Any]] = {
            (kind.method.encode(), kind.path.encode()): kind for kind in KINDS.values() if not kind.must_finish
        }
        self.pacer = Pacer(time.monotonic, lambda at, wake: loop.call_at(at, wake), lambda: door.waiting)
        self.max_connections = _max_connections(config.max_connections)
        self.receiving_bytes = 0
        self._metrics = metrics
        self._connections: set[Visitor] = set()
        self._trusted = [ipaddress.ip_network(text) for text in config.trusted_proxies]
        self._uncounted: dict[str, int] = {}  # refusals by kind that the metrics do not have yet
        self._refused: dict[str, int] = {}  # by kind, since the last line of the log
        door.on_room = self.pacer.release
        metrics.door.observe(
            door,
            {state.value: partial(self._count, state) for state in State},
            lambda: len(self.pacer),
            lambda: self.receiving_bytes,
            lambda: self.pacer.refusals_per_s,
        )
        metrics.door.before_scrape = self._count_refusals

    def _count(self, state: State) -> int:
        return sum(connection.state is state for connection in self._connections)

    # ---- connections

    def opened(self, connection: Visitor) -> None:
        """Take a new connection in; at the limit, the one that has been idle longest makes room for it."""
        self._connections.add(connection)
        connection.is_paced = not self._is_trusted(connection)
        if len(self._connections) <= self.max_connections:
            return
        idle = [c for c in self._connections if c.state in (State.IDLE, State.RECEIVING) and c is not connection]
        if idle:
            # several at once: to look at all of them for each new connection would be what an attacker wants
            for old in heapq.nsmallest(1 + len(idle) // 64, idle, key=lambda c: (c.served > 0, c.began_at)):
                self._metrics.door.ended(Ended.EVICTED)
                old.abort()  # it has nothing to read; over TLS a farewell would wait for its caller
        elif connection.transport is not None:  # else it is told after the handshake
            self._metrics.door.ended(Ended.REFUSED)
            connection.end(answers.TOO_MANY_CONNECTIONS)

    def not_secured(self) -> None:
        """Count a connection whose TLS handshake came to nothing."""
        self._metrics.door.ended(Ended.HANDSHAKE)

    def closed(self, connection: Visitor) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        self.pacer.forget(connection)

    def _is_trusted(self, connection: Visitor) -> bool:
        name = None if connection.transport is None else connection.transport.get_extra_info("peername")
        if not self._trusted or not isinstance(name, tuple):
            return False
        peer = ipaddress.ip_address(name[0])
        return any(peer in network for network in self._trusted)

    # ---- requests

    def reserve(self, num_bytes: int) -> bool:
        """Count bytes of bodies that arrive, or give them back (negative); False = there is no room for them."""
        if num_bytes > 0 and self.receiving_bytes + num_bytes > self.config.max_receiving_bytes:
            return False
        self.receiving_bytes += num_bytes
        return True

    def refused(self, kind: Kind[Any, Any]) -> None:
        """Count a refusal at the door; the metrics have it before the next scrape."""
        self._uncounted[kind.name] = self._uncounted.get(kind.name, 0) + 1

    def _count_refusals(self) -> None:
        for kind, num in self._uncounted.items():
            self._metrics.requests.refused_at_door(kind, num)
            self._refused[kind] = self._refused.get(kind, 0) + num
        self._uncounted.clear()

    def abandoned(self, kind: Kind[Any, Any], after_s: float) -> None:
        """Count a request whose caller hung up while it waited at the door."""
        self._metrics.requests.done(kind.name, kind.path, ABANDONED, after_s)

    def broken(self, status: int) -> None:
        """Count a request that never became one."""
        self._metrics.requests.broken(status)

    # ---- in the background

    async def watch(self) -> None:
        """Close connections whose time is over, and log refusals once a second, until cancelled."""
        logged_at = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            now_at = time.monotonic()
            self._sweep(now_at)
            self._count_refusals()
            if self._refused and now_at - logged_at >= 1.0:
                counts = ", ".join(f"{num} {KINDS[kind].plural}" for kind, num in self._refused.items())
                log.warning("refused at the door in %.1f s: %s", now_at - logged_at, counts)
                self._refused.clear()
                logged_at = now_at

    def _sweep(self, now_at: float) -> None:
        for connection in list(self._connections):
            limit_at, answer = connection.limit_at()
            if now_at < limit_at:
                continue
            if answer is None:
                self._metrics.door.ended(Ended.UNREAD if connection.has_unread_answer else Ended.IDLE)
                connection.abort()
            else:
                self._metrics.door.ended(Ended.SLOW)
                self.broken(408)
                connection.end(answer)


ENTRANCE = web.AppKey("entrance", Entrance)


def _max_connections(wanted: int) -> int:
    """How many connections the process may have open by its limit of descriptors, raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + KEPT_FILES
    if soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = max(16, min(wanted, soft - KEPT_FILES))
    if allowed < wanted:
        log.warning("server.max_connections: %d, but the limit of open files allows %d", wanted, allowed)
    return allowed
