"""However events come, the service reads the history that the trainer reads, bit for bit.

The events of 80 users come shuffled, late and doubled, in every way in. The reference is the
dataset that `prepare` makes of the log of all arrivals: without the doubled ones where the way in
drops them (idempotency keys, merges, messages that are read again), and with them where it keeps
them. Two of three items have texts for names, so the ids are hashes with the key of the dataset.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.names import item_ids
from npu_gr.dataset import PrepareOptions, prepare
from npu_gr.dataset.files import Dataset
from npu_gr.history_store.load import load_interactions
from npu_gr.model.weights import Checkpoint, save
from npu_gr.tools.ingest import EventModel, Target
from npu_gr.tools.kafka_ingest import ConsumeConfig, EventConsumer
from tests.history_store.redis_server import redis_path
from tests.models import tiny_model
from tests.server.oip.inputs import inputs_of, json_body
from tests.serving import FIRST_ACTION, FIRST_ID, serving
from tests.tools.test_consumer import Crash
from tests.tools.test_consumer import Log as Topic

NUM_USERS = 80
CHUNK = 256  # events of a row of the embedded store: some users have more
NAMES: list[str | int] = [
    FIRST_ID + row if row % 3 == 0 else f"SKU-{row:03d}" for row in range(300)
]
CANDIDATES = [NAMES[row] for row in (3, 50, 181, 258)]
SHOWN_AT = 1_700_000_000
PATIENT = {"X-Request-Timeout-Ms": "20000"}  # a busy machine
ACTIONS = ("1", "2", "3")
Scores = dict[str, list[float]]


class Arrival(NamedTuple):
    """Some events of a user that come together, in the order in which they come."""

    user: str
    key: str
    events: Events
    is_again: bool = False


def arrivals_of(user: str, random: np.random.Generator, num: int) -> Iterator[Arrival]:
    """Make distinct events with many equal times, in several parts, of which some come again."""
    history = Events.make(
        random.choice(300, num, replace=False),
        random.integers(0, 3, num),
        1_600_000_000 + 3600 * random.integers(0, 1 + num // 2, num),
    )
    cuts = [0, *np.sort(random.integers(1, num + 1, 3)).tolist(), num]
    parts = [
        Arrival(user, f"{user}-{begin}", history[begin:end])
        for begin, end in pairwise(cuts)
        if end > begin
    ]
    yield from parts
    yield from (one._replace(is_again=True) for one in parts if random.random() < 0.3)


@pytest.fixture(scope="module")
def users() -> dict[str, list[Arrival]]:
    random = np.random.default_rng(3)
    sizes = [CHUNK + 30 if user % 20 == 0 else 1 + user % 23 for user in range(NUM_USERS)]
    return {
        f"u{user}": list(arrivals_of(f"u{user}", random, num)) for user, num in enumerate(sizes)
    }


def columns(history: Events) -> dict[str, list[Any]]:
    return {
        "items": [NAMES[row] for row in history.items.tolist()],
        "actions": (history.actions + FIRST_ACTION).tolist(),
        "timestamps": history.timestamps.tolist(),
    }


class Reference(NamedTuple):
    """What the trainer reads: the datasets, and the history of each user."""

    datasets: tuple[Dataset, Dataset]  # of the first arrival of each user, and of all
    checkpoint: Path  # of a ranker that knows the items by their names
    distinct: dict[str, Events]
    kept: dict[str, Events]  # with the doubled events


@pytest.fixture(scope="module")
def reference(
    users: dict[str, list[Arrival]], tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    folder = tmp_path_factory.mktemp("log")

    def prepared(name: str, most: int, *, keep: bool = False) -> Dataset:
        rows = ["user,item,event,time"]
        for arrivals in users.values():
            for one in arrivals[:most]:
                of_event = zip(*columns(one.events).values(), strict=True)
                rows += [f"{one.user},{item},{event},{at}" for item, event, at in of_event]
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
        options = PrepareOptions(
            user="user",
            item="item",
            event="event",
            time="time",
            keep_duplicates=keep,
            like="" if name == "first" else str(folder / "first"),  # with its key
        )
        return prepare(folder / f"{name}.csv", folder / name, options).dataset

    first = prepared("first", 1)
    every = prepared("distinct", 99)
    kept = prepared("kept", 99, keep=True)
    assert len(kept.interactions()) > len(every.interactions())
    assert first.item_key == every.item_key == kept.item_key != b""
    made = Checkpoint(
        model=tiny_model(),
        item_ids=item_ids(NAMES, first.item_key),
        name="tiny",
        action_names=ACTIONS,
    )
    save(made, folder / "checkpoint")
    ItemNames.make(list(map(str, NAMES)), [], first.item_key).save(folder / "checkpoint")
    return Reference((first, every), folder / "checkpoint", histories(every), histories(kept))


def rows_of(key: bytes) -> dict[int, int]:
    """Map the id of each item to its row."""
    return dict(zip(item_ids(NAMES, key).tolist(), range(len(NAMES)), strict=True))


def histories(dataset: Dataset) -> dict[str, Events]:
    """The history of each user in a dataset, with the rows and actions of the model."""
    log = dataset.interactions()
    rows = rows_of(dataset.item_key)
    action = np.array([int(name) - FIRST_ACTION for name in log.action_names])
    return {
        name: Events.make(
            [rows[item] for item in log.items[log.users == user].tolist()],
            action[log.values[log.users == user].astype(np.int64)],
            log.timestamps[log.users == user],
        )
        for user, name in enumerate(log.user_names)
    }


class Rig(NamedTuple):
    """An instance, and what comes."""

    client: Any
    service: Any
    users: dict[str, list[Arrival]]
    reference: Reference
    folder: Path

    async def post(self, path: str, body: Any) -> Any:
        async with self.client.post(path, json=body, headers=PATIENT) as answer:
            said = await answer.json()
            assert answer.status in (200, 202), said
            return said

    async def rank(self, user: str, **more: Any) -> Any:
        body = {"user_id": user, "candidates": CANDIDATES, "timestamp": SHOWN_AT, **more}
        return await self.post("/v1/rank", body)

    async def wanted(self, of_users: dict[str, Events]) -> dict[str, Scores]:
        """The scores of the histories that the trainer reads."""
        found = {}
        for user, history in of_users.items():
            ranked = await self.rank(f"reference {user}", history=columns(history))
            assert ranked["history"]["sorted_events"] == 0
            found[user] = ranked["scores"]
        return found

    async def each(self, work: Callable[[list[Arrival]], Awaitable[None]]) -> None:
        """Do the work of all users, the arrivals of one user in their order."""
        free = asyncio.Semaphore(8)

        async def one(arrivals: list[Arrival]) -> None:
            async with free:
                await work(arrivals)

        await asyncio.gather(*map(one, self.users.values()))


def together(*arrivals: Arrival) -> Events:
    whole = arrivals[0].events
    for one in arrivals[1:]:
        whole = whole + one.events
    return whole


# ---- ways into the store


async def by_events(rig: Rig) -> None:
    async def work(arrivals: list[Arrival]) -> None:
        for one in arrivals:
            body = {"user_id": one.user, "events": columns(one.events), "idempotency_key": one.key}
            await rig.post("/v1/events", body)

    await rig.each(work)


async def by_bulk(rig: Rig, mode: str) -> None:
    for round_ in zip_longest(*rig.users.values()):
        of_users = [
            {"user_id": one.user, "events": columns(one.events)}
            | ({"idempotency_key": one.key} if mode == "append" else {})
            for one in round_
            if one is not None
        ]
        said = await rig.post("/v1/events/bulk", {"mode": mode, "users": of_users})
        assert said["num_failed"] == 0


async def by_bulk_append(rig: Rig) -> None:
    await by_bulk(rig, "append")


async def by_bulk_merge(rig: Rig) -> None:
    await by_bulk(rig, "merge")


async def by_bulk_replace(rig: Rig) -> None:
    of_users = [
        {"user_id": user, "events": columns(together(*arrivals))}
        for user, arrivals in rig.users.items()
    ]
    for _ in range(2):
        said = await rig.post("/v1/events/bulk", {"mode": "replace", "users": of_users})
        assert said["num_failed"] == 0


async def by_load(rig: Rig) -> None:
    """Load a log, then the grown one, which has late events, twice."""
    first, every = rig.reference.datasets
    for dataset in (first, every, every):
        log = await asyncio.to_thread(dataset.interactions)
        await load_interactions(rig.service.parts.histories, log, ACTIONS)


async def by_kafka(rig: Rig) -> None:
    """Consume one message an event, some of them twice after a crash."""
    messages = [
        json.dumps({"user": one.user, "item": item, "event": event, "time": at}).encode()
        for arrivals in rig.users.values()
        for one in arrivals
        if not one.is_again
        for item, event, at in zip(*columns(one.events).values(), strict=True)
    ]
    topic, key = Topic(messages), rig.reference.datasets[0].item_key
    config = ConsumeConfig(brokers="", topics=("t",), dead_letters=rig.folder / "dead.jsonl")
    target = Target(rig.service.parts.histories, EventModel(ACTIONS, (), key), "it")
    topic.dies_at_commit = 3
    with pytest.raises(Crash):
        await EventConsumer(topic.consumer(asyncio.Event()), target, config).run(asyncio.Event())
    topic.dies_at_commit = -1
    stop = asyncio.Event()
    again = EventConsumer(topic.consumer(stop), target, config)
    await again.run(stop)
    assert again.counts["known"]._value.get() > 0
    assert again.counts["dead"]._value.get() == 0
    assert topic.committed == len(messages)


def sections_of(reference: Reference) -> dict[str, Any]:
    return {"checkpoint": str(reference.checkpoint), "service": {"unsorted_history": "sort"}}


WAYS = {
    "events": (by_events, "distinct"),
    "bulk append": (by_bulk_append, "distinct"),
    "bulk merge": (by_bulk_merge, "distinct"),
    "bulk replace": (by_bulk_replace, "kept"),
    "load": (by_load, "distinct"),
    "kafka": (by_kafka, "distinct"),
}


@pytest.fixture(params=["embedded", "redis"])
def history_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    timeouts = {"timeout_s": 30.0, "read_timeout_s": 30.0}
    if request.param == "embedded":
        yield {"path": str(tmp_path / "history.db"), **timeouts}
        return
    with redis_path(tmp_path) as path:
        yield {"kind": "redis", "url": f"unix://{path}", **timeouts}


@pytest.mark.parametrize("way", WAYS)
async def test_the_store_has_what_the_trainer_reads(
    way: str,
    history_store: dict[str, Any],
    users: dict[str, list[Arrival]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    write, doubled = WAYS[way]
    want: dict[str, Events] = getattr(reference, doubled)
    sections = sections_of(reference) | {"history_store": history_store}
    async with serving(tmp_path, watched=False, **sections) as (client, instance):
        rig = Rig(client, instance, users, reference, tmp_path)
        await write(rig)
        scores = await rig.wanted(want)
        assert len(want) == NUM_USERS
        rows = rows_of(reference.datasets[0].item_key)
        for user, history in want.items():
            read = await instance.parts.histories.read(UserKey("", user), HistoryRef(), 9999)
            assert [rows[item] for item in read.events.items.tolist()] == history.items.tolist()
            assert read.events.actions.tolist() == history.actions.tolist()
            assert read.events.timestamps.tolist() == history.timestamps.tolist()
            ranked = await rig.rank(user)
            assert ranked["history"]["source"] == "store"
            assert ranked["history"]["sorted_events"] == 0  # they are stored in order
            assert ranked["scores"] == scores[user]


# ---- ways with a request


async def in_the_request(rig: Rig, arrivals: list[Arrival]) -> Scores:
    ranked = await rig.rank(arrivals[0].user, history=columns(together(*arrivals)))
    scores: Scores = ranked["scores"]
    return scores


async def by_base(rig: Rig, arrivals: list[Arrival]) -> Scores:
    first, *rest = arrivals
    user = first.user
    ranked = await rig.post("/v1/signal", {"user_id": user, "history": columns(first.events)})
    for one in rest:
        base = ranked["history"]["fingerprint"]
        ranked = await rig.rank(user, base=base, history=columns(one.events))
    if not rest:
        ranked = await rig.rank(user, base=ranked["history"]["fingerprint"])
    scores: Scores = ranked["scores"]
    return scores


async def by_base_of_the_store(rig: Rig, arrivals: list[Arrival]) -> Scores:
    """The first events are in the store, and the others continue the answer from there."""
    first, *rest = arrivals
    user = first.user
    await rig.post("/v1/events", {"user_id": user, "events": columns(first.events)})
    stored = await rig.rank(user)
    assert stored["history"]["source"] == "store"
    more = {"history": columns(together(*rest))} if rest else {}
    ranked = await rig.rank(user, base=stored["history"]["fingerprint"], **more)
    scores: Scores = ranked["scores"]
    return scores


async def by_open_inference(rig: Rig, arrivals: list[Arrival]) -> Scores:
    body = {"user_id": arrivals[0].user, "candidates": CANDIDATES, "timestamp": SHOWN_AT}
    inputs = inputs_of({**body, "history": columns(together(*arrivals))})
    path = "/v2/models/rank/infer"
    async with rig.client.post(path, data=json_body(inputs), headers=PATIENT) as answer:
        said = await answer.json()
        assert answer.status == 200, said
    outputs = {one["name"]: one["data"] for one in said["outputs"]}
    return {task: outputs[f"scores.{task}"] for task in ("click", "like")}


@pytest.mark.parametrize("way", [in_the_request, by_base, by_base_of_the_store, by_open_inference])
async def test_a_request_means_what_the_trainer_reads(
    way: Callable[[Rig, list[Arrival]], Awaitable[Scores]],
    users: dict[str, list[Arrival]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, watched=False, **sections_of(reference)) as (client, instance):
        rig = Rig(client, instance, users, reference, tmp_path)
        scores = await rig.wanted(reference.kept)
        for user, arrivals in users.items():
            assert await way(rig, arrivals) == scores[user]
