"""One stream of a gRPC connection: messages of a call in both directions, with the flow control of what is sent."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol
from urllib.parse import quote_from_bytes

from npu_gr.router.picker.frames import FRAME_BYTES, Flag, SendWindow, Type, frame, literal

PREFIX = struct.Struct(">BL")  # of a message: whether it is compressed, and its length
PREFIX_BYTES = PREFIX.size
_OK_HEAD = b"\x88" + literal(b"content-type", b"application/grpc")  # 0x88 is ":status: 200" of HPACK's fixed table
_MAX_TEXT = 120  # characters of a status's message
# What is before the first message of an answer, written at once: the frame HEADERS, the head of the frame DATA, and the
# message's prefix. The other way to write the same is `_begin` and `flush`.
_HEAD_FRAME = frame(Type.HEADERS, Flag.END_HEADERS, 0, _OK_HEAD)
_BEFORE_FIRST = struct.Struct(f">5sL{len(_OK_HEAD)}sBHBBLBL")
_UP_TO_NUMBER = _HEAD_FRAME[:5]


class CallStatus(IntEnum):
    """How a call ends."""

    OK = 0
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class PickerCall(Protocol):
    """The work of one call; the connection tells it what arrives."""

    def received(self, message: bytes) -> None:
        """A whole message has come."""
        ...

    def half_closed(self) -> None:
        """The caller sends nothing more; the answer may still be sent."""
        ...

    def dropped(self) -> None:
        """Nobody wants the answer any more; called once, whatever ended the call."""
        ...


class PickerWire(Protocol):
    """The connection, as its streams use it."""

    window: SendWindow

    def write(self, data: bytes) -> None:
        """Send frames."""
        ...

    def ended(self, stream: PickerStream) -> None:
        """The stream has sent its last frame."""
        ...


class PickerStream:
    """What a call sends with."""

    __slots__ = (
        "_trailers",
        "_wire",
        "began_at",
        "buffer",
        "call",
        "has_head",
        "is_half_closed",
        "num_counted",
        "num_kept",
        "number",
        "pending",
        "send_window",
        "unacknowledged_bytes",
    )

    def __init__(self, wire: PickerWire, number: int, send_window: int, began_at: float) -> None:
        self.number = number
        self.call: PickerCall | None = None
        self.send_window = send_window  # bytes that it may send now
        self.buffer = bytearray()  # the beginning of a message
        self.num_counted = 0  # bytes of that message, counted when its length was read
        self.unacknowledged_bytes = 0  # received, and not given back to the caller's window
        self.pending = bytearray()  # waits for a window
        self.num_kept = 0  # bytes of it, counted by the connection
        self.began_at = began_at
        self.has_head = False  # of the answer
        self.is_half_closed = False
        self._wire = wire
        self._trailers: bytes | None = None

    def send(self, message: bytes) -> None:
        """Send a message of the answer, now or when the caller's window allows."""
        if self._trailers is not None:
            return
        num_bytes = len(message)
        size = PREFIX_BYTES + num_bytes
        window = self._wire.window
        if not self.has_head and size <= self.send_window and size <= window.num_bytes and size <= window.frame_bytes:
            self.has_head = True  # the usual case: an answer in one piece
            self.send_window -= size
            window.num_bytes -= size
            number = self.number
            before = _BEFORE_FIRST.pack(
                *(_UP_TO_NUMBER, number, _OK_HEAD), *(size >> 16, size & 0xFFFF, Type.DATA, 0, number), *(0, num_bytes)
            )
            self._wire.write(before + message)
            return
        self._begin()
        self.pending += PREFIX.pack(0, num_bytes)
        self.pending += message
        self.flush()

    def end(self, status: CallStatus = CallStatus.OK, text: str = "") -> None:
        """End the call after what was sent; a second end is none.

        Args:
            status: of the call.
            text: why it is not OK.
        """
        if self._trailers is not None:
            return
        self._begin()
        self._trailers = literal(b"grpc-status", b"%d" % status)
        if text:
            quoted = quote_from_bytes(text[:_MAX_TEXT].encode("ascii", "replace"), safe=" !\"#$&'()*+,-./:;<=>?@[]_{}")
            self._trailers += literal(b"grpc-message", quoted[:_MAX_TEXT].encode())
        self.flush()

    def flush(self) -> None:
        """Send what the windows allow, and the end if nothing is left before it."""
        wire = self._wire
        window = wire.window
        while self.pending:
            room = min(self.send_window, window.num_bytes, window.frame_bytes)
            if room <= 0:
                return
            data = bytes(self.pending[:room])
            del self.pending[:room]
            self.send_window -= len(data)
            window.num_bytes -= len(data)
            wire.write(frame(Type.DATA, 0, self.number, data))
        if self._trailers is not None:
            wire.write(frame(Type.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, self.number, self._trailers))
            wire.ended(self)

    def _begin(self) -> None:
        if not self.has_head:
            self.has_head = True
            self._wire.write(frame(Type.HEADERS, Flag.END_HEADERS, self.number, _OK_HEAD))

    def messages(self, data: bytes) -> Iterator[bytes]:
        """Take what has come, and yield the messages that are whole."""
        self.buffer += data
        while len(self.buffer) >= PREFIX_BYTES:
            end = PREFIX_BYTES + self.announced_bytes
            if len(self.buffer) < end:
                return
            message = bytes(self.buffer[PREFIX_BYTES:end])
            del self.buffer[:end]
            yield message

    @property
    def announced_bytes(self) -> int:
        """The length of the message that the buffer begins with."""
        return int.from_bytes(self.buffer[1:PREFIX_BYTES], "big")


assert FRAME_BYTES > _MAX_TEXT, "an answer's headers fit into one frame"
