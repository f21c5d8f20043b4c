"""POST /v1/generate against a real instance.

Valid items, the same from every tier, filters, versions, bad input.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.errors import CheckpointError, ConfigError
from npu_gr.engine.cost import CostModel
from tests.decoders import VARIANTS, saved
from tests.serving import encoded, serving, until

Client = TestClient[Any, Any]
CODES = [8, 8, 8]
HISTORY: dict[str, list[int]] = {
    "items": [3, 10, 17, 24, 31, 38],
    "actions": [1] * 6,
    "timestamps": list(range(6)),
}


def write_catalogue(path: Path, num_items: int = 200, seed: int = 0) -> dict[int, list[int]]:
    sids = np.random.default_rng(seed).integers(0, 8, (num_items, 3)).tolist()
    rows = [
        {
            "item_id": item,
            "sid": sid,
            "order": 0.0,
            "attributes": {"stock": item % 5, "kind": "abc"[item % 3]},
        }
        for item, sid in enumerate(sids)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dict(enumerate(sids))


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    if not (folder / "decoder").exists():
        (folder / "decoder").mkdir()
        saved(folder / "decoder", **VARIANTS["qwen3 g2 tied"])
    if not (folder / "items.jsonl").exists():
        write_catalogue(folder / "items.jsonl")
    return {
        "checkpoint": str(folder / "decoder"),
        "catalogue": str(folder / "items.jsonl"),
        "codes": CODES,
        "max_beams": 64,
        "beam_width": 32,
        "max_prompt_tokens": 48,
        "hbm_bytes": 4_000_000,
        "dram_bytes": 4_000_000,
        **changes,
    }


async def generate(client: Client, status: int = 200, **body: Any) -> dict[str, Any]:
    headers = {"X-Request-Timeout-Ms": "30000"}
    async with client.post(
        "/v1/generate", json={"user_id": "u", "history": HISTORY, **body}, headers=headers
    ) as r:
        answer: dict[str, Any] = await r.json(content_type=None)
        assert r.status == status, answer
        return answer


async def test_the_whole_way(tmp_path: Path) -> None:
    async with serving(tmp_path, generate=section(tmp_path)) as (client, _):
        sids = write_catalogue(tmp_path / "items.jsonl")
        cold = await generate(client, num_items=20)
        assert (cold["outcome"], cold["status"], len(cold["items"])) == (
            "miss_full",
            "complete",
            20,
        )
        assert len(set(cold["items"])) == 20
        assert [cold["sids"][i * 3 : i * 3 + 3] for i in range(20)] == [
            sids[item] for item in cold["items"]
        ]
        assert cold["scores"] == sorted(cold["scores"], reverse=True)
        assert cold["num_levels"] == 3
        hit = await generate(client, num_items=20)
        assert (hit["outcome"], hit["prefix_tokens"]) == ("hbm_hit", 18)
        assert hit["items"] == cold["items"]
        np.testing.assert_allclose(hit["scores"], cold["scores"], rtol=1e-5)

        body = msgspec.msgpack.encode({"user_id": "u", "history": HISTORY, "num_items": 20})
        media = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        async with client.post("/v1/generate", data=body, headers=media) as response:
            raw = msgspec.msgpack.decode(await response.read())
        assert np.frombuffer(raw["items"], "<i8").tolist() == cold["items"]
        assert np.frombuffer(raw["sids"], "<i4").tolist() == cold["sids"]


async def test_an_answer_names_a_base_for_the_next_request(tmp_path: Path) -> None:
    async with serving(tmp_path, generate=section(tmp_path)) as (client, _):
        base = (await generate(client))["history"]["fingerprint"]
        new = {"items": [45], "actions": [1], "timestamps": [9]}
        whole = {name: [*HISTORY[name], *new[name]] for name in new}
        want = await generate(client, history=whole, user_id="v")
        got = await generate(client, history=new, base=base)
        assert got["outcome"] == "hbm_hit"
        assert got["items"] == want["items"]
        async with client.get("/metrics") as response:
            text = await response.text()
        assert 'npu_gr_generate_duration_seconds_count{outcome="hbm_hit"} 1.0' in text
        assert "npu_gr_generated_items_total 150.0" in text
        assert 'npu_gr_kv_budget_bytes{tier="generate_dram"}' in text


async def test_a_prompt_that_would_be_late_is_cut_to_its_newest_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.engine.cost.LEAST_TOKENS", 4)
    async with serving(tmp_path, generate=section(tmp_path)) as (client, service):
        last = {name: values[-2:] for name, values in HISTORY.items()}
        want = await generate(client, history=last, user_id="v")
        # 4 s a token, of 30 s
        service.versions.generator().engine.cost = CostModel(0.0, 4.0, 0.0, 0.0, 0.0)
        got = await generate(client)
        assert (got["outcome"], got["history"]["num_tokens"]) == ("degraded", 6)
        assert got["history"]["read_events"] == 2
        assert got["items"] == want["items"]
        service.versions.generator().engine.cost = CostModel(0.0, 14.0, 0.0, 0.0, 0.0)
        assert (await generate(client))["history"]["num_tokens"] == 3
        async with client.get("/metrics") as response:
            assert 'degraded_read_events_count{kind="generate"} 2.0' in await response.text()


async def test_a_signal_encodes_the_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path, generate=section(tmp_path)) as (client, service):
        async with client.post("/v1/signal", json={"user_id": "s", "history": HISTORY}) as response:
            assert (await response.json())["generate_verdict"] == "preinfer"
        await encoded(service.versions.generator().relay)
        answer = await generate(client, user_id="s")
        assert answer["outcome"] == "hbm_hit"
        assert answer["prefix_tokens"] == 18
        async with client.delete("/v1/users/s") as response:
            assert response.status == 204
        assert (await generate(client, user_id="s"))["outcome"] == "miss_full"


async def test_filters_hold_before_the_search(tmp_path: Path) -> None:
    async with serving(tmp_path, generate=section(tmp_path)) as (client, _):
        some = await generate(client, allow_items=[5, 6, 7, 999], num_items=10)
        assert sorted(some["items"]) == [5, 6, 7]
        assert (some["status"], some["limited_by"]) == ("exhausted", "filter")
        best = (await generate(client, num_items=3))["items"]
        without = await generate(client, deny_items=best, num_items=3)
        assert not set(best) & set(without["items"])
        stock = await generate(client, attributes={"stock": [1, 2], "kind": ["a"]}, num_items=10)
        assert stock["items"]
        assert all(item % 5 in (1, 2) and item % 3 == 0 for item in stock["items"])
        nothing = await generate(client, attributes={"kind": ["z"]})
        assert (nothing["items"], nothing["sids"], nothing["status"]) == ([], [], "exhausted")
        assert nothing["limited_by"] == "filter"


async def test_an_answer_says_what_ended_its_list(tmp_path: Path) -> None:
    one_each = "".join(
        json.dumps({"item_id": item, "sid": [item // 8, item % 8, 0]}) + "\n" for item in range(40)
    )
    (tmp_path / "items.jsonl").write_text(one_each)
    async with serving(tmp_path, generate=section(tmp_path)) as (client, _):

        async def ended(num_items: int, **body: Any) -> tuple[str, str, int]:
            answer = await generate(client, num_items=num_items, **body)
            return answer["status"], answer["limited_by"], len(answer["items"])

        every = {"exclude_seen": False}
        assert await ended(40, **every) == ("complete", "", 40)
        assert await ended(41, **every) == ("exhausted", "catalogue", 40)
        assert await ended(41) == ("exhausted", "filter", 34)  # without the six seen ones
        assert await ended(41, deny_items=[999], **every) == ("exhausted", "catalogue", 40)
        allowed = {"allow_items": [1, 9, 17], **every}
        assert await ended(3, beam_width=1, **allowed) == ("exhausted", "beam", 1)
        assert await ended(4, beam_width=3, **allowed) == ("exhausted", "filter", 3)
        assert await ended(10_000, beam_width=20, **every) == ("exhausted", "beam", 20)
        async with client.post("/v1/catalog/items", json={"withdraw": [0]}) as response:
            assert response.status == 200
        assert await ended(41, **every) == ("exhausted", "catalogue", 39)
        async with client.get("/metrics") as response:
            text = await response.text()
        for limit, count in (("catalogue", 3), ("filter", 2), ("beam", 2)):
            assert f'npu_gr_generate_exhausted_total{{limited_by="{limit}"}} {count}.0' in text


async def test_memory_bounds_the_beams(tmp_path: Path) -> None:
    wide = section(tmp_path, max_beams=3000)
    async with serving(tmp_path, checkpoint=None, generate=wide) as (client, _):
        answer = await generate(client, num_items=2000, beam_width=2500)
        assert (len(answer["items"]), answer["limited_by"]) == (194, "filter")
    small = {**wide, "beam_bytes": 100_000}
    with pytest.raises(ConfigError, match=r"max_beams: 3000 beams of .*, but generate\.beam_bytes"):
        async with serving(tmp_path, checkpoint=None, generate=small):
            pass


async def test_the_catalogue_is_swapped_and_rolled_back(tmp_path: Path) -> None:
    async with serving(tmp_path, generate=section(tmp_path)) as (client, _):

        async def post(what: str, status: int = 200) -> dict[str, Any]:
            async with client.post(f"/v1/catalog/{what}") as response:
                assert response.status == status
                answer: dict[str, Any] = await response.json(content_type=None)
                return answer

        first = await generate(client)
        assert "no previous version" in (await post("rollback", 422))["detail"]
        write_catalogue(tmp_path / "items.jsonl", 150, seed=7)
        asked = [asyncio.create_task(generate(client)) for _ in range(20)]
        reloaded = await post("reload")
        assert (reloaded["num_items"], reloaded["previous"]) == (150, first["catalogue_version"])
        sids = {first["catalogue_version"]: first["sids"]}
        for answer in await asyncio.gather(*asked):
            assert sids.setdefault(answer["catalogue_version"], answer["sids"]) == answer["sids"]
        assert (await generate(client))["catalogue_version"] == reloaded["version"]
        (tmp_path / "items.jsonl").write_text('{"item_id": 1, "sid": [1, 2]}\n')
        assert "semantic IDs have 2 codes" in (await post("reload", 422))["detail"]
        (tmp_path / "items.jsonl").write_text('{"item_id": 1, "sid": [1, 2, 99]}\n')
        assert "record 1" in (await post("reload", 422))["detail"]
        back = await post("rollback")
        assert back["version"] == first["catalogue_version"]
        assert (await generate(client))["items"] == first["items"]
        async with client.get("/v1/catalog") as response:
            assert (await response.json())["version"] == first["catalogue_version"]
        missing = await generate(client, 404, catalogue_version="nope")
        assert missing["detail"].startswith("catalogue_version: 'nope' is not served")


async def test_items_come_and_go_without_a_reload(tmp_path: Path) -> None:
    async with serving(tmp_path, generate=section(tmp_path)) as (client, _):

        async def change(status: int = 200, **body: Any) -> dict[str, Any]:
            async with client.post("/v1/catalog/items", json=body) as response:
                assert response.status == status
                answer: dict[str, Any] = await response.json(content_type=None)
                return answer

        first = await generate(client, num_items=3)
        new = {
            "item_id": 900,
            "sid": first["sids"][:3],
            "order": 0.5,
            "attributes": {"kind": "z", "stock": 7},
        }
        gone = first["items"]
        changed = await change(add=[new], withdraw=gone)
        assert (changed["num_items"], changed["previous"]) == (198, first["catalogue_version"])
        answer = await generate(client, num_items=200)
        assert 900 in answer["items"]
        assert not set(gone) & set(answer["items"])
        assert answer["catalogue_version"] == changed["version"]
        assert (await generate(client, attributes={"kind": ["z"]}))["items"] == [900]
        assert (await change(restore=gone))["num_items"] == 201
        for body, detail in (
            ({"add": [new]}, "catalogue: record 1: item 900 is already in the catalogue"),
            (
                {"add": [new | {"item_id": 901, "sid": [0]}]},
                "catalogue: SIDs of 1 codes, those of the catalogue have 3",
            ),
            (
                {"add": [{"item_id": 901, "sid": [0, 0, 0], "features": {"kind": "a"}}]},
                "catalogue: add[0].attributes.stock: is missing; give it, or one value of the "
                "feature 'stock'",
            ),
            (
                {"add": [new | {"item_id": 901, "attributes": {"kind": "z", "stock": "many"}}]},
                "catalogue: add[0].attributes.stock: 'many' is not of the type",
            ),
            (
                {"add": [new | {"item_id": 901, "attributes": {"colour": "red"}}]},
                "catalogue: add[0].attributes.colour: the items of the catalogue have kind, stock",
            ),
            ({"withdraw": [12345]}, "catalogue: record 1: item 12345 is not in the catalogue"),
            ({"withdraw": [-1]}, "withdraw[0]: Expected `int` >= 0"),
            ({"remove": [1]}, "unknown field remove"),
        ):
            assert (await change(422, **body))["detail"].startswith(detail)
        # two names with one id: the lower 62 bits of their hashes are equal
        pair = [new | {"item_id": name} for name in ("SKU-2A4E ", "~2qx<o0+")]
        changed = await change(add=pair)
        assert changed["num_items"] == 202
        assert changed["rejected"] == {"~2qx<o0+": "has the id of 'SKU-2A4E'"}
        assert "SKU-2A4E" in (await generate(client, num_items=202))["items"]
        again = await change(add=pair[1:], withdraw=["SKU-2A4E"])
        assert (again["num_items"], again["rejected"]) == (201, changed["rejected"])
        assert (await generate(client, num_items=202))["catalogue_version"] != changed["version"]
        async with client.post("/v1/catalog/rollback") as response:
            assert (await response.json())["version"] == changed["version"]


async def test_an_instance_may_only_generate(tmp_path: Path) -> None:
    async with serving(tmp_path, checkpoint=None, generate=section(tmp_path)) as (client, service):
        cold = await generate(client, user_id="c")
        await client.delete("/v1/users/c")
        async with client.post("/v1/signal", json={"user_id": "u", "history": HISTORY}) as response:
            signal = await response.json()
            assert (response.status, signal["verdict"], signal["generate_verdict"]) == (
                202,
                "preinfer",
                "preinfer",
            )
        await encoded(service.versions.generator().relay)
        hit = await generate(client, base=signal["history"]["fingerprint"], history=None)
        assert hit["outcome"] == "hbm_hit"
        assert hit["items"] == cold["items"]
        async with client.post(
            "/v1/rank", json={"user_id": "u", "candidates": [1], "history": HISTORY}
        ) as response:
            assert response.status == 404
            assert "does not rank" in (await response.json(content_type=None))["detail"]
        async with client.get("/v1/models") as response:
            [model] = (await response.json())["models"]
        assert (model["tasks"], model["num_items"]) == (["generate"], 200)
        assert (await client.delete("/v1/users/u")).status == 204
        assert (await client.get("/readyz")).status == 200


@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        ({"beam_width": 65}, 422, "beam_width: 65, the limit is 64"),
        ({"beam_width": 5000}, 422, "beam_width: 5000, the limit is 64"),
        ({"num_items": 0}, 422, "num_items: Expected `int` >= 1"),
        ({"temperature": 0.0}, 422, "temperature: Expected `float` >= 0.001"),
        ({"normalise": "all"}, 422, "normalise: Invalid enum value 'all'"),
        (
            {"attributes": {"colour": ["red"]}},
            422,
            "filter: no attribute 'colour'; there are kind, stock",
        ),
        (
            {"attributes": {"stock": ["many"]}},
            422,
            "filter: 'many' is not of the type of attribute 'stock'",
        ),
        ({"attributes": {"stock": []}}, 422, "attributes[...]: Expected `array` of length >= 1"),
        ({"allow_items": "AAAA"}, 422, "allow_items: 3 bytes are not whole"),
        ({"beam_widht": 5}, 422, "unknown field beam_widht; did you mean beam_width?"),
        ({"model_version": "x"}, 404, "model_version: 'x' is not served"),
        (
            {"history": {"items": [900], "actions": [1], "timestamps": [0]}},
            422,
            "history: none of the newest 1 items",
        ),
    ],
    ids=str,
)
async def test_a_bad_generate_is_explained(
    tmp_path_factory: pytest.TempPathFactory, change: Any, status: int, detail: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "generate"
    folder.mkdir(exist_ok=True)
    async with serving(folder, generate=section(folder)) as (client, _):
        assert (await generate(client, status, **change))["detail"].startswith(detail)


async def test_a_generate_that_waits_presses_by_its_own_objective(tmp_path: Path) -> None:
    slo = {"rank_s": 0.001, "generate_s": 10.0}
    async with serving(tmp_path, generate=section(tmp_path), slo=slo, watched=False) as (
        client,
        service,
    ):
        scheduler = service.parts.scheduler
        go_on = threading.Event()
        blocked = asyncio.create_task(scheduler.call(lambda: go_on.wait(30), 1e9))
        service.versions.generator().engine.cost = CostModel(1.0, 0.0, 0.0, 0.0, 0.0)
        asked = asyncio.create_task(generate(client))
        await until(lambda: scheduler.pressure > 0)
        pressure = scheduler.pressure
        go_on.set()
        await asyncio.gather(blocked, asked)
        assert pressure == pytest.approx(0.1)
        assert scheduler.pressure == 0.0


async def test_a_long_history_is_cut_and_an_unknown_item_left_out(tmp_path: Path) -> None:
    items = [*range(40), 999]
    history = {"items": items, "actions": [1] * 41, "timestamps": list(range(41))}
    async with serving(tmp_path, generate=section(tmp_path, cut_step_items=8)) as (client, _):
        answer = await generate(client, history=history)
        assert answer["history"]["num_tokens"] == 48
        assert answer["history"]["cut_tokens"] == 72
        assert answer["history"]["unknown_items"] == 1


async def test_an_instance_without_a_generator_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        assert (await generate(client, 404))["detail"].startswith("this instance does not generate")


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"codes": [100, 100, 100]}, ConfigError, r"generate\.codes: the last token is 299"),
        ({"codes": [8, 8]}, ConfigError, r"generate\.catalogue: .*semantic IDs have 3 codes"),
        ({"hbm_bytes": 10}, ConfigError, r"generate\.hbm_bytes: 10 holds 0 pages"),
        ({"catalogue": "none.jsonl"}, ConfigError, r"generate\.catalogue: none\.jsonl"),
        ({"checkpoint": "nowhere"}, CheckpointError, "nowhere"),
    ],
    ids=str,
)
async def test_a_start_that_cannot_be_is_explained(
    tmp_path: Path, change: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        async with serving(tmp_path, generate=section(tmp_path, **change)):
            pass


async def test_an_empty_catalogue_is_served_as_one(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").touch()
    async with serving(tmp_path, generate=section(tmp_path)) as (client, _):
        assert (await generate(client, 422))["detail"].startswith(
            "history: none of the newest 6 items"
        )
