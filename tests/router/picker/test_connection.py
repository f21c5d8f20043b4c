"""HTTP/2 as a hostile caller writes it, byte by byte: the connection ends, and the router serves the next one."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hpack
import pytest

from npu_gr.router.picker import external_processor_pb2 as pb
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
from tests.router.picker.asked import PROCESS, asked, chunk, headers

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", PROCESS), (":authority", "a"), ("te", "trailers")]
OPENING = PREFACE + settings({})


def message(request: pb.ProcessingRequest) -> bytes:
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


class Caller:
    """A connection with a codec of HPACK of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()

    def write(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    def begin(self, number: int, flags: int = Flag.END_HEADERS) -> bytes:
        return frame(Type.HEADERS, flags, number, self.encoder.encode(REQUEST))

    async def frame(self) -> tuple[int, int, int, bytes]:
        async with asyncio.timeout(5):
            high, low, kind, flags, number = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            return kind, flags, number, await self.reader.readexactly(high << 16 | low)

    async def until(self, kind: int) -> tuple[int, int, bytes]:
        """The next frame of a type: its flags, stream and payload."""
        while True:
            seen, flags, number, payload = await self.frame()
            if seen == kind:
                return flags, number, payload

    async def end(self) -> Code:
        """The code with which the connection ends."""
        _, _, payload = await self.until(Type.GOAWAY)
        async with asyncio.timeout(5):
            assert await self.reader.read() == b""
        return Code(U32.unpack_from(payload, 4)[0])


@asynccontextmanager
async def caller(port: int) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Caller(reader, writer)
    finally:
        writer.close()


def broken(c: Caller) -> list[tuple[bytes, Code]]:
    call = OPENING + c.begin(1)
    reset = frame(Type.RST_STREAM, 0, 9, U32.pack(8))
    return [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", Code.PROTOCOL_ERROR),
        (PREFACE + frame(Type.PING, 0, 0, b"x" * 8), Code.PROTOCOL_ERROR),
        (OPENING + HEAD.pack(1, 0, Type.DATA, 0, 1), Code.FRAME_SIZE_ERROR),
        (OPENING + frame(Type.PING, 0, 0, b"x"), Code.FRAME_SIZE_ERROR),
        (OPENING + frame(Type.SETTINGS, 0, 0, b"x"), Code.FRAME_SIZE_ERROR),
        (OPENING + settings({Http2Setting.INITIAL_WINDOW_SIZE: 2**31}), Code.FLOW_CONTROL_ERROR),
        (OPENING + frame(Type.DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR),
        (OPENING + reset, Code.PROTOCOL_ERROR),
        (OPENING + frame(Type.RST_STREAM, 0, 1, b""), Code.FRAME_SIZE_ERROR),
        (OPENING + frame(Type.PUSH_PROMISE, 0, 1), Code.PROTOCOL_ERROR),
        (OPENING + frame(Type.CONTINUATION, 0, 1, b"x"), Code.PROTOCOL_ERROR),
        (OPENING + c.begin(1, 0) + frame(Type.PING, 0, 0, b"x" * 8), Code.PROTOCOL_ERROR),
        (
            OPENING + frame(Type.HEADERS, 0, 1) + frame(Type.CONTINUATION, 0, 1) * 2,
            Code.ENHANCE_YOUR_CALM,
        ),
        (
            OPENING + frame(Type.HEADERS, 0, 1) + frame(Type.CONTINUATION, 0, 1, b"\0" * 16_000) * 5,
            Code.ENHANCE_YOUR_CALM,
        ),
        (OPENING + frame(Type.HEADERS, Flag.END_HEADERS, 1, b"\xff\xff\xff"), Code.COMPRESSION_ERROR),
        (
            OPENING + frame(Type.HEADERS, Flag.END_HEADERS | Flag.PADDED, 1, b"\x09\x00"),
            Code.PROTOCOL_ERROR,
        ),
        (OPENING + frame(Type.HEADERS, Flag.END_HEADERS, 2, b"\x83"), Code.PROTOCOL_ERROR),
        (OPENING + window_update(0, 2**31 - 1), Code.FLOW_CONTROL_ERROR),
        (OPENING + window_update(0, 0), Code.PROTOCOL_ERROR),
        (OPENING + window_update(3, 1), Code.PROTOCOL_ERROR),
        (call + frame(Type.HEADERS, Flag.END_HEADERS, 1, b""), Code.PROTOCOL_ERROR),
        (call + frame(Type.DATA, Flag.PADDED, 1, b""), Code.PROTOCOL_ERROR),
        (
            call + frame(Type.DATA, 0, 1, b"\0\0\x01\0\0") + frame(Type.DATA, 0, 1, b"x" * 16_384) * 600,
            Code.NO_ERROR,
        ),
    ]


NUM_BROKEN = 23


@pytest.fixture
async def picker() -> AsyncIterator[int]:
    async with asked() as a:
        yield a.port
        assert a.site.router.in_flight == 0
        await a.site.until(lambda: a.site.router.kept.num_bytes == 0 and not len(a.site.router.connections))


async def test_a_broken_connection_ends_with_its_code_and_the_next_one_is_served(picker: int) -> None:
    for i in range(NUM_BROKEN):
        async with caller(picker) as c:
            cases = broken(c)
            assert len(cases) == NUM_BROKEN
            data, code = cases[i]
            c.write(data)
            if code is Code.NO_ERROR:  # within the windows: the message is over none of the limits but never ends
                c.writer.close()
                continue
            assert await c.end() == code, i
    async with caller(picker) as c:
        c.write(OPENING, c.begin(1), frame(Type.DATA, Flag.END_STREAM, 1, message(headers({"x-user-id": "u"}))))
        _, number, data = await c.until(Type.DATA)
        assert number == 1
        assert pb.ProcessingResponse.FromString(data[5:]).HasField("request_headers")


async def test_frames_may_come_in_any_pieces_and_mean_the_same(picker: int) -> None:
    rng = random.Random(0)
    for _ in range(10):
        async with caller(picker) as c:
            data = message(headers({"x-user-id": "u", "content-type": "application/json"}))
            cut = rng.randrange(1, len(data))
            block = c.encoder.encode(REQUEST)
            at = rng.randrange(1, len(block))
            padded = bytes([7]) + data[cut:] + b"\0" * 7
            said = OPENING + frame(Type.HEADERS, Flag.PRIORITY, 1, b"\0" * 5 + block[:at])
            said += frame(Type.CONTINUATION, Flag.END_HEADERS, 1, block[at:]) + frame(99, 0, 1, b"later")
            said += frame(Type.DATA, 0, 1, data[:cut]) + frame(Type.DATA, Flag.END_STREAM | Flag.PADDED, 1, padded)
            while said:
                size = rng.randrange(1, 40)
                c.write(said[:size])
                said = said[size:]
                await c.writer.drain()
                await asyncio.sleep(0)
            _, _, answer = await c.until(Type.DATA)
            assert pb.ProcessingResponse.FromString(answer[5:]).HasField("request_headers")
            flags, _, trailers = await c.until(Type.HEADERS)
            assert flags & Flag.END_STREAM
            assert (b"grpc-status", b"0") in list(c.decoder.decode(trailers, raw=True))


async def test_nothing_is_sent_over_the_callers_windows(picker: int) -> None:
    body = random.Random(0).randbytes(200_000)
    async with caller(picker) as c:
        window = {0: 65_535, 1: 1000}
        c.write(PREFACE, settings({Http2Setting.INITIAL_WINDOW_SIZE: window[1]}), c.begin(1))
        said = [headers({"x-user-id": "u"}, mode=pb.FULL_DUPLEX_STREAMED)]
        said += [chunk(body[i : i + 10_000], i + 10_000 == len(body)) for i in range(0, len(body), 10_000)]
        for one in said:
            data = message(one)
            c.write(*(frame(Type.DATA, 0, 1, data[i : i + 16_384]) for i in range(0, len(data), 16_384)))
        got = bytearray()
        rng = random.Random(1)
        heard: list[pb.ProcessingResponse] = []
        while not (heard and heard[-1].request_body.response.body_mutation.streamed_response.end_of_stream):
            kind, _, number, payload = await c.frame()
            if kind != Type.DATA:
                continue
            for of in (0, number):
                window[of] -= len(payload)
                assert window[of] >= 0, "over the window"
            got += payload
            while len(got) >= 5 and len(got) >= 5 + struct.unpack_from(">L", got, 1)[0]:
                size = 5 + struct.unpack_from(">L", got, 1)[0]
                heard.append(pb.ProcessingResponse.FromString(bytes(got[5:size])))
                del got[:size]
            more = rng.randrange(1, 20_000)
            for of in (0, 1):
                if window[of] < 20_000:
                    window[of] += more
                    c.write(window_update(of, more))
        echoed = [one.request_body.response.body_mutation.streamed_response.body for one in heard[1:]]
        assert b"".join(echoed) == body


async def test_with_our_table_confirmed_the_same_block_is_the_same_request(picker: int) -> None:
    async with caller(picker) as c:
        c.write(OPENING, c.begin(1), c.begin(3))  # the second one refers to the caller's table
        c.write(frame(Type.SETTINGS, Flag.ACK, 0))
        c.encoder.header_table_size = 0
        c.write(*(c.begin(number) for number in (5, 7, 9)))
        for number in (1, 3, 5, 7, 9):
            c.write(frame(Type.DATA, Flag.END_STREAM, number, message(headers({"x-user-id": "u"}))))
        assert {(await c.until(Type.DATA))[1] for _ in range(5)} == {1, 3, 5, 7, 9}


async def test_a_router_that_leaves_says_so_and_finishes_its_calls() -> None:
    async with asked(limits={"max_inflight": 2}) as a, caller(a.port) as c:
        c.write(OPENING, *(c.begin(number) for number in (1, 3, 5)))
        _, number, code = await c.until(Type.RST_STREAM)
        assert (number, U32.unpack(code)[0]) == (5, Code.REFUSED_STREAM)
        a.site.router.is_draining = True
        _, _, payload = await c.until(Type.GOAWAY)
        assert U32.unpack_from(payload)[0] == 5
        c.write(*(frame(Type.DATA, Flag.END_STREAM, n, message(headers({"x-user-id": "u"}))) for n in (1, 3)))
        assert {(await c.until(Type.DATA))[1] for _ in range(2)} == {1, 3}
        async with asyncio.timeout(5):
            await c.reader.read()
