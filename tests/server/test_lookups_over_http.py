"""GET a user, similar items and trending items; POST one event."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.history import Events
from npu_gr.core.served import CatalogueChange
from npu_gr.handlers.lookups import BUCKET_S, KEPT_S, MOST_COUNTS, RecentItems
from tests.keys import bearer, entry, write_keys
from tests.server.test_recommend_over_http import HISTORY, post, recommend
from tests.server.test_rules_over_http import brand, section
from tests.serving import FIRST_ID, serving
from tests.vector_search.vectors import KNOWN

Client = TestClient[Any, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lookups")


def stored(tmp_path: Path) -> dict[str, Any]:
    return {"history_store": {"kind": "embedded", "path": str(tmp_path / "history.db")}}


async def get(
    client: Client, path: str, status: int = 200, headers: dict[str, str] | None = None
) -> Any:
    async with client.get(path, headers=headers) as response:
        answer = await response.json(content_type=None)
        assert response.status == status, answer
        return answer


async def test_one_event_is_that_of_columns(folder: Path, tmp_path: Path) -> None:
    now = int(time.time())
    async with serving(folder, **stored(tmp_path)) as (client, _):
        one: dict[str, Any] = {"item_id": FIRST_ID + 3, "event": "2", "timestamp": now - 5}
        assert (await post(client, "/v1/events", user_id="a", **one))["num_events"] == 1
        columns = {"items": [FIRST_ID + 3], "actions": ["2"], "timestamps": [now - 5]}
        await post(client, "/v1/events", user_id="b", events=columns)
        first, second = [(await get(client, f"/v1/users/{user}"))["events"] for user in "ab"]
        assert first == second
        await post(client, "/v1/events", user_id="a", item_id=str(FIRST_ID), event=1)
        newest = (await get(client, "/v1/users/a"))["events"][0]
        assert newest["item"] == FIRST_ID
        assert abs(newest["timestamp"] - now) < 60  # without a time it is now
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"item_id": 5}, "events: missing"),
            ({"events": columns, "item_id": 5}, "either columns, or"),
            ({"item_id": 5, "event": "no such"}, "no such"),
            ({"item_id": 5, "event": "1", "timestamp": now * 1000}, "milliseconds"),
        ]
        for body, detail in wrong:
            answer = await post(client, "/v1/events", 422, user_id="a", **body)
            assert detail in answer["detail"]


async def test_a_user_is_what_the_service_knows(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, **stored(tmp_path), **section(folder)) as (client, service):
        name = "a/b ü?#"
        path = f"/v1/users/{quote(name, safe='')}"
        await get(client, path, 404)
        for at in range(30):
            event: dict[str, Any] = {
                "item_id": FIRST_ID + at,
                "event": "1",
                "timestamp": 1_700_000_000 + at,
            }
            await post(client, "/v1/events", user_id=name, **event)
        found = await get(client, f"{path}?num_events=3")
        assert (found["user_id"], found["num_events"]) == (name, 30)
        assert [one["item"] for one in found["events"]] == [FIRST_ID + at for at in (29, 28, 27)]
        assert found["events"][0]["event"] == "1"
        assert (found["prefixes"], found["in_vectors"]) == ([], False)
        assert found["versions"].keys() >= {"rank", "match", "recommend"}

        await post(client, "/v1/signal", 202, user_id=name)
        for model in service.versions.current():
            await model.relay.settled()
        prefixes = (await get(client, path))["prefixes"]
        assert {"hbm"} == {one["tier"] for one in prefixes}
        assert (await get(client, f"/v1/users/{KNOWN}"))["in_vectors"]

        assert (await client.delete(path)).status == 204
        await get(client, path, 404)
        await get(client, f"{path}?num_events=0", 422)
        await get(client, f"{path}?tenant={'x' * 200}", 422)
        await get(client, "/v1/users/%ff", 400)
        await get(client, path, 504, {"X-Request-Timeout-Ms": "0"})
        await get(client, path, 403, {"Origin": "http://evil.example"})


async def test_similar_items_are_near_and_pass_filters(folder: Path) -> None:
    async with serving(folder, **section(folder)) as (client, service):
        path = f"/v1/items/{FIRST_ID + 4}/similar"
        found = await get(client, f"{path}?num_items=8")
        assert found["basis"] == "vectors"
        scores = [one["score"] for one in found["items"]]
        assert len(scores) == 8
        assert scores == sorted(scores, reverse=True)
        items = [one["item"] for one in found["items"]]
        assert FIRST_ID + 4 not in items
        only = await get(client, f"{path}?attribute=brand:acme&attribute=brand:bolt")
        assert {brand(one["item"]) for one in only["items"]} == {"acme", "bolt"}
        few = await get(client, f"{path}?attribute=price:3")
        assert {one["item"] % 7 for one in few["items"]} == {3}
        await service.catalogue.update(CatalogueChange(withdraw=np.array(items[:1])))
        left = await get(client, f"{path}?num_items=1000")
        assert items[0] not in [one["item"] for one in left["items"]]
        await service.catalogue.update(CatalogueChange(restore=np.array(items[:1])))
        await get(client, "/v1/items/nobody/similar", 404)
        for query in ("num_items=0", "num_items=x", "attribute=brand", "attribute=price:x"):
            await get(client, f"{path}?{query}", 422)
        await get(client, f"{path}?attribute=colour:red", 422)


async def test_what_trends_is_counted_from_events_of_the_tenant(
    folder: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", entry("mine", tenant="mine"), entry("yours", tenant="u"))
    now = int(time.time())
    mine, yours = bearer("mine"), bearer("yours")
    server = {"api_keys_file": str(keys)}
    async with serving(folder, server=server, **stored(tmp_path), **section(folder)) as (client, _):
        assert (await get(client, "/v1/trending", headers=mine))["basis"] in ("popular", "nothing")
        await get(client, "/v1/trending", 401)
        for item, count in ((FIRST_ID + 1, 2), (FIRST_ID + 2, 3)):
            for _ in range(count):
                body = {"user_id": "a", "item_id": item, "event": "1", "timestamp": now}
                async with client.post("/v1/events", json=body, headers=mine) as response:
                    assert response.status == 200
        users = [
            {
                "user_id": "b",
                "events": {
                    "items": [FIRST_ID + 1, FIRST_ID + 9],
                    "actions": ["1", "1"],
                    "timestamps": [now - 2 * KEPT_S, now],
                },
            }
        ]
        async with client.post("/v1/events/bulk", json={"users": users}, headers=mine) as response:
            assert response.status == 200
        found = await get(client, "/v1/trending?window_s=600", headers=mine)
        assert found["basis"] == "events"
        assert [(one["item"] - FIRST_ID, one["score"]) for one in found["items"]] == [
            *((2, 3.0), (1, 2.0), (9, 1.0))  # not the event of two days ago
        ]
        assert (await get(client, "/v1/trending", headers=yours))["basis"] != "events"
        for query in ("window_s=0", "window_s=nan", "window_s=90000", "num_items=9999"):
            await get(client, f"/v1/trending?{query}", 422, headers=mine)
        await get(client, "/v1/trending?tenant=other", 403, headers=mine)


def test_counts_of_events_are_bounded() -> None:
    now = [1_000_000.0]
    recent = RecentItems(lambda: now[0])

    def add(items: range, at: float) -> None:
        ids = np.array(items)
        recent.add("t", Events.make(ids, np.zeros(len(ids)), np.full(len(ids), int(at))))

    add(range(MOST_COUNTS), now[0] - 4 * BUCKET_S)
    add(range(10), now[0])
    assert set(recent.counts("t", KEPT_S)) == set(range(10))  # the oldest quarter went
    now[0] += 2 * KEPT_S
    assert not recent.counts("t", KEPT_S)
    for _ in range(200):
        now[0] += BUCKET_S
        add(range(3), now[0])
    assert len(recent._counts) <= KEPT_S // BUCKET_S + 2
    assert sum(recent.counts("t", BUCKET_S).values()) in (3, 6)


async def test_recommend_still_knows_the_user(folder: Path, tmp_path: Path) -> None:
    """A look-up changes nothing that a recommend reads."""
    async with serving(folder, **stored(tmp_path), **section(folder)) as (client, _):
        before = await recommend(client, history=HISTORY)
        await get(client, f"/v1/users/{KNOWN}?num_events=1")
        after = await recommend(client, history=HISTORY)
        assert before["items"] == after["items"]
