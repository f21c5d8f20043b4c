"""Rounds of the consumer: commits follow acknowledgements, duplicates count once."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import aiokafka
import numpy as np
import pytest
from aiokafka import errors
from prometheus_client import CollectorRegistry

from npu_gr.core.errors import ConfigError, StoreFailed, Unavailable, Unprocessable
from npu_gr.core.feature_schema.encode import hash_names
from npu_gr.core.history import UserKey, Write, Written
from npu_gr.core.names import item_id
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig, HistoryStore
from npu_gr.tools import kafka_ingest as module
from npu_gr.tools.consume_message import Fields
from npu_gr.tools.ingest import EventModel, Target
from npu_gr.tools.kafka_ingest import MOST_OF_USER, ConsumeConfig, EventConsumer
from tests.features_of import every_feature

ACTIONS = ("view", "purchase")


class Partition(NamedTuple):
    topic: str
    partition: int


class Message(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Crash(BaseException):
    """The process dies here."""


class Log:
    """A topic of one partition, and the group's committed offset.

    A consumer that begins anew begins there.
    """

    def __init__(self, values: list[bytes]) -> None:
        self.messages = [
            Message("t", 0, at, 1_600_000_000_000 + at, None, value)
            for at, value in enumerate(values)
        ]
        self.committed = 0
        self.commits: list[int] = []
        self.dies_at_commit = -1
        self.leaves_after = 10_000  # commits: then another member of the group has the partition
        self.partition = Partition("t", 0)

    def consumer(self, stop: asyncio.Event) -> Any:
        return _Consumer(self, stop)


class _Consumer:
    def __init__(self, log: Log, stop: asyncio.Event) -> None:
        self._log = log
        self._at = log.committed
        self._stop = stop

    async def getmany(self, *, timeout_ms: int, max_records: int) -> dict[Any, list[Message]]:
        part = self._log.messages[self._at : self._at + min(max_records, 300)]
        self._at += len(part)
        if not part:
            self._stop.set()
            return {}
        return {self._log.partition: part}

    def assignment(self) -> set[Partition]:
        return {self._log.partition} if len(self._log.commits) < self._log.leaves_after else set()

    def highwater(self, partition: Partition) -> int:
        assert partition in self.assignment(), "as aiokafka does"
        return len(self._log.messages)

    async def commit(self, offsets: dict[Partition, int]) -> None:
        if len(self._log.commits) == self._log.dies_at_commit:
            raise Crash
        self._log.commits.append(offsets[self._log.partition])
        self._log.committed = offsets[self._log.partition]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[HistoryStore]:
    opened = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert opened is not None
    yield opened
    await opened.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(module, "RETRY_MOST_S", 0.002)


def value(number: int, user: str = "u", event: str = "view") -> bytes:
    return json.dumps(
        {"user": user, "item": number, "event": event, "time": 1_600_000_000 + number}
    ).encode()


def events_of(
    log: Log, store: Any, folder: Path, stop: asyncio.Event, **features: str
) -> EventConsumer:
    target = Target(store, EventModel(ACTIONS, every_feature(("event",))), "it")
    letters = folder / "dead.jsonl"
    config = ConsumeConfig(
        brokers="", topics=("t",), dead_letters=letters, fields=Fields(features=features)
    )
    return EventConsumer(log.consumer(stop), target, config)


async def consumed(log: Log, store: Any, folder: Path, **features: str) -> CollectorRegistry:
    stop = asyncio.Event()
    events = events_of(log, store, folder, stop, **features)
    await events.run(stop)
    return events.registry


async def test_features_of_events_are_kept(store: HistoryStore, tmp_path: Path) -> None:
    """By the names of the model.

    What a message lacks is missing, and what does not fit is no event.
    """
    sent: list[dict[str, Any]] = [
        {"p": {"from": "fr"}, "spent": 2.5},
        {"spent": None},
        {"spent": "much"},
        {},
    ]
    log = Log(
        [
            json.dumps({**json.loads(value(number)), **more}).encode()
            for number, more in enumerate(sent)
        ]
    )
    done = await consumed(log, store, tmp_path, country="p.from", spent="spent")
    assert counted(done) == {"written": 3, "known": 0, "dead": 1}
    assert "features.spent: row 0 is a text" in (tmp_path / "dead.jsonl").read_text()
    read = (await store.read(UserKey("", "u"), 9)).events.features
    assert read.names["country"].tolist() == hash_names([["fr"], [], []], 1).tolist()
    assert read.numbers["spent"].tolist()[0] == 2.5
    assert np.isnan(read.numbers["spent"][1:]).all()
    with pytest.raises(
        ConfigError, match="--feature colour: not an event feature of it; it has country, tags"
    ):
        await consumed(Log([]), store, tmp_path, colour="colour")


def counted(registry: CollectorRegistry) -> dict[str, int]:
    return {
        result: int(
            registry.get_sample_value("npu_gr_consume_messages_total", {"result": result}) or 0
        )
        for result in ("written", "known", "dead")
    }


def dead(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "dead.jsonl").read_text().splitlines()]


async def items(store: HistoryStore, user: str = "u") -> list[int]:
    found: list[int] = (await store.read(UserKey("", user), 9999)).events.items.tolist()
    return found


async def test_a_crash_between_acknowledgement_and_commit_counts_nothing_twice(
    store: HistoryStore, tmp_path: Path
) -> None:
    # of one user: more than the keys that the store remembers
    log = Log([value(number) for number in range(700)])
    for crash in range(5):
        log.dies_at_commit = len(log.commits) + crash
        with pytest.raises(Crash):
            await consumed(log, store, tmp_path)
    log.dies_at_commit = -1
    known = counted(await consumed(log, store, tmp_path))["known"]
    assert 0 < known <= MOST_OF_USER
    assert await items(store) == [*range(700)]
    steps = zip([0, *log.commits], log.commits, strict=False)
    # what may be read again has its keys
    assert max(after - before for before, after in steps) <= MOST_OF_USER


async def test_poison_does_not_block_other_messages(store: HistoryStore, tmp_path: Path) -> None:
    log = Log([value(0), b"{", value(1, event="nap"), value(2, user=""), value(3)])
    assert counted(await consumed(log, store, tmp_path)) == {"written": 2, "known": 0, "dead": 3}
    assert log.committed == 5
    assert [line["offset"] for line in dead(tmp_path)] == [1, 2, 3]
    assert "'nap' is not an action of the model: view, purchase" in dead(tmp_path)[1]["reason"]
    assert await items(store) == [0, 3]


class Failing:
    """A store in front of another one that fails first, or fails for one item."""

    def __init__(
        self, store: HistoryStore, errors: list[Exception], bad: int = -1, reason: Any = None
    ) -> None:
        self._store = store
        self.errors = errors
        self._bad = bad
        self._reason = reason
        self.calls: list[int] = []

    async def write_many(self, batch: list[Write]) -> list[Any]:
        self.calls.append(len(batch))
        if self.errors:
            raise self.errors.pop(0)
        is_bad = [self._bad in one.events.items.tolist() for one in batch]
        if any(is_bad) and isinstance(self._reason, Unprocessable):
            raise self._reason  # the form of one fails the whole call
        written = iter(
            await self._store.write_many(
                [one for one, bad in zip(batch, is_bad, strict=True) if not bad]
            )
        )
        return [self._reason if bad else next(written) for bad in is_bad]


async def test_a_partition_that_leaves_with_its_commit_is_not_looked_at(
    store: HistoryStore, tmp_path: Path
) -> None:
    log = Log([value(number) for number in range(10)])
    log.leaves_after = 1
    assert counted(await consumed(log, store, tmp_path))["written"] == 10
    assert log.commits == [10]


async def test_a_service_whose_model_has_no_actions_makes_nothing_poison(
    store: HistoryStore, tmp_path: Path
) -> None:
    config = ConsumeConfig(brokers="", topics=("t",), dead_letters=tmp_path / "dead.jsonl")
    with pytest.raises(ConfigError, match="it: the model has no actions"):
        EventConsumer(
            Log([]).consumer(asyncio.Event()), Target(store, EventModel(()), "it"), config
        )


async def test_a_store_without_room_is_waited_for(store: HistoryStore, tmp_path: Path) -> None:
    errors = [Unavailable("full"), StoreFailed("away"), Unavailable("full")]
    failing = Failing(store, list(errors))
    log = Log([value(number) for number in range(10)])
    registry = await consumed(log, failing, tmp_path)
    assert failing.calls == [10] * 4
    assert registry.get_sample_value("npu_gr_consume_retries_total") == 3
    assert (await items(store), log.commits) == ([*range(10)], [10])
    assert (
        registry.get_sample_value("npu_gr_consume_lag_messages", {"topic": "t", "partition": "0"})
        == 0
    )


@pytest.mark.parametrize(
    "reason", [StoreFailed("damaged"), Unprocessable("users[4]: not the form")]
)
async def test_one_that_can_never_be_written_is_a_dead_letter(
    reason: Exception, store: HistoryStore, tmp_path: Path
) -> None:
    log = Log([value(number, user=f"u{number}") for number in range(10)])
    failing = Failing(store, [], bad=item_id(4), reason=reason)
    assert counted(await consumed(log, failing, tmp_path)) == {"written": 9, "known": 0, "dead": 1}
    assert (log.committed, [line["reason"] for line in dead(tmp_path)]) == (10, [str(reason)])


async def test_stopped_while_the_store_is_away_it_commits_nothing(
    store: HistoryStore, tmp_path: Path
) -> None:
    log = Log([value(number) for number in range(10)])
    stop = asyncio.Event()

    class Away:
        async def write_many(self, batch: list[Write]) -> list[Written]:
            stop.set()
            raise Unavailable("away")

    await events_of(log, Away(), tmp_path, stop).run(stop)
    assert log.commits == []


async def test_letters_that_cannot_be_kept_are_not_committed(
    store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log([b"{", value(1)])
    tries = []

    def full(self: EventConsumer, letters: list[Any]) -> None:
        tries.append(len(log.commits))
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        whole(self, letters)

    whole = EventConsumer._bury
    monkeypatch.setattr(EventConsumer, "_bury", full)
    assert counted(await consumed(log, store, tmp_path)) == {"written": 1, "known": 0, "dead": 1}
    assert (tries, log.commits, len(dead(tmp_path))) == ([0, 0, 0], [2], 1)


class _Joining:
    """A group's session: it fails at its start or between two rounds, or ends by SIGTERM."""

    def __init__(self, log: Log, faults: list[tuple[str, Exception]], told: list[str]) -> None:
        self._inner = _Consumer(log, asyncio.Event())
        self._fault = faults.pop(0) if faults else ("", Exception())
        self._told = told

    async def start(self) -> None:
        self._told.append("start")
        if self._fault[0] == "start":
            raise self._fault[1]

    async def stop(self) -> None:
        self._told.append("stop")

    async def getmany(self, **limits: int) -> dict[Any, list[Message]]:
        batches = await self._inner.getmany(**limits)
        if self._fault[0] == "round":
            raise self._fault[1]  # read, and never written
        if not batches:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        return batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_group_is_joined_again_after_a_rebalance_that_failed(
    store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, told = Log([value(number) for number in range(10)]), list[str]()
    target = Target(store, EventModel(ACTIONS), "it")
    config = ConsumeConfig(brokers="b:1", topics=("t",), dead_letters=tmp_path / "dead.jsonl")

    @asynccontextmanager
    async def opened() -> AsyncIterator[Target]:
        yield target

    async def ran(*faults: tuple[str, Exception]) -> dict[str, int]:
        left = [*faults]
        told.clear()
        made = partial(_Joining, log, left, told)
        monkeypatch.setattr(aiokafka, "AIOKafkaConsumer", lambda *_, **__: made())
        return await module.consume(config, opened)

    failed, away = errors.InvalidRequestError(), errors.KafkaConnectionError()
    counts = await ran(("start", failed), ("round", failed), ("", failed))
    assert counts == {"written": 10, "known": 0, "dead": 0}
    assert told == ["start", "stop"] * 3
    assert (log.commits, await items(store)) == ([10], [*range(10)])
    # brokers that go are waited for; those that never were there, and a rejection, end it in words
    await ran(("round", failed), ("start", away))
    assert told == ["start", "stop"] * 3
    for fault in (away, errors.GroupAuthorizationFailedError()):
        with pytest.raises(ConfigError, match=f"kafka: b:1: {type(fault).__name__}"):
            await ran(("start", fault))
        assert told == ["start", "stop"]


LETTER = Message("t", 1, 7, 1_600_000_000_000, b"key", b"{", (("trace", b"abc"), ("nothing", None)))


def letters_of(path: Path) -> Callable[[list[Any]], None]:
    target = Target(cast(Any, None), EventModel(ACTIONS), "it")
    return EventConsumer(
        None, target, ConsumeConfig(brokers="", topics=(), dead_letters=path)
    )._bury


def decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


async def test_a_line_has_all_of_the_message(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    letters_of(path)([(LETTER, "no JSON"), (Message("t", 0, 1, -1, None, None), "no value")])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (decoded(first["key"]), decoded(first["value"])) == (LETTER.key, LETTER.value)
    assert [(name, decoded(value)) for name, value in first["headers"]] == [*LETTER.headers]
    assert (first["topic"], first["partition"], first["offset"], first["reason"]) == (
        "t",
        1,
        7,
        "no JSON",
    )
    assert (second["key"], second["value"], second["headers"]) == (None, None, [])


async def test_a_line_that_a_crash_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    letters = letters_of(path)
    letters([(LETTER, "one")])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    letters([(LETTER, "two")])
    letters([(LETTER, "three")])
    lines = path.read_bytes().splitlines()
    assert lines[1] == whole[:40]
    assert [json.loads(line)["reason"] for line in (lines[0], *lines[2:])] == [
        "one",
        "two",
        "three",
    ]


async def test_a_file_that_was_rotated_away_is_made_anew_and_private(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    letters = letters_of(path)
    path.rename(tmp_path / "dead.1.jsonl")
    before = os.umask(0)
    try:
        letters([(LETTER, "one")])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
