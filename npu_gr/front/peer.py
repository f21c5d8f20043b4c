"""One end of the connection between a front worker and the engine.

What is sent within one turn of the event loop leaves in one write: a frame that wakes a sleeping process costs it 60
us, one of sixteen in a write costs 7. Whoever sends what is no frame is cut off, in words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec

from npu_gr.core.errors import TooLarge
from npu_gr.front.frames import HEADER_BYTES, MAX_FRAME_BYTES, decode, encode

log = logging.getLogger(__name__)

_NOT_OURS = (msgspec.DecodeError, ValueError, TypeError, AssertionError, RecursionError)
READ_BYTES = 262_144  # at a time; what is longer is read into a buffer of its own length


class Peer(asyncio.BufferedProtocol):
    """Reads and writes frames. Event loop only."""

    def __init__(self, name: str, on_frame: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        """Talk to nobody yet.

        Args:
            name: of the other side, in the log.
            on_frame: called with each frame. A ValueError, as that of a frame that comes at the wrong time, is the
                end of the connection.
            on_lost: called once with the reason, "" for a plain end.
        """
        self._name = name
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._chunk = bytearray(READ_BYTES)
        self._filled = 0  # bytes of `_chunk` that are part of a frame which is not whole
        self._long: bytearray | None = None  # a frame that `_chunk` is too short for
        self._long_filled = 0
        self._out: list[bytes] = []
        self._why = ""
        self.before_flush: Callable[[], None] = lambda: None  # may send what was held back
        self.is_open = True

    # ---- sending

    def send(self, frame: Any, *, is_alone: bool = False) -> None:
        """Send a frame at the end of this turn of the event loop; nothing happens where the other side is gone.

        Args:
            frame: any.
            is_alone: no other frame can follow in this turn, so it goes at once: waiting for the end costs another.

        Raises:
            TooLarge: it is longer than a frame may be. UnicodeEncodeError: a text of it is not Unicode.
        """
        if not self.is_open:
            return
        data = encode(frame)
        if len(data) > MAX_FRAME_BYTES:
            raise TooLarge(f"{type(frame).__name__}: {len(data):,} bytes, a frame has {MAX_FRAME_BYTES:,} at most")
        if not is_alone:
            self.flush_soon()
        self._out += (len(data).to_bytes(HEADER_BYTES, "little"), data)
        if is_alone:
            self._flush()

    def flush_soon(self) -> None:
        """Call `before_flush`, and write, at the end of this turn."""
        if not self._out:
            self._loop.call_soon(self._flush)
            self._out.append(b"")

    def _flush(self) -> None:
        self.before_flush()
        out, self._out = self._out, []
        if self._transport is not None and self.is_open and len(out) > 1:
            self._transport.write(b"".join(out))

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the other side has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def close(self) -> None:
        """Send what waits, then close; never longer than a second."""
        if self._transport is None or not self.is_open:
            return
        self._flush()
        self._transport.close()
        for _ in range(100):
            if not self.is_open:
                return
            await asyncio.sleep(0.01)
        self._transport.abort()

    def cut(self, why: str) -> None:
        """End the connection at once.

        Args:
            why: in words, for the log; "" = it is no fault.
        """
        if self.is_open and self._transport is not None:
            self._why = why
            self._transport.abort()

    # ---- receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._on_lost(self._why or ("" if exc is None else f"{type(exc).__name__}: {exc}"))

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._long is not None:
            return memoryview(self._long)[self._long_filled :]
        return memoryview(self._chunk)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._long is not None:
            self._long_filled += nbytes
            if self._long_filled == len(self._long):
                data, self._long = self._long, None
                self._take(data)
            return
        self._filled += nbytes
        begin = 0
        chunk = memoryview(self._chunk)
        while self.is_open and self._filled - begin >= HEADER_BYTES:
            size = int.from_bytes(chunk[begin : begin + HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                self._refuse(f"a frame of {size:,} bytes; {MAX_FRAME_BYTES:,} is the limit")
                return
            end = begin + HEADER_BYTES + size
            if end > self._filled:
                if HEADER_BYTES + size > READ_BYTES:
                    self._long = bytearray(size)
                    self._long_filled = self._filled - begin - HEADER_BYTES
                    self._long[: self._long_filled] = chunk[begin + HEADER_BYTES : self._filled]
                    begin = self._filled
                break
            self._take(chunk[begin + HEADER_BYTES : end])
            begin = end
        left = self._filled - begin
        if begin and left:
            self._chunk[:left] = self._chunk[begin : self._filled]
        self._filled = left

    def _take(self, data: memoryview | bytearray) -> None:
        if not self.is_open or self._why:
            return
        try:
            self._on_frame(decode(data))
        except _NOT_OURS as error:
            self._refuse(f"{len(data):,} bytes that are no frame: {error}")

    def _refuse(self, what: str) -> None:
        log.error("%s sent %s; the connection is closed", self._name, what)
        self.cut(what)
