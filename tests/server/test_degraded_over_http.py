"""A degraded rank reads the newest events that fit, never none, and says how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.arrays import I64
from npu_gr.engine.cost import LEAST_TOKENS, CostModel
from npu_gr.handlers.hooks import HookContext
from tests.features_of import every_feature
from tests.models import events, tiny_order
from tests.serving import FIRST_ID, columns, serving, write_checkpoint

BUDGET_S = 30.0  # of every request; the cost model says how much fits into it
FREE = CostModel(0.0, 0.0, 0.0, 0.0, 0.0)
CANDIDATES = [FIRST_ID + row for row in (3, 5, 7, 11)]
SHOWN_AT = 2_000_000_000
LENGTHS = (2, 8, 60, 600)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"token": "interleaved"},
    "with a user's token": {"features": every_feature(("user", "request", "cross"))},
}


def slow(budget_ms: int) -> CostModel:
    """A device on which `BUDGET_S` is as much as these milliseconds are elsewhere.

    There a pass without a history takes 1 ms, and every token 40 us more.
    """
    ms = BUDGET_S / budget_ms
    return CostModel(1.0 * ms, 0.04 * ms, 0.0, 0.0, 0.0)


async def post(client: TestClient[Any, Any], kind: str, **body: Any) -> dict[str, Any]:
    headers = {"X-Request-Timeout-Ms": str(int(BUDGET_S * 1e3))}
    async with client.post(f"/v1/{kind}", json=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        assert response.status == 200, answer
        return answer


@pytest.mark.parametrize("name", list(MODELS))
async def test_its_scores_are_those_of_the_events_that_it_says(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "checkpoint", **MODELS[name])
    kept = {"keep_full": False}  # no rank finds a prefix
    async with serving(tmp_path, relay=kept, watched=False) as (client, service):
        engine = service.versions.ranker().engine

        async def rank(history: dict[str, list[int]], cost: CostModel) -> dict[str, Any]:
            engine.cost = cost
            return await post(
                client,
                "rank",
                user_id="u",
                history=history,
                candidates=CANDIDATES,
                timestamp=SHOWN_AT,
            )

        degraded = 0
        for length in LENGTHS:
            whole = columns(events(length))
            for budget_ms in range(1, 21):
                answer = await rank(whole, slow(budget_ms))
                read = answer["history"]["read_events"]
                assert 0 < read <= length
                assert (answer["outcome"] == "degraded") == (read < length)
                if read == length:
                    continue
                degraded += 1
                assert length > LEAST_TOKENS // 2
                newest = {column: values[-read:] for column, values in whole.items()}
                alone = await rank(newest, FREE)
                assert (alone["outcome"], alone["history"]["read_events"]) == ("miss_full", read)
                assert answer["scores"] == alone["scores"]
                assert answer["history"]["num_tokens"] == alone["history"]["num_tokens"]
        assert degraded > 15
        async with client.get("/metrics") as response:
            text = await response.text()
        assert f'npu_gr_degraded_read_events_count{{kind="rank"}} {degraded}.0' in text


async def unchanged(items: I64, _: HookContext) -> I64:
    return items


@pytest.mark.parametrize("hook", [None, f"{__name__}:unchanged"], ids=["one job", "two jobs"])
async def test_a_degraded_recommend_says_it_too(tmp_path: Path, hook: str | None) -> None:
    write_checkpoint(tmp_path / "checkpoint", tiny_order(), retrieval=True)
    sections: dict[str, Any] = {
        "relay": {"keep_full": False},
        "recommend": {"sources": {"shared_encoder": 30}, "order": "rank", "hook": hook},
    }
    async with serving(tmp_path, watched=False, **sections) as (client, service):
        engine = service.versions.ranker().engine

        async def recommend(length: int, cost: CostModel) -> dict[str, Any]:
            engine.cost = cost
            whole = columns(events(600))
            newest = {column: values[-length:] for column, values in whole.items()}
            return await post(
                client,
                "recommend",
                format="columns",
                user_id="u",
                history=newest,
                num_items=30,
                exclude_seen=False,
                timestamp=SHOWN_AT,
            )

        answer = await recommend(600, slow(5))
        assert answer["outcome"] == "degraded"
        read = answer["history"]["read_events"]
        assert LEAST_TOKENS <= read < 600
        alone = await recommend(read, FREE)
        assert alone["history"]["read_events"] == read
        scores = dict(zip(alone["items"], alone["scores"], strict=True))
        if hook is None:
            assert (answer["items"], answer["scores"]) == (alone["items"], alone["scores"])
        else:  # candidates may differ: the search may have read more than the rank
            shared = set(scores) & set(answer["items"])
            assert shared
            for item, score in zip(answer["items"], answer["scores"], strict=True):
                assert score == scores.get(item, score)

        cheap = await recommend(600, FREE)
        assert (cheap["outcome"], cheap["history"]["read_events"]) == ("miss_full", 600)
