"""The overload benchmark runs from start to end, and its lines follow from the runs."""

from __future__ import annotations

import importlib.util
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import door, loads
from benchmarks.door_lines import (
    ALONE,
    BEFORE,
    BEHIND,
    FASTAPI,
    Density,
    of_density,
    of_repeats,
    of_run,
)
from benchmarks.frame import Line
from benchmarks.loadgen import BIN_S, ClientReport, ClientTimes, LoadStream, StreamCounts
from benchmarks.loads import Load, Run, Usual, normal_at_s, usual_of
from benchmarks.servers import (
    Server,
    Traffic,
    check,
    fastapi,
    has_fastapi,
    hit_ratio,
    instance,
    make_checkpoint,
    running,
    write_bodies,
)
from npu_gr.core.errors import Unavailable
from npu_gr.model.weights import load

CONFIG = Path(__file__).parents[2] / "configs" / "cpu.yaml"
TRAFFIC = Traffic(history_tokens=30, num_candidates=10, num_users=4)
GOOD = (10, 0, 0, 0, 0, 0)
BAD = (1, 2, 30, 0, 0, 0)
NOTHING = (0, 0, 0, 0, 0, 0)
USUAL = Usual(10.0, 1.0)
TIMES = ClientTimes(count=1, p50=1.0, p90=2.0, p99=3.0, max=4.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("door") / "checkpoint"
    make_checkpoint(folder, 1, 64, 0)
    return folder


def test_every_request_has_its_user_its_tenant_and_a_budget_of_its_own(
    checkpoint: Path, tmp_path: Path
) -> None:
    bodies = Traffic(num_tenants=256).bodies(load(checkpoint), "", 0)
    assert len({body["tenant"] for body in bodies}) == 256
    lines = (
        write_bodies(tmp_path / "ranks", bodies, (100.0, 1000.0), copies=2).read_text().splitlines()
    )
    assert len(lines) == 512
    users, tenants, budgets, texts = zip(*(line.split("\t") for line in lines), strict=True)
    assert users[2] == "X-User-Id: user-1"
    assert tenants[2] == "X-Tenant-Id: tenant-1"
    assert len(set(budgets)) > 500
    assert all(100 <= float(each.partition(": ")[2]) <= 1000 for each in budgets)
    assert all(2000 < len(text) < 3000 for text in texts)


def test_an_instance_is_checked_and_its_prefixes_are_found(
    checkpoint: Path, tmp_path: Path
) -> None:
    bodies = TRAFFIC.bodies(load(checkpoint), "tenant", 0)
    with running("ours", instance("ours", checkpoint, tmp_path)) as server:
        check(server, checkpoint, bodies)
        assert hit_ratio(server, bodies, 0) == 1.0
        other = tmp_path / "other"
        make_checkpoint(other, 1, 64, 1)
        with pytest.raises(AssertionError, match="ours: click differs by"):
            check(server, other, bodies)


def test_a_server_that_does_not_start_says_why(checkpoint: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match=r"ours did not start: npu-gr: .*kv_cache\.hbm_bytes"),
        running("ours", instance("ours", checkpoint, tmp_path, ["kv_cache.hbm_bytes=1"])),
    ):
        pass


def test_fastapi_has_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    if not has_fastapi():
        pytest.skip("FastAPI is not installed (the extra bench)")
    with running(FASTAPI, fastapi(checkpoint, tmp_path)) as server:
        check(server, checkpoint, TRAFFIC.bodies(load(checkpoint), "tenant", 0))


@pytest.mark.skipif(
    not (
        shutil.which("cc") and shutil.which("haproxy") and importlib.util.find_spec("npu_gr.route")
    ),
    reason="needs a C compiler, HAProxy and the router that runs it",
)
def test_from_start_to_end(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARM_S", "BEFORE_S", "AFTER_S", "REFERENCE_S"):
        monkeypatch.setattr(loads, name, 0.1)
    monkeypatch.setattr(loads, "CLOSED", (2,))
    monkeypatch.setattr(door, "Traffic", partial(replace, replace(TRAFFIC, num_users=32)))
    monkeypatch.setattr(loads, "BURSTS", (2,))
    parts = ("closed", "slow", "bursts", "fair")
    found = list(door.lines(CONFIG, checkpoint, None, 0.2, 1, parts, (), 0))
    cases = [line.case.partition(":")[0] for line in found]
    assert cases[:4] == [
        f"2 clients that retry immediately, {arm}" for arm in (BEHIND, BEHIND, ALONE, ALONE)
    ]
    assert found[0].ours > 0
    assert f"bursts of 2, {BEHIND}" in cases


def counts(**changes: Any) -> StreamCounts:
    zero = dict.fromkeys(
        ("due", "unsent", "in_time", "late", "rejected", "other", "timeouts", "errors"), 0
    )
    settings: dict[str, Any] = {"name": "load", "span_s": 2.0, "bins": [GOOD] * 40 + [NOTHING] * 2}
    settings |= {"server_cpu_s": 1.0, "answered_ms": TIMES}
    return StreamCounts(**{**zero, **settings, **changes})


def made(group: str, size: float, good: int, normal_s: float = 0.2, **changes: Any) -> Run:
    mode = group if group in ("closed", "bursts") else "poisson"
    main = counts(**{"in_time": good, "due": good, **changes})
    return Run(
        load=Load(name="load", group=group, mode=mode, size=size, seconds=2.0),
        capacity_per_s=500.0,
        reference_cpu_s=1e-3,
        main=main,
        client=ClientReport(
            cpu_s=0.1, ran_s=4.0, late_tick_ms=TIMES, streams=[main, counts(name="hot")]
        ),
        normal_after_s=normal_s,
    )


def evaluated(arm: str, run: Run) -> list[bool | None]:
    return [line.ok for line in of_run(arm, run)]


@pytest.mark.parametrize(
    ("arm", "clients", "good", "ok"),
    [(BEHIND, 64, 950, True), (BEHIND, 64, 940, False), (BEHIND, 256, 700, True), (ALONE, 16, 900,
    True),
     (ALONE, 256, 1, None), (BEFORE, 64, 1, None)],
)  # fmt: skip
def test_clients_that_retry_are_compared_with_the_capacity(
    arm: str, clients: int, good: int, ok: bool
) -> None:
    goodput, *normal = evaluated(arm, made("closed", clients, good))
    assert goodput is ok
    assert normal == ([] if arm == BEFORE else [True])


def test_an_overload_loses_nothing_is_not_late_and_level() -> None:
    assert evaluated(BEHIND, made("poisson", 3.0, 800)) == [True] * 5
    assert evaluated(BEHIND, made("poisson", 3.0, 790, normal_s=1.1))[::4] == [False, False]
    lost, late = evaluated(BEHIND, made("poisson", 3.0, 800, timeouts=1, late=17, due=5000))[1:3]
    assert (lost, late) == (False, False)
    falling = made("poisson", 3.0, 800, bins=[GOOD] * 20 + [(3, 0, 0, 0, 0, 0)] * 20)
    assert evaluated(BEHIND, falling)[3] is False
    assert evaluated(BEHIND, made("poisson", 10.0, 1)) == [None, True, True]
    assert evaluated(ALONE, made("poisson", 10.0, 1)) == [None, True]
    assert evaluated(BEHIND, made("slow", 3.0, 700))[0] is True


def test_what_one_plans_for_is_all_in_time() -> None:
    assert evaluated(BEHIND, made("poisson", 0.8, 1000)) == [True, None]
    assert evaluated(BEHIND, made("poisson", 0.8, 990, due=1000)) == [False, None]


def test_of_bursts_and_of_the_small_tenant_none_is_rejected() -> None:
    for group in ("bursts", "fair"):
        assert evaluated(BEHIND, made(group, 16, 400)) == [True]
        assert evaluated(BEHIND, made(group, 16, 399, rejected=1)) == [False]


def test_after_a_pause_it_is_normal_within_a_second() -> None:
    assert evaluated(ALONE, made("pause", 4, 400, normal_s=1.0)) == [True]
    assert evaluated(ALONE, made("pause", 4, 400, normal_s=math.inf)) == [False]


def test_of_several_runs_the_median_counts_and_all_are_listed() -> None:
    runs = [list(of_run(BEHIND, made("closed", 64, good))) for good in (300, 500, 400, 100)]
    first = next(iter(of_repeats(runs)))
    assert (first.ours, first.ratio, first.ok) == (150.0, 0.3, False)
    assert first.case.endswith("; the median of 0.30, 0.50, 0.40, 0.10; 0 of 4 ok")
    assert list(of_repeats(runs[:1])) == runs[0]
    line = runs[0][0]
    nothing = replace(line, ratio=math.nan)  # is the worst
    assert math.isnan(next(iter(of_repeats([[nothing], [line]]))).ratio)


def test_density_is_compared_with_fastapi() -> None:
    def best(*each: float) -> list[Density]:
        return [Density(one, 16, one, 40.0) for one in each]

    found: list[Line] = list(
        of_density({ALONE: best(1, 240, 999), FASTAPI: best(200, 200, 200)}, 0.05)
    )
    assert [(line.ratio, line.ok) for line in found] == [(1.2, True), (1.0, None)]
    assert [line.ok for line in of_density({ALONE: best(240)}, 0.05)] == [None]


def test_the_loads_are_of_the_capacity() -> None:
    bodies = loads.Bodies(Path("all"), Path("hot"), Path("small"))
    by_name = {load.name: load for load in loads.loads(2.0)}
    assert by_name["3x"].streams(bodies, 100.0)[0].rate_per_s == 300.0
    assert by_name["1x"].streams(bodies, 100.0)[0].rate_per_s == 80.0
    burst = by_name["bursts of 16"].streams(bodies, 100.0)[0]
    assert burst.burst_size / burst.every_s == pytest.approx(25.0)
    small, hot = by_name["20/s of a tenant next to 16 hot clients"].streams(bodies, 100.0)
    assert (small.bodies, hot.bodies) == (Path("small"), Path("hot"))
    assert [by_name[f"{n} clients that retry immediately"].clients for n in (4, 256)] == [4, 8]
    assert {load.group for load in by_name.values()} == set(door.PARTS) - {"density", "fleet"}


def test_normal_is_the_first_bin_that_stays_as_usual() -> None:
    assert normal_at_s([GOOD] * 10, USUAL) == 0.0
    assert normal_at_s([BAD, NOTHING, GOOD, GOOD, GOOD, GOOD], USUAL) == 2 * BIN_S
    assert normal_at_s([BAD, GOOD, BAD, BAD, BAD, GOOD, GOOD, GOOD, GOOD], USUAL) == 5 * BIN_S
    assert normal_at_s([BAD] * 20, USUAL) == math.inf
    assert normal_at_s([GOOD] * 3, USUAL) == math.inf  # too few to tell
    assert normal_at_s([GOOD] * 10, Usual(0.0, 0.0)) == math.inf  # nothing to compare with
    half = (5, 0, 0, 0, 0, 0)  # all in time, but half as many as usual: they wait
    assert normal_at_s([half] * 20, USUAL) == math.inf


def test_usual_leaves_out_empty_bins() -> None:
    assert usual_of([GOOD, GOOD, NOTHING, NOTHING]) == Usual(10.0, 1.0)
    assert usual_of([(5, 0, 5, 0, 0, 0)]) == Usual(5.0, 0.5)
    assert usual_of([NOTHING]) == Usual(0.0, 0.0)


def test_density_is_the_best_before_the_goal_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients are the best of a core, eight miss the goal, and sixteen are not asked."""
    asked = list[int]()

    def drive(_port: int, streams: list[LoadStream], **_more: Any) -> ClientReport:
        clients = streams[-1].connections
        asked.append(clients)
        p99 = ClientTimes(count=1, p50=1.0, p90=1.0, p99=10.0 * clients, max=80.0)
        answers = {1: 100, 2: 300, 4: 200, 8: 900}[clients]
        found = counts(in_time=answers, due=answers, answered_ms=p99)
        return ClientReport(cpu_s=0.0, ran_s=1.0, late_tick_ms=TIMES, streams=[found])

    monkeypatch.setattr(door, "drive", drive)
    best = door.density(Server(name="x", port=1, processes=()), Path("none"), 0.05, 0)
    assert (best.clients, best.ranks_per_core_s, best.ranks_per_s) == (2, 300.0, 150.0)
    assert asked == [1, 2, 4, 8]
