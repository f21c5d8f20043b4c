"""One connection of a client: its requests are answered one after the other, in the order in which they came."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from npu_gr.router.alarm import NEVER, Alarm
from npu_gr.router.answers import CONTINUE, Refused
from npu_gr.router.exchange import Exchange
from npu_gr.router.reader import RequestReader
from npu_gr.router.request import RequestHead
from npu_gr.router.router import Router
from npu_gr.server.tls_listener import bound_read_ahead

_MAX_PIPELINED = 16
_LINGER_S = 2.0  # after an answer that came before the whole request: time for the client to read it


class ClientConnection(asyncio.Protocol):
    """Implements `Downstream` and `Sweepable`.

    `_exchanges[0]` is being answered; the client has sent the ones behind it without waiting. A client that closes its
    sending side has left, even if it would still read (`asyncio.Protocol.eof_received` closes the connection).
    """

    def __init__(self, router: Router) -> None:
        self.is_held = False  # the client reads more slowly than it is written to
        self._router = router
        self._exchanges: deque[Exchange] = deque()
        self._reader = RequestReader(router.config.limits, router.once, self._on_head)
        self._alarm = Alarm(self._tick)
        self.wake = self._alarm.set
        self._transport: asyncio.Transport | None = None
        self._abort_handshake: Callable[[], object] | None = None
        self._is_reading_paused = False
        self._idle_since_at = time.monotonic()
        self._lingers_at = 0.0  # since when it is read only so that the client reads the last answer; 0: it is not

    # ---- what the listener calls while TLS shakes hands

    def accepted(self, abort: Callable[[], object]) -> None:
        """Count the connection already; over the limit it ends here, because there is no way yet to say why."""
        self._abort_handshake = abort
        if not self._router.connections.add(self):
            self._router.metrics.refused_connections.add()
            abort()

    def not_secured(self) -> None:
        """Forget the connection."""
        self._router.connections.remove(self)

    # ---- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or answer 503 if there are too many."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._abort_handshake = None
        bound_read_ahead(transport)
        if not self._router.connections.add(self):
            self._router.metrics.refused_connections.add()
            self._refuse(Refused(503, "the router is at its limit of connections"))

    def data_received(self, data: bytes) -> None:
        """Read requests, and let the one in front go on."""
        try:
            self._reader.feed(data)
        except Refused as error:
            self._refuse(error)
        if self._exchanges:
            self._exchanges[0].push()
            if len(self._exchanges) > _MAX_PIPELINED:
                self.pause(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all work for the client."""
        self._router.connections.remove(self)
        self._alarm.cancel()
        while self._exchanges:
            self._exchanges.popleft().cancel()
        self._transport = None

    def pause_writing(self) -> None:
        """Hold the answer back: the client reads too slowly."""
        self.is_held = True
        if self._exchanges:
            self._exchanges[0].hold_answer(True)

    def resume_writing(self) -> None:
        """Let the answer go on."""
        self.is_held = False
        if self._exchanges:
            self._exchanges[0].hold_answer(False)

    # ---- what the reader calls

    def _on_head(self, head: RequestHead) -> Exchange:
        """A request's head is complete: queue the request, and decide whether it may be made."""
        exchange = Exchange(self._router, self, head)
        self._exchanges.append(exchange)
        wants_body = exchange.admit()
        if wants_body and head.seen.get(b"expect", b"").lower() == b"100-continue" and len(self._exchanges) == 1:
            self.write(CONTINUE)
        return exchange

    def _refuse(self, error: Refused) -> None:
        """Answer what is being read with an error when it is its turn, then close."""
        self._lingers_at = time.monotonic()
        head, exchange = self._reader.drop()
        if exchange is None:
            exchange = Exchange(self._router, self, head or RequestHead(began_at=self._lingers_at))
            self._exchanges.append(exchange)
        exchange.refuse(error)
        if self._exchanges and self._exchanges[0] is exchange:
            exchange.push()

    # ---- what the exchanges call

    def write(self, data: bytes) -> None:
        """Send to the client."""
        if self._transport is not None:
            self._transport.write(data)

    def pause(self, is_paused: bool) -> None:
        """Stop reading, or (False) read on; what has already arrived is kept."""
        if self._transport is not None and is_paused != self._is_reading_paused:
            self._is_reading_paused = is_paused
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def finished(self, is_last: bool) -> None:
        """The request in front is answered completely: close the connection, or go on with the next request."""
        exchange = self._exchanges.popleft()
        if is_last:
            self._reader.drop()
            if not exchange.body.is_whole:
                self._lingers_at = time.monotonic()
                self.pause(False)
            self.end()
            return
        self._idle_since_at = time.monotonic()
        if self._is_reading_paused:
            self.pause(False)
        if self._exchanges:
            self._exchanges[0].push()

    def _tick(self, now_at: float) -> float:
        """Let every exchange do what is due. Returns the next instant for which one waits."""
        return min([exchange.tick(now_at) for exchange in list(self._exchanges)], default=NEVER)

    def abort(self) -> None:
        """Close at once: the answer cannot be completed."""
        if self._transport is not None:
            self._transport.abort()

    # ---- what the router calls

    def end(self) -> None:
        """Close after what was written; requests that wait for their turn are dropped."""
        while self._exchanges:
            self._exchanges.popleft().cancel()
        if self._transport is None:
            if self._abort_handshake is not None:
                self._abort_handshake()
            return
        if self._lingers_at and self._transport.can_write_eof():
            self._transport.write_eof()  # closing now would reset the connection while the client still sends
        else:
            self._transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, not even the beginning of one."""
        return not self._exchanges and self._reader.head is None

    def sweep(self, now_at: float) -> None:
        """End what takes too long; called once a second."""
        config = self._router.config
        head = self._reader.head
        if self._lingers_at and now_at - self._lingers_at > _LINGER_S:
            self.abort()
        elif head is not None and now_at - head.began_at > config.header_timeout_s:
            self._refuse(Refused(408, f"headers: not complete after {config.header_timeout_s:g} s"))
        elif self.is_idle and now_at - self._idle_since_at > config.idle_s:
            self.end()
