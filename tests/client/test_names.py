"""Names go in as the company writes them and come out as it knows them.

Titles come with them where they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from npu_gr.client import AsyncClient, Behaviours, Ranked
from npu_gr.client.wire import Names
from npu_gr.core.errors import NotFound, TooLarge, Unprocessable
from npu_gr.core.names import item_ids as ids_of
from tests.client.shop import ACTIONS, KEY, NAMES, TITLES, shop

item_ids = partial(ids_of, key=KEY)
AT_S = 1_700_000_000
ROWS = [1, 4, 9, 30, 31]
SEEN = Behaviours(
    [NAMES[row] for row in ROWS],
    ["view", "cart", "purchase", "view", "view"],
    range(AT_S, AT_S + 5),
)
CANDIDATES = NAMES[50:60]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with shop(tmp_path) as (url, _), AsyncClient(url, timeout_s=30.0) as one:
        yield one


def spelt(name: str) -> str | int:
    return int(name) if name.isdecimal() else name


async def test_every_spelling_ranks_the_same_bit_for_bit(client: AsyncClient) -> None:
    times = [datetime.fromtimestamp(AT_S + place, UTC) for place in range(5)]
    names = [spelt(NAMES[row]) for row in ROWS]
    spellings: list[tuple[Behaviours, Names]] = [
        (SEEN, CANDIDATES),
        (Behaviours(names, np.array(SEEN.actions), times), [spelt(name) for name in CANDIDATES]),
        (Behaviours(item_ids(names), SEEN.actions, np.array(times, object)), np.array(CANDIDATES)),
        (
            Behaviours(
                np.array(names, object),
                SEEN.actions,
                np.arange(AT_S, AT_S + 5).astype("datetime64[s]"),
            ),
            item_ids(CANDIDATES),
        ),
    ]
    found = [
        await client.rank(f"u{place}", candidates, history=history, timestamp=AT_S + 9, top_k=3)
        for place, (history, candidates) in enumerate(spellings)
    ]
    for ranked in found:
        assert ranked.answer.unknown_candidates == ranked.answer.history.unknown_items == 0
        assert ranked.scores["click"].tobytes() == found[0].scores["click"].tobytes()
        assert places(ranked) == places(found[0])


def places(ranked: Ranked) -> list[int]:
    """Where the best stand among the candidates, each by the spelling of its own request."""
    return [ranked.names.index(item.name) for item in ranked.top]


async def test_a_top_has_titles(client: AsyncClient) -> None:
    ranked = await client.rank(
        "u", [*CANDIDATES, "no such thing"], history=SEEN, top_k=4, fields=["title"]
    )
    assert len(ranked.top) == 4
    for item in ranked.top:
        assert item.title == (TITLES[str(item.name)] or None)
        assert item.score == ranked.scores["click"][ranked.names.index(item.name)]
    assert math.isnan(ranked.scores["click"][-1])
    plain = await client.rank("u", CANDIDATES, history=SEEN, top_k=4)
    assert [item.title for item in plain.top] == [None] * 4


async def test_what_is_found_has_names_and_titles(client: AsyncClient) -> None:
    matched = await client.match("u", num_items=12, fields=["title"])
    shown = await client.recommend(
        "u", history=SEEN, num_items=8, fields=["title"], deny_items=[matched.names[0]]
    )
    assert (len(matched), len(shown)) == (12, 8)
    for found in (matched, shown):
        assert [item.name for item in found] == found.names
        assert found[0] == next(iter(found))
        for item in found:
            assert item.name in map(spelt, NAMES)
            assert item.title == (TITLES[str(item.name)] or None)
    assert matched.scores.tolist() == sorted(matched.scores.tolist(), reverse=True)
    assert matched.names[0] not in shown.names
    assert shown.answer.degraded == []
    again = await client.rank("u", shown.names, history=SEEN)
    assert again.answer.unknown_candidates == 0, "what is answered can be asked"


async def test_items_are_told_by_id_and_by_name(client: AsyncClient) -> None:
    names: list[str | int] = ["SKU-0001-B", 42, "with, a comma & more=é", "0"]
    found = await client.items(names, ids=item_ids(["SKU-0004-B", 9]))
    assert [one.id for one in found] == [*item_ids(["SKU-0004-B", 9]), *item_ids(names)]
    assert [one.name for one in found] == [
        "SKU-0004-B",
        9,
        "SKU-0001-B",
        "42",
        "with, a comma & more=é",
        "0",
    ]
    assert [one.title for one in found] == [
        "Thing no. 4",
        None,
        None,
        "Thing no. 42",
        None,
        "Thing no. 0",
    ]
    assert await client.items() == []
    many = [f"a rather long name of an item, number {number}" for number in range(2500)]
    assert [one.id for one in await client.items(many)] == item_ids(many).tolist()
    with pytest.raises(Unprocessable, match="ids"):
        await client.items(ids=[-1])


def one_event(row: int, action: str = "view") -> Behaviours:
    return Behaviours([NAMES[row]], [action], [AT_S + row])


async def test_many_users_are_written_in_one_call(client: AsyncClient) -> None:
    many: dict[str | int, Behaviours] = {
        f"user {number}": one_event(number % 50) for number in range(1500)
    }
    written = await client.ingest(
        many | {7: one_event(3), "bad": one_event(3, "bought")}, idempotency_key="k"
    )
    assert list(written) == [*many, 7, "bad"]
    assert {one.num_events for user, one in written.items() if user != "bad"} == {1}
    failure = written["bad"].error
    assert failure is not None
    assert (failure.status, written["bad"].num_events) == (422, None)
    assert '"bought"' in failure.detail
    again = await client.ingest(many, idempotency_key="k")
    assert {one.num_events for one in again.values()} == {1}, "the key has been there"
    assert (await client.ingest({7: one_event(4)}))[7].num_events == 2
    assert (await client.ingest({7: one_event(4)}))[7].num_events == 3, "a call of its own"
    assert (await client.ingest({7: one_event(4)}, mode="merge"))[7].num_added == 0
    assert (await client.ingest({7: one_event(4)}, mode="replace"))[7].num_events == 1
    assert (await client.rank(7, CANDIDATES)).answer.history.num_tokens == 1
    assert await client.ingest({}) == {}


async def test_long_histories_go_in_several_requests(client: AsyncClient) -> None:
    def history(num: int) -> Behaviours:
        return Behaviours([NAMES[1]] * num, ["view"] * num, range(AT_S, AT_S + num))

    written = await client.ingest({f"user {number}": history(2000) for number in range(12)})
    assert [one.num_events for one in written.values()] == [2000] * 12
    with pytest.raises(TooLarge, match=r"index 1: the events of this user have .* bytes"):
        await client.ingest({"first": history(1), "second": history(20_000)})
    assert (await client.events("first", history(1))).num_events == 1, "nothing was sent"


async def test_an_action_that_the_model_lacks_is_named_with_those_that_it_has(
    client: AsyncClient,
) -> None:
    with pytest.raises(Unprocessable) as raised:
        await client.events("u", Behaviours(["SKU-0001-B"], ["bought"], [AT_S]))
    assert raised.value.field == "events.actions"
    assert all(action in str(raised.value) for action in ("bought", *ACTIONS))


async def test_milliseconds_are_rejected_with_the_remedy(client: AsyncClient) -> None:
    with pytest.raises(Unprocessable, match="milliseconds") as raised:
        await client.events("u", Behaviours(["SKU-0001-B"], ["view"], [AT_S * 1000]))
    assert raised.value.field == "events.timestamps"
    with pytest.raises(Unprocessable, match="milliseconds"):
        await client.rank("u", CANDIDATES, timestamp=AT_S * 1000)


async def test_a_kind_that_is_not_served(client: AsyncClient) -> None:
    with pytest.raises(NotFound, match="generate"):
        await client.generate("u", history=SEEN)
