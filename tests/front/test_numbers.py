"""The instance's one registry has what every worker counted; what is true of workers is summed or has their label."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS
from npu_gr.front.worker import reports
from npu_gr.metrics.registry.deltas import Delta, Gained, add
from npu_gr.metrics.slo import Result
from tests.front.rig import Rig, fronted
from tests.front.test_front import ALL, LONG, send
from tests.keys import bearer, entry, write_keys
from tests.server.fake import FakeService, metrics_of_all_kinds
from tests.serving import until


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"npu_gr_{name}", labels) or 0.0


def text(registry: CollectorRegistry) -> str:
    """What is counted, without the instants of creation, and without what is true of the process."""
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(one for one in lines if "_created" not in one and "lag" not in one and "gc_" not in one)


def test_what_one_process_counted_another_one_adds() -> None:
    """Counted in two processes and added is counted in one."""
    alone, first, second, engine = (metrics_of_all_kinds() for _ in range(4))
    gained = [Gained(one.counted) for one in (first, second)]
    for turn in range(3):
        for place, one in enumerate((first, second)):
            for counting in (one, alone):
                counting.requests.done("rank", "/v1/rank", 200, 0.01 * (turn + 1), {"queue": 0.001}, has_s=1.0)
                counting.requests.done("rank", "/v1/rank", 503, 0.2)
                counting.requests.refused_at_door("signal", place + 1)
        for each in gained:
            engine.counted_elsewhere(each.take())
    assert text(engine.registry) == text(alone.registry)
    assert engine.requests.rolling["rank"].total == alone.requests.rolling["rank"].total
    assert engine.requests.rolling["signal"].total.failed == 9
    assert [each.take() for each in gained] == [[], []]
    assert value(engine.registry, "slo_requests_total", kind="rank", result=Result.GOOD.value) == 6


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (Delta("no_such_total", (), (1.0,)), "no such series"),
        (Delta("requests_total", ("/v1/rank",), (1.0,)), "no such series"),
        (Delta("gc_pause_seconds", ("0",), (1.0, 1.0)), "1 buckets"),
    ],
)
def test_what_is_of_another_build_is_refused(delta: Delta, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        add(metrics_of_all_kinds().counted, [delta])


async def test_every_worker_counts_in_the_one_registry() -> None:
    async with fronted(FakeService(ALL), num_workers=2) as rig:
        for _ in range(12):
            assert (await send(rig, KINDS["rank"], Connection="close"))[0] == 200
        async with rig.session.get(rig.url("/metrics", admin=True)) as response:
            assert response.status == 200
        await until(lambda: value(rig.metrics.registry, "requests_total", route="/v1/rank", code="200") == 12)
        registry = rig.metrics.registry
        assert value(registry, "request_duration_seconds_count", kind="rank") == 12
        assert value(registry, "slo_requests_total", kind="rank", result="good") == 12
        rolling = rig.metrics.requests.rolling["rank"]
        assert rolling.total.good == 12
        assert sum(slot.took.total() for slot in rolling._slots) == 12  # the P99 over time knows them all
        assert len([one for one in rig.newest.lines() if '"route":"/v1/rank"' in one]) == 12
        for number in "01":
            assert value(registry, "front_worker_connected", worker=number) == 1
            assert value(registry, "front_worker_resident_bytes", worker=number) > 1e6
            assert value(registry, "front_worker_cpu_seconds_total", worker=number) > 0
        async with rig.session.get(rig.url("/metrics", admin=True)) as response:
            shown = await response.text()
        assert 'npu_gr_connections{state="served"} ' in shown
        assert "npu_gr_ready 1.0" in shown


async def test_what_was_counted_right_before_a_scrape_is_in_it() -> None:
    async with fronted(FakeService(ALL)) as rig:
        for num in range(1, 4):
            await send(rig, KINDS["rank"])
            async with rig.session.get(rig.url("/metrics?name[]=npu_gr_requests_total", admin=True)) as response:
                assert f'npu_gr_requests_total{{code="200",route="/v1/rank"}} {num}.0' in await response.text()


async def test_a_trace_is_named_by_the_bucket_of_its_request() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with fronted(FakeService(ALL)) as rig:
        await send(rig, KINDS["rank"], traceparent=f"00-{trace}-00f067aa0ba902b7-01")
        headers = {"Accept": "application/openmetrics-text"}
        async with rig.session.get(rig.url("/metrics", admin=True), headers=headers) as response:
            assert trace in await response.text()


async def test_operators_see_the_instance_through_any_worker() -> None:
    service = FakeService(ALL)
    async with fronted(service) as rig:
        await send(rig, KINDS["rank"])
        answers: dict[str, Any] = {}
        for path in ("/debug/status", "/debug/stacks", "/debug/config", "/debug/profile?seconds=1"):
            async with rig.session.get(rig.url(path, admin=True)) as response:
                assert response.status == 200, path
                answers[path] = await response.text()
        status = json.loads(answers["/debug/status"])
        assert status["ready"] is True
        (rank,) = (one for one in status["goodput"] if one["kind"] == "rank")
        assert (rank["good"], rank["p50_s"] > 0) == (1, True)
        assert [one["kind"] for one in status["slow"]] == ["rank"]
        assert "==== front worker 0" in answers["/debug/stacks"]
        assert "==== engine" in answers["/debug/stacks"]
        async with rig.session.post(rig.url("/debug/user", admin=True), json={"user_id": "known"}) as response:
            assert await response.json() == {"places": {"histories": True}}
        for method, path, code in (
            ("GET", "/v1/models", 200),
            ("GET", "/v1/catalog", 404),
            ("GET", "/debug/record", 404),
        ):
            is_admin = path.startswith("/debug")
            async with rig.session.request(method, rig.url(path, admin=is_admin)) as response:
                assert response.status == code, path
        async with rig.session.post(rig.url("/v1/models/reload", admin=True)) as response:
            assert response.status == 200
        async with rig.session.get(rig.url("/debug/bundle", admin=True)) as response:
            assert response.status == 200


async def test_a_rate_is_the_keys_whatever_worker_it_comes_to(tmp_path: Path) -> None:
    """What one worker let in, the others know within a few hundredths of a second."""
    keys = write_keys(tmp_path / "keys", entry("slow", rate_per_s=5.0), entry("operator"))
    async with fronted(FakeService(ALL), num_workers=2, api_keys_file=keys) as rig:
        rings = [front._keys_and_door[0] for front in rig.fronts if front._keys_and_door is not None]
        key = rings[0].find(bearer("slow")["Authorization"].encode())
        for _ in range(5):
            rings[0].spend(key)
        bucket = rings[1]._buckets["slow"]
        await until(lambda: bucket._level <= 1.0)


async def test_signals_are_earned_whatever_worker_the_ranks_came_to() -> None:
    service = FakeService(ALL)
    async with fronted(service, num_workers=2) as rig:
        doors = [front._service.door for front in rig.fronts if front._service is not None]
        for door in doors:
            door._tenants.saw("other")
            door._tenants.saw(UserKey("t", "u").tenant)
        for _ in range(70):
            doors[1]._tenants.may_signal("t", 1.0)
        assert not doors[1]._tenants.may_signal("t", 1.0)
        doors[0].on_device("t")
        await until(lambda: doors[1]._tenants.may_signal("t", 1.0))


async def test_lines_that_a_dead_worker_dropped_stay_counted() -> None:
    async with fronted(FakeService(ALL)) as rig:
        await until(lambda: rig.workers._workers[0].gauges is not None)
        worker = rig.workers._workers[0]
        assert worker.gauges is not None
        worker.gauges.lines_dropped["stdout"] = 7
        await _relinked(rig)
        assert rig.workers._lines_dropped()["stdout"] >= 7


async def _relinked(rig: Rig) -> None:
    await rig.unlink()
    await rig.link(0)
    await until(lambda: rig.workers._workers[0].gauges is not None)


async def test_counts_survive_that_the_engine_is_another() -> None:
    """What was counted while there was none is told to the next one."""
    async with fronted(FakeService(ALL)) as rig:
        await rig.unlink()
        await asyncio.gather(*(send(rig, KINDS["rank"], **LONG) for _ in range(3)))
        await rig.link(0)
        await until(lambda: value(rig.metrics.registry, "requests_total", route="/v1/rank", code="503") == 3)


async def test_the_slowest_requests_are_shown_however_many_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MOST_ENDED", 2)
    async with fronted(FakeService(ALL)) as rig:
        mine = rig.fronts[0]._reports
        assert mine is not None
        mine.send_stats()
        await send(rig, KINDS["rank"])
        (line,) = (one.line for one in mine._ended)
        for num in range(50):
            mine._note("rank", msgspec.structs.replace(line, duration_s=float(num), request_id=str(num)))
        mine.send_stats()
        await until(lambda: len(rig.newest.lines()) >= 2 + reports.MOST_SLOW)
        slowest = [one.line.request_id for one in rig.newest.slowest(3, 100.0)]
        assert slowest == ["49", "48", "47"]
        p50_s, p99_s = rig.newest.percentiles_s("rank") or (9.0, 9.0)
        assert p50_s <= p99_s < 1.0  # of the first ones alone: the slowest would tell of nobody's time
