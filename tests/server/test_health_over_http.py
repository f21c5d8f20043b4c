"""A pass that never returns makes the instance unready, then dead; wrong scores are not served.

Callers have their answer at their deadline, and pages stay held as long as the device uses them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core import health
from npu_gr.core.errors import Unavailable
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.handlers.ranking import MOST_FAILED
from npu_gr.handlers.service import Service
from tests.models import events
from tests.serving import FIRST_ID, columns, encoded, make_config, serving, until

CANDIDATES = [FIRST_ID + row for row in (5, 17, 200, 3)]
SHOWN_AT = 1_700_000_000
BUDGET_S = 0.15
Client = TestClient[Any, Any]


async def rank(
    client: Client, user: str = "u", budget_s: float = 10.0, num: int = 80
) -> tuple[int, dict[str, Any]]:
    body = {
        "user_id": user,
        "candidates": CANDIDATES,
        "timestamp": SHOWN_AT,
        "history": columns(events(num)),
    }
    headers = {"X-Request-Timeout-Ms": f"{budget_s * 1e3:.0f}"}
    async with client.post("/v1/rank", json=body, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)


async def status(client: Client, path: str) -> tuple[int, str]:
    async with client.get(path) as answer:
        return answer.status, str((await answer.json(content_type=None)).get("detail", ""))


async def metric(client: Client, sample: str) -> float:
    text = await (await client.get("/metrics")).text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{sample} ")]
    return float(line.rsplit(" ", 1)[1])


class Hanging:
    """Passes of a ranker, which hang until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.busy = threading.Event()
        forward = RankEngine.forward

        def hurt(engine: RankEngine, passes: Sequence[RankPass]) -> Any:
            if not self.go.is_set():
                self.busy.set()
                assert self.go.wait(60)
            return forward(engine, passes)

        monkeypatch.setattr(RankEngine, "forward", hurt)


@asynccontextmanager
async def hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Client, Service, Hanging]]:
    """An instance whose device hangs in a rank of one user, which has been answered."""
    hanging = Hanging(monkeypatch)
    async with serving(tmp_path, watched=False) as (client, service):
        assert (await rank(client, "before"))[0] == 200
        monkeypatch.setattr(health, "LEAST_S", 1.0)
        hanging.go.clear()
        try:
            assert (await rank(client, budget_s=BUDGET_S))[0] == 504
            assert hanging.busy.is_set()
            yield client, service, hanging
        finally:
            hanging.go.set()


async def test_a_pass_that_never_returns_is_seen_and_its_callers_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hung(tmp_path, monkeypatch) as (client, service, hanging):
        relay = service.versions.ranker().relay
        held = relay.tiers.pool.reserved_bytes
        assert held, "the device still writes the pages of the request"
        # one that waits behind the pass has its answer at its deadline, too
        assert (await rank(client, "waits", BUDGET_S))[0] == 504
        await until(lambda: not service.is_ready()[0])
        code, why = await status(client, "/readyz")
        assert code == 503
        assert why.startswith("device_0 has not moved for ")
        assert (await rank(client, "next", 10.0))[0] == 503, "not begun, so another may take it"
        assert (await status(client, "/healthz"))[0] == 200
        assert await metric(client, 'npu_gr_work_late{worker="device_0"}') == 1
        assert await metric(client, 'npu_gr_device_pass_age_seconds{worker="device_0"}') > 0
        late = (await (await client.get("/debug/status")).json())["late"]
        assert late["device_0"] > BUDGET_S
        assert relay.tiers.pool.reserved_bytes == held
        (work,) = service.parts.scheduler._streams.workers[0].works()
        work.dead_s = 0.0
        code, why = await status(client, "/healthz")
        assert code == 503
        assert why.startswith("device_0 has not moved for ")
        hanging.go.set()  # it moves: all is well again
        await until(lambda: service.is_ready()[0])
        assert (await status(client, "/healthz"))[0] == 200
        assert (await rank(client, "after"))[0] == 200
        await until(lambda: not relay.tiers.pool.reserved_bytes)
        await until(lambda: not service.admission.work.admitted)


async def test_an_instance_stops_while_a_pass_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.engine.device_threads.STOP_S", 0.05)
    async with hung(tmp_path, monkeypatch) as (_, service, hanging):
        waits = asyncio.create_task(service.parts.scheduler.call(lambda: None, float("inf")))
        await asyncio.sleep(0)
        await service.parts.scheduler.stop()
        with pytest.raises(Unavailable):
            await waits
        assert not hanging.go.is_set(), "it hangs still"


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return np.allclose(one["scores"]["click"], other["scores"]["click"], rtol=0, atol=1e-5)


async def hit(client: Client, user: str) -> dict[str, Any]:
    """Rank twice, so that the second reads the prefix of the first."""
    await rank(client, user)
    return (await rank(client, user))[1]


async def spoil_and_check(client: Client, service: Service, user: str) -> dict[str, Any]:
    """Rank from a prefix that is spoilt, and wait for the end of its self-check."""
    await rank(client, user)
    ranking = service.versions.ranker()
    ranking.engine.arena._keys[0].mul_(1.5)
    wrong = (await rank(client, user))[1]
    await asyncio.gather(*ranking._selfcheck._background)
    return wrong


async def test_a_failed_selfcheck_drops_the_prefixes_of_its_user(tmp_path: Path) -> None:
    async with serving(tmp_path, service={"selfcheck_ratio": 1.0}) as (client, service):
        right = (await rank(client))[1]
        wrong = await spoil_and_check(client, service, "u")
        assert wrong["outcome"] == "hbm_hit"
        assert not same(wrong, right)
        again = (await rank(client))[1]
        assert again["outcome"] == "miss_full", "its prefix is gone"
        assert same(again, right)
        assert not service.versions.ranker().relay.settings.is_switched_off
        assert service.is_ready()[0]


async def test_after_a_failed_selfcheck_every_cached_rank_is_checked(tmp_path: Path) -> None:
    async with serving(tmp_path, service={"selfcheck_ratio": 1.0}) as (client, service):
        ranking = service.versions.ranker()
        await spoil_and_check(client, service, "u")
        ranking.reconfigure(make_config(tmp_path, service={"selfcheck_ratio": 0.0}).service)
        for user in ("v", "w"):
            before = await metric(client, "npu_gr_drift_ratio_count")
            await hit(client, user)
            await asyncio.gather(*ranking._selfcheck._background)
            assert await metric(client, "npu_gr_drift_ratio_count") == before + 1


async def test_failures_in_a_row_switch_the_prefix_cache_off_until_a_reload(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"service": {"selfcheck_ratio": 1.0}}
    async with serving(tmp_path, read=lambda: make_config(tmp_path, **sections), **sections) as (
        client,
        service,
    ):
        relay = service.versions.ranker().relay
        right = (await rank(client, "cold"))[1]
        for number in range(MOST_FAILED):
            assert not relay.settings.is_switched_off
            await spoil_and_check(client, service, f"u{number}")
        assert relay.settings.is_switched_off
        assert await metric(client, "npu_gr_prefix_cache_switched_off") == 1
        for user in ("u0", "cold", "new"):  # everybody is answered without it, and right
            answer = await hit(client, user)
            assert (answer["outcome"], answer["reason"]) == ("miss_full", "disabled")
            assert same(answer, right)
        assert len(relay.tiers.pool) == 0
        assert service.is_ready()[0], "cold scores are right"
        async with client.post("/v1/models/reload") as reloaded:
            assert reloaded.status == 200, await reloaded.text()
        assert await metric(client, "npu_gr_prefix_cache_switched_off") == 0
        answer = await hit(client, "new")
        assert answer["outcome"] == "hbm_hit"
        assert same(answer, right)
        await asyncio.gather(*service.versions.ranker()._selfcheck._background)
        assert not relay.settings.is_switched_off


async def test_a_good_check_in_between_keeps_the_cache_on(tmp_path: Path) -> None:
    async with serving(tmp_path, service={"selfcheck_ratio": 1.0}) as (client, service):
        ranking = service.versions.ranker()
        for number in range(MOST_FAILED + 1):
            await spoil_and_check(client, service, f"u{number}")
            await hit(client, f"good{number}")
            await asyncio.gather(*ranking._selfcheck._background)
        assert not ranking.relay.settings.is_switched_off


async def test_it_is_unready_if_cold_scores_differ_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, service={"selfcheck_ratio": 1.0}) as (client, service):
        await rank(client)
        random = np.random.default_rng(0)
        forward = RankEngine.forward

        def noisy(engine: RankEngine, passes: Sequence[RankPass]) -> Any:
            return [
                (scores + random.normal(size=scores.shape)).astype(np.float32)
                for scores in forward(engine, passes)
            ]

        monkeypatch.setattr(RankEngine, "forward", noisy)
        await rank(client)
        await asyncio.gather(*service.versions.ranker()._selfcheck._background)
        code, why = await status(client, "/readyz")
        assert code == 503
        assert why.startswith("two cold passes of one rank differ by ")
        assert (await rank(client, "next"))[0] == 503


async def test_scores_that_are_not_numbers_fail_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, service={"selfcheck_ratio": 1.0}) as (client, service):
        await rank(client)
        ranking = service.versions.ranker()
        await encoded(ranking.relay)
        ranking.engine.arena._keys[0].fill_(float("nan"))
        await rank(client)
        await asyncio.gather(*ranking._selfcheck._background)
        assert await metric(client, "npu_gr_selfcheck_failures_total") == 1
        assert time.monotonic() < ranking._selfcheck._all_until_at
