"""A long body is rejected before its objects are made, in the words of the check after it.

What is valid passes.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import NpuGrError, TooLarge, Unprocessable
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas import CODECS, bulk
from npu_gr.server.schemas.admin import CHANGE_BYTES, CatalogueItemsBody
from npu_gr.server.schemas.media import JSON, MSGPACK, decode, skim
from tests.server.fake import FakeNames

CONFIG = ServerConfig()
RANK: Any = CODECS["rank"].body
GENERATE: Any = CODECS["generate"].body
RECOMMEND: Any = CODECS["recommend"].body
LONG = {
    "items": [2**62 - 1] * CONFIG.max_history_events,
    "actions": ["a" * 16] * CONFIG.max_history_events,
    "timestamps": [10**11] * CONFIG.max_history_events,
}


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def written(body: dict[str, Any]) -> list[tuple[str, bytes]]:
    return [(JSON, json.dumps(body).encode()), (MSGPACK, pack(body))]


def checked(body: bytes, media: str, cls: Any, most: int = bulk.LOOSE_BYTES) -> None:
    bulk.check(skim(body, media, cls), len(body), cls, CONFIG, most)


def raw(num: int, width: int) -> str:
    return base64.b64encode(b"\1" * (num * width)).decode()


@pytest.mark.parametrize("media", [JSON, MSGPACK])
def test_the_longest_body_that_is_valid_passes(media: str) -> None:
    texts = {f"{index:0128}": "x" for index in range(100)}
    body = {
        "user_id": "u" * 128,
        "history": LONG,
        "num_items": 5,
        "deny_items": [2**62 - 1] * CONFIG.max_candidates,
    }
    for cls, more in (
        (RECOMMEND, {"context": texts}),
        (GENERATE, {"attributes": {"a": ["x" * 32] * 1000}}),
    ):
        ((_, sent),) = (pair for pair in written(body | more) if pair[0] == media)
        checked(sent, media, cls)
        decode(sent, media, cls)
        assert len(sent) <= CONFIG.max_body_bytes


def test_raw_columns_pass_up_to_their_limit() -> None:
    most = CONFIG.max_history_events
    body = {
        "user_id": "u",
        "candidates": raw(CONFIG.max_candidates, 8),
        "history": {"items": raw(most, 8), "actions": raw(most, 2), "timestamps": raw(most, 8)},
    }
    checked(json.dumps(body).encode(), JSON, RANK)
    body["candidates"] = raw(CONFIG.max_candidates + 1, 8)
    with pytest.raises(TooLarge, match="candidates: 10001 entries, the limit is 10000"):
        checked(json.dumps(body).encode(), JSON, RANK)
    packed = {"user_id": "u", "candidates": b"\1" * 8 * (CONFIG.max_candidates + 1)}
    with pytest.raises(TooLarge, match="candidates: 10001 entries"):
        checked(pack(packed), MSGPACK, RANK)


def escaped(text: str) -> list[str]:
    """Base64 as JSON may write it: as it is, as PHP, as Gson, and as nobody does."""
    every = "".join(f"\\u{ord(one):04x}" for one in text)
    return [
        text,
        text.replace("/", "\\/"),
        text.replace("=", "\\u003d"),
        every,
        every.replace("003d", "003D"),
    ]


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("less", [0, 1, 2])  # one, two and no signs of padding
def test_base64_is_counted_exactly(over: int, less: int) -> None:
    limit = CONFIG.max_history_events - less
    config = msgspec.structs.replace(CONFIG, max_history_events=limit)
    actions = base64.b64encode(b"\xff\x7f" * (limit + over)).decode()
    for text in escaped(actions):
        body = (
            b'{"user_id":"u","candidates":[1],"history":{"items":"","timestamps":"","actions":"%s"}}'
            % text.encode()
        )
        assert len(decode(body, JSON, RANK).history.actions) == 2 * (limit + over)
        if over:
            with pytest.raises(
                TooLarge, match=f"history.actions: {limit + 1} entries, the limit is {limit}"
            ):
                bulk.check(skim(body, JSON, RANK), len(body), RANK, config, bulk.LOOSE_BYTES)
        else:
            bulk.check(skim(body, JSON, RANK), len(body), RANK, config, bulk.LOOSE_BYTES)


@pytest.mark.parametrize("num", [10_001, 70_000])
def test_a_list_over_its_limit_is_rejected_in_the_words_of_the_later_check(num: int) -> None:
    for media, sent in written({"user_id": "u", "candidates": [7] * num}):
        with pytest.raises(TooLarge) as early:
            checked(sent, media, RANK)
        with pytest.raises(TooLarge) as late:
            CODECS["rank"].parse(decode(sent, media, RANK), CONFIG, FakeNames())
        assert str(early.value) == str(late.value)


def many(num: int) -> dict[str, list[int]]:
    return {f"{index:06}": [1] for index in range(num)}


@pytest.mark.parametrize(
    ("cls", "body"),
    [
        (GENERATE, {"user_id": "u", "attributes": many(50_000)}),
        (RECOMMEND, {"user_id": "u", "context": dict.fromkeys(many(50_000), 1)}),
        (RANK, {"user_id": "u" * 1_000_000, "candidates": [1]}),
        (RANK, {"user_id": "u", "candidates": [1], "history": many(50_000)}),
    ],
)
def test_what_is_no_column_is_bounded_in_bytes(cls: Any, body: dict[str, Any]) -> None:
    for media, sent in written(body):
        with pytest.raises((TooLarge, Unprocessable)) as rejected:
            checked(sent, media, cls)
        assert len(str(rejected.value)) < 200


@pytest.mark.parametrize(
    ("sent", "media"),
    [
        (b'{"user_id":"u","candidates":[1]' + b',"base":"b"' * 100_000 + b"}", JSON),
        (
            b'{"user_id":"u","candidates":[1]'
            + b',"history":{"items":[1,1,1,1,1,1,1,1]}' * 9_000
            + b"}",
            JSON,
        ),
        (b"\x82\xa7user_id\xa1u\xaacandidates\xdd\xff\xff\xff\xff" + b"\1" * 100_000, MSGPACK),
        (b"\x82\xa7user_id\xa1u\xaacandidates\xc6\xff\xff\xff\xff" + b"\1" * 100_000, MSGPACK),
        (b"\xdf\xff\xff\xff\xff" + b"\xa4base\xa1b" * 20_000, MSGPACK),
        (b'{"user_id":"u","candidates":' + b"[" * 100_000, JSON),
        (b'{"user_id":"u","base":' + b'{"a":' * 100_000, JSON),
        (b"\x82\xa4base" + b"\x91" * 100_000, MSGPACK),
        (b'{"candidates":[1' + b" " * 100_000 + b'],"user_id":' + b'"\xff"' * 20_000, JSON),
    ],
)
def test_bombs_are_rejected_in_words(sent: bytes, media: str) -> None:
    with pytest.raises(NpuGrError) as rejected:
        checked(sent, media, RANK)
    assert rejected.value.status in (400, 413, 422)
    assert len(str(rejected.value)) < 300


def test_a_field_that_is_given_twice_hides_nothing() -> None:
    """Only the last one of a name is a column; the first one counts as what stands beside it."""
    sent = b'{"user_id":"u","candidates":[' + b"1," * 40_000 + b'1],"candidates":[1]}'
    with pytest.raises(TooLarge, match="outside of its columns"):
        checked(sent, JSON, RANK)


def test_a_change_of_the_catalogue_is_bounded() -> None:
    body = {"add": [{"item_id": item, "sid": [1, 2, 3]} for item in range(20_000)]}
    for media, sent in written(body):
        with pytest.raises((TooLarge, Unprocessable), match="outside of its columns"):
            checked(sent, media, CatalogueItemsBody, CHANGE_BYTES)


ODD = ["a,b", 'q"', "\\", '\\"', "\\\\", ",", '","', '",', " ", "é,\u2028", "\n,", 7, "[", "]"]


@given(st.lists(st.sampled_from(ODD), min_size=1, max_size=8))
def test_commas_within_names_are_not_counted(names: list[str | int]) -> None:
    """The exact number passes and one more is rejected, in both spellings of non-ASCII text."""
    for sent in (json.dumps(names), json.dumps(names, ensure_ascii=False)):
        body = b'{"user_id":"u","candidates":%s}' % sent.encode()
        bulk.check(
            skim(body, JSON, RANK),
            len(body),
            RANK,
            ServerConfig(max_candidates=len(names)),
            bulk.LOOSE_BYTES,
        )
        if len(names) > 1:
            few = ServerConfig(max_candidates=len(names) - 1)
            with pytest.raises(TooLarge, match=f"candidates: {len(names)} entries"):
                bulk.check(skim(body, JSON, RANK), len(body), RANK, few, bulk.LOOSE_BYTES)
