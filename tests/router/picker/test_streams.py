"""What a call sends is the same whether it goes out at once or waits for the caller's windows."""

from __future__ import annotations

import hpack
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.router.picker.frames import FRAME_BYTES, HEAD, Flag, SendWindow, Type
from npu_gr.router.picker.streams import PREFIX_BYTES, PickerStream

WINDOW_BYTES = 1 << 20


class Wire:
    """Implements `PickerWire`."""

    def __init__(self) -> None:
        self.window = SendWindow()
        self.window.num_bytes = WINDOW_BYTES
        self.written: list[bytes] = []
        self.ends = 0

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def ended(self, _stream: PickerStream) -> None:
        self.ends += 1

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        data, found = b"".join(self.written), []
        while data:
            high, low, kind, flags, number = HEAD.unpack_from(data)
            end = HEAD.size + (high << 16 | low)
            found.append((kind, flags, number, data[HEAD.size : end]))
            data = data[end:]
        return found


def sent(message: bytes, number: int, window_bytes: int) -> Wire:
    """A whole answer of one message, whose stream has this window at first, and a large one then."""
    wire = Wire()
    stream = PickerStream(wire, number, window_bytes, began_at=0.0)
    stream.send(message)
    if stream.pending:
        stream.send_window = WINDOW_BYTES
        stream.flush()
    assert wire.window.num_bytes == WINDOW_BYTES - len(message) - PREFIX_BYTES
    stream.end()
    assert wire.ends == 1
    return wire


@given(st.binary(max_size=400), st.integers(0, 2**30).map(lambda i: 2 * i + 1))
def test_an_answer_in_one_piece_is_the_one_that_has_waited(message: bytes, number: int) -> None:
    at_once, waited = sent(message, number, WINDOW_BYTES), sent(message, number, 0)
    assert len(at_once.written) == len(waited.written) - 1
    assert b"".join(at_once.written) == b"".join(waited.written)
    (head, data, trailers) = at_once.frames()
    assert head[:3] == (Type.HEADERS, Flag.END_HEADERS, number)
    assert dict(hpack.Decoder().decode(head[3], raw=True)) == {b":status": b"200", b"content-type": b"application/grpc"}
    assert data == (Type.DATA, 0, number, b"\0" + len(message).to_bytes(4, "big") + message)
    assert trailers[:3] == (Type.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, number)


@given(st.integers(FRAME_BYTES - 50, 3 * FRAME_BYTES), st.integers(0, 2 * FRAME_BYTES))
def test_no_frame_is_over_the_callers_limit(size: int, window_bytes: int) -> None:
    wire = sent(bytes(size), 1, window_bytes)
    pieces = [payload for kind, _, _, payload in wire.frames() if kind == Type.DATA]
    assert b"".join(pieces) == b"\0" + size.to_bytes(4, "big") + bytes(size)
    assert max(map(len, pieces)) <= FRAME_BYTES
