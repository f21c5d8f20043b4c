"""However the bytes of requests are cut, the same requests come out; what is too long is told early."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import BadRequest
from npu_gr.server.entrance.framing import MAX_HEAD_BYTES
from npu_gr.server.entrance.incoming import HeadTooLarge, Incoming

LINE = b"POST /v1/rank HTTP/1.1\r\n"


def whole(body: bytes) -> bytes:
    return LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes) -> bytes:
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:3], body[3:]) if piece)
    return LINE + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"


def received(incoming: Incoming, data: bytes) -> list[bytes]:
    """Take all requests that are whole with some more bytes."""
    if incoming.data:
        incoming.add(data)
    else:
        incoming.data = data
    taken = []
    while incoming.data and (incoming.head is not None or incoming.read_head() is not None):
        request, body_bytes = incoming.take()
        assert incoming.head is not None
        if request is None:
            break
        assert len(request) == incoming.head.num_bytes + body_bytes
        taken.append(bytes(request))
        incoming.head = None
    return taken


@given(
    requests=st.lists(st.builds(lambda make, body: make(body), st.sampled_from([whole, chunked]), st.binary())),
    cuts=st.lists(st.integers(0, 1000)),
)
def test_requests_come_out_as_they_were_sent_however_they_are_cut(requests: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(requests)
    at = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    incoming = Incoming()
    taken = [request for begin, end in itertools.pairwise(at) for request in received(incoming, sent[begin:end])]
    assert taken == requests
    assert not incoming.data


def test_a_body_is_known_before_it_is_here() -> None:
    incoming = Incoming()
    incoming.data = whole(b"x" * 1000)[:-600]
    incoming.read_head()
    assert incoming.take() == (None, 1000)
    incoming = Incoming()
    incoming.data = chunked(b"x" * 1000)[:-600]
    head = incoming.read_head()
    assert head is not None
    assert incoming.take() == (None, len(incoming.data) - head.num_bytes)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_that_is_too_long_is_no_head(end: bytes) -> None:
    incoming = Incoming()
    incoming.data = LINE + b"x" * MAX_HEAD_BYTES + end
    with pytest.raises(HeadTooLarge):
        incoming.read_head()


def test_a_chunk_without_a_size_is_no_request() -> None:
    incoming = Incoming()
    incoming.data = chunked(b"x").replace(b"1\r\n", b"?\r\n")
    incoming.read_head()
    with pytest.raises(BadRequest, match="hexadecimal"):
        incoming.take()
