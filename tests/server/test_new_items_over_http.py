"""An added item scores as with a ranker that knows it without a residual.

POST /v1/catalog/items adds it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quality_cold import with_new_items
from npu_gr.model.config import ItemFeature
from npu_gr.model.feature_rows import NewItems
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.weights import Checkpoint, load, save
from npu_gr.service.config import Config
from tests.decoders import VARIANTS, saved
from tests.models import CPU, tiny_model, tiny_order
from tests.serving import encoded, make_config, serving

CODES = (8, 8, 8)
GENRES = ("drama", "comedy", "war")
FEATURE = ItemFeature(name="genre", num_values=3, max_values=2, values=GENRES)
NUM = 60
ITEMS = list(range(100, 100 + NUM))
SIDS = np.random.default_rng(0).integers(0, 8, (NUM, 3)).astype(np.int32)
# D1: the semantic IDs of known items
NEW = {900 + n: (SIDS[n].tolist(), [GENRES[n % 3]]) for n in range(5)}
SEEN = ITEMS[:12]
SHOWN_AT = 1_700_000_000
PATIENT = {"X-Request-Timeout-Ms": "30000"}
Client = Any


def make_ranker(folder: Path, seed: int = 0, **changes: Any) -> None:
    settings = {
        "item_codes": CODES,
        "row_dropout": 0.1,
        "item_features": (FEATURE,),
        "retrieval": True,
        **changes,
    }
    model = tiny_model(seed=seed, num_items=NUM, **settings)
    if model.config.item_codes:
        model.codes.of_item.copy_(torch.from_numpy(SIDS))
    order = tiny_order(NUM) if model.config.retrieval else None
    ids = np.array(ITEMS, np.int64)
    save(
        Checkpoint(model=model, item_ids=ids, name="r", action_values=(1.0, 2.0, 3.0), order=order),
        folder,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("new")
    make_ranker(made / "checkpoint")
    make_ranker(made / "next", seed=1)
    make_ranker(made / "old", row_dropout=0.0, item_codes=())
    (made / "decoder").mkdir()
    saved(made / "decoder", **VARIANTS["qwen3 g2 tied"])
    return made


def sections(
    folder: Path, tmp_path: Path, added: dict[int, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"item_id": i, "sid": s} for i, s in zip(ITEMS, SIDS.tolist(), strict=True)
    ]
    rows += [
        {"item_id": item, "sid": sid, "features": {"genre": g}}
        for item, (sid, g) in (added or {}).items()
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate = {
        "checkpoint": str(folder / "decoder"),
        "catalogue": str(tmp_path / "items.jsonl"),
        "codes": list(CODES),
        "max_beams": 128,
        "beam_width": 128,
        "max_prompt_tokens": 48,
        "hbm_bytes": 4_000_000,
    }
    recommend = {"sources": {"generate": 100}, "order": "rank", "min_coverage": 0.5}
    return {
        "generate": generate,
        "recommend": recommend,
        "history_store": {"kind": "none"},
        **changes,
    }


class ByHand:
    """The definition: a ranker trained with the new items, without a cache.

    It learnt no residual of them.
    """

    def __init__(self, folder: Path, new: dict[int, Any]) -> None:
        model = load(folder).model
        none = model.config.item_codes
        ids = [
            [GENRES.index(g) for g in genres] + [3] * (2 - len(genres))
            for _, genres in new.values()
        ]
        codes = (
            np.array([sid for sid, _ in new.values()], np.int32)
            if none
            else np.empty((len(new), 0), np.int32)
        )
        self.model: HSTU = with_new_items(model, NewItems((np.array(ids),), codes))
        self.row = {item: row for row, item in enumerate([*ITEMS, *new])}

    def run(self, seen: list[int], candidates: list[int], *, is_next: bool = False) -> torch.Tensor:
        segment = Segment(
            items=torch.tensor([self.row[item] for item in seen]),
            actions=torch.ones(len(seen), dtype=torch.int64),
            times=SHOWN_AT - 1000 + torch.arange(len(seen)),
            candidates=torch.tensor(
                [len(self.row)] if is_next else [self.row[item] for item in candidates]
            ),
            candidate_time=SHOWN_AT,
            is_next=is_next,
        )
        found: torch.Tensor = self.model(CPU, [segment])[0]
        return found

    def scores(self, seen: list[int], candidates: list[int]) -> list[float]:
        scores: list[float] = self.run(seen, candidates)[:, 0].tolist()
        return scores

    def best(self, seen: list[int], hidden: set[int]) -> list[int]:
        """The items by u . e, best first."""
        products = self.model.items.vectors() @ self.run(seen, [], is_next=True)[0]
        items = list(self.row)
        return [
            items[row]
            for row in products.argsort(descending=True).tolist()
            if items[row] not in hidden
        ]


async def post(client: Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    async with client.post(path, json=body, headers=PATIENT) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        assert response.status == status, answer
        return answer


async def add(client: Client, new: dict[int, Any], status: int = 200) -> dict[str, Any]:
    rows = [
        {"item_id": item, "sid": sid, "features": {"genre": genres}}
        for item, (sid, genres) in new.items()
    ]
    return await post(client, "/v1/catalog/items", status, add=rows)


def asked(seen: list[int], **more: Any) -> dict[str, Any]:
    times = [SHOWN_AT - 1000 + place for place in range(len(seen))]
    history = {"items": seen, "actions": [2] * len(seen), "timestamps": times}
    return {"user_id": "u", "history": history, "timestamp": SHOWN_AT, **more}


async def rank(
    client: Client, seen: list[int], candidates: list[int], **more: Any
) -> dict[str, Any]:
    return await post(client, "/v1/rank", **asked(seen, candidates=candidates, **more))


async def recommend(
    client: Client, seen: list[int], num_items: int = 50, **more: Any
) -> dict[str, Any]:
    body = {"format": "columns", **asked(seen, num_items=num_items, **more)}
    return await post(client, "/v1/recommend", **body)


async def metric(client: Client, name: str) -> float:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_a_new_item_has_its_score_in_candidates_histories_and_recommends(
    folder: Path, tmp_path: Path
) -> None:
    """Five new items on the semantic IDs of known ones have a score.

    In a review they were last for ever, without one; this is its script.
    """
    new = list(NEW)
    by_hand = ByHand(folder / "checkpoint", NEW)
    async with serving(folder, **sections(folder, tmp_path)) as (client, _):
        before = await rank(client, SEEN, [ITEMS[20], *new])
        assert before["unknown_candidates"] == 5
        await add(client, NEW)
        after = await rank(client, SEEN, [ITEMS[20], *new])
        assert after["unknown_candidates"] == 0
        assert after["scores"]["click"] == pytest.approx(
            by_hand.scores(SEEN, [ITEMS[20], *new]), abs=1e-5
        )
        assert after["scores"]["click"][0] == before["scores"]["click"][0]

        seen = [*SEEN, new[0], ITEMS[30], new[1]]
        ranked = await rank(client, seen, [*new, ITEMS[20]])
        assert (ranked["history"]["unknown_items"], ranked["history"]["num_tokens"]) == (
            0,
            len(seen),
        )
        assert ranked["scores"]["click"] == pytest.approx(
            by_hand.scores(seen, [*new, ITEMS[20]]), abs=1e-5
        )

        found = await recommend(client, SEEN)
        assert None not in found["scores"]
        assert set(new) & set(found["items"])
        scores = dict(zip(found["items"], by_hand.scores(SEEN, found["items"]), strict=True))
        assert found["items"] == sorted(found["items"], key=lambda item: -scores[item])
        assert await metric(client, 'npu_gr_new_items{state="scored"}') == 5
        assert await metric(client, 'npu_gr_new_items{state="unscored"}') == 0
        assert await metric(client, "npu_gr_spare_item_rows") == 4096 - 5


async def test_a_history_whose_item_becomes_known_is_another_prefix(
    folder: Path, tmp_path: Path
) -> None:
    seen = [*SEEN[:6], 900, *SEEN[6:]]
    by_hand = ByHand(folder / "checkpoint", NEW)
    async with serving(folder, **sections(folder, tmp_path)) as (client, service):
        body = asked(seen)
        del body["timestamp"]
        await post(client, "/v1/signal", 202, **body)
        await encoded(service.versions.ranker().relay)
        hit = await rank(client, seen, ITEMS[40:])
        assert (hit["outcome"], hit["history"]["unknown_items"]) == ("hbm_hit", 1)
        await add(client, NEW)
        missed = await rank(client, seen, ITEMS[40:])
        assert missed["outcome"] == "miss_full"
        assert missed["scores"]["click"] == pytest.approx(
            by_hand.scores(seen, ITEMS[40:]), abs=1e-5
        )


async def test_the_shared_encoder_finds_new_items_and_no_withdrawn_ones(
    folder: Path, tmp_path: Path
) -> None:
    by_hand = ByHand(folder / "checkpoint", NEW)
    of_shared_encoder = sections(folder, tmp_path)
    of_shared_encoder["recommend"] = {
        "sources": {"shared_encoder": 65},
        "order": "retrieval",
        "min_coverage": 0.5,
    }

    async def found(client: Client, **more: Any) -> list[int]:
        items: list[int] = (await recommend(client, SEEN, 65, exclude_seen=False, **more))["items"]
        return items

    async with serving(folder, **of_shared_encoder) as (client, _):
        assert set(await found(client)) == set(ITEMS)
        await add(client, NEW)
        assert await found(client) == by_hand.best(SEEN, set())
        assert await found(client, deny_items=[901]) == by_hand.best(SEEN, {901})
        await post(client, "/v1/catalog/items", withdraw=[900, 902, ITEMS[3]])
        assert await found(client) == by_hand.best(SEEN, {900, 902, ITEMS[3]})
        # which takes the other two out of the catalogue for good
        await add(client, {902: NEW[902]})
        assert await found(client) == by_hand.best(SEEN, {900, ITEMS[3]})
        # what a history has stays, and who asks is told
        ranked = await rank(client, [*SEEN, 900], [900, ITEMS[3]])
        assert ranked["scores"]["click"] == pytest.approx(
            by_hand.scores([*SEEN, 900], [900, ITEMS[3]]), abs=1e-5
        )
        await post(client, "/v1/catalog/rollback")
        assert await found(client) == by_hand.best(SEEN, {900, 902, ITEMS[3]})
        fitted = await recommend(client, SEEN, 65, exclude_seen=False, order="blended")
        assert None not in fitted["scores"]


async def test_a_new_item_gets_the_columns_of_the_other_items(folder: Path, tmp_path: Path) -> None:
    """As `train all` makes them: an order score, and an attribute for each single feature."""
    made = sections(folder, tmp_path)
    path = tmp_path / "items.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for place, row in enumerate(rows):
        row |= {"order": place + 1.0, "attributes": {"genre": "war", "year": "1998"}}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = {"item_id": "SKU-0043", "sid": SIDS[0].tolist(), "title": "Boots"}
    async with serving(folder, **made) as (client, _):

        async def change(status: int = 200, **more: Any) -> dict[str, Any]:
            return await post(client, "/v1/catalog/items", status, add=[new | more])

        missing = await change(422, features={"genre": "war"})
        assert missing["detail"].startswith("catalogue: add[0].attributes.year: is missing")
        several = await change(
            422, features={"genre": ["war", "drama"]}, attributes={"year": "2000"}
        )
        assert several["detail"].startswith("catalogue: add[0].attributes.genre: is missing")
        await change(features={"genre": ["drama"]}, attributes={"year": "2000"})
        drama = {"attributes": {"genre": ["drama"]}}
        asked_for = asked(SEEN, num_items=5, **drama)
        del asked_for["timestamp"]
        answer = await post(client, "/v1/generate", **asked_for)
        assert (answer["items"], answer["limited_by"]) == (["SKU-0043"], "filter")
        asked_for |= {"attributes": {}, "allow_items": [ITEMS[0], "SKU-0043"], "num_items": 2}
        both = await post(client, "/v1/generate", exclude_seen=False, **asked_for)
        assert both["items"] == [ITEMS[0], "SKU-0043"]  # one semantic ID, the new item last


async def test_an_item_with_other_features_has_another_row(folder: Path, tmp_path: Path) -> None:
    other = {900: (SIDS[7].tolist(), ["war", "comedy"])}
    seen = [*SEEN, 900]
    want = ByHand(folder / "checkpoint", {**NEW, **other}).scores(seen, [900, 901])
    async with serving(folder, **sections(folder, tmp_path)) as (client, service):
        await add(client, NEW)
        first = await rank(client, seen, [900, 901])
        await post(
            client, "/v1/signal", 202, **{k: v for k, v in asked(seen).items() if k != "timestamp"}
        )
        await encoded(service.versions.ranker().relay)
        await post(client, "/v1/catalog/items", withdraw=[900])
        await add(client, other)
        second = await rank(client, seen, [900, 901])
        assert second["outcome"] == "miss_full"  # the prefix in memory was made with the other row
        assert second["scores"]["click"] == pytest.approx(want, abs=1e-5)
        assert second["scores"]["click"] != pytest.approx(first["scores"]["click"], abs=1e-3)
        shared_encoder = await recommend(client, SEEN, 65, order="blended", exclude_seen=False)
        assert len(set(shared_encoder["items"])) == len(shared_encoder["items"])


async def test_a_change_that_the_ranker_cannot_follow_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    small = sections(folder, tmp_path, service={"spare_items": 3})
    async with serving(folder, **small) as (client, _):
        async with client.get("/v1/catalog") as response:
            version = (await response.json())["version"]
        told = await add(client, NEW, 422)
        assert (
            "5 items need new rows of the ranker, but only 3 of service.spare_items are free"
        ) in told["detail"]
        for features, why in (
            ({"brand": "x"}, "item 900: unknown feature 'brand'; the ranker has genre"),
            (
                {"genre": ["war", "drama", "comedy"]},
                "item 900: feature 'genre': 3 values, the limit is 2",
            ),
        ):
            row = {"item_id": 900, "sid": NEW[900][0], "features": features}
            told = await post(client, "/v1/catalog/items", 422, add=[row])
            assert why in told["detail"]
        async with client.get("/v1/catalog") as response:
            assert (await response.json())["version"] == version
        await add(client, {item: NEW[item] for item in list(NEW)[:3]})  # every row is still there
        told = await post(
            client, "/v1/rank", 422, **asked(SEEN, candidates=[900, 904], unknown_items="refuse")
        )
        assert told["detail"] == "candidates: 1 unknown item: 904"
        assert (await rank(client, SEEN, [900, 904]))["scores"]["click"][1] is None
        row = {"item_id": 904, "sid": NEW[904][0], "features": {"genre": 7}}
        await post(client, "/v1/catalog/items", 422, add=[row])


async def test_of_two_requests_for_one_new_item_one_adds_it(folder: Path, tmp_path: Path) -> None:
    async def once(client: Client, seed: int) -> int:
        row = {"item_id": 900, "sid": SIDS[seed].tolist()}
        async with client.post(
            "/v1/catalog/items", json={"add": [row]}, headers=PATIENT
        ) as response:
            return int(response.status)

    async with serving(folder, **sections(folder, tmp_path)) as (client, _):
        assert sorted(await asyncio.gather(*(once(client, seed) for seed in range(4)))) == [
            200,
            422,
            422,
            422,
        ]
        assert await metric(client, "npu_gr_spare_item_rows") == 4095


async def test_ranks_meanwhile_see_all_of_a_new_item_or_nothing(
    folder: Path, tmp_path: Path
) -> None:
    new = list(NEW)
    want = ByHand(folder / "checkpoint", NEW).scores(SEEN, new)
    async with serving(folder, **sections(folder, tmp_path)) as (client, _):

        async def added() -> None:
            for item in new:
                await add(client, {item: NEW[item]})

        adding = asyncio.create_task(added())
        seen = set()
        while not adding.done():
            for answer in await asyncio.gather(*(rank(client, SEEN, new) for _ in range(4))):
                scores = answer["scores"]["click"]
                known = [place for place, score in enumerate(scores) if score is not None]
                assert known == list(range(len(known)))  # those that were added so far
                assert [scores[place] for place in known] == pytest.approx(
                    want[: len(known)], abs=1e-5
                )
                seen.add(len(known))
        await adding
        assert len(seen) > 1


async def test_a_start_and_a_new_version_score_what_the_catalogue_has(
    folder: Path, tmp_path: Path
) -> None:
    added = {item: NEW[item] for item in (900, 901)}
    whole = sections(folder, tmp_path, added)
    another = {**whole, "checkpoint": str(folder / "next")}

    def read() -> Config:
        return make_config(folder, **another)

    three = list(NEW)[:3]
    at_start = ByHand(folder / "checkpoint", added).scores(SEEN, list(added))
    afterwards = ByHand(folder / "next", {item: NEW[item] for item in three}).scores(SEEN, three)
    async with serving(folder, **whole, read=read) as (client, _):
        ranked = await rank(client, SEEN, list(added))
        assert ranked["scores"]["click"] == pytest.approx(at_start, abs=1e-5)
        await add(client, {902: NEW[902]})
        await post(client, "/v1/models/reload")
        again = await rank(client, SEEN, three)
        assert again["scores"]["click"] == pytest.approx(afterwards, abs=1e-5)
        await post(client, "/v1/catalog/reload")  # the file lacks 902, but the log has it
        assert 902 in (await recommend(client, SEEN, 65, exclude_seen=False))["items"]
        # nothing recommends a withdrawn item, and histories keep it
        await post(client, "/v1/catalog/items", withdraw=[902])
        assert 902 not in (await recommend(client, SEEN, 65, exclude_seen=False))["items"]
        assert (await rank(client, SEEN, [902]))["unknown_candidates"] == 0


async def test_codes_that_mean_something_else_do_not_count(folder: Path, tmp_path: Path) -> None:
    other = sections(folder, tmp_path)
    rows = [
        {"item_id": item, "sid": sid} for item, sid in zip(ITEMS, SIDS[::-1].tolist(), strict=True)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = {item: (list(CODES), genres) for item, (_, genres) in NEW.items()}
    want = ByHand(folder / "checkpoint", bare).scores(SEEN, list(NEW))
    async with serving(folder, **other) as (client, _):
        await add(client, NEW)
        ranked = await rank(client, SEEN, list(NEW))
        assert ranked["scores"]["click"] == pytest.approx(want, abs=1e-5)


async def test_a_ranker_without_row_dropout_knows_no_new_item(folder: Path, tmp_path: Path) -> None:
    old = sections(folder, tmp_path, checkpoint=str(folder / "old"))
    async with serving(folder, **old) as (client, _):
        await add(client, NEW)
        assert (await rank(client, SEEN, list(NEW)))["unknown_candidates"] == 5
        assert await metric(client, 'npu_gr_new_items{state="unscored"}') == 5
        assert await metric(client, "npu_gr_spare_item_rows") == 0
