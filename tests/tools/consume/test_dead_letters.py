"""A letter is kept as it came, whatever it is: whole lines of a private file, or messages that a broker takes."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import Unavailable
from npu_gr.tools.consume.dead_letters import DeadLetterFile, DeadLetterTopic
from tests.tools.consume.broker import Broker
from tests.tools.consume.test_consumer import Message

LETTER = Message("t", 1, 7, 1_600_000_000_000, b"key", b"{", (("trace", b"abc"), ("nothing", None)))


def decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


async def test_a_line_has_all_of_the_message(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    await DeadLetterFile(path).put([(LETTER, "no JSON"), (Message("t", 0, 1, -1, None, None), "no value")])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (decoded(first["key"]), decoded(first["value"])) == (LETTER.key, LETTER.value)
    assert [(name, decoded(value)) for name, value in first["headers"]] == [*LETTER.headers]
    assert (first["topic"], first["partition"], first["offset"], first["reason"]) == ("t", 1, 7, "no JSON")
    assert (second["key"], second["value"], second["headers"]) == (None, None, [])


async def test_a_line_that_a_crash_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    letters = DeadLetterFile(path)
    await letters.put([(LETTER, "one")])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    await letters.put([(LETTER, "two")])
    await letters.put([(LETTER, "three")])
    lines = path.read_bytes().splitlines()
    assert lines[1] == whole[:40]
    assert [json.loads(line)["reason"] for line in (lines[0], *lines[2:])] == ["one", "two", "three"]


async def test_a_file_that_was_rotated_away_is_made_anew_and_private(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    letters = DeadLetterFile(path)
    path.rename(tmp_path / "dead.1.jsonl")
    before = os.umask(0)
    try:
        await letters.put([(LETTER, "one")])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


class Kept:
    """A producer in front of none: it checks as aiokafka does, and keeps."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sent: list[dict[str, Any]] = []

    async def send_and_wait(self, topic: str, value: bytes | None, key: bytes | None, headers: list[Any]) -> None:
        from aiokafka.errors import MessageSizeTooLargeError

        assert not (value is None and key is None), "Need at least one: key or value"
        size = len(value or b"") + len(key or b"") + sum(len(name) + len(one or b"") for name, one in headers)
        if size > self.most:
            raise MessageSizeTooLargeError
        self.sent.append({"value": value, "key": key, "headers": headers})


async def test_a_letter_has_its_own_headers_and_ours() -> None:
    kept = Kept(1000)
    await DeadLetterTopic(kept, "dead").put([(LETTER, "no JSON")])
    (sent,) = kept.sent
    assert (sent["value"], sent["key"]) == (b"{", b"key")
    assert sent["headers"] == [*LETTER.headers, ("reason", b"no JSON"), ("from", b"t/1/7")]


async def test_a_letter_of_nothing_is_kept() -> None:
    kept = Kept(1000)
    await DeadLetterTopic(kept, "dead").put([(Message("t", 0, 1, 5, None, None), "no value")])
    assert [(one["value"], one["key"]) for one in kept.sent] == [(b"", None)]


@pytest.mark.parametrize(
    "large",
    [
        LETTER._replace(value=b"x" * 1000),
        LETTER._replace(key=b"x" * 1000),
        LETTER._replace(headers=(("x", b"x" * 1000),)),
    ],
    ids=["value", "key", "headers"],
)
async def test_a_letter_that_the_topic_does_not_take_is_named_there(large: Message) -> None:
    kept = Kept(200)
    await DeadLetterTopic(kept, "dead").put([(large, "no JSON"), (LETTER, "after it")])
    first, second = kept.sent
    assert (first["value"], first["key"]) == (b"", None)
    assert first["headers"] == [("reason", b"no JSON (too large for this topic)"), ("from", b"t/1/7")]
    assert second["value"] == b"{"


async def test_a_topic_that_takes_nothing_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="--dead-letter-topic: dead: "):
        await DeadLetterTopic(Kept(1), "dead").put([(LETTER, "no JSON")])


async def test_a_real_producer_sends_all_of_them() -> None:
    broker = Broker()
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    letters = [
        (LETTER, "no JSON"),
        (Message("t", 0, 1, 5, None, None), "no value"),
        (LETTER._replace(value=b"x" * 2_000_000), "large"),
    ]
    producer = AIOKafkaProducer(bootstrap_servers=broker.address, acks="all")
    await producer.start()
    try:
        await DeadLetterTopic(producer, "dead").put(letters)
    finally:
        await producer.stop()
    consumer = AIOKafkaConsumer("dead", bootstrap_servers=broker.address, auto_offset_reset="earliest")
    await consumer.start()
    try:
        found = [await consumer.getone() for _ in letters]
    finally:
        await consumer.stop()
    assert {dict(one.headers)["reason"]: one.value for one in found} == {
        b"no JSON": b"{",
        b"no value": b"",
        b"large (too large for this topic)": b"",
    }
