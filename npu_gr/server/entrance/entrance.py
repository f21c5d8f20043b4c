"""What all connections of an instance share: the door, its pacing, and the limits of connections and bytes."""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import logging
import time
from collections import Counter
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web

from npu_gr.admission.door import Door
from npu_gr.core.errors import Refusal
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.door import Ended
from npu_gr.metrics.slo import is_promised
from npu_gr.server.auth.key_ring import KeyRing
from npu_gr.server.auth.rules import rules
from npu_gr.server.auth.throttle import Throttle
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance import answers, shed_library
from npu_gr.server.entrance.listener import Listener, State, Visitor, listeners
from npu_gr.server.entrance.pacing import Pacer
from npu_gr.server.entrance.refusals import Refusals
from npu_gr.server.entrance.shedding import Acceptor, Lendable, Shedder
from npu_gr.server.entrance.straight import Answer

log = logging.getLogger(__name__)


SWEEP_S = 0.25  # between two looks for connections whose time is over
# Of a request's time, what passes from the shedder's look at it to the door's, as long as the event loop is busy: one
# that goes up and just misses has cost Python a refusal
ON_ITS_WAY = 0.08


class Entrance:
    """Event loop only."""

    def __init__(self, config: ServerConfig, door: Door, metrics: Metrics, keys: KeyRing) -> None:
        """Nobody is connected yet.

        Args:
            config: the section `server`.
            door: admission control.
            metrics: where connections and refusals are counted.
            keys: in force.
        """
        loop = asyncio.get_running_loop()
        self.config = config
        self.door = door
        self.keys = keys
        self.kinds: dict[tuple[bytes, bytes], Kind[Any, Any]] = {
            (kind.method.encode(), path.encode()): kind
            for kind in KINDS.values()
            if not kind.must_finish
            for path in kind.paths
        }
        self._with_version = [
            (method, *path.partition(b"{version}")[::2], kind)
            for (method, path), kind in self.kinds.items()
            if b"{" in path
        ]
        self.straight: dict[tuple[bytes, bytes], Answer] = {}  # method, path -> what answers it; see `straight.py`
        self.open_routes = {
            (verb, path.encode())
            for (method, path), rule in rules().items()
            if rule.scope is None
            for verb in ((b"GET", b"HEAD") if method == "GET" else (method.encode(),))
        }
        self.pacer = Pacer(time.monotonic, lambda at, wake: loop.call_at(at, wake), lambda: door.waiting)
        # of callers over the rate of their key: no free place ends their pause
        self.rate_pacer = Pacer(time.monotonic, lambda at, wake: loop.call_at(at, wake), lambda: 0)
        self.refusals = Refusals(loop)
        self.shedder: Shedder | None = None  # made when a request was refused
        self.acceptors: list[Acceptor] = []  # of the public address, in clear
        self._loop = loop
        self._shed_library = shed_library.load()
        if self._shed_library is None:
            log.info("every refusal is Python's: the shedder was not built (`npu-gr build-ops --cpu`, on Linux)")
        self.wrong_keys = Throttle()
        self.listeners = listeners(config)
        public = self.listeners[0]
        self.has_proxies = bool(config.trusted_proxies)
        self.everything = Listener(  # for sockets that somebody else opens
            max_connections=public.max_connections, max_receiving_bytes=public.max_receiving_bytes
        )
        self._metrics = metrics
        self._connections: set[Visitor] = set()
        self._trusted = [ipaddress.ip_network(text) for text in config.trusted_proxies]
        self._uncounted: Counter[tuple[str, bool, Refusal]] = Counter()  # refusals that the metrics lack; is promised
        self._refused: dict[str, int] = {}  # by kind, since the last line of the log
        door.on_room = self._release
        metrics.door.observe(
            door,
            {state.value: partial(self.count, state) for state in State},
            lambda: self.num_paused,
            lambda: self.num_lent,
            lambda: self.receiving_bytes,
            lambda: self.pacer.refusals_per_s,
        )
        metrics.door.before_scrape = self._count_refusals

    def kind_at(self, method: bytes, path: bytes) -> Kind[Any, Any] | None:
        """Find the kind of a request; None = its route belongs to none that needs a place.

        Args:
            method: as it was sent.
            path: as it was sent, without the query.
        """
        kind = self.kinds.get((method, path))
        if kind is None and path.startswith(b"/v2/"):
            for other, begin, end, found in self._with_version:
                if method == other and path.startswith(begin) and path.endswith(end):
                    return found
        return kind

    def count(self, state: State) -> int:
        """Count the connections in a state."""
        return sum(connection.state is state for connection in self._connections)

    @property
    def num_paused(self) -> int:
        """Connections that are not read for a moment."""
        return len(self.pacer) + len(self.rate_pacer)

    @property
    def num_lent(self) -> int:
        """Connections that the shedder reads."""
        return 0 if self.shedder is None else len(self.shedder)

    @property
    def receiving_bytes(self) -> int:
        """Bytes of bodies that arrive or wait."""
        return sum(listener.receiving_bytes for listener in {one.listener for one in self._connections})

    # ---- connections

    def opened(self, connection: Visitor) -> None:
        """Take a new connection in; at the limit, the one that has been idle longest makes room for it."""
        listener = connection.listener
        self._connections.add(connection)
        listener.connections.add(connection)
        connection.is_trusted = self._is_trusted(connection)
        if self._room_for(listener) >= 0:
            return
        idle = [c for c in listener.connections if c.state in _MAKE_ROOM and c is not connection]
        if idle:
            # several at once: to look at all of them for each new connection would be what an attacker wants
            for old in heapq.nsmallest(1 + len(idle) // 64, idle, key=_last_to_go):
                self._metrics.door.ended(Ended.EVICTED)
                old.abort()  # it has nothing to read; over TLS a farewell would wait for its caller
        elif connection.transport is not None:  # else it is told after the handshake
            self._metrics.door.ended(Ended.REFUSED)
            connection.end(answers.TOO_MANY_CONNECTIONS)

    def _room_for(self, listener: Listener) -> int:
        """How many more connections a listener may have; below 0: it has too many."""
        newcomers = 0 if self.shedder is None or not listener.is_public else self.shedder.num_newcomers
        return listener.max_connections - len(listener.connections) - newcomers

    def not_secured(self) -> None:
        """Count a connection whose TLS handshake came to nothing."""
        self._metrics.door.ended(Ended.HANDSHAKE)

    def closed(self, connection: Visitor) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        connection.listener.connections.discard(connection)
        self.pacer.forget(connection)
        self.rate_pacer.forget(connection)

    def _is_trusted(self, connection: Visitor) -> bool:
        name = None if connection.transport is None else connection.transport.get_extra_info("peername")
        if not self._trusted or not isinstance(name, tuple):
            return False
        peer = ipaddress.ip_address(name[0])
        return any(peer in network for network in self._trusted)

    # ---- requests

    def room(self, kind: str, tenant: str, has_s: float, /) -> int:
        """Say how many requests of a kind and a tenant, with so many seconds, the door would take now."""
        return self.door.room(kind, tenant, has_s, ON_ITS_WAY)

    def refused(self, kind: Kind[Any, Any], has_s: float, reason: Refusal, num: int = 1) -> None:
        """Count refusals at the door; the metrics have them before the next scrape.

        Args:
            kind: of the requests.
            has_s: what their callers granted, from the last byte on.
            reason: the door's.
            num: of them.
        """
        promised = is_promised(has_s, self._metrics.requests.objectives[kind.name].threshold_s)
        self._uncounted[kind.name, promised, reason] += num

    def _count_refusals(self) -> None:
        for (kind, promised, reason), num in self._uncounted.items():
            self._metrics.requests.refused_at_door(kind, num, reason, is_promised=promised)
            self._refused[kind] = self._refused.get(kind, 0) + num
        self._uncounted.clear()

    def abandoned(self, kind: Kind[Any, Any], num: int = 1) -> None:
        """Count requests whose callers hung up while they waited at the door."""
        self._metrics.requests.abandoned(kind.name, num)

    def denied(self, kind: Kind[Any, Any] | None, status: int, after_s: float) -> None:
        """Count a request that was refused for its key before it was parsed."""
        if kind is None:
            self.broken(status)
        else:
            refusal = Refusal.RATE if status == HTTPStatus.TOO_MANY_REQUESTS else None
            self._metrics.requests.done(kind.name, kind.path, status, after_s, refusal=refusal)

    def broken(self, status: int) -> None:
        """Count a request that never became one."""
        self._metrics.requests.broken(status)

    def slow(self, connection: Visitor, answer: bytes = answers.BODY_TOO_LATE) -> None:
        """End a connection whose request did not come in its time."""
        self._metrics.door.ended(Ended.SLOW)
        self.broken(408)
        connection.end(answer)

    # ---- connections that are lent

    @property
    def can_shed(self) -> bool:
        """Whether there is a shedder to lend connections to."""
        return self._shed_library is not None

    @property
    def most_newcomers(self) -> int:
        """How many connections the shedder may have accepted."""
        public = self.listeners[0]
        return public.max_connections - len(public.connections)

    def shed(self, connection: Lendable, request: bytes | bytearray, kind: Kind[Any, Any], tenant: str) -> None:
        """Lend a connection whose request was refused at once, and refuse others like it as long as the door would.

        Args:
            connection: its own; `can_shed`.
            request: its bytes.
            kind, tenant: that the door decided by.
        """
        if self.shedder is None:
            assert self._shed_library is not None
            try:
                self.shedder = Shedder(self._shed_library, self._loop, self, self.pacer)
            except OSError as error:
                log.warning("every refusal is Python's from now on: %s", error)
                self._shed_library = None
                return
        self.shedder.learn(request, kind, tenant, connection.has_s)
        if not connection.is_lent:
            self.shedder.offer(connection)

    def accepts_no_more(self, acceptor: Acceptor) -> None:
        """Let nobody accept in the place of an acceptor any more."""
        if acceptor in self.acceptors:
            self.acceptors.remove(acceptor)
            if self.shedder is not None:
                self.shedder.accept_no_more(acceptor)

    def _release(self, places: int) -> None:
        self.pacer.release(places)
        if self.shedder is not None:
            self.shedder.release(places)

    def close(self) -> None:
        """Lend nothing any more."""
        if self.shedder is not None:
            self.shedder.close()
            self.shedder = None
        self._shed_library = None

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
                self.slow(connection, answer)


ENTRANCE = web.AppKey("entrance", Entrance)
_MAKE_ROOM = (State.IDLE, State.RECEIVING, State.HELD)  # for new connections at the limit


def _last_to_go(connection: Visitor) -> tuple[bool, bool, float]:
    """Order connections that make room: those with a wrong key first, those that were never served, the oldest."""
    return connection.state is not State.HELD, connection.served > 0, connection.began_at
