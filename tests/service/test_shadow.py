"""A shadow scores what the served ranker answered, as if it served; it is promoted and guarded."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.history import UserKey
from npu_gr.core.memory import HostMemory
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry
from npu_gr.handlers import shadow as shadowing
from npu_gr.handlers.service import Service
from npu_gr.handlers.shadow import Compared, Shadow, SpareTime
from npu_gr.model.delta import file_name
from npu_gr.replay.compare import compare
from npu_gr.service import guard as guarding
from tests.server.test_deltas_over_http import delta_to, post, rows_of
from tests.service.test_reload import File, Traffic, gone
from tests.serving import serving

Client = TestClient[Any, Any]
TOOLONG = 30.0  # a busy machine


async def call(client: Client, method: str, at: str = "", status: int = 200, **body: Any) -> Any:
    async with client.request(method, f"/v1/models/shadow{at}", json=body or None) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(TOOLONG):
        while not holds():  # noqa: ASYNC110  (what is awaited has no event)
            await asyncio.sleep(0.01)


def rankers(folder: Path, **sections: Any) -> tuple[File, str, str]:
    """Return a configuration that serves `old`, and the versions of `old` and `new`."""
    file = File(folder)
    new, old = file.add("new", 2), file.add("old", 1)
    slo = {"rank_s": 5.0, "signal_s": 5.0}  # nobody is rejected
    file.use("old", **{"slo": slo, "service": {"selfcheck_ratio": 0.0}, **sections})
    return file, old, new


def always(service: Service) -> None:
    """Let passes of any length run, while nothing else does."""
    spare = service.versions.shadow._spare  # type: ignore[union-attr]
    spare._read_p99_s, spare._read_at = lambda: 1e9, -1e9


def seen_by(shadow: Shadow) -> list[Compared]:
    """Return a list to which all that is compared is added from now on."""
    seen: list[Compared] = []
    on_compared = shadow._on_compared

    def saw(one: Compared) -> None:
        seen.append(one)
        on_compared(one)

    shadow._on_compared = saw
    return seen


async def scored(client: Client, service: Service, traffic: Traffic, num: int) -> None:
    """Rank until so many were scored by the shadow."""
    shadow = service.versions.shadow
    assert shadow is not None
    wanted = shadow.num_scored + num
    number = 0
    async with asyncio.timeout(TOOLONG):
        while shadow.num_scored < wanted:
            await traffic.rank(number % 6)
            await asyncio.sleep(0.01)
            number += 1


async def test_it_scores_as_if_it_served_and_is_recorded(tmp_path: Path) -> None:
    record = {"folder": str(tmp_path / "traffic"), "enabled": False}
    file, old, new = rankers(tmp_path, record=record)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1, new: 2})
        opened = await call(client, "POST", path=str(tmp_path / "new"), share=1.0)
        assert (opened["state"], opened["version"], opened["against"]) == ("scoring", new, old)
        always(service)
        shadow = service.versions.shadow
        assert shadow is not None
        seen = seen_by(shadow)
        await scored(client, service, traffic, 14)
        for one in seen:  # the slow definition: the model itself, over the whole history
            right = [
                np.allclose(one.scores["click"], w[:, 0], atol=1e-5) for w in traffic.want[new]
            ]
            assert sum(right) == 1
        # users come again: their prefixes are in the pool, and are spare
        pool = shadow.ranking.relay.tiers.pool

        def prefixes(user: int) -> list[PrefixEntry]:
            return pool.find(UserKey("", f"u{user}"), new, pool.arena.layout.layout_id)

        assert all(len(prefixes(user)) == 1 for user in range(6))
        info = await call(client, "GET")
        assert info["scored"] == shadow.num_scored
        assert 0 <= info["top_overlap"] <= 1
        assert "still" not in str(await call(client, "POST", status=422, path="x"))
        await call(client, "DELETE")
        folder = Path(info["answers"])
        assert not any(map(len, map(prefixes, range(6))))
        assert set(traffic.seen.values()) > {0}
        assert traffic.seen[new] == 0  # no client saw it
    both = compare(folder / "served", folder / "shadow", 1.0)
    assert both.is_paired
    assert both.model_versions == ([old], [new])
    assert both.drift.num_with_values == info["scored"]
    assert both.drift.top_overlap == pytest.approx(info["top_overlap"])


async def test_dropped_it_is_freed(tmp_path: Path) -> None:
    file, _, _ = rankers(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        await call(client, "POST", path=str(tmp_path / "new"), share=1.0)
        assert service.versions.shadow is not None
        kept = weakref.ref(service.versions.shadow.ranking.engine)
        await call(client, "DELETE")

        def is_gone() -> bool:
            gc.collect()
            return kept() is None

        await until(is_gone)


async def test_its_failures_are_its_own(tmp_path: Path) -> None:
    file, old, _ = rankers(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1})
        await call(client, "POST", path=str(tmp_path / "new"), share=1.0)
        always(service)
        shadow = service.versions.shadow
        assert shadow is not None

        def fail(_: object) -> Any:
            raise RuntimeError("planted")

        shadow.ranking.engine.forward = fail  # type: ignore[method-assign,assignment]
        number = 0
        while shadow.num_skipped[shadowing.Skipped.FAILED] < 4:
            await traffic.rank(number % 6)
            number += 1
            await asyncio.sleep(0.01)
        assert service.is_ready() == (True, "")
        assert service.parts.scheduler.failures_in_a_row == 0
        await shadow.stop()
        pool = shadow.ranking.relay.tiers.pool
        assert pool.reserved_bytes == 0
        text = await (await client.get("/metrics")).text()
        assert 'npu_gr_shadow_skipped_total{reason="failed"}' in text


async def test_what_cannot_be_compared_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _, _ = rankers(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        for name, words in (("old", "the weights that serve"), ("none", "none")):
            answer = await call(client, "POST", status=422, path=str(tmp_path / name))
            assert words in answer["detail"]
        few = HostMemory(1000, "machine")
        monkeypatch.setattr("npu_gr.service.memory.free_memory", lambda: few)
        answer = await call(client, "POST", status=422, path=str(tmp_path / "new"))
        assert "needs about" in answer["detail"]
        for method, path in (("DELETE", ""), ("POST", "/promote")):
            await call(client, method, path, 404)
        assert service.versions.shadow is None


async def test_an_erased_user_is_nowhere_in_it(tmp_path: Path) -> None:
    file, old, _ = rankers(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1})
        await call(client, "POST", path=str(tmp_path / "new"), share=1.0)
        shadow = service.versions.shadow
        assert shadow is not None
        shadow._spare = SpareTime(lambda: False, lambda: 0.0)  # it waits for time
        await traffic.rank(1)
        await until(lambda: shadow.knows(UserKey("", "u1")))
        async with client.delete("/v1/users/u1") as response:
            assert response.status == 204
        assert not any((await service.knows(UserKey("", "u1"))).values())
        await traffic.rank(2)
        await until(lambda: shadow.knows(UserKey("", "u2")))
        shadow._spare = SpareTime(lambda: True, lambda: 1e9)
        await scored(client, service, traffic, 1)


async def test_promoted_it_serves_at_once_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.service.shadow.GUARD_S", 1.5)
    file, old, new = rankers(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1, new: 2})
        stop = asyncio.Event()
        await call(client, "POST", path=str(tmp_path / "new"), share=1.0)
        always(service)
        await scored(client, service, traffic, 8)
        load = [asyncio.create_task(traffic.until(stop, 1000 * n)) for n in range(3)]
        ranking = service.versions.shadow.ranking  # type: ignore[union-attr]
        info = await call(client, "POST", "/promote")
        assert (info["state"], info["version"], info["against"]) == ("guarding", new, old)
        assert service.versions.ranker() is ranking  # nothing was loaded again
        assert service.parts.settings.config.checkpoint == str(tmp_path / "new")
        assert [one["version"] for one in await gone(client)] == [new]
        assert (await call(client, "GET"))["state"] == "none"
        stop.set()
        await asyncio.gather(*load)
        assert (await traffic.rank(0))["model_version"] == new


async def test_the_guard_rolls_back_what_got_worse(tmp_path: Path) -> None:
    """After the promotion the new ranker is damaged: its items differ from what it showed."""
    file, old, new = rankers(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1, new: 2})
        await call(client, "POST", path=str(tmp_path / "new"), share=1.0)
        always(service)
        await scored(client, service, traffic, guarding.LEAST_COMPARED)
        await call(client, "POST", "/promote")
        always(service)
        traffic.want[new] = [-one for one in traffic.want[new]]
        forward = service.versions.ranker().engine.forward
        model = service.versions.ranker().engine
        model.forward = lambda passes: [-one for one in forward(passes)]  # type: ignore[method-assign]
        began_at, number = time.monotonic(), 0
        while service.versions.ranker().version == new:
            await traffic.rank(number % 6)
            number += 1
            await asyncio.sleep(0.01)
            assert time.monotonic() < began_at + 60.0
        info = await call(client, "GET")
        assert info["state"] == "none"
        assert info["rolled_back"].split(":")[0] in ("items", "scores")
        text = await (await client.get("/metrics")).text()
        assert 'npu_gr_guard_rollbacks_total{reason="' in text
        assert (await traffic.rank(1))["model_version"] == old


async def test_a_ranker_that_a_delta_has_changed_comes_back_from_draining(tmp_path: Path) -> None:
    """Its version is that of its opening, its weights are not."""
    file, _, new = rankers(tmp_path, relay={"t_life_s": 60.0})
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        old = service.versions.ranker()
        made = tmp_path / "made"
        await asyncio.to_thread(
            delta_to, tmp_path / "old", made, rows_of("item.weight", 3), tmp_path / "deltas", 1
        )
        await post(client, tmp_path / "deltas" / file_name(1))
        await call(client, "POST", path=str(tmp_path / "new"), share=1.0)
        assert (await call(client, "POST", "/promote"))["version"] == new
        async with client.post("/v1/models/rollback") as response:
            assert response.status == 200, await response.text()
        assert service.versions.ranker() is old
        await until(lambda: service.versions.shadow is None)  # nothing is left to guard
        assert (await call(client, "GET"))["rolled_back"] == ""


# ---- rules


def test_longer_passes_get_their_share_of_the_time() -> None:
    now_at = 0.0
    spare = SpareTime(lambda: True, lambda: 0.05, lambda: now_at)
    assert spare.take(0.001)  # 2 % of the P99
    assert not spare.take(0.026)  # over half of it
    taken = 0
    for step in range(20_000):
        now_at = step * 0.1
        taken += spare.take(0.01)
    saved_s = shadowing.LONG_RATIO * shadowing.SAVED_S
    assert taken * 0.01 == pytest.approx(0.005 * 2000 + saved_s, rel=0.02)
    for passes_s in ([0.02] * 16, [0.026]):
        with pytest.raises(shadowing.NotScored):
            spare.has_for(passes_s)
    assert not spare.has_for([0.02, 0.02])
    assert not SpareTime(lambda: False, lambda: 1e9).take(0.0)


@pytest.mark.parametrize("load", [0.3, 0.8])
@pytest.mark.parametrize("pass_s", [0.00007, 0.0005, 0.002])
def test_the_p99_of_the_served_ranker_stays(load: float, pass_s: float) -> None:
    """One device on a virtual clock: ranks of 2 ms come at random, the shadow always has work."""
    random = np.random.default_rng(0)
    passes_s = 0.002 * random.lognormal(0.0, 0.3, 10_000)
    arrives_at = np.cumsum(random.exponential(passes_s.mean() / load, len(passes_s)))

    def p99_s(spare: SpareTime | None, clock: list[float]) -> tuple[float, int]:
        free_at, num, taken = 0.0, 0, []
        for at, rank_s in zip(arrives_at.tolist(), passes_s.tolist(), strict=True):
            while spare is not None and free_at < at:
                clock[0] = free_at
                if spare.take(pass_s):
                    free_at += pass_s
                    num += 1
                else:
                    free_at = min(free_at + 0.0005, at)
            free_at = max(free_at, at) + rank_s
            taken.append(free_at - at)
        return float(np.percentile(taken, 99)), num

    alone_s, _ = p99_s(None, [0.0])
    clock = [0.0]
    with_s, num = p99_s(SpareTime(lambda: True, lambda: alone_s, lambda: clock[0]), clock)
    assert num > 100
    assert with_s <= 1.02 * alone_s
