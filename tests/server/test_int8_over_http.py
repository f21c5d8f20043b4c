"""Pages in int8 over HTTP: one score from every tier, and one that int8 suits ill is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.handlers.ranking import MOST_FAILED
from tests.models import events
from tests.server.test_health_over_http import CANDIDATES, SHOWN_AT, Client, hit, metric, same
from tests.serving import columns, make_config, serving, until

# random weights move further than trained ones
INT8: dict[str, Any] = {
    "kv_cache": {"dtype": "int8"},
    "service": {"selfcheck_ratio": 1.0, "selfcheck_max_int8_drift": 0.5},
}


HISTORY = columns(events(137))


async def rank(
    client: Client, user: str = "u", num: int = 80, route: str = "/v1/rank"
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "user_id": user,
        "history": {name: column[:num] for name, column in HISTORY.items()},
    }
    if route == "/v1/rank":
        body |= {"candidates": CANDIDATES, "timestamp": SHOWN_AT}
    async with client.post(route, json=body) as answer:
        assert answer.ok, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_cold_hit_dram_and_a_delta_are_one_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.relay.lookup.reload_pays", lambda *_: True)
    async with serving(tmp_path, **INT8) as (client, service):
        relay = service.versions.ranker().relay
        cold = [await rank(client, f"cold{n}", n) for n in (80, 137)]
        answers = [await rank(client), await rank(client)]
        dram = relay.tiers.dram
        assert dram is not None
        await until(lambda: dram.knows(UserKey("", "u")))
        await relay.settled()
        for entry in list(relay.tiers.pool._found.values()):
            relay.tiers.pool.drop(entry)
        answers.append(await rank(client))
        answers.append(await rank(client, num=137))
        await rank(client, num=137, route="/v1/signal")
        await relay.settled()
        answers.append(await rank(client, num=137))
        outcomes = [answer["outcome"] for answer in answers]
        assert outcomes == ["miss_full", "hbm_hit", "dram_hit", "hbm_hit", "hbm_hit"]
        assert [answer["prefix_tokens"] for answer in answers] == [0, 80, 80, 80, 137]
        for answer, num in zip(answers, (80, 80, 80, 137, 137), strict=True):
            assert answer["scores"] == cold[num == 137]["scores"]
        await asyncio.gather(*service.versions.ranker()._selfcheck._background)
        assert await metric(client, "npu_gr_drift_ratio_count") >= 3
        assert await metric(client, "npu_gr_selfcheck_failures_total") == 0


async def test_scores_that_move_too_far_switch_the_pages_and_the_rounding_off(
    tmp_path: Path,
) -> None:
    """After several self-checks; from then on the scores are those without int8."""
    async with serving(tmp_path) as (client, _):
        exact = await hit(client, "exact")
    async with serving(tmp_path, **INT8) as (client, service):
        ranking = service.versions.ranker()
        fine = {"selfcheck_ratio": 1.0, "selfcheck_max_int8_drift": 1e-6}
        ranking.reconfigure(make_config(tmp_path, service=fine).service)
        for number in range(MOST_FAILED):
            assert not ranking.relay.settings.is_switched_off
            assert not same(await hit(client, f"u{number}"), exact)
            await asyncio.gather(*ranking._selfcheck._background)
        assert ranking.relay.settings.is_switched_off
        assert await metric(client, "npu_gr_selfcheck_failures_total") == MOST_FAILED
        answer = await hit(client, "next")
        assert (answer["outcome"], answer["reason"]) == ("miss_full", "disabled")
        assert answer["scores"] == exact["scores"]


async def test_it_does_not_start_where_int8_moves_scores_too_far_or_no_kernel_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = {**INT8, "service": {"selfcheck_max_int8_drift": 1e-6}}
    with pytest.raises(ConfigError, match=r"int8 moves the scores of this ranker by .* 1e-06; use"):
        async with serving(tmp_path, **fine):
            pass
    monkeypatch.setattr("npu_gr.backend.cpu.backend.CPUBackend.has_int8", False)
    with pytest.raises(ConfigError, match=r"kv_cache\.dtype: int8 is for .* backend cpu has no"):
        async with serving(tmp_path, **INT8):
            pass
