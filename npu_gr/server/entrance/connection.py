"""One connection: it collects a request's bytes, asks the door, and hands them to aiohttp when the request is let in.

    idle --> receiving --> waiting --> served --> idle
               |             |
               |             '-- 429, written here: no request object, no task, no trace
               '-- 401, 403, 408, 413

aiohttp sees whole requests only. So a body that arrives slowly holds no place, a request that is refused was never
parsed, and a handler never waits for its caller. The bytes that wait are in `incoming.py`. What took a place goes the
straight way (`straight.py`), everything else through aiohttp's own loop (both in `answering.py`). The key is checked as
soon as the head is here: whoever has none sends no body. Requests that the table of kinds does not have (health,
metrics, administration) need no place.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from npu_gr.admission.door import Slot, Ticket
from npu_gr.core.errors import BadRequest, Forbidden, Overloaded, Refusal, Unauthorized
from npu_gr.core.kinds import Kind, Priority
from npu_gr.server.auth.keys import ANYBODY, Key
from npu_gr.server.entrance import answers
from npu_gr.server.entrance.answering import Answering
from npu_gr.server.entrance.entrance import Entrance
from npu_gr.server.entrance.framing import Head, granted_s, tenant_of
from npu_gr.server.entrance.incoming import HeadTooLarge, Incoming
from npu_gr.server.entrance.kernel_socket import KernelSocket
from npu_gr.server.entrance.listener import Listener, State
from npu_gr.server.entrance.pacing import RETRY_S
from npu_gr.server.entrance.shed_library import UP_BYTES, UP_RETRIES
from npu_gr.server.entrance.shedding import Newcomer
from npu_gr.server.tls_listener import bound_read_ahead

REFUSED_AT_ONCE = 32  # pipelined requests; then the loop goes round, so that others are read, too
READ_AHEAD_BYTES = 65_536  # of pipelined requests behind the one that is served


class Connection(Answering):
    """The protocol object of one connection."""

    __slots__ = (
        "_abort_handshake",
        "_came_at",
        "_came_in_pieces",
        "_close_when_idle",
        "_closed_at",
        "_held",
        "_idle",
        "_incoming",
        "_is_paused",
        "_is_shed",
        "_kernel",
        "_kind",
        "_read_at",
        "_request",
        "_reserved_bytes",
        "_ticket",
        "_was_paused",
        "_wire",
        "at_once_since_at",
        "began_at",
        "has_s",
        "is_lent",
        "is_trusted",
        "key",
        "listener",
        "newcomer",
        "refused_at",
        "slot",
        "whole_at",
    )

    def __init__(self, manager: web.Server, entrance: Entrance, listener: Listener, **kwargs: Any) -> None:
        """Nothing has come yet.

        Args:
            manager: of aiohttp.
            entrance: what all connections share.
            listener: the address that it came to.
            kwargs: of aiohttp's handler.
        """
        super().__init__(manager, entrance, **kwargs)
        self.listener = listener
        self.began_at = 0.0  # when the first byte of the present request came; while idle, since when it is idle
        self.whole_at = 0.0  # when its last byte came
        self.has_s = 0.0  # what the caller granted, from then on
        self.slot: Slot | None = None  # of the request that is served
        self.key: Key | None = None  # of the present request; None = it needs none, or its head is not whole
        self.refused_at = float("-inf")
        self.at_once_since_at = 0.0
        self.is_trusted = False
        self._is_paused = False
        self._was_paused = False  # before the request that comes now
        self._came_at = float("inf")  # when the shedder read the request that comes now
        self._came_in_pieces = False  # the request did
        self.is_lent = False  # to the shedder, which reads in our place
        self._is_shed = False  # a request like the present one may be refused without asking, once it was refused
        self.newcomer: Newcomer | None = None  # what the shedder says of it, until it is made
        self._incoming = Incoming()
        self._kind: Kind[Any, Any] | None = None
        self._request: bytes | bytearray = b""  # while it waits
        self._ticket: Ticket | None = None
        self._reserved_bytes = 0
        self._held: asyncio.TimerHandle | None = None  # of the 401
        self._close_when_idle = False
        self._idle: asyncio.Future[None] | None = None
        self._closed_at: float | None = None
        self._abort_handshake: Callable[[], object] | None = None  # while TLS shakes hands
        self._wire: asyncio.Transport | None = None  # the transport, also after aiohttp has let go of it
        self._read_at = 0.0  # when the first byte of the present request was read
        self._kernel = KernelSocket(None)  # of the transport

    # ---- the connection

    def accepted(self, abort: Callable[[], object]) -> None:
        """TLS shakes hands: the connection counts already, and has as long as for the head of a request."""
        self.began_at = time.monotonic()
        self._abort_handshake = abort
        self._entrance.opened(self)

    def not_secured(self) -> None:
        """The handshake came to nothing; if it was aborted, the entrance knows why."""
        if self._abort_handshake is not None:
            self._entrance.not_secured()
        self._entrance.closed(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._abort_handshake = None
        bound_read_ahead(transport)
        self.began_at = self.at_once_since_at = time.monotonic()
        self._wire = cast("asyncio.Transport", transport)
        is_tls = transport.get_extra_info("sslcontext") is not None
        self._kernel = KernelSocket(transport.get_extra_info("socket"), is_tls=is_tls)
        self._entrance.opened(self)
        newcomer, self.newcomer = self.newcomer, None
        if newcomer is not None:
            self._go_on_with(newcomer)

    def _go_on_with(self, newcomer: Newcomer) -> None:
        """Go on where the shedder has left off, which accepted the connection."""
        if newcomer.why == UP_BYTES:
            self.read(newcomer.data, newcomer.came_at)
        elif newcomer.why == UP_RETRIES:
            self.refused_at, self.at_once_since_at = time.monotonic(), float("-inf")
            self._entrance.pacer.pause(self)
        elif newcomer.data and self.transport is not None:
            self.transport.write(newcomer.data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._entrance.closed(self)
        if self.is_lent and self._entrance.shedder is not None:
            self.is_lent = False
            self._entrance.shedder.forget(self, self.descriptor)
        if self._ticket is not None:
            assert self._kind is not None
            self._entrance.door.cancel(self._ticket)
            self._entrance.abandoned(self._kind)
            self._ticket = None
        if self._serving is not None:
            self._serving.cancel()
        if self._held is not None:
            self._held.cancel()
        self._incoming.data = b""
        self._become_idle()
        self._kernel.detach()
        super().connection_lost(exc)

    def _withdraw(self) -> None:
        """Before it is closed: the shedder reads it no more."""
        if self.is_lent and self._entrance.shedder is not None:
            self._entrance.shedder.withdraw(self)

    def close(self) -> None:
        """Close the connection when the request that is here has been answered."""
        self._withdraw()
        if self.state is State.IDLE:
            super().close()
        elif self._held is not None:
            self._held.cancel()
            self.end(answers.UNAUTHORIZED)
        else:
            self._close_when_idle = True

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109  (aiohttp's signature)
        """Let the request that is here be answered first, if that takes no longer than `timeout` seconds."""
        self._withdraw()
        if self.state is not State.IDLE:
            self._close_when_idle = True
            self._idle = self._loop.create_future()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle, timeout)
        if self._serving is not None:
            self._serving.cancel()
        await super().shutdown(timeout)

    def pause(self) -> None:
        """Stop reading, for the pacer; requests that were read already wait as well."""
        self._is_paused = True
        self._pause_transport_reading()

    def resume(self) -> None:
        """Read again, for the pacer."""
        self._is_paused = False
        self._was_paused = True
        self._resume_transport_reading()
        self._advance()

    @property
    def descriptor(self) -> int:
        """Of its socket."""
        return self._kernel.descriptor

    def can_be_lent(self) -> bool:
        """Whether nothing of a request is here, and all that was written has left."""
        if self.state is not State.IDLE or self._incoming.data or self._is_paused or self._close_when_idle:
            return False
        wire = self.transport
        return wire is not None and not self._force_close and not wire.is_closing() and not wire.get_write_buffer_size()

    def lend(self) -> int:
        """Read no more, for the shedder; returns the descriptor."""
        self.is_lent = True
        self._pause_transport_reading()
        return self.descriptor

    def read(self, data: bytes, came_at: float) -> None:
        """Take what the shedder has read, and when; it reads no more until that is answered."""
        self._came_at = came_at
        self.data_received(data)
        if self.is_lent and self.state in (State.RECEIVING, State.HELD) and self._entrance.shedder is not None:
            self._entrance.shedder.give_back(self)  # the rest comes in pieces

    def take_back(self, unsent: bytes = b"", was_abandoned: Kind[Any, Any] | None = None) -> None:
        """Read again, after the shedder; `Lendable` has the arguments."""
        self.is_lent = False
        if self._entrance.shedder is not None:
            answered_at, since_at = self._entrance.shedder.times(self.descriptor)
            if answered_at:  # else the shedder did not take it
                self.began_at, self.at_once_since_at = max(self.began_at, answered_at), since_at
        if was_abandoned is not None:
            self._entrance.abandoned(was_abandoned)
            self.force_close()
            return
        if self.transport is not None and unsent:
            self.transport.write(unsent)
        if not self._is_paused and self.state is not State.HELD:
            self._resume_transport_reading()  # which also sees that its caller has closed

    def _resume_transport_reading(self) -> None:
        if not self.is_lent:  # else it is aiohttp that wants more, and the shedder reads
            super()._resume_transport_reading()

    def force_close(self) -> None:
        """Close as soon as what was written has left."""
        self._withdraw()
        if self._closed_at is None:
            self._closed_at = time.monotonic()
        super().force_close()

    def abort(self) -> None:
        """Close at once, whatever has not left."""
        self._withdraw()
        if self._wire is not None:
            self._wire.abort()
        elif self._abort_handshake is not None:
            self._abort_handshake()
            self._abort_handshake = None

    def end(self, answer: bytes) -> None:
        """Write an answer and close."""
        self._entrance.refusals.write()
        if self.transport is not None:
            self.transport.write(answer)
        self._incoming.data = b""
        self._release()  # now: over TLS the farewell of a caller may never come
        self.force_close()

    @property
    def has_unread_answer(self) -> bool:
        """Whether an answer was written that its caller has not read."""
        return self._closed_at is not None or self._answering_since_at is not None or self._is_unsent()

    def limit_at(self) -> tuple[float, bytes | None]:
        """Say until when the connection may be as it is, and with which answer it ends then."""
        config = self._entrance.config
        if self._closed_at is not None:  # but its last bytes wait for a caller who does not read
            return self._closed_at + config.write_timeout_s, None
        if self.state is State.IDLE:
            if self.is_lent and self._entrance.shedder is not None:
                self.began_at = max(self.began_at, self._entrance.shedder.times(self.descriptor)[0])
            since_s = config.idle_timeout_s if self.served else config.header_timeout_s
            if self.served and self._is_unsent():
                since_s = min(since_s, config.write_timeout_s)
            return self.began_at + since_s, None
        if self.state is State.RECEIVING:
            if self._incoming.head is None:
                return self.began_at + config.header_timeout_s, answers.HEAD_TOO_LATE
            granted = granted_s(self._incoming.head, config.default_budget_s, config.max_budget_s)
            has_s = config.body_timeout_s if self._kind is None else min(granted, config.body_timeout_s)
            return self.began_at + has_s, answers.BODY_TOO_LATE
        if self._answering_since_at is not None:
            return self._answering_since_at + config.write_timeout_s, None
        return float("inf"), None

    def _is_unsent(self) -> bool:
        """Whether the last answer is still here although it counts as written: TLS takes in whole answers at once."""
        is_tls = self._wire is not None and self._wire.get_extra_info("sslcontext") is not None
        return is_tls and self._kernel.has_unsent()

    # ---- a request

    def data_received(self, data: bytes) -> None:
        if not data:  # aiohttp goes on with what its parser holds
            super().data_received(data)
            return
        if self.state is State.HELD or self._force_close:  # TLS reads on until its caller has said farewell
            return
        if self._incoming.data:
            self._incoming.add(data)
        else:
            self._incoming.data = data
        if self.state in (State.IDLE, State.RECEIVING):
            self._advance()
        elif len(self._incoming.data) > READ_AHEAD_BYTES:
            self._pause_transport_reading()

    def _advance(self) -> None:
        """Go on with the bytes that are here, as long as they hold whole requests that are refused at once."""
        num_refused = 0
        while self._incoming.data and self.state in (State.IDLE, State.RECEIVING):
            if self._is_paused or self._force_close:
                return
            if self.state is State.IDLE:
                self.state = State.RECEIVING
                self._read_at = time.monotonic()
                idle_since_at = self.began_at
                self.began_at = min(self._read_at - self._kernel.received_ago_s(), self._came_at)
                self._came_at = float("inf")
                if self.began_at - idle_since_at > RETRY_S:
                    self.at_once_since_at = self._entrance.pacer.late(
                        self.at_once_since_at, idle_since_at, self.began_at
                    )
            try:
                request = self._whole()
            except BadRequest as error:
                self._entrance.broken(400)
                self.end(answers.bad_request(str(error)))
                return
            except HeadTooLarge:
                self._entrance.broken(431)
                self.end(answers.HEAD_TOO_LARGE)
                return
            if request is None:
                self._came_in_pieces = True
                return
            self._offer(request)
            num_refused += 1
            if num_refused == REFUSED_AT_ONCE and self._incoming.data:
                self._loop.call_soon(self._advance)
                return

    def _whole(self) -> bytes | bytearray | None:
        """Take the request that is here; None = it is not whole yet, or it was refused for its key or its size.

        Raises:
            BadRequest: it is no HTTP/1.1.
            HeadTooLarge: its head is over the limit.
        """
        head = self._incoming.head
        is_new = head is None
        if head is None:
            head = self._incoming.read_head()
            if head is None:
                return None
            if self.listener.is_public:
                self._kind = self._entrance.kind_at(head.method, head.path)
            if not self._is_welcome(head):
                return None
        request, body_bytes = self._incoming.take()
        if not self._reserve(body_bytes):
            return None
        if is_new and head.waits_for_continue and self.transport is not None:
            self._entrance.refusals.write()
            self.transport.write(answers.CONTINUE)
        return request

    def _is_welcome(self, head: Head) -> bool:
        """Find the caller's key before the body is read; end the connection where it does not allow the request."""
        entrance = self._entrance
        if (head.method, head.path) in entrance.open_routes:
            return True
        if not entrance.keys.has_keys:
            self.key = ANYBODY
            return True
        try:
            self.key = entrance.keys.find(head.authorization)
            if self._kind is not None:
                entrance.keys.require(self.key, self._kind.scope)
        except Unauthorized as error:
            entrance.denied(self._kind, error.status, time.monotonic() - self.began_at)
            self._end_late(answers.UNAUTHORIZED, entrance.wrong_keys.hold_s())
            return False
        except Forbidden as error:
            entrance.denied(self._kind, error.status, time.monotonic() - self.began_at)
            self.end(answers.forbidden(str(error)))
            return False
        return True

    def _end_late(self, answer: bytes, after_s: float) -> None:
        """Write an answer and close, but not before so many seconds; until then nothing is read."""
        if after_s == 0.0:
            self.end(answer)
            return
        self.state = State.HELD
        self._incoming.data = b""
        self._incoming.head = None
        self._pause_transport_reading()
        self._held = self._loop.call_later(after_s, self.end, answer)

    def _reserve(self, body_bytes: int) -> bool:
        """Count a body before it is read; end the connection where there is no room for it."""
        if body_bytes > self._entrance.config.max_body_bytes:
            self._entrance.broken(413)
            self.end(answers.BODY_TOO_LARGE)
            return False
        more = body_bytes - self._reserved_bytes
        if more and not self.listener.reserve(more):
            self._entrance.broken(503)
            self.end(answers.TOO_MANY_BYTES)
            return False
        self._reserved_bytes = body_bytes
        return True

    def _release(self) -> None:
        if self._reserved_bytes:
            self.listener.reserve(-self._reserved_bytes)
            self._reserved_bytes = 0

    # ---- the door

    def _offer(self, request: bytes | bytearray) -> None:
        head = self._incoming.head
        kind = self._kind
        assert head is not None
        if head.closes:
            self._close_when_idle = True
        config = self._entrance.config
        if self._came_in_pieces:
            self.whole_at = max(self.began_at, time.monotonic() - self._kernel.received_ago_s())
        else:
            self.whole_at = self.began_at
        sent_s = self.whole_at - self.began_at
        self.has_s = granted_s(head, config.default_budget_s, config.max_budget_s) - sent_s
        if kind is not None and self.has_s < 0 < self.has_s + sent_s:
            self._entrance.slow(self)
            return
        if self.key is not None and self.key.rate_per_s is not None and not self._is_within_rate(self.key):
            return
        if kind is None:
            self._feed(request)
            return
        has_hung_up = self._kernel.has_hung_up and kind.priority is not Priority.SIGNAL  # what one is for is no answer
        was_paused, self._was_paused = self._was_paused, False
        if was_paused:
            self._entrance.pacer.resumed(has_hung_up=has_hung_up)
        if has_hung_up:
            self._entrance.abandoned(kind)
            self._incoming.data = b""
            self._become_idle()
            self.force_close()
            return
        if was_paused:
            door = self._entrance.door
            if door.is_late(kind.name, self.whole_at, self.has_s) and door.has_room(kind.name):
                # it grew old because we did not read it: its caller is told, and may send a fresh one into the room
                self._refuse(Refusal.LATE, at_once=True)
                return
        self.state = State.WAITING
        self._request = request
        tenant = None if self.key is None else self.key.tenant
        if tenant is None:
            tenant = tenant_of(request, head.num_bytes)
        self._is_shed = self._may_be_shed(kind)
        ticket = self._entrance.door.arrive(kind.name, tenant, self.whole_at, self.has_s, self)
        if self.state is State.WAITING:
            self._ticket = ticket
        elif ticket is None and self._is_shed:
            self._entrance.shed(self, request, kind, tenant)

    def _may_be_shed(self, kind: Kind[Any, Any]) -> bool:
        """Whether requests like the one that is here may be refused without asking, once it was."""
        # the door refuses a signal for its tenant's sake, too; and a request spends of its key's rate
        if not self._kernel.is_clear or kind.priority is Priority.SIGNAL:
            return False
        return (self.key is None or self.key.rate_per_s is None) and self._entrance.can_shed

    def _is_within_rate(self, key: Key) -> bool:
        """Spend the rate of the request's key; answer 429 where it is spent, and go on with the next request."""
        entrance = self._entrance
        try:
            entrance.keys.spend(key)
        except Overloaded as error:
            began_at, read_at = self.began_at, self._read_at
            entrance.denied(self._kind, error.status, time.monotonic() - began_at)
            if not self.is_trusted:
                entrance.rate_pacer.refused(self, began_at)
            entrance.refusals.add(self, answers.over_rate(str(error)))
            self._become_idle()
            entrance.rate_pacer.took(self.began_at - read_at)
            return False
        return True

    def let_in(self, slot: Slot) -> None:
        """Start the request's handler."""
        self._ticket = None
        self.slot = slot
        request, self._request = self._request, b""
        head = self._incoming.head
        assert head is not None
        self._serve(request, head)

    def refuse(self, reason: Refusal) -> None:
        """Answer 429, and go on with the next request."""
        was_waiting = self._ticket is not None
        self._ticket = None
        self._request = b""
        if not self.is_trusted:
            self._entrance.pacer.refused(self, self.began_at)
        self._refuse(reason, at_once=not was_waiting)
        if was_waiting and self._incoming.data:
            self._loop.call_soon(self._advance)

    def _refuse(self, reason: Refusal, *, at_once: bool) -> None:
        assert self._kind is not None
        self._entrance.refused(self._kind, self.has_s, reason)
        self._entrance.refusals.add(self, answers.overloaded(reason))
        read_at = self._read_at
        self._become_idle()
        if at_once:
            self._entrance.pacer.took(self.began_at - read_at)

    def _go_on(self) -> None:
        self._become_idle()
        if self._incoming.data:
            self._loop.call_soon(self._advance)

    def _become_idle(self) -> None:
        self.state = State.IDLE
        self.began_at = time.monotonic()
        self._came_in_pieces = False
        self._incoming.head = None
        self._kind = None
        self.key = None
        self._release()
        if self.slot is not None:
            self.slot.leave()
            self.slot = None
        if self._close_when_idle and self.transport is not None and not self._incoming.data:
            self._loop.call_soon(self.force_close)  # aiohttp's `close` leaves a connection open that it has not served
        elif self._incoming.data and not self._is_paused:
            self._resume_transport_reading()
        if self.is_lent and self._entrance.shedder is not None:
            self._entrance.shedder.offer(self)
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
