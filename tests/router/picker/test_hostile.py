"""What one caller can make the picker hold or do is bounded, byte by byte, without a network in between."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, cast

import hpack
import pytest
from prometheus_client import CollectorRegistry

from npu_gr.core.settings import from_table
from npu_gr.router.config import RouterConfig
from npu_gr.router.instance import Check
from npu_gr.router.members import ring_of
from npu_gr.router.metrics import RouterMetrics
from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.picker.addresses import Addresses
from npu_gr.router.picker.connection import GrpcConnection
from npu_gr.router.picker.frames import (
    HEAD,
    PREFACE,
    U32,
    Code,
    Flag,
    Http2Setting,
    Type,
    frame,
    settings,
    window_update,
)
from npu_gr.router.picker.serve import Picker
from npu_gr.router.router import Router
from tests.router.picker.asked import PROCESS, chunk, headers

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", PROCESS), (":authority", "a"), ("te", "trailers")]
OPENING = PREFACE + settings({}) + frame(Type.SETTINGS, Flag.ACK, 0)
PICK = headers({"x-user-id": "u"})


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_closed = False
        self.is_paused = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_extra_info(self, _name: str) -> None:
        return None


class Peer:
    """One connection to a picker of three instances that are up."""

    def __init__(self, **limits: int) -> None:
        found = [{"name": f"i{i}", "host": "127.0.0.1", "port": 1000 + i} for i in range(3)]
        table = {"discovery": {"instances": found}, "picker": {}, "limits": limits, "max_budget_s": 10.0}
        config = from_table(table, RouterConfig)
        self.router = Router(config, RouterMetrics(CollectorRegistry()))
        self.router.members.replace(config.discovery.instances, ring_of(config.discovery.instances))
        for one in self.router.members.instances.values():
            one.checked(Check.READY, 0.0)
        self.picker = Picker(self.router, Addresses(config, self.router.members))
        self.encoder = hpack.Encoder()
        self.encoder.header_table_size = 0
        self.opened()

    def opened(self) -> None:
        self.wire = Wire()
        self.connection: GrpcConnection = self.picker.connection()
        self.connection.connection_made(cast(Any, self.wire))

    def say(self, *data: bytes) -> None:
        if not self.wire.is_closed:
            self.connection.data_received(b"".join(data))

    def begin(self, number: int, flags: int = Flag.END_HEADERS) -> bytes:
        return frame(Type.HEADERS, flags, number, self.encoder.encode(REQUEST))

    def lost(self) -> None:
        self.connection.connection_lost(None)
        held = (self.router.in_flight, self.router.kept.num_bytes, len(self.router.connections))
        assert held == (0, 0, 0)
        assert not any(one.in_flight for one in self.router.members.instances.values())

    def kinds(self) -> list[int]:
        """The types of all frames written."""
        at, kinds = 0, []
        while at < len(self.wire.written):
            high, low, kind, _, _ = HEAD.unpack_from(self.wire.written, at)
            kinds.append(kind)
            at += HEAD.size + (high << 16 | low)
        return kinds

    def code(self) -> Code:
        """The code of the GOAWAY, which is the last frame."""
        assert self.kinds()[-1] == Type.GOAWAY
        return Code(U32.unpack_from(self.wire.written, len(self.wire.written) - 4)[0])


def message(request: pb.ProcessingRequest) -> bytes:
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


async def test_any_bytes_in_any_pieces_end_the_connection_or_go_on_and_nothing_is_held_afterwards() -> None:
    draw = random.Random(0)
    peer = Peer()
    body = [headers({}, mode=pb.FULL_DUPLEX_STREAMED), chunk(b'{"user_id": "u"}', ends=True)]
    good = OPENING + peer.begin(1) + frame(Type.DATA, 0, 1, message(PICK)) + frame(Type.PING, 0, 0, bytes(8))
    good += peer.begin(3) + frame(Type.DATA, Flag.END_STREAM, 3, b"".join(map(message, body)))
    good += window_update(0, 10) + frame(Type.RST_STREAM, 0, 1, U32.pack(8)) + peer.begin(5)
    peer.lost()
    ended = 0
    for _ in range(1500):
        peer.opened()
        broken = bytearray(good)
        for _ in range(draw.choice((0, 1, 1, 2, 5))):
            broken[draw.randrange(len(PREFACE), len(broken))] = draw.randrange(256)
        data = bytes(broken) if draw.random() < 0.8 else bytes(broken[: draw.randrange(len(broken))])
        while data:
            size = draw.choice((1, 9, 100, 10_000))
            peer.say(data[:size])
            data = data[size:]
        ended += peer.wire.is_closed
        assert peer.wire.is_closed == (Type.GOAWAY in peer.kinds())
        peer.lost()
    assert 300 < ended < 1450


async def test_calls_that_are_reset_at_once_leave_nothing() -> None:
    peer = Peer(max_inflight=8)
    peer.say(OPENING)
    for number in range(1, 2001, 2):
        reset = frame(Type.RST_STREAM, 0, number, U32.pack(8))
        peer.say(peer.begin(number), frame(Type.DATA, 0, number, message(PICK)), reset)
    assert peer.connection.is_idle
    assert not peer.wire.is_closed
    assert peer.router.metrics.placed_at("i0") + peer.router.metrics.placed_at("i1") + peer.router.metrics.placed_at(
        "i2"
    ) == len(range(1, 2001, 2))
    peer.lost()


async def test_who_does_not_read_is_not_read_from() -> None:
    peer = Peer()
    peer.say(OPENING)
    before = len(peer.wire.written)
    for flood in (frame(Type.PING, 0, 0, bytes(8)), settings({})):
        peer.say(flood * 1000)
    assert len(peer.wire.written) - before <= 1000 * (17 + 9), "an answer for each, no longer than what it answers"
    peer.connection.pause_writing()
    assert peer.wire.is_paused
    peer.connection.resume_writing()
    assert not peer.wire.is_paused
    peer.lost()


BLOCKS = {
    "a reference repeated": b"\x82" * 60_000,
    "the table's size again and again": b"\x3f\xe1\x1f" * 20_000,
    "a header of nothing": b"\0\x01a\0" * 16_000,
}


@pytest.mark.parametrize("name", BLOCKS)
async def test_headers_that_grow_when_they_are_read_are_refused(name: str) -> None:
    for size, codes in ((16_384, {Code.COMPRESSION_ERROR}), (60_000, {Code.ENHANCE_YOUR_CALM})):
        peer = Peer()
        block = BLOCKS[name][:size]
        pieces = [block[i : i + 16_384] for i in range(0, len(block), 16_384)]
        said = frame(Type.HEADERS, 0 if len(pieces) > 1 else Flag.END_HEADERS, 1, pieces[0])
        for piece in pieces[1:]:
            said += frame(Type.CONTINUATION, Flag.END_HEADERS if piece is pieces[-1] else 0, 1, piece)
        peer.say(OPENING, said)
        assert peer.code() in codes
        peer.lost()


async def test_what_waits_for_a_window_that_never_opens_is_counted_and_bounded() -> None:
    peer = Peer(max_body_bytes=100_000, max_kept_bytes=150_000)
    peer.say(PREFACE, settings({Http2Setting.INITIAL_WINDOW_SIZE: 0}), frame(Type.SETTINGS, Flag.ACK, 0))
    first = headers({"x-user-id": "u"}, mode=pb.FULL_DUPLEX_STREAMED)
    for number in (1, 3, 5):
        peer.say(peer.begin(number), frame(Type.DATA, 0, number, message(first)))
        for _ in range(5):
            said = message(chunk(b"x" * 12_000))
            peer.say(frame(Type.DATA, 0, number, said))
        assert peer.router.kept.num_bytes <= 150_000
    assert peer.router.kept.num_bytes > 100_000, "two of them wait"
    assert Type.DATA not in peer.kinds()
    assert Type.RST_STREAM in peer.kinds(), "and one was refused"
    peer.say(window_update(0, 1 << 20), window_update(1, 1 << 20))
    assert Type.DATA in peer.kinds()
    assert 50_000 < peer.router.kept.num_bytes < 75_000
    peer.lost()


async def test_windows_that_shrink_below_nothing_and_grow_again_send_everything_once() -> None:
    peer = Peer()
    peer.say(PREFACE, settings({Http2Setting.INITIAL_WINDOW_SIZE: 50}), frame(Type.SETTINGS, Flag.ACK, 0))
    peer.say(peer.begin(1), frame(Type.DATA, 0, 1, message(PICK)))
    peer.say(settings({Http2Setting.INITIAL_WINDOW_SIZE: 0}))
    sent = bytes(peer.wire.written)
    for size in (10, 40, 51, 100, 1000):
        peer.say(settings({Http2Setting.INITIAL_WINDOW_SIZE: size}))
    peer.say(frame(Type.GOAWAY, 0, 0, bytes(8)))
    data = b""
    at = 0
    written = bytes(peer.wire.written)
    assert written.startswith(sent)
    while at < len(written):
        high, low, kind, _, _ = HEAD.unpack_from(written, at)
        end = at + HEAD.size + (high << 16 | low)
        data += written[at + HEAD.size : end] if kind == Type.DATA else b""
        at = end
    assert pb.ProcessingResponse.FromString(data[5:]).HasField("request_headers")
    peer.lost()


async def test_a_connection_that_says_nothing_is_closed_and_a_silent_one_is_asked_first() -> None:
    peer = Peer()
    now_at = time.monotonic()
    peer.connection.sweep(now_at + 9)
    assert not peer.wire.is_closed
    peer.connection.sweep(now_at + 11)
    assert peer.wire.is_closed, "no preface within header_timeout_s"
    peer.lost()
    peer.opened()
    peer.say(OPENING)
    for later_s, is_closed in ((70, False), (76, False), (85, False)):
        peer.connection.sweep(time.monotonic() + later_s)
        assert peer.wire.is_closed == is_closed
    assert peer.kinds().count(Type.PING) == 1
    peer.say(frame(Type.PING, Flag.ACK, 0, bytes(8)))
    peer.connection.sweep(time.monotonic() + 10)
    assert not peer.wire.is_closed, "it has answered"
    peer.connection.sweep(time.monotonic() + 76)
    peer.connection.sweep(time.monotonic() + 87)
    assert peer.wire.is_closed, "its host is gone"
    peer.lost()


async def test_a_gateway_that_forgets_its_calls_holds_no_places() -> None:
    peer = Peer()
    peer.say(OPENING, *(peer.begin(number) + frame(Type.DATA, 0, number, message(PICK)) for number in (1, 3, 5)))
    assert peer.router.in_flight == 3
    peer.connection.sweep(time.monotonic() + 19)
    assert peer.router.in_flight == 3
    peer.connection.sweep(time.monotonic() + 21)
    assert peer.router.in_flight == 0
    assert peer.kinds().count(Type.RST_STREAM) == 3
    assert not peer.wire.is_closed
    peer.say(peer.begin(7), frame(Type.DATA, 0, 7, message(PICK)))
    assert peer.router.in_flight == 1, "the next call is served"
    await asyncio.sleep(0)
    peer.lost()


async def test_nothing_is_written_to_a_call_that_is_reset_in_the_same_piece() -> None:
    """Envoy ends its side and resets the call at once when a request is over."""
    peer = Peer()
    peer.say(OPENING, peer.begin(1), frame(Type.DATA, 0, 1, message(PICK)))
    before = len(peer.wire.written)
    peer.say(frame(Type.DATA, Flag.END_STREAM, 1), frame(Type.RST_STREAM, 0, 1, U32.pack(2)))
    assert len(peer.wire.written) == before
    assert sum(len(one.rank_times_s) for one in peer.router.members.instances.values()) == 1, "how long it took"
    assert peer.router.metrics.requests.value(kind="rank", status="0") == 1
    peer.lost()
