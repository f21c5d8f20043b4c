"""Headers are read from their bytes as the library of protobuf reads them, and so are the modes of bodies."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.picker import messages
from npu_gr.router.picker.heads import pairs_of

NAMES = (b"x-user-id", b":path", b"", b"a", b"k" * 130, b"k" * 127 + b"\x1a")
KEYS = st.sampled_from([*(name.decode() for name in NAMES), "x-user", "accept", "k" * 127, "k" * 128])
VALUES = st.one_of(st.text(max_size=140), st.integers(120, 260).map(lambda size: "v" * size))
PIECES = st.sampled_from(
    [b"\n", b"\x12", b"\x1a", b"\0", b"\1", b"\x80\0", b"\x81\0", b"x-user-id", b"\n\x09x-user-id"]
)


@st.composite
def encoded(draw: st.DrawFn) -> bytes:
    """A header as some gateway may write it: its fields in any order, twice, in either form of the value, or broken."""
    fields = draw(
        st.lists(
            st.one_of(
                KEYS.map(lambda key: pb.HeaderValue(key=key)),
                VALUES.map(lambda value: pb.HeaderValue(value=value)),
                VALUES.map(lambda value: pb.HeaderValue(raw_value=value.encode())),
            ),
            max_size=3,
        )
    )
    usual = pb.HeaderValue(key=draw(KEYS), raw_value=draw(VALUES).encode())
    data = draw(
        st.sampled_from([usual.SerializeToString(), b"".join(one.SerializeToString() for one in fields)])
        | st.lists(PIECES, max_size=6).map(b"".join)
    )
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


# What resembles the short form: another first field, another second one, a long name, a length in too many bytes.
@example([b"\x12\x01a\x1a\x01b"])
@example([b"\n\x01a\x22\x01b"])
@example([pb.HeaderValue(key="k" * 127 + "\x1a", raw_value=b"v" * 25).SerializeToString()])
@example([b"\n\x01a\x1a\x85\0vvvvv\x7a\x7d" + bytes(125)])
@given(st.lists(encoded(), max_size=4))
def test_headers_are_those_that_the_library_reads(given: list[bytes]) -> None:
    try:
        read = [pb.HeaderValue.FromString(one) for one in given]
    except DecodeError:
        with pytest.raises(DecodeError):
            pairs_of(given, NAMES)
        return
    pairs = [(one.key.encode(), one.raw_value or one.value.encode()) for one in read]
    assert pairs_of(given, NAMES) == [pair for pair in pairs if pair[0] in NAMES]


@given(
    st.binary(max_size=6)
    | st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda two: bytes((8, two[0], 16, two[1])))
)
def test_modes_are_those_that_the_library_reads(config: bytes) -> None:
    try:
        read = pb.ProtocolConfiguration.FromString(config)
    except DecodeError:
        with pytest.raises(DecodeError):
            messages.modes(config)
        return
    assert messages.modes(config) == (read.request_body_mode, read.response_body_mode)
