"""What the ranker of a cascade does not know.

Too much of it is rejected, the rest is last or dropped, and counted.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.names import item_id
from npu_gr.handlers.hooks import HookContext
from npu_gr.handlers.service import Service
from npu_gr.model.weights import Checkpoint, save
from npu_gr.vector_search.vectors import save as save_vectors
from tests.decoders import VARIANTS, saved
from tests.models import tiny_model
from tests.server.test_recommend_over_http import IN_COLUMNS
from tests.serving import make_config, serving
from tests.vector_search.vectors import make_vectors

HERE = "tests.server.test_recommend_unknown_over_http"
NAMES = {
    item_id(name): name
    for name in [f"{kind}-{number:04}" for kind in ("SKU", "NEW") for number in range(100)]
}
KNOWN = [item_id(f"SKU-{number:04}") for number in range(100)]  # to the ranker
NEW = [item_id(f"NEW-{number:04}") for number in range(8)]
PATIENT = {"X-Request-Timeout-Ms": "30000"}
Client = Any


def named(items: list[int]) -> list[int | str]:
    """Items as a company calls them."""
    return [NAMES.get(item, item) for item in items]


def history(items: list[int]) -> dict[str, Any]:
    at_s = [1_600_000_000 + place for place in range(len(items))]
    return {"items": named(items), "actions": [1] * len(items), "timestamps": at_s}


SEEN = KNOWN[:6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tests share the models."""
    made = tmp_path_factory.mktemp("unknown")
    write_ranker(made / "checkpoint", KNOWN)
    (made / "decoder").mkdir()
    saved(made / "decoder", **VARIANTS["qwen3 g2 tied"])
    return made


def write_ranker(folder: Path, items: list[int], seed: int = 0) -> None:
    model = tiny_model(seed=seed, num_items=len(items))
    ids = np.array(items, np.int64)
    save(
        Checkpoint(model=model, item_ids=ids, name="ranker", action_values=(1.0, 2.0, 3.0)), folder
    )


async def write_vectors(folder: Path, items: list[int]) -> None:
    await asyncio.to_thread(
        save_vectors, make_vectors(item_ids=np.array(sorted(items), np.int64)), folder
    )


def write_catalogue(path: Path, items: list[int]) -> None:
    sids = np.random.default_rng(0).integers(0, 8, (len(items), 3)).tolist()
    rows = [{"item_id": item, "sid": sid} for item, sid in zip(items, sids, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sections(
    folder: Path, items: list[int], num_retrieved: int = 30, **changes: Any
) -> dict[str, Any]:
    write_catalogue(folder / "items.jsonl", items)
    generate = {
        "checkpoint": str(folder / "decoder"),
        "catalogue": str(folder / "items.jsonl"),
        "change_log": "none",  # tests share the folder
        "codes": [8, 8, 8],
        "max_beams": 128,
        "beam_width": 128,
        "max_prompt_tokens": 48,
        "hbm_bytes": 4_000_000,
    }
    return {"generate": generate, "recommend": {"sources": {"generate": num_retrieved}, **changes}}


def popular(folder: Path, *names: str) -> str:
    path = folder / "popular.txt"
    path.write_text("".join(f"{name}\n" for name in names))
    return str(path)


async def recommend(client: Client, status: int = 200, **body: Any) -> dict[str, Any]:
    asked = {"user_id": "u", "history": history(SEEN), "timestamp": 1_700_000_000}
    body = {**asked, **IN_COLUMNS["/v1/recommend"], **body}
    body = {name: value for name, value in body.items() if value is not None}
    async with client.post("/v1/recommend", json=body, headers=PATIENT) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        assert response.status == status, answer
        return {**answer, "items": raw(answer["items"])} if status == 200 else answer


def raw(items: list[int | str]) -> list[int]:
    """Ids; an answer names items as the company does."""
    return [item_id(item) if isinstance(item, str) else item for item in items]


async def post(client: Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    async with client.post(path, json=body, headers=PATIENT) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        assert response.status == status, answer
        return answer


async def coverage(client: Client) -> dict[str, float]:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    head = 'npu_gr_catalogue_coverage_ratio{source="'
    return {
        line[len(head) :].partition('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith(head)
    }


# ---- the answer


async def test_an_item_that_the_ranker_does_not_know_comes_last_and_is_counted(
    folder: Path,
) -> None:
    async with serving(folder, **sections(folder, KNOWN + NEW, 200, max_candidates=200)) as (
        client,
        _,
    ):
        few = await recommend(client, num_items=10)
        assert few["degraded"] == []  # nothing that the answer holds is without a score
        assert None not in few["scores"]
        assert (few["num_candidates"], few["num_unknown"]) == (94, 8)
        every = await recommend(client, num_items=200)
        assert every["items"][:10] == few["items"]
        assert every["scores"].index(None) == 94
        assert every["scores"][94:] == [None] * 8
        assert sorted(every["items"][94:]) == sorted(NEW)
        assert (every["num_candidates"], every["num_unknown"], every["degraded"]) == (
            94,
            8,
            ["rank"],
        )
        assert every["stages"][-1]["result"] == "partial"
        assert set(every["origins"]) == {"generate"}
        async with client.get("/metrics") as response:
            assert (
                'npu_gr_recommend_unknown_items_total{source="generate"} 16.0'
            ) in await response.text()


async def test_a_place_among_the_ranked_goes_to_an_item_that_the_ranker_knows(folder: Path) -> None:
    few = sections(folder, KNOWN + NEW, 200, max_candidates=96, order="fused")
    async with serving(folder, **few) as (client, _):
        answer = await recommend(client, num_items=200)
        assert (answer["num_candidates"], len(answer["items"])) == (94, 96)
        assert [score is None for score in answer["scores"]] == [False] * 94 + [True] * 2
        assert (await recommend(client, num_items=20, num_candidates=20))["degraded"] == []


async def test_unknown_items_are_dropped_where_that_is_configured_or_asked(folder: Path) -> None:
    async with serving(folder, **sections(folder, KNOWN + NEW, 200, unknown_items="drop")) as (
        client,
        _,
    ):
        dropped = await recommend(client, num_items=200)
        assert len(dropped["items"]) == 94
        assert not set(NEW) & set(dropped["items"])
        assert (dropped["num_unknown"], dropped["degraded"]) == (8, ["rank"])
        assert (await recommend(client, num_items=94))["degraded"] == []
        whole = await recommend(client, num_items=200, unknown_items="last")
        assert whole["items"][:94] == dropped["items"]
        assert len(whole["items"]) == 102
    async with serving(folder, **sections(folder, KNOWN + NEW, 200)) as (client, _):
        assert (await recommend(client, num_items=200, unknown_items="drop"))["items"] == dropped[
            "items"
        ]
        wrong = await recommend(client, 422, unknown_items="hide")
        assert wrong["detail"].startswith("unknown_items: ")


async def test_popular_items_take_the_place_of_dropped_ones(folder: Path) -> None:
    new = [f"NEW-{number:04}" for number in range(8)]
    names = popular(folder, *new, *(f"SKU-{number:04}" for number in range(100)))
    few = sections(
        folder, KNOWN[:16] + NEW, 24, unknown_items="drop", popular=names, min_coverage=0.5
    )
    async with serving(folder, **few) as (client, _):
        answer = await recommend(client, num_items=12)
        assert len(answer["items"]) == 12
        assert None not in answer["scores"]
        assert set(answer["origins"]) == {"generate", "popular"}
        assert not set(answer["items"]) & {*SEEN, *NEW}
        denied = await recommend(client, num_items=12, deny_items=named(KNOWN[10:50]))
        assert not set(denied["items"]) & {*SEEN, *NEW, *KNOWN[10:50]}
        assert "popular" in denied["origins"]
        best = await recommend(client, num_items=8, num_candidates=8, deny_items=named(KNOWN[:16]))
        assert len(best["items"]) == 8  # although the eight most popular ones are unknown


def adds_unknown(items: I64, shown: HookContext) -> list[int]:
    return [NEW[0], *items.tolist()]


async def test_a_hook_may_add_what_the_ranker_does_not_know(folder: Path) -> None:
    async with serving(folder, **sections(folder, KNOWN, hook=f"{HERE}:adds_unknown")) as (
        client,
        _,
    ):
        answer = await recommend(client, num_items=50)
        assert (answer["items"][-1], answer["origins"][-1], answer["num_unknown"]) == (
            NEW[0],
            "hook",
            1,
        )
        assert None not in answer["scores"][:-1]
        gone = await recommend(client, num_items=50, unknown_items="drop")
        assert gone["items"] == answer["items"][:-1]


async def test_a_ranker_that_knows_nothing_says_so(folder: Path) -> None:
    async with serving(folder, **sections(folder, NEW, min_coverage=0)) as (client, _):
        answer = await recommend(client, history=history([NEW[0]]), num_items=5)
        assert (answer["outcome"], answer["num_candidates"], answer["num_unknown"]) == (None, 0, 7)
        assert (answer["scores"], answer["degraded"]) == ([None] * 5, ["rank"])
        dropped = await recommend(client, history=history([NEW[0]]), unknown_items="drop")
        assert (dropped["items"], dropped["num_unknown"], dropped["degraded"]) == ([], 7, ["rank"])


async def test_a_ranker_that_rejects_unknown_candidates_is_not_asked_for_them(folder: Path) -> None:
    strict = {"service": {"unknown_items": "reject"}, **sections(folder, KNOWN + NEW, 200)}
    async with serving(folder, **strict) as (client, _):
        answer = await recommend(client, num_items=200)
        assert answer["outcome"] is not None
        assert answer["num_unknown"] == 8


# ---- whom nobody knows


@pytest.mark.parametrize("unknown_items", ["last", "drop"])
async def test_known_cold_and_strange_users_all_get_items(
    folder: Path, tmp_path: Path, unknown_items: str
) -> None:
    names = popular(folder, *(f"SKU-{number:04}" for number in range(99, 0, -1)))
    asked = {**sections(folder, KNOWN, popular=names, unknown_items=unknown_items)}
    asked["history_store"] = {"path": str(tmp_path / "history.db")}
    async with serving(folder, **asked) as (client, _):
        await post(client, "/v1/events", user_id="known", events=history(SEEN))
        await post(client, "/v1/events", user_id="strange", events=history([5, 6, 7]))
        for user, generated, origin in (
            ("known", "ok", "generate"),
            ("nobody", "cold", "popular"),
            ("strange", "cold", "popular"),
        ):
            answer = await recommend(client, user_id=user, history=None)
            assert len(answer["items"]) == 10, user
            assert set(answer["origins"]) == {origin}
            assert {stage["stage"]: stage["result"] for stage in answer["stages"]}[
                "generate"
            ] == generated
            assert answer["history"]["source"] == "store"
            assert None not in answer["scores"]
        brought = await recommend(client, user_id="other", history=history([5, 6, 7]))
        assert set(brought["origins"]) == {"popular"}


async def test_popular_names_that_the_ranker_lacks_are_told_at_the_start(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = popular(folder, "SKU-0001", "SKU-9999", "SKU-0002", "what?")
    async with serving(folder, **sections(folder, KNOWN, popular=names)) as (client, _):
        assert await coverage(client) == {"generate": 1.0, "popular": 0.5}
    assert ("recommend: the ranker knows 2 of the 4 items of popular") in [
        r.getMessage() for r in caplog.records
    ]


# ---- the limit


async def test_a_cascade_of_strangers_does_not_start(folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        async with serving(folder, **sections(folder, KNOWN[:56] + list(range(44)))):
            pass
    assert str(error.value) == (
        "recommend: the ranker knows 56 of the 100 items of generate (56 %); "
        "recommend.min_coverage is 0.9"
    )
    async with serving(
        folder, **sections(folder, KNOWN[:56] + list(range(44)), min_coverage=0.5)
    ) as (client, _):
        assert await coverage(client) == {"generate": 0.56}
    await write_vectors(folder / "strange", list(range(40)))
    both = sections(folder, KNOWN) | {"match": {"vectors": str(folder / "strange")}}
    async with serving(folder, **both) as (client, _):  # the cascade does not ask it
        assert await coverage(client) == {"generate": 1.0}
    both["recommend"] = {"sources": {"generate": 10, "match": 10}}
    with pytest.raises(ConfigError, match="knows 0 of the 40 items of match"):
        async with serving(folder, **both):
            pass


async def test_a_catalogue_of_strangers_is_rejected_and_single_items_are_not(folder: Path) -> None:
    async with serving(folder, **sections(folder, KNOWN[:40])) as (client, service):
        served = (await service.catalogue.info()).version
        write_catalogue(folder / "items.jsonl", KNOWN[:40] + list(range(60)))
        rejected = await post(client, "/v1/catalog/reload", 422)
        assert rejected["detail"] == (
            "catalogue: recommend: the ranker knows 40 of the 100 items of generate (40 %); "
            "recommend.min_coverage is 0.9"
        )
        assert (await service.catalogue.info()).version == served
        assert await coverage(client) == {"generate": 1.0}
        new = [{"item_id": name, "sid": [0, 0, number]} for number, name in enumerate(named(NEW))]
        await post(client, "/v1/catalog/items", add=new, withdraw=named(KNOWN[20:40]))
        assert (await coverage(client))["generate"] == pytest.approx(20 / 28)
        await post(client, "/v1/catalog/rollback")
        assert await coverage(client) == {"generate": 1.0}
        await post(client, "/v1/catalog/rollback")  # undone: what was served is never rejected
        assert (await coverage(client))["generate"] == pytest.approx(20 / 28)
        write_catalogue(folder / "items.jsonl", KNOWN + list(range(12)))
        await post(client, "/v1/catalog/reload")  # too few, and more than now, with the changes
        assert await coverage(client) == {"generate": 0.8}


async def test_vectors_of_strangers_are_rejected(folder: Path) -> None:
    await write_vectors(folder / "vectors", KNOWN[:40])
    matched: dict[str, Any] = {
        "match": {"vectors": str(folder / "vectors")},
        "recommend": {"sources": {"match": 10}},
    }
    async with serving(folder, **matched) as (client, service):
        assert await coverage(client) == {"match": 1.0}
        served = (await service.vectors.info()).version
        await write_vectors(folder / "vectors", list(range(40)))
        rejected = await post(client, "/v1/match/reload", 422)
        assert "knows 0 of the 40 items of match (0 %)" in rejected["detail"]
        assert (await service.vectors.info()).version == served
        await write_vectors(folder / "vectors", [*KNOWN[:38], 5, 6])
        await post(client, "/v1/match/reload")
        assert await coverage(client) == {"match": 0.95}
        await post(client, "/v1/match/rollback")
        assert await coverage(client) == {"match": 1.0}


async def test_a_ranker_of_strangers_is_rejected_at_a_reload(folder: Path, tmp_path: Path) -> None:
    write_ranker(tmp_path / "strange", list(range(100)), seed=1)
    write_ranker(tmp_path / "other", [*KNOWN, *NEW], seed=2)
    asked = {"relay": {"t_life_s": 0.2}, **sections(folder, KNOWN)}
    now = {"checkpoint": str(folder / "checkpoint")}
    async with serving(folder, read=lambda: make_config(folder, **asked, **now), **asked) as (
        client,
        service,
    ):
        served = service.versions.ranker().version
        now["checkpoint"] = str(tmp_path / "strange")
        rejected = await post(client, "/v1/models/reload", 422)
        assert rejected["detail"].startswith(
            "reload: recommend: the ranker knows 0 of the 100 items of generate (0 %)"
        )
        await still(client, service, served)
        now["checkpoint"] = str(tmp_path / "other")
        write_catalogue(folder / "few.jsonl", KNOWN[:10] + list(range(10)))
        asked["generate"] = {**asked["generate"], "catalogue": str(folder / "few.jsonl")}
        rejected = await post(client, "/v1/models/reload", 422)
        assert "the ranker knows 10 of the 20 items of generate" in rejected["detail"]
        await still(client, service, served)
        # the old ranker does not know the new ones
        write_catalogue(folder / "few.jsonl", KNOWN[:11] + NEW + [1])
        await post(client, "/v1/models/reload")
        assert service.versions.ranker().version != served
        assert await coverage(client) == {"generate": 0.95}


async def still(client: Client, service: Service, version: str) -> None:
    assert service.versions.ranker().version == version
    assert not service.versions.is_draining
    assert await coverage(client) == {"generate": 1.0}
    assert (await recommend(client))["model_version"] == version
