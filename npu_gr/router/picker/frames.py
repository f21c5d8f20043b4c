"""HTTP/2's frames as the picker reads and writes them, and its names for their numbers (RFC 9113, sections 4 to 7)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">BHBBL")  # length (its high byte, the rest), type, flags, stream
_HEAD_BYTES, _unpack_head = HEAD.size, HEAD.unpack_from
U32 = struct.Struct(">L")
SETTING = struct.Struct(">HL")
FRAME_BYTES = 16_384  # what either side may send at first; we never allow more
FIRST_WINDOW_BYTES = 65_535
MAX_WINDOW_BYTES = 2**31 - 1


# Plain numbers, not enums: in Python 3.11 an enum's member costs several times as much, and every frame reads some.
class Type:
    """The type of a frame."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag:
    """What a frame's flags say; ACK and END_STREAM share a bit."""

    ACK = 0x1
    END_STREAM = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Http2Setting(IntEnum):
    """A setting of one side, which the other one keeps to."""

    HEADER_TABLE_SIZE = 1
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class BrokenHttp2(Exception):
    """The other side broke the protocol, or is over a limit: the connection ends with `code`."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


TakeFrame = Callable[[int, int, int, bytes], bool]
"""Takes a frame: type, flags, stream, payload. Returns whether to read on; False is the end of all reading."""


class FrameReader:
    """Cuts what arrives on a connection into frames."""

    def __init__(self, take: TakeFrame) -> None:
        self.is_waiting = True  # for the preface
        self._take = take
        self._begun = b""  # the beginning of a frame, or of the preface

    def feed(self, data: bytes) -> None:
        """Hand on the frames that are whole now.

        Raises:
            BrokenHttp2: it is no HTTP/2, or a frame is over `FRAME_BYTES`. Whatever `take` raises.
        """
        if self._begun:
            data = self._begun + data
        at = 0
        if self.is_waiting:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise BrokenHttp2(Code.PROTOCOL_ERROR, "no HTTP/2")
            self.is_waiting = len(data) < len(PREFACE)
            at = 0 if self.is_waiting else len(PREFACE)
        size, take = len(data), self._take
        while not self.is_waiting and size - at >= _HEAD_BYTES:
            high, low, kind, flags, number = _unpack_head(data, at)
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise BrokenHttp2(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes, limit {FRAME_BYTES}")
            begin = at + _HEAD_BYTES
            end = begin + length
            if size < end:
                break
            if not take(kind, flags, number & 0x7FFF_FFFF, data[begin:end]):
                return
            at = end
        self._begun = data[at:] if at < size else b""


class SendWindow:
    """What the caller lets us send (RFC 9113, sections 5.2 and 6.5.2), of all streams and of a new one."""

    __slots__ = ("frame_bytes", "has_settings", "num_bytes", "of_stream")

    def __init__(self) -> None:
        self.num_bytes = FIRST_WINDOW_BYTES  # that all streams together may send now
        self.of_stream = FIRST_WINDOW_BYTES  # that a new stream may send
        self.frame_bytes = FRAME_BYTES  # of a frame's payload, at most
        self.has_settings = False  # of the caller

    def set(self, payload: bytes) -> int:
        """Take the caller's settings. Returns by how much the windows of open streams change.

        Raises:
            BrokenHttp2: one of them is out of its range.
        """
        before = self.of_stream
        self.has_settings = True
        for name, value in SETTING.iter_unpack(payload):
            if name == Http2Setting.INITIAL_WINDOW_SIZE:
                self.of_stream = checked_window(value)
            elif name == Http2Setting.MAX_FRAME_SIZE:
                self.frame_bytes = max(FRAME_BYTES, min(value, 1 << 20))
        return self.of_stream - before


def checked_window(num_bytes: int) -> int:
    """Return a window. Raises BrokenHttp2: it is over what HTTP/2 allows."""
    if num_bytes > MAX_WINDOW_BYTES:
        raise BrokenHttp2(Code.FLOW_CONTROL_ERROR, "a window over 2^31 - 1")
    return num_bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Write a frame; the payload is not over what the other side allows."""
    length = len(payload)
    return HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def settings(given: dict[Http2Setting, int]) -> bytes:
    """Write the frame of our settings."""
    return frame(Type.SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in given.items()))


def window_update(stream: int, num_bytes: int) -> bytes:
    """Write the frame that lets the other side send more; stream 0 is the connection."""
    return frame(Type.WINDOW_UPDATE, 0, stream, U32.pack(num_bytes))


def literal(name: bytes, value: bytes) -> bytes:
    """Write a header as HPACK's literal without indexing: it needs no table (RFC 7541, section 6.2.2)."""
    assert max(len(name), len(value)) < 127, "a length in one byte"
    return b"\0%c%s%c%s" % (len(name), name, len(value), value)


def unpadded(payload: bytes, flags: int) -> bytes:
    """Return a payload without its padding.

    Raises:
        BrokenHttp2: there is more padding than payload.
    """
    if not flags & Flag.PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise BrokenHttp2(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
