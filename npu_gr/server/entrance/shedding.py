"""Requests like one that the door has just refused are refused without Python.

A refusal by way of `connection.py` takes three times what the kernel takes to read it and to write the answer. At ten
times the load that is more than one event loop has. So an idle connection whose caller was refused is lent to a native
shedder (`ops/door`), whose thread reads it in our place and needs no GIL:

    refused at once --> lent --> like a request that was refused, and still would be --> 429
                         |
                         '--> anything else: its bytes go up; the connection is not read until they are answered

Neither waits for the other, but for a round of requests where a lent connection is closed. The event loop looks in each
of its turns that brings something, and the door says then how many requests of each pattern it would take now: so many
go up, and the others are refused. A pattern is what the door decides by: the request line, the headers that it reads,
and the tenant. So another tenant's request goes up, and whatever is no plain whole HTTP/1.1 request, too. A key that is
withdrawn meanwhile gets a 429 for as long as the door refuses.

A connection whose caller retries at once goes back, and is paused (`pacing.py`), unless such pauses help nobody.

Callers who do not wait for us hang up and connect anew, and to accept a connection takes Python a quarter of a
millisecond. So while requests are refused the shedder accepts, too: a connection becomes Python's when a request of it
goes up, or when it is silent.

Linux, clear TCP, and a library that was built; elsewhere every refusal is Python's.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import time
from collections import deque
from ctypes import byref, c_double, c_int64
from socket import socket
from typing import Any, NamedTuple, Protocol

from npu_gr.core.errors import Refusal
from npu_gr.core.kinds import Kind
from npu_gr.server.entrance import answers, shed_library
from npu_gr.server.entrance.pacing import Paced, Pacer
from npu_gr.server.entrance.shed_library import MOST_PATTERNS, UP_BYTES, UP_RETRIES
from npu_gr.server.headers import BUDGET_HEADERS

MOST_UPS = 1024  # connections that may go up before the event loop looks
ROOM_BYTES = 131_072  # a longer request is Python's
BUFFER_BYTES = 32 * ROOM_BYTES
MAX_KEY_BYTES = 2048  # MAX_KEY_BYTES of request_key.h
# Share of refusals from which on a connection stays lent when a request of it was let in. Its next request costs Python
# a refusal and a loan if it goes back, and a way through the shedder for nothing if it stays and is let in again.
KEPT = 0.5
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

    def read(self, data: bytes, came_at: float) -> None:
        """Take what came while it was lent, and when."""
        ...

    def take_back(self, unsent: bytes = b"", was_abandoned: Kind[Any, Any] | None = None) -> None:
        """Read again.

        Args:
            unsent: the rest of an answer, that is to be written.
            was_abandoned: the kind of a request that was read, and whose caller had hung up.
        """
        ...


class Newcomer(NamedTuple):
    """What the shedder says of a connection that it has accepted, and that is its owner's from now on."""

    why: int  # it goes up: UP_BYTES, UP_UNSENT, UP_RETRIES or UP_SILENT of `shed_library`
    data: bytes  # that were read; of UP_UNSENT: that are to be written
    came_at: float  # of what was read, on the monotonic clock


class Acceptor(Protocol):
    """Whoever accepts connections while the shedder does not."""

    sockets: tuple[socket, ...]

    def rest(self) -> None:
        """Accept nothing until `go_on`."""
        ...

    def go_on(self) -> None:
        """Accept again."""
        ...

    def adopt(self, accepted: socket, newcomer: Newcomer) -> asyncio.Task[None]:
        """Make a connection of a socket; done when it can be read."""
        ...


class Owner(Protocol):
    """Whose connections are lent."""

    acceptors: list[Acceptor]
    has_proxies: bool  # some connections carry several callers' requests

    @property
    def most_newcomers(self) -> int:
        """How many connections the shedder may have accepted."""
        ...

    def room(self, kind: str, tenant: str, has_s: float, /) -> int:
        """Say how many requests of a kind and a tenant, with so many seconds, the door would take now."""
        ...

    def refused(self, kind: Kind[Any, Any], has_s: float, reason: Refusal, num: int = 1) -> None:
        """Count refusals."""
        ...

    def abandoned(self, kind: Kind[Any, Any], num: int = 1) -> None:
        """Count requests whose callers had hung up."""
        ...


class _Pattern:
    """Requests that the door refuses."""

    def __init__(self, number: int, key: bytes, kind: Kind[Any, Any], tenant: str, has_s: float) -> None:
        self.number = number
        self.key = key
        self.kind = kind
        self.tenant = tenant
        self.has_s = has_s  # from its arrival to its answer
        self.used_at = time.monotonic()


class _Lent(NamedTuple):
    """A connection that is lent."""

    connection: Lendable
    lent_as: int  # its number: a descriptor that was closed is soon another connection's


class _Up(NamedTuple):
    """What goes up."""

    descriptor: int
    lent_as: int
    came_to: int
    why: int
    kind: Kind[Any, Any] | None  # of the request that was read, if that is known
    data: bytes
    came_at: float  # on the monotonic clock


class Shedder:
    """The connections of an instance that are lent. Event loop only."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        loop: asyncio.AbstractEventLoop,
        owner: Owner,
        pacer: Pacer,
    ) -> None:
        """Nothing is lent yet.

        Args:
            library: of `shed_library.load`.
            loop: that runs.
            owner: of the connections.
            pacer: pauses connections whose callers retry at once.

        Raises:
            OSError: there is no descriptor left.
        """
        self._library = library
        self._loop = loop
        self._owner = owner
        self._pacer = pacer
        texts = answers.all_overloaded(Refusal.LATE)
        ends = (c_int64 * len(texts))(*(sum(map(len, texts[: n + 1])) for n in range(len(texts))))
        names = "".join(f"{name}\n" for name in ("authorization", *map(str.lower, BUDGET_HEADERS)))
        self._at = library.npu_gr_shed_new(
            names.encode(), b"".join(texts), ends, len(texts), MOST_UPS, BUFFER_BYTES, ROOM_BYTES
        )
        if not self._at:
            raise OSError("no descriptors are left for the shedder")
        buffer = (ctypes.c_char * BUFFER_BYTES).from_address(library.npu_gr_shed_buffer(self._at))
        self._buffer = memoryview(buffer)
        self._key = ctypes.create_string_buffer(MAX_KEY_BYTES)
        self._ups = (shed_library.Up * MOST_UPS)()
        self._counts_at = (shed_library.PatternCounts * MOST_PATTERNS)()
        self._counts = list(self._counts_at)  # by place, as the library writes them
        self._told_at = (shed_library.Pattern * MOST_PATTERNS)()
        self._told = list(self._told_at)  # by place, what the library knows
        self._patterns: dict[int, _Pattern] = {}  # by place
        self._numbers = itertools.count(1)
        self._lent: dict[int, _Lent] = {}  # by descriptor
        self._offered: list[Lendable] = []
        self._taken: deque[_Up] = deque()  # and not handed to its connection yet
        self._accepting: dict[Acceptor, list[int]] = {}  # in whose place the shedder accepts; its listeners
        self._acceptors: dict[int, Acceptor] = {}  # by listener, also of those that accept again
        self._num_opening = 0  # requests of newcomers that are not at the door yet
        self._is_shut = False  # requests of a pattern do not come up at all
        self._refused_share = 0.0  # of the requests that came to lent connections
        self._is_due = False
        self._looks_again: asyncio.TimerHandle | None = None
        self._done = library.npu_gr_shed_done(self._at)
        loop.add_reader(self._done, self._look)

    def close(self) -> None:
        """Lend nothing any more."""
        self._loop.remove_reader(self._done)
        if self._looks_again is not None:
            self._looks_again.cancel()
        self._library.npu_gr_shed_free(self._at)
        self._at = None

    def __len__(self) -> int:
        return len(self._lent) + self.num_newcomers

    @property
    def num_newcomers(self) -> int:
        """Connections that it has accepted, and that nobody else knows."""
        return 0 if self._at is None else int(self._library.npu_gr_shed_newcomers(self._at))

    def times(self, descriptor: int) -> tuple[float, float]:
        """Say when a lent connection was answered last, and since when its requests have come at once (`Paced`)."""
        answered_at, at_once_since_at = c_double(), c_double()
        self._library.npu_gr_shed_times(self._at, descriptor, byref(answered_at), byref(at_once_since_at))
        return answered_at.value, at_once_since_at.value

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
        for pattern in self._patterns.values():
            if pattern.key == key:
                pattern.used_at = time.monotonic()
                return
        place = next((place for place in range(MOST_PATTERNS) if place not in self._patterns), None)
        if place is not None:  # else those are refused by Python until one is forgotten
            self._patterns[place] = _Pattern(next(self._numbers), key, kind, tenant, has_s)

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
                descriptor = connection.descriptor
                if can_be_lent and self._refused_share > KEPT:
                    self._library.npu_gr_shed_resume(self._at, descriptor, self._lent[descriptor].lent_as)
                else:
                    self.give_back(connection)
            elif can_be_lent:
                descriptor = connection.lend()
                since_at = float("inf") if connection.is_trusted else connection.at_once_since_at
                if lent_as := self._library.npu_gr_shed_lend(self._at, descriptor, since_at):
                    self._lent[descriptor] = _Lent(connection, lent_as)
                else:
                    connection.take_back()

    def forget(self, connection: Lendable, descriptor: int) -> None:
        """Forget a lent connection that is closed."""
        if self._at is not None:
            self._stop(connection, descriptor)

    def give_back(self, connection: Lendable) -> None:
        """Let a lent connection be read by its owner, who has all that was read of it."""
        self._stop(connection, connection.descriptor)
        connection.take_back()

    def withdraw(self, connection: Lendable) -> None:
        """Let a lent connection be read by its owner from now on, who is about to close it."""
        lent = self._lent.get(connection.descriptor)
        if lent is not None and lent.connection is connection:
            self._library.npu_gr_shed_stop(self._at, connection.descriptor, lent.lent_as)
            self._take()
        if connection.is_lent:
            self.give_back(connection)

    def _stop(self, connection: Lendable, descriptor: int) -> None:
        lent = self._lent.get(descriptor)
        if lent is not None and lent.connection is connection:
            self._library.npu_gr_shed_stop(self._at, descriptor, lent.lent_as)
            del self._lent[descriptor]

    # ---- accepting

    def accept_no_more(self, acceptor: Acceptor) -> None:
        """Let its owner accept again, or close its sockets."""
        for listener in self._accepting.pop(acceptor, ()):
            self._library.npu_gr_shed_accept_no_more(self._at, listener)

    def _accept(self, acceptor: Acceptor) -> None:
        acceptor.rest()
        listeners = self._accepting[acceptor] = []
        for one in acceptor.sockets:
            listener = self._library.npu_gr_shed_accept(self._at, one.fileno(), self._owner.has_proxies)
            if not listener:  # it has too many sockets
                self.accept_no_more(acceptor)
                self._accepting[acceptor] = []  # not tried again in this overload
                acceptor.go_on()
                return
            listeners.append(listener)
            self._acceptors[listener] = acceptor

    def _adopt(self, up: _Up) -> None:
        """Make a connection of a newcomer."""
        brings_request = up.why == UP_BYTES
        self._num_opening += brings_request

        def opened(_task: asyncio.Task[None]) -> None:
            self._num_opening -= brings_request
            self._look_soon()

        newcomer = Newcomer(up.why, up.data, up.came_at)
        task = self._acceptors[up.came_to].adopt(socket(fileno=up.descriptor), newcomer)
        task.add_done_callback(opened)

    # ---- the shedder's work

    def release(self, places: int) -> None:
        """Let requests come up for free places."""
        if places > 0 and self._is_shut:
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Take what was read, lend what was offered, and say what is refused from now on."""
        self._is_due = False
        if self._at is None:
            return
        self._take()
        self._lend()
        self._turn()

    def _take(self) -> None:
        """Hand what goes up to its connections, in its order, also where one of them calls this again."""
        self._collect()
        while self._taken:
            up = self._taken.popleft()
            if up.came_to:
                self._adopt(up)
                continue
            lent = self._lent.get(up.descriptor)
            if lent is None or lent.lent_as != up.lent_as:
                continue  # it was closed meanwhile
            connection = lent.connection
            if up.why == UP_BYTES:
                connection.read(up.data, up.came_at)
                continue
            del self._lent[up.descriptor]
            if up.why == UP_RETRIES:
                connection.take_back()
                self._pacer.pause(connection)
            else:
                connection.take_back(up.data, up.kind)

    def _collect(self) -> None:
        """Take what goes up, and count what was refused."""
        num_refused = num_taken = 0
        kinds = {pattern.number: pattern.kind for pattern in self._patterns.values()}
        while True:  # once more than it brings something: that leaves the buffer with the next call
            num_ups = self._library.npu_gr_shed_take(self._at, self._ups, self._counts_at)
            num_refused += self._count(self._patterns)
            num_taken += num_ups
            if not num_ups:
                break
            for up in self._ups[:num_ups]:
                data = bytes(self._buffer[up.offset : up.offset + up.num_bytes])
                self._taken.append(_Up(up.fd, up.lent_as, up.came_to, up.why, kinds.get(up.pattern), data, up.came_at))
        if num_seen := num_refused + num_taken:
            self._refused_share += (1 - (1 - WEIGHT) ** num_seen) * (num_refused / num_seen - self._refused_share)

    def _count(self, patterns: dict[int, _Pattern]) -> int:
        """Count what the library says that it has refused of each pattern; returns of all."""
        num_refused = 0
        for place, pattern in patterns.items():
            counts = self._counts[place]
            if counts.refused:
                pattern.used_at = time.monotonic()
                self._owner.refused(pattern.kind, pattern.has_s, Refusal.LATE, counts.refused)
                num_refused += counts.refused
            if counts.abandoned:
                pattern.used_at = time.monotonic()
                self._owner.abandoned(pattern.kind, counts.abandoned)
        return num_refused

    def _turn(self) -> None:
        """Say which requests are refused, and how many of them go up."""
        before = self._patterns
        forgotten_at = time.monotonic() - FORGOTTEN_S
        self._is_shut = False
        self._patterns = {place: pattern for place, pattern in before.items() if pattern.used_at >= forgotten_at}
        for place in before.keys() - self._patterns.keys():
            self._told[place].number = 0
        for place, pattern in self._patterns.items():
            told = self._told[place]
            if told.number != pattern.number:
                told.number = pattern.number
                told.key = pattern.key
                told.key_bytes = len(pattern.key)
            room = self._owner.room(pattern.kind.name, pattern.tenant, pattern.has_s)
            told.quota = max(0, room - self._num_opening)
            self._is_shut |= told.quota == 0
        self._library.npu_gr_shed_turn(
            self._at, self._told_at, self._pacer.run_s, max(0, self._owner.most_newcomers), self._counts_at
        )
        self._count(before)
        is_refusing = bool(self._patterns)
        for acceptor in self._owner.acceptors:
            if is_refusing and acceptor not in self._accepting:
                self._accept(acceptor)
            elif not is_refusing and acceptor in self._accepting:
                self.accept_no_more(acceptor)
                acceptor.go_on()
        if is_refusing and self._looks_again is None:
            self._looks_again = self._loop.call_later(FORGOTTEN_S, self._look_again)

    def _look_again(self) -> None:
        """Hear of it when no request comes any more."""
        self._looks_again = None
        self._look()
