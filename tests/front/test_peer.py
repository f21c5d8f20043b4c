"""Frames arrive whole and in order however the bytes are cut; what is no frame ends the connection in words."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import TooLarge
from npu_gr.front import peer as module
from npu_gr.front.frames import MAX_FRAME_BYTES, AskFrame, CancelFrame, encode
from npu_gr.front.peer import READ_BYTES, Peer
from tests.serving import until


class End:
    """Notes what a peer is told."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.lost: list[str] = []
        self.peer = Peer("the other side", self.frames.append, self.lost.append)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[End, socket.socket]]:
    """A peer, and the raw socket of the other side."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end = End()
    await asyncio.get_running_loop().create_unix_connection(lambda: end.peer, sock=ours)
    theirs.setblocking(False)
    with theirs:
        yield end, theirs
        end.peer.cut("")
        await until(lambda: bool(end.lost))


def framed(*all_frames: Any) -> bytes:
    return b"".join(len(data).to_bytes(4, "little") + data for data in map(encode, all_frames))


def asking(number: int, num_bytes: int) -> AskFrame:
    return AskFrame(number, "x", bytes([number % 256]) * num_bytes)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, 5_000, READ_BYTES - 20, READ_BYTES, READ_BYTES + 7]), max_size=6),
    cuts=st.lists(st.integers(1, 300_000), min_size=1, max_size=8),
)
@settings(max_examples=30, deadline=None)
def test_frames_arrive_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    async def run() -> None:
        sent = [asking(number, size) for number, size in enumerate(sizes)]
        left = memoryview(framed(*sent))
        end = End()
        place = 0
        while left:  # as the transport does: into the buffer that the peer gives, no more than it holds
            buffer = end.peer.get_buffer(-1)
            num = min(len(buffer), len(left), cuts[place % len(cuts)] if place < 500 else READ_BYTES)
            place += 1
            assert num > 0
            buffer[:num] = left[:num]
            left = left[num:]
            end.peer.buffer_updated(num)
        assert [(one.id, bytes(one.body)) for one in end.frames] == [(one.id, bytes(one.body)) for one in sent]

    asyncio.run(run())


async def test_what_is_sent_in_one_turn_leaves_in_one_write() -> None:
    async with connected() as (end, theirs):
        for number in range(16):
            end.peer.send(CancelFrame(number))
        await asyncio.sleep(0)
        assert theirs.recv(65_536) == framed(*(CancelFrame(number) for number in range(16)))


async def test_a_long_frame_goes_both_ways() -> None:
    async with connected() as (end, theirs):
        data = framed(asking(1, 3_000_000))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(theirs, data)
        await until(lambda: bool(end.frames))
        end.peer.send(end.frames[0])
        received = b""
        while len(received) < len(data):
            received += await loop.sock_recv(theirs, 1 << 20)
        assert received == data


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\xff\xff\xff\xff", f"a frame of 4,294,967,295 bytes; {MAX_FRAME_BYTES:,} is the limit"),
        (b"\x05\0\0\0hello", "5 bytes that are no frame"),
        (b"\0\0\0\0", "0 bytes that are no frame"),
        (b"\x03\0\0\0\x93\xcc\xfa", "3 bytes that are no frame"),  # an unknown tag
        (b"\x02\0\0\0\x91\x02", "2 bytes that are no frame"),  # Cancel without its id
        (framed(CancelFrame(1))[:-1] + b"\xa1", "no frame"),  # its id is a text that is cut off
    ],
)
async def test_what_is_no_frame_ends_the_connection_in_words(
    sent: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected() as (end, theirs):
        theirs.sendall(sent + framed(CancelFrame(2)))
        await until(lambda: bool(end.lost))
        assert words in end.lost[0]
        assert end.frames == []  # nothing that came behind it counts
    assert any(words in record.message and record.levelno == logging.ERROR for record in caplog.records)


async def test_nothing_longer_than_a_frame_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 1000)
    async with connected() as (end, theirs):
        with pytest.raises(TooLarge, match=r"AskFrame: .* bytes, a frame has 1,000 at most"):
            end.peer.send(asking(1, 1000))
        end.peer.send(CancelFrame(1))
        await asyncio.sleep(0)
        assert theirs.recv(65_536) == framed(CancelFrame(1))


async def test_the_end_of_the_other_side_is_told_once() -> None:
    async with connected() as (end, theirs):
        theirs.close()
        await until(lambda: bool(end.lost))
        end.peer.send(CancelFrame(1))  # into the void
        await asyncio.sleep(0.01)
        assert end.lost == [""]
        assert not end.peer.is_open


async def test_what_is_not_taken_is_counted() -> None:
    async with connected() as (end, theirs):
        end.peer.send(asking(1, 4_000_000))
        await asyncio.sleep(0)
        assert end.peer.unsent_bytes > 3_000_000
        assert theirs.fileno() >= 0
