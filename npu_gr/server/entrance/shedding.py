"""Requests like one that the door has just refused are refused without Python.

A refusal by way of `connection.py` takes three times what the kernel takes to read it and to write the answer. At ten
times the load that is more than one event loop has. So an idle connection whose caller was refused is lent to a native
shedder (`ops/door`), whose thread reads it in our place and needs no GIL:

    refused at once --> lent --> like a request that was refused, and still would be --> 429
                         |
                         '--> anything else: its bytes go up; the connection is not read until they are answered

The event loop looks at it in each of its turns that brings something, and the door says then how many requests of each
pattern it would take now: so many go up, and the others are refused. A pattern is what the door decides by: the request
line, the headers that it reads, and the tenant. So another tenant's request goes up, and whatever is no plain whole
HTTP/1.1 request, too. A key that is withdrawn meanwhile gets a 429 for as long as the door refuses.

A connection whose caller retries at once goes back, and is paused (`pacing.py`), unless such pauses help nobody.

Linux, clear TCP, and a library that was built; elsewhere every refusal is Python's.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from ctypes import c_int64
from typing import Any, Protocol

from npu_gr.core.errors import Refusal
from npu_gr.core.kinds import Kind
from npu_gr.server.entrance import answers, shed_library
from npu_gr.server.entrance.pacing import FREE, Paced, Pacer
from npu_gr.server.entrance.shed_library import UP_BYTES, UP_RETRIES
from npu_gr.server.headers import BUDGET_HEADERS

MOST_UPS = 1024  # connections that may go up before the event loop looks
ROOM_BYTES = 131_072  # a longer request is Python's
BUFFER_BYTES = 32 * ROOM_BYTES
MAX_KEY_BYTES = 2048  # MAX_KEY_BYTES of request_key.h
MOST_PATTERNS = 16
KEPT = 0.75  # share of refusals from which on a connection stays lent when a request of it was let in
WEIGHT = 1 / 256  # of one more request in that share
FORGOTTEN_S = 1.0  # a pattern that nothing was refused by for so long


class Lendable(Paced, Protocol):
    """A connection that can be lent."""

    is_lent: bool
    has_s: float  # what the caller of its newest request granted
    is_trusted: bool  # it carries other callers' requests, so nobody may be made to wait for another's retries

    @property
    def descriptor(self) -> int:
        """Of its socket."""
        ...

    def can_be_lent(self) -> bool:
        """Whether nothing of a request is here, and all that was written has left."""
        ...

    def lend(self) -> int:
        """Read no more; returns the descriptor."""
        ...

    def read(self, data: bytes) -> None:
        """Take what came while it was lent."""
        ...

    def take_back(self, unsent: bytes = b"", was_abandoned: Kind[Any, Any] | None = None) -> None:
        """Read again.

        Args:
            unsent: the rest of an answer, that is to be written.
            was_abandoned: the kind of a request that was read, and whose caller had hung up.
        """
        ...


class _Pattern:
    """Requests that the door refuses."""

    def __init__(self, key: bytes, kind: Kind[Any, Any], tenant: str, has_s: float) -> None:
        self.key = key
        self.kind = kind
        self.tenant = tenant
        self.has_s = has_s  # from its arrival to its answer
        self.used_at = 0.0


class Shedder:
    """The connections of an instance that are lent. Event loop only."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        loop: asyncio.AbstractEventLoop,
        room: Callable[[str, str, float], int],
        refused: Callable[[Kind[Any, Any], float, Refusal, int], None],
        pacer: Pacer,
    ) -> None:
        """Nothing is lent yet.

        Args:
            library: of `shed_library.load`.
            loop: that runs.
            room: how many requests of a kind and a tenant, with so many seconds, the door would take now.
            refused: told of refusals: of which kind, with how many seconds, why, how many.
            pacer: pauses connections whose callers retry at once.

        Raises:
            OSError: there is no descriptor left.
        """
        self._library = library
        self._loop = loop
        self._room = room
        self._refused = refused
        self._pacer = pacer
        texts = answers.all_overloaded(Refusal.LATE)
        ends = (c_int64 * len(texts))(*(sum(map(len, texts[: n + 1])) for n in range(len(texts))))
        names = "".join(f"{name}\n" for name in ("authorization", *map(str.lower, BUDGET_HEADERS)))
        self._at = library.npu_gr_shed_new(names.encode(), b"".join(texts), ends, len(texts))
        if not self._at:
            raise OSError("no descriptors are left for the shedder")
        self._patterns: list[_Pattern] = []
        self._their = (shed_library.Pattern * MOST_PATTERNS)()
        self._lent: dict[int, Lendable] = {}
        self._offered: list[Lendable] = []
        self._key = ctypes.create_string_buffer(MAX_KEY_BYTES)
        self._buffer = ctypes.create_string_buffer(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._ups = (shed_library.Up * MOST_UPS)()
        self._job = shed_library.ShedJob(
            patterns=self._their,
            ups=self._ups,
            most_ups=MOST_UPS,
            buffer=ctypes.addressof(self._buffer),
            buffer_bytes=BUFFER_BYTES,
            room_bytes=ROOM_BYTES,
        )
        self._is_at_work = False
        self._is_shut = False  # requests of a pattern do not come up at all
        self._refused_share = 0.0  # of the requests that came to lent connections
        self._is_due = False
        self._done = library.npu_gr_shed_done(self._at)
        loop.add_reader(self._done, self._look)

    def close(self) -> None:
        """Lend nothing any more."""
        if self._is_at_work:
            self._library.npu_gr_shed_wait(self._at)
        self._loop.remove_reader(self._done)
        self._library.npu_gr_shed_free(self._at)
        self._at = None

    def __len__(self) -> int:
        return len(self._lent)

    def answered_at(self, descriptor: int) -> float:
        """Say when a lent connection was answered last, on the monotonic clock."""
        return float(self._library.npu_gr_shed_answered_at(self._at, descriptor))

    # ---- patterns

    def learn(self, request: bytes | bytearray, kind: Kind[Any, Any], tenant: str, has_s: float) -> None:
        """Refuse requests like one that the door has refused.

        Args:
            request: its bytes.
            kind, tenant, has_s: that the door decided by.
        """
        if len(request) >= ROOM_BYTES:
            return
        num_bytes = self._library.npu_gr_shed_key(self._at, bytes(request), len(request), self._key)
        if num_bytes < 0:
            return
        key = self._key.raw[:num_bytes]
        now_at = time.monotonic()
        for pattern in self._patterns:
            if pattern.key == key:
                pattern.used_at = now_at
                return
        if len(self._patterns) < MOST_PATTERNS:  # else those are refused by Python until one is forgotten
            self._patterns.append(_Pattern(key, kind, tenant, has_s))
            self._patterns[-1].used_at = now_at

    # ---- lending

    def offer(self, connection: Lendable) -> None:
        """Lend a connection when what was written to it has left."""
        self._offered.append(connection)
        self._look_soon()

    def _lend(self) -> None:
        offered, self._offered = self._offered, []
        for connection in offered:
            can_be_lent = connection.can_be_lent()
            if connection.is_lent:
                if can_be_lent and self._refused_share > KEPT:
                    self._library.npu_gr_shed_resume(self._at, connection.descriptor)
                else:
                    self.give_back(connection)
            elif can_be_lent:
                descriptor = connection.lend()
                self._lent[descriptor] = connection
                num_at_once = -1 if connection.is_trusted else connection.num_at_once
                if not self._library.npu_gr_shed_lend(self._at, descriptor, num_at_once):
                    del self._lent[descriptor]
                    connection.take_back()

    def forget(self, connection: Lendable, descriptor: int) -> None:
        """Forget a lent connection that is closed."""
        if self._at is not None and self._lent.get(descriptor) is connection:
            del self._lent[descriptor]  # the descriptor has left the shedder by itself

    def give_back(self, connection: Lendable) -> None:
        """Let a lent connection be read by its owner. Only while the shedder is not at work."""
        if self._lent.get(connection.descriptor) is connection:
            del self._lent[connection.descriptor]
            self._library.npu_gr_shed_take_back(self._at, connection.descriptor)
        connection.take_back()

    # ---- the shedder's work

    def withdraw(self, connection: Lendable) -> None:
        """Let a lent connection be read by its owner from now on, who is about to close it."""
        is_at_work = self._is_at_work
        self._take(self._end() if is_at_work else [])
        if connection.is_lent:
            self.give_back(connection)
        if is_at_work:
            self._begin()

    def release(self, places: int) -> None:
        """Let requests come up for free places."""
        if places > 0 and self._is_shut:
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Take what was read, lend what was offered, and let it go on with what the door says now."""
        self._is_due = False
        if self._at is None:
            return
        self._take(self._end() if self._is_at_work else [])
        self._lend()
        self._begin()

    def _take(self, ups: list[tuple[Lendable, int, Kind[Any, Any] | None, bytes]]) -> None:
        for connection, why, kind, data in ups:
            if why == UP_BYTES:
                connection.read(data)
            elif why == UP_RETRIES:
                connection.take_back()
                self._pacer.pause(connection)
            else:
                connection.take_back(data, kind)

    def _begin(self) -> None:
        now_at = time.monotonic()
        self._patterns = [one for one in self._patterns if now_at - one.used_at < FORGOTTEN_S]
        for their, pattern in zip(self._their, self._patterns, strict=False):
            their.key = pattern.key
            their.key_bytes = len(pattern.key)
            their.quota = self._room(pattern.kind.name, pattern.tenant, pattern.has_s)
            their.refused = 0
        self._is_shut = any(their.quota == 0 for their in self._their[: len(self._patterns)])
        self._job.num_patterns = len(self._patterns)
        self._job.most_at_once = FREE if self._pacer.is_patient else -1
        if self._lent:
            self._is_at_work = True
            self._library.npu_gr_shed_post(self._at, self._job)

    def _end(self) -> list[tuple[Lendable, int, Kind[Any, Any] | None, bytes]]:
        """Let it pause; returns what goes up: connection, why, kind of its request if that is known, bytes."""
        self._library.npu_gr_shed_wait(self._at)
        self._is_at_work = False
        now_at = time.monotonic()
        job = self._job
        for their, pattern in zip(self._their[: job.num_patterns], self._patterns[: job.num_patterns], strict=True):
            if their.refused:
                pattern.used_at = now_at
                self._refused(pattern.kind, pattern.has_s, Refusal.LATE, their.refused)
        num_refused = sum(their.refused for their in self._their[: job.num_patterns])
        if num_seen := num_refused + job.num_ups:
            self._refused_share += (1 - (1 - WEIGHT) ** num_seen) * (num_refused / num_seen - self._refused_share)
        ups = []
        for up in self._ups[: job.num_ups]:
            connection = self._lent.get(up.fd) if up.why == UP_BYTES else self._lent.pop(up.fd, None)
            if connection is not None:  # else it was closed meanwhile
                kind = self._patterns[up.pattern].kind if up.pattern >= 0 else None
                ups.append((connection, up.why, kind, bytes(self._view[up.offset : up.offset + up.num_bytes])))
        return ups
