"""A generate without seen items is brute force over the catalogue without the history's items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.decoders import VARIANTS, saved
from tests.server.test_generate_over_http import Client, generate
from tests.serving import serving

NUM_ITEMS = 120


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    """A beam as wide as the catalogue, so that the search is brute force.

    Several items share a semantic ID.
    """
    if not (folder / "decoder").exists():
        (folder / "decoder").mkdir()
        saved(folder / "decoder", **VARIANTS["qwen3 g2 tied"])
        sids = np.random.default_rng(0).integers(0, 4, (NUM_ITEMS, 3)).tolist()
        rows = [
            {"item_id": item, "sid": sid, "attributes": {"kind": item % 3}}
            for item, sid in enumerate(sids)
        ]
        (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "checkpoint": str(folder / "decoder"),
        "catalogue": str(folder / "items.jsonl"),
        "codes": [4, 4, 4],
        "max_beams": 64,
        "beam_width": 64,
        "max_prompt_tokens": 24,
        "cut_step_items": 2,
        "hbm_bytes": 4_000_000,
        **changes,
    }


def history(items: list[int]) -> dict[str, list[int]]:
    return {"items": items, "actions": [1] * len(items), "timestamps": list(range(len(items)))}


async def test_it_is_brute_force_over_the_catalogue_without_the_items_of_the_history(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(1)
    async with serving(tmp_path, checkpoint=None, generate=section(tmp_path)) as (client, _):
        withdrawn = [7, 8, 9]
        async with client.post("/v1/catalog/items", json={"withdraw": withdrawn}) as response:
            assert response.status == 200
        for number in range(25):
            # longer than the prompt, some items twice, some unknown to the catalogue
            seen = random.integers(0, NUM_ITEMS + 20, int(random.integers(1, 90))).tolist()
            seen.append(int(random.integers(10, NUM_ITEMS)))
            asked: dict[str, Any] = {"user_id": f"u{number}", "history": history(seen)}
            if number % 3 == 0:
                asked["deny_items"] = random.integers(0, NUM_ITEMS, 10).tolist()
            if number % 4 == 0:
                asked["attributes"] = {"kind": [0, 2]}
            if number % 5 == 0:
                asked["allow_items"] = random.integers(0, NUM_ITEMS, 60).tolist()
            every = await generate(client, num_items=NUM_ITEMS, exclude_seen=False, **asked)
            want = [
                (item, score)
                for item, score in zip(every["items"], every["scores"], strict=True)
                if item not in set(seen)
            ]
            num_items = int(random.integers(1, NUM_ITEMS))
            got = await generate(client, num_items=num_items, **asked)
            assert got["items"] == [item for item, _ in want[:num_items]]
            np.testing.assert_allclose(
                got["scores"], [score for _, score in want[:num_items]], rtol=1e-5
            )
            assert got["status"] == ("complete" if len(want) >= num_items else "exhausted")
            if asked.keys() == {"user_id", "history"}:
                assert len(every["items"]) == NUM_ITEMS - len(withdrawn)


async def test_a_narrow_beam_spends_nothing_on_what_was_seen(tmp_path: Path) -> None:
    async with serving(tmp_path, checkpoint=None, generate=section(tmp_path, beam_width=5)) as (
        client,
        _,
    ):
        best = (await generate(client, num_items=5, history=history([1]), exclude_seen=False))[
            "items"
        ]
        got = await generate(client, num_items=5, history=history([*best, 1]))
        assert (got["status"], len(got["items"])) == ("complete", 5)
        assert not {*best, 1} & {*got["items"]}


@pytest.mark.parametrize("configured", [True, False])
async def test_the_configuration_decides_for_a_request_that_does_not(
    tmp_path: Path, configured: bool
) -> None:
    async with serving(
        tmp_path, checkpoint=None, generate=section(tmp_path, exclude_seen=configured)
    ) as (client, _):
        for exclude_seen in (None, True, False):
            said = {} if exclude_seen is None else {"exclude_seen": exclude_seen}
            answer = await generate(client, num_items=NUM_ITEMS, history=history([3, 4, 5]), **said)
            is_out = configured if exclude_seen is None else exclude_seen
            assert len(answer["items"]) == NUM_ITEMS - 3 * is_out


async def test_who_has_seen_everything_gets_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, checkpoint=None, generate=section(tmp_path)) as (client, _):
        answer = await generate(client, history=history(list(range(NUM_ITEMS))))
        assert (answer["items"], answer["status"]) == ([], "exhausted")


async def test_histories_leave_the_filter_cache_to_attribute_queries(tmp_path: Path) -> None:
    async with serving(tmp_path, checkpoint=None, generate=section(tmp_path)) as (client, service):
        cache = service.versions.generator().items.filters
        await generate(client, history=history([1, 2]), attributes={"kind": [1]})
        await generate(client, history=history([1, 2]))
        used = cache.bytes_used
        for number in range(5):
            await generate(client, user_id=f"u{number}", history=history([number, *range(40, 80)]))
        assert cache.bytes_used == used


async def test_the_items_of_a_stored_history_are_seen(tmp_path: Path) -> None:
    async with serving(tmp_path, checkpoint=None, generate=section(tmp_path)) as (client, _):
        async with client.post(
            "/v1/events", json={"user_id": "u", "events": history([11, 12, 13])}
        ) as response:
            assert response.status == 200
        answer = await stored(client)
        assert answer["history"]["source"] == "store"
        assert len(answer["items"]) == NUM_ITEMS - 3
        assert not {11, 12, 13} & {*answer["items"]}


async def stored(client: Client) -> dict[str, Any]:
    return await generate(client, num_items=NUM_ITEMS, history=None)
