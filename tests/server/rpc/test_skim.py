"""What decoding a long message would make is known, and bounded, before anything of it is made."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import DecodeError

from npu_gr.core.errors import BadRequest, TooLarge
from npu_gr.server.codec.bulk import LOOSE_BYTES
from npu_gr.server.config import ServerConfig
from npu_gr.server.rpc.calls import Calls, RpcCall
from npu_gr.server.rpc.messages import message
from npu_gr.server.rpc.skim import PIECE, most_elements, skim

INFER = message("inference.ModelInferRequest")
RANK = message("npu_gr.v1.RankRequest")
MOST = 4_194_304  # bytes of a message, by default


def walked(body: bytes, cls: Any, elements: int = 2**40, loose_bytes: int = 2**40) -> int:
    """Walk through a whole message. Returns how often others had the event loop."""
    return sum(1 for _ in skim(body, cls.DESCRIPTOR, elements, loose_bytes))


def elements_of(made: Any) -> int:
    """The slow definition: decode it and count what stands in columns."""
    num = 0
    for field, value in made.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            num += sum(elements_of(one) for one in value.values() if hasattr(one, "ListFields"))
        elif field.message_type is not None:
            num += sum(map(elements_of, value)) if field.is_repeated else elements_of(value)
        elif field.is_repeated:
            num += len(value)
    return num


def drawn(draw: random.Random) -> Iterator[tuple[Any, Any]]:
    """Messages of many shapes, and their classes."""

    def numbers(most: int) -> list[int]:
        return [draw.choice((0, 1, 127, 128, 2**40, -1)) for _ in range(draw.randrange(most))]

    def names(most: int) -> list[str]:
        return ["n" * draw.choice((0, 1, 5, 126, 127, 128, 300)) for _ in range(draw.randrange(most))]

    for _ in range(60):
        contents = {"int64_contents": numbers(50), "bytes_contents": [one.encode() for one in names(20)]}
        contents["fp32_contents"] = [1.0] * draw.randrange(30)
        tensor = {"name": "a", "datatype": "INT64", "shape": numbers(3), "contents": contents}
        raw = [draw.randbytes(draw.randrange(200)) for _ in range(draw.randrange(4))]
        yield INFER(model_name="rank", inputs=[tensor] * draw.randrange(4), raw_input_contents=raw), INFER
        history = {
            "items": {"ids": numbers(60)},
            "actions": {"names": names(20)},
            "timestamps": {"raw": draw.randbytes(80)},
        }
        yield RANK(user_id="u", history=history, candidates={"names": names(30), "ids": numbers(5)}), RANK


def test_elements_are_counted_as_protobuf_has_them() -> None:
    for made, cls in drawn(random.Random(0)):
        body = made.SerializeToString()
        num = elements_of(made)
        walked(body, cls, num)
        if num:
            with pytest.raises(TooLarge, match=f"over {num - 1} elements"):
                walked(body, cls, num - 1)


def test_what_stands_beside_the_columns_is_counted_in_bytes_whatever_it_is() -> None:
    columns = RANK(candidates={"raw": b"x" * 10_000, "names": ["n" * 50] * 100}).SerializeToString()
    loose = RANK(user_id="u" * 400).SerializeToString()
    unknown = b"\xa2\x7d\x05later"  # a field that no message here has
    head = 1 + 2  # of `candidates`: its tag and its length
    of_raw = 1 + 2
    num = len(loose) + len(unknown) + head + of_raw
    walked(columns + loose + unknown, RANK, loose_bytes=num)
    with pytest.raises(TooLarge, match="beside its columns"):
        walked(columns + loose + unknown, RANK, loose_bytes=num - 1)


def test_bytes_that_are_no_message_are_refused_or_refused_by_protobuf() -> None:
    draw = random.Random(1)
    refused = 0
    for made, cls in drawn(draw):
        for _ in range(20):
            broken = bytearray(made.SerializeToString())
            for _ in range(draw.choice((1, 1, 3))):
                broken[draw.randrange(len(broken))] = draw.randrange(256)
            try:
                walked(bytes(broken), cls)
            except BadRequest:
                refused += 1
                has_group = any(byte & 7 in (3, 4) for byte in broken)  # of protobuf's first version: we take none
                if not has_group:
                    with pytest.raises(DecodeError):
                        cls.FromString(bytes(broken))
    assert 100 < refused < 2300


def within(field: int, content: bytes) -> bytes:
    """A message in a field of another one."""
    return bytes([field << 3 | 2]) + varint(len(content)) + content


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def number_of(cls: Any, name: str) -> int:
    return int(cls.DESCRIPTOR.fields_by_name[name].number)


CANDIDATES = number_of(RANK, "candidates")
HOSTILE = {  # 4 MB each; decoding one took up to 50 ms
    "empty names": within(CANDIDATES, b"\x12\x00" * 2_000_000),
    "numbers of a byte": within(CANDIDATES, within(1, b"\x01" * 4_000_000)),
    "numbers one by one": within(CANDIDATES, b"\x08\x01" * 2_000_000),
    "the same column again and again": within(CANDIDATES, b"") * 2_000_000,
    "fields that nobody knows": b"\xa0\x7d\x01" * 1_300_000,
    "one long text": within(1, b"u" * 4_000_000),
}


class Spied:
    """A class of messages that says whether anything was decoded."""

    def __init__(self, cls: Any) -> None:
        self.DESCRIPTOR = cls.DESCRIPTOR
        self._cls = cls
        self.num_decoded = 0

    def FromString(self, body: bytes) -> Any:  # noqa: N802  (protobuf's)
        self.num_decoded += 1
        return self._cls.FromString(body)


class Turns:
    """Implements what `Calls.decoded` uses of `Pieces`; every turn lets the event loop go on."""

    def __init__(self) -> None:
        self.num = 0
        self.is_inside = False

    async def turn(self, _until_at: float) -> None:
        assert not self.is_inside
        self.num += 1
        await asyncio.sleep(0)

    def __enter__(self) -> None:
        self.is_inside = True

    def __exit__(self, *_: object) -> None:
        self.is_inside = False


def decoding() -> tuple[Calls, Turns]:
    turns = Turns()
    return Calls(cast(Any, SimpleNamespace(pieces=turns, config=ServerConfig()))), turns


CALL = cast(RpcCall, SimpleNamespace(until_at=float("inf")))


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_message_is_refused_before_it_is_decoded(name: str) -> None:
    calls, _ = decoding()
    spied = Spied(RANK)
    with pytest.raises(TooLarge):
        await calls.decoded(CALL, spied, HOSTILE[name][:MOST])
    assert not spied.num_decoded


async def test_others_have_the_event_loop_while_a_long_message_is_looked_at() -> None:
    calls, turns = decoding()
    num_names = 60_000
    body = RANK(user_id="u", history={"items": {"names": ["n" * 60] * num_names}}).SerializeToString()
    num_others = 0

    async def others() -> None:
        nonlocal num_others
        while True:
            num_others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    made = await calls.decoded(CALL, RANK, body)
    task.cancel()
    assert len(made.history.items.names) == num_names
    assert turns.num >= num_names // (2 * PIECE) + 2, "a piece of walking at a time, and decoding is one of its own"
    assert num_others >= num_names // (2 * PIECE)


async def test_a_short_message_is_decoded_at_once() -> None:
    calls, turns = decoding()
    body = RANK(user_id="u", candidates={"ids": range(1000)}).SerializeToString()
    assert len(body) <= LOOSE_BYTES
    await calls.decoded(CALL, RANK, body)
    assert turns.num == 1


def test_the_longest_message_that_the_limits_allow_passes() -> None:
    config = ServerConfig()
    names = {"names": ["n"] * config.max_history_events}
    history = {"items": names, "actions": names, "timestamps": {"seconds": [1] * config.max_history_events}}
    made = RANK(user_id="u", history=history, candidates={"names": ["c"] * config.max_candidates})
    walked(made.SerializeToString(), RANK, most_elements(config), LOOSE_BYTES)
