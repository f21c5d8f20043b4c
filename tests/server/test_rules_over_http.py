"""Filters of generate, match and recommend, and the rules and the hook after the rank."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.served import CatalogueChange
from npu_gr.handlers.hooks import HookContext, RankedItems
from npu_gr.replay.files import read as read_log
from tests.server.test_recommend_over_http import (
    HISTORY,
    NUM_ITEMS,
    matching,
    popular,
    post,
    recommend,
    results,
)
from tests.server.test_recommend_over_http import section as plain_section
from tests.serving import FIRST_ID, serving

Client = TestClient[Any, Any]
HERE = "tests.server.test_rules_over_http"
BRANDS = ("acme", "bolt", "cane", "dorn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules")


def brand(item: int) -> str:
    return BRANDS[(item - FIRST_ID) % 4]


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    """The cascade over generate and match; items have a brand and a price."""
    made = plain_section(folder, sources={"generate": 60, "match": 10}, **changes)
    rows = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    for row in rows:
        row["attributes"] = {"brand": brand(row["item_id"]), "price": row["item_id"] % 7}
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made | {"match": {"vectors": matching(folder), "max_items": 300}}


# ---- filters


@pytest.mark.parametrize("name", ["generate", "match", "recommend"])
async def test_filters_mean_the_same_in_every_kind(folder: Path, name: str) -> None:
    async def ask(status: int = 200, **filters: Any) -> Any:
        body: dict[str, Any] = {"history": HISTORY, "num_items": 200, "exclude_seen": False}
        return await post(client, f"/v1/{name}", status, **body, **filters)

    async with serving(folder, **section(folder, popular=popular(folder))) as (client, service):
        whole = set((await ask())["items"])
        assert len(whole) >= 40
        in_catalogue = {item for item in whole if item < FIRST_ID + NUM_ITEMS}

        acme = set((await ask(attributes={"brand": ["acme"]}))["items"])
        assert acme
        assert {brand(item) for item in acme} == {"acme"}
        assert acme >= {item for item in in_catalogue if brand(item) == "acme"}
        assert max(acme) < FIRST_ID + NUM_ITEMS  # an item without attributes does not pass

        both = set((await ask(attributes={"brand": ["acme", "bolt"], "price": [1, 2]}))["items"])
        assert both
        assert all(brand(item) in ("acme", "bolt") and item % 7 in (1, 2) for item in both)

        few = sorted(whole)[:9]
        assert set((await ask(allow_items=few))["items"]) == set(few)
        assert set((await ask(allow_items=few, deny_items=few[:4]))["items"]) == set(few[4:])
        mixed = await ask(allow_items=few, attributes={"brand": ["acme"]})
        assert set(mixed["items"]) == {item for item in few if brand(item) == "acme"}
        nothing = await ask(attributes={"brand": ["nobody"]})
        assert (nothing["items"], nothing["limited_by"]) == ([], "filter")
        assert (await ask(allow_items=[]))["items"] == []

        await service.catalogue.update(CatalogueChange(withdraw=np.array(few[:1])))
        gone = set((await ask(attributes={"brand": [brand(few[0])]}))["items"])
        assert few[0] not in gone
        await service.catalogue.update(CatalogueChange(restore=np.array(few[:1])))

        for filters, detail in (
            ({"attributes": {"colour": ["red"]}}, "no attribute 'colour'; there are brand, price"),
            ({"attributes": {"price": ["cheap"]}}, "'cheap' is not of the type"),
            ({"attributes": {"brand": []}}, "attributes"),
            ({"allow_items": [-1]}, "allow_items"),
        ):
            assert detail in (await ask(422, **filters))["detail"]


async def test_a_filter_reaches_every_source(folder: Path) -> None:
    """What the shared encoder, transitions and neighbours find passes too, and is not short."""
    async with serving(folder, **section(folder)) as (client, _):
        plain = await recommend(client, num_items=8)
        dorn = await recommend(client, num_items=8, attributes={"brand": ["dorn"]})
        assert {brand(item) for item in dorn["items"]} == {"dorn"}
        assert len(dorn["items"]) == len(plain["items"]) == 8  # a filter finds others instead


async def test_attributes_need_a_catalogue(folder: Path) -> None:
    async with serving(folder, match={"vectors": matching(folder)}) as (client, _):
        answer = await post(client, "/v1/match", 422, attributes={"brand": ["acme"]})
        assert "has no catalogue (section generate)" in answer["detail"]


@pytest.mark.parametrize("name", ["generate", "match", "recommend"])
async def test_an_answer_may_be_a_list_of_objects(folder: Path, name: str) -> None:
    body: dict[str, Any] = {"history": HISTORY, "num_items": 4}
    async with serving(folder, **section(folder)) as (client, _):
        columns = await post(client, f"/v1/{name}", **body, fields=["title"])
        objects = await post(client, f"/v1/{name}", **body, format="objects")
        assert objects.keys() == {"request_id", "items", "limited_by"}
        rows = zip(columns["items"], columns["titles"], columns["scores"], strict=True)
        items = [{"item": item, "title": title, "score": score} for item, title, score in rows]
        assert [one["item"] for one in objects["items"]] == columns["items"]
        assert [one["title"] for one in objects["items"]] == columns["titles"]
        scores = [one["score"] for one in objects["items"]]
        np.testing.assert_allclose(scores, columns["scores"], atol=1e-4)
        assert objects["items"][0].keys() == items[0].keys()
        explained = await post(client, f"/v1/{name}", **body, format="objects", explain=True)
        assert explained["explain"].keys() == columns.keys() - {"titles"}
        answer = await post(client, f"/v1/{name}", 422, **body, format="rows")
        assert "format" in answer["detail"]


# ---- rules


async def test_configured_rules_and_those_of_a_request_add_up(folder: Path) -> None:
    async with serving(folder, **section(folder)) as (client, _):
        plain = await recommend(client, num_items=40)
        assert "propensities" not in plain
        again = await recommend(client, num_items=40, rules={})
        assert (again["items"], again["scores"]) == (plain["items"], plain["scores"])
    denied = [item for item in plain["items"] if brand(item) == "acme"][:1]
    never = FIRST_ID + 240
    rules = {
        "deny": {"items": denied, "attributes": {"brand": ["bolt"]}},
        "pin": [{"item": never, "place": 2}, {"item": denied[0], "place": 1}],
        "diversity": [{"by": "brand", "most": 3}],
        "boost": [{"attributes": {"brand": ["cane"]}, "add": 100.0}],
    }
    async with serving(folder, **section(folder, rules=rules)) as (client, _):
        answer = await recommend(client, num_items=8)
        items = answer["items"]
        assert results(answer)["rules"] == "ok"
        assert items[1] == never
        assert answer["origins"][1] == "pin"
        assert not set(denied) & set(items)
        counts = Counter(map(brand, items))
        assert counts["bolt"] == 0
        assert max(counts.values()) <= 3
        assert brand(items[0]) == "cane"
        best = next(one for one in plain["items"] if one not in denied and brand(one) != "bolt")
        more = await recommend(
            client,
            num_items=8,
            rules={"pin": [{"item": best, "place": 1}], "diversity": [{"by": "brand", "most": 1}]},
            shown_items=None,
        )
        assert more["items"][:2] == [best, never]
        assert max(Counter(map(brand, more["items"])).values()) == 1
        assert (more["status"], more["limited_by"]) == ("exhausted", "filter")

        capped = await recommend(
            client, num_items=8, rules={"cap": {"most": 2}}, shown_items=items[:1] * 2 + items[2:3]
        )
        assert items[0] not in capped["items"]
        assert items[2] in capped["items"]
        async with client.get("/metrics") as response:
            text = await response.text()
        assert 'npu_gr_recommend_stages_total{result="ok",stage="rules"} 3.0' in text

        for body, detail in (
            ({"shown_items": items[:1]}, "shown_items: needs a cap"),
            ({"rules": {"pin": [{"item": 1}]}}, "rules.pin[0]"),
            ({"rules": {"deny": {}}}, "unknown field rules.deny"),
            ({"rules": {"diversity": [{"by": "colour", "most": 1}]}}, "no attribute 'colour'"),
            ({"rules": {"explore": {"keep": 1}}}, "either `epsilon` or `temperature`"),
        ):
            answer = await recommend(client, 422, **body)
            assert detail in answer["detail"], answer


async def test_propensities_are_answered_and_recorded(folder: Path, tmp_path: Path) -> None:
    record = {"folder": str(tmp_path / "traffic"), "enabled": True, "suffix": ".jsonl"}
    explore = {"explore": {"keep": 2, "temperature": 0.5}}
    async with serving(folder, record=record, **section(folder, rules=explore)) as (client, _):
        answer = await recommend(client, num_items=6)
        drawn = answer["propensities"]
        assert drawn[:2] == [1.0, 1.0]
        assert all(0 < one < 1 for one in drawn[2:])
    [path] = (tmp_path / "traffic").glob("*.jsonl")
    [logged] = [one for one in read_log(path) if one.kind == "recommend"]
    assert logged.answer is not None
    assert np.frombuffer(logged.answer.items, "<i8").tolist() == answer["items"]
    np.testing.assert_allclose(np.frombuffer(logged.answer.propensities, "<f4"), drawn, rtol=1e-6)


@pytest.mark.parametrize(
    ("rules", "detail"),
    [
        ({"deny": {"attributes": {"colour": ["red"]}}}, "rules.deny: filter: no attribute"),
        ({"boost": [{"attributes": {"price": ["x"]}}]}, "rules.boost[0]: filter: 'x' is not of"),
        ({"diversity": [{"by": "colour", "most": 1}]}, "rules.diversity: filter: no attribute"),
        ({"pin": [{"item": -1, "place": 1}]}, "rules.pin: index 0: -1 is not an item id"),
    ],
)
async def test_a_bad_rule_is_told_at_the_start(
    folder: Path, rules: dict[str, Any], detail: str
) -> None:
    with pytest.raises(ConfigError) as error:
        async with serving(folder, **section(folder, rules=rules)):
            pass
    assert detail in str(error.value)


# ---- the hook


def only_cheap(items: RankedItems, shown: HookContext) -> I64:
    """Rules as a site might have them: sees names, titles, attributes and scores; may add."""
    assert shown.user.user == "u"
    assert len(items) == len(items.names) == len(items.titles) == len(items.scores)
    assert items.names == items.ids.tolist()
    assert not np.isnan(items.scores).all()
    prices = items.attribute("price")
    is_cheap = np.array([price is not None and float(price) < 3 for price in prices])
    extra = [int(one) for one in str(shown.context.get("extra", "")).split()]
    return np.concatenate([items.ids[is_cheap][::-1], np.array(extra, np.int64)])


def too_slow(items: RankedItems, shown: HookContext) -> I64:
    time.sleep(0.4)
    return items.ids[:0]


async def names_a_missing_attribute(items: RankedItems, shown: HookContext) -> I64:
    items.attribute("colour")
    return items.ids


async def test_a_hook_after_the_rank_orders_and_adds(folder: Path) -> None:
    async with serving(folder, **section(folder)) as (client, _):
        plain = await recommend(client, num_items=100)
    wanted = [item for item in plain["items"] if item % 7 < 3][::-1]
    hooked = section(folder, hook_after=f"{HERE}:only_cheap", hook_budget_s=5.0)
    async with serving(folder, **hooked) as (client, _):
        answer = await recommend(client, num_items=5)
        assert (answer["items"], results(answer)["hook_after"]) == (wanted[:5], "ok")
        others = {*range(FIRST_ID, FIRST_ID + NUM_ITEMS)} - {*plain["items"], *HISTORY["items"]}
        extra, denied = sorted(others)[:2]
        answer = await recommend(
            client,
            num_items=100,
            context={"extra": f"{extra} {denied}"},
            deny_items=[denied],
        )
        assert answer["items"] == [*wanted, extra]  # what is denied stays out
        assert (answer["scores"][-1], answer["origins"][-1]) == (None, "hook_after")


@pytest.mark.parametrize(
    ("hook", "result"), [("too_slow", "out_of_time"), ("names_a_missing_attribute", "failed")]
)
async def test_a_hook_after_the_rank_that_fails_is_left_out(
    folder: Path, hook: str, result: str
) -> None:
    hooked = section(folder, hook_after=f"{HERE}:{hook}", hook_budget_s=0.1)
    async with serving(folder, **hooked) as (client, _):
        answer = await recommend(client)
        assert (answer["degraded"], results(answer)["hook_after"]) == (["hook_after"], result)
        assert len(answer["items"]) == 10
        async with client.get("/metrics") as response:
            text = await response.text()
        assert f'recommend_stages_total{{result="{result}",stage="hook_after"}} 1.0' in text
