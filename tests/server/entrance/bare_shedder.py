"""The native shedder without a door, for tests of it alone."""

from __future__ import annotations

import ctypes
import socket
import time
from ctypes import c_int64

from npu_gr.server.entrance import shed_library
from npu_gr.server.entrance.shed_library import MOST_PATTERNS
from npu_gr.server.entrance.shedding import MAX_KEY_BYTES, ROOM_BYTES

NAMES = b"authorization\nx-request-timeout-ms\ngrpc-timeout\n"
ANSWER = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
MOST_STRANGERS = 16  # as in shedder.h
STRANGERS_PER_S = 400
MOST_UNKNOWN = 512
UNKNOWN_PER_S = 4000


class Bare:
    """A shedder without a door."""

    def __init__(self, most_ups: int = 512, room_bytes: int = ROOM_BYTES) -> None:
        library = shed_library.load()
        assert library is not None
        self.library = library
        self.at = library.npu_gr_shed_new(
            NAMES, ANSWER, (c_int64 * 1)(len(ANSWER)), 1, most_ups, 32 * room_bytes, room_bytes
        )
        self.patterns = (shed_library.Pattern * MOST_PATTERNS)()
        self.ups = (shed_library.Up * most_ups)()
        self.counts = (shed_library.PatternCounts * MOST_PATTERNS)()
        buffer = (ctypes.c_char * (32 * room_bytes)).from_address(library.npu_gr_shed_buffer(self.at))
        self.buffer = memoryview(buffer)
        self.refused = 0
        self.abandoned = 0

    def key(self, request: bytes) -> bytes | None:
        key = ctypes.create_string_buffer(MAX_KEY_BYTES)
        num_bytes = self.library.npu_gr_shed_key(self.at, request, len(request), key)
        return None if num_bytes < 0 else key.raw[:num_bytes]

    def lend(self, ours: socket.socket, at_once_since_at: float = 0.0) -> int:
        """Lend a connection; returns its number."""
        lent_as: int = self.library.npu_gr_shed_lend(self.at, ours.fileno(), at_once_since_at)
        assert lent_as
        self.lent_as = lent_as
        return lent_as

    def refuse(self, request: bytes, quota: int = 0, most_at_once_s: float = float("inf")) -> None:
        """Refuse requests like one from now on."""
        key = self.key(request)
        assert key is not None
        self.patterns[0] = shed_library.Pattern(number=1, key=key, key_bytes=len(key), quota=quota)
        self.turn(most_at_once_s)

    def turn(self, most_at_once_s: float = float("inf"), most_newcomers: int = 1000) -> None:
        """Say what is refused."""
        self.library.npu_gr_shed_turn(self.at, self.patterns, most_at_once_s, most_newcomers, self.counts)
        self._count()

    def _count(self) -> None:
        self.refused += self.counts[0].refused
        self.abandoned += self.counts[0].abandoned

    def take(self, num_ups: int = 0) -> list[tuple[int, int, bytes]]:
        """Take what goes up, so much at least; returns descriptor, why, bytes of each."""
        found: list[tuple[int, int, bytes]] = []
        give_up_at = time.monotonic() + 5
        while True:
            num = self.library.npu_gr_shed_take(self.at, self.ups, self.counts)
            self._count()
            found += [
                (up.fd, up.why, bytes(self.buffer[up.offset : up.offset + up.num_bytes])) for up in self.ups[:num]
            ]
            if len(found) >= num_ups or time.monotonic() > give_up_at:
                return found
            time.sleep(1e-3)
