"""What stands in a run, when a server counts as normal, and what the lines conclude from it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import door_loads
from benchmarks.door import parse_ablations
from benchmarks.door_client import BIN_S, ClientReport, ClientTimes, LoadStream, StreamCounts
from benchmarks.door_costs import Density, RefusalCost, refusal_cost
from benchmarks.door_lines import of_density, of_loads, of_refusals, of_repeats
from benchmarks.door_loads import (
    AFTER_S,
    BEFORE_S,
    BURST_SHARE,
    WARM_S,
    Load,
    LoadRun,
    Usual,
    good_per_s,
    loads,
    normal_at_s,
    run,
    usual_of,
)
from benchmarks.door_servers import Server
from benchmarks.line import Line
from npu_gr.core.errors import ConfigError

GOOD = (10, 0, 0, 0, 0, 0)
BAD = (1, 2, 30, 0, 0, 0)
NONE = (0, 0, 0, 0, 0, 0)
USUAL = Usual(10.0, 1.0)
STREAM = LoadStream(name="load", mode="closed", bodies=Path("none"), to_s=2.0, connections=1)


def times(p99: float = 10.0, count: int = 1) -> ClientTimes:
    return ClientTimes(count=count, p50=1.0, p90=2.0, p99=p99, max=p99)


def counts(**changes: Any) -> StreamCounts:
    settings: dict[str, Any] = {
        "name": "load",
        "span_s": 2.0,
        "server_cpu_s": 2.0,
        "main_thread_cpu_s": 1.0,
        "main_thread_wait_s": 0.2,
        "bins": [GOOD] * 40 + [NONE] * 2,
        "answered_ms": times(),
        "refused_ms": times(),
        "late_start_ms": times(),
    }
    zero = dict.fromkeys(("due", "unsent", "in_time", "late", "refused", "other", "timeouts", "errors"), 0)
    return StreamCounts(**{**zero, **settings, **changes})


def made(group: str, size: float, good: int, reference_per_s: float = 500.0, **changes: Any) -> LoadRun:
    refused = changes.pop("refused", 0)
    bins = changes.pop("bins", [GOOD] * 20)
    main = counts(in_time=good, refused=refused, due=good + refused + changes.pop("lost", 0), **changes)
    client = ClientReport(cpu_s=0.1, ran_s=4.0, late_tick_ms=times(), streams=[main, counts(name="hot")])
    return LoadRun(
        load=Load(name=f"{group} {size:g}", group=group, size=size, seconds=2.0, streams=(STREAM,)),
        before_per_s=reference_per_s,
        after_per_s=reference_per_s,
        usual=USUAL,
        bins=bins,
        main=main,
        client=client,
    )


def told(on: LoadRun, off: LoadRun) -> list[Line]:
    return list(of_loads([{"on": on, "off": off}], "case", ("on", "off"), []))


def test_of_several_runs_the_median_counts_and_all_are_told() -> None:
    runs = [told(made("poisson", 3.0, good), made("poisson", 3.0, 10)) for good in (300, 500, 400, 100)]
    first = next(iter(of_repeats(runs)))
    assert first.ours == 150.0  # of 50, 150, 200 and 250 a second
    assert first.ratio == pytest.approx(0.3)
    assert first.ok is False
    assert first.case.endswith("; the median of 0.30, 0.50, 0.40, 0.10; 0 of 4 ok")
    assert list(of_repeats(runs[:1])) == runs[0]


def test_a_burst_that_was_refused_in_one_run_of_three_is_told() -> None:
    runs = [told(made("bursts", 16.0, 300, refused=n), made("bursts", 16.0, 300)) for n in (0, 1, 0)]
    (burst, *_) = of_repeats(runs)
    assert burst.ok
    assert burst.case.endswith("; 2 of 3 ok")


def test_what_is_no_number_is_the_worst() -> None:
    line = told(made("closed", 16.0, 900), made("closed", 16.0, 1))[0]
    nothing, all_of_it = replace(line, ratio=math.nan), replace(line, ratio=1.0)
    assert math.isnan(next(iter(of_repeats([[nothing], [all_of_it]]))).ratio)
    assert next(iter(of_repeats([[all_of_it], [nothing], [all_of_it]]))).ratio == 1.0


def test_normal_is_the_first_bin_that_stays_as_usual() -> None:
    assert normal_at_s([GOOD] * 10, USUAL) == 0.0
    assert normal_at_s([BAD, NONE, GOOD, GOOD, GOOD, GOOD], USUAL) == 2 * BIN_S
    assert normal_at_s([BAD, GOOD, BAD, BAD, BAD, GOOD, GOOD, GOOD, GOOD], USUAL) == 5 * BIN_S
    assert normal_at_s([BAD] * 20, USUAL) == math.inf
    assert normal_at_s([GOOD] * 3, USUAL) == math.inf  # too few to tell
    assert normal_at_s([GOOD] * 10, Usual(0.0, 0.0)) == math.inf  # nothing to compare with
    half = (5, 0, 0, 0, 0, 0)  # all in time, but half as many as usual: they wait
    assert normal_at_s([half] * 20, USUAL) == math.inf


def test_usual_leaves_out_empty_bins() -> None:
    assert usual_of([GOOD, GOOD, NONE, NONE]) == Usual(10.0, 1.0)
    assert usual_of([(5, 0, 5, 0, 0, 0)]) == Usual(5.0, 0.5)
    assert usual_of([NONE]) == Usual(0.0, 0.0)


def test_a_part_of_a_stream() -> None:
    assert good_per_s(counts(bins=[BAD] * 8 + [GOOD] * 12), 0.4, 1.0) == pytest.approx(200.0)


def test_the_worst_second() -> None:
    even = made("poisson", 3.0, 300)
    assert even.worst_second == 1.0
    halves = [(5, 0, 0, 0, 0, 0)] * 20 + [(15, 0, 0, 0, 0, 0)] * 20
    assert replace(even, main=counts(bins=halves)).worst_second == pytest.approx(0.5)
    assert replace(even, main=counts(bins=[NONE] * 40)).worst_second == 0.0


def test_every_load_of_the_issue_is_there(tmp_path: Path) -> None:
    made = loads(tmp_path / "a", tmp_path / "hot", tmp_path / "small", 800.0, 4.0, 60.0)
    assert [load.size for load in made if load.group == "closed"] == [4, 16, 64, 256]
    bursts = [load.streams[0] for load in made if load.group == "bursts"]
    assert [stream.burst_size for stream in bursts] == [8, 16, 24, 32]
    assert all(stream.burst_size / stream.every_s == pytest.approx(BURST_SHARE * 800.0) for stream in bursts)
    poisson = [load for load in made if load.group == "poisson"]
    assert [load.streams[0].rate_per_s for load in poisson] == [800.0, 2400.0, 8000.0]
    assert all(load.seconds == 60.0 for load in poisson)
    pauses = [load.streams[0] for load in made if load.group == "pause"]
    assert [(s.mode, s.rate_per_s) for s in pauses] == [
        ("closed", 0.0),
        ("poisson", 4000.0),
        ("poisson", 4000.0),
        ("poisson", 8000.0),
    ]
    fair = [load for load in made if load.group == "fair"]
    assert [len(load.streams) for load in fair] == [1, 2]
    assert all(stream.to_s == load.seconds == 12.0 for load in fair for stream in load.streams)


def test_references_stand_around_the_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def drive(port: int, streams: list[LoadStream], **more: Any) -> ClientReport:
        seen.update(more, port=port, streams={stream.name: stream for stream in streams})
        bins = {"after": [BAD] * 3 + [GOOD] * 17}
        answers = [counts(name=stream.name, bins=bins.get(stream.name, [GOOD] * 40)) for stream in streams]
        return ClientReport(cpu_s=0.1, ran_s=4.0, late_tick_ms=times(), streams=answers)

    monkeypatch.setattr(door_loads, "drive", drive)
    server = Server(name="ours", port=7, pids=(5, 6))
    plan = loads(tmp_path / "a", tmp_path / "hot", tmp_path / "small", 800.0, 2.0, 2.0)
    closed = run(server, plan[0], tmp_path / "a", 0.05, 0)
    spans = [(name, round(s.from_s, 3), round(s.to_s, 3)) for name, s in seen["streams"].items()]
    begins = WARM_S + BEFORE_S
    assert spans == [
        ("warm", 0.0, WARM_S),
        ("before", WARM_S, begins),
        ("load", begins, begins + 2.0),
        ("after", begins + 2.0, begins + 2.0 + AFTER_S),
    ]
    assert (seen["port"], seen["watch"], seen["pause"]) == (7, (5, 6), None)
    assert closed.normal_after_s(closed.usual) == pytest.approx(0.15)
    assert closed.after_per_s == pytest.approx(200.0)
    pause = next(load for load in plan if load.group == "pause")
    run(server, pause, tmp_path / "a", 0.05, 0)
    assert (seen["pause"].pid, seen["pause"].at_s, seen["pause"].for_s) == (5, begins + 1.0, 0.110)
    still = next(load for load in plan if load.pause_s > 1.0)
    found = run(server, still, tmp_path / "a", 0.05, 0)
    assert (seen["pause"].at_s, seen["pause"].for_s) == (begins + 1.0, 1.5)
    assert found.bins == []  # the answers of this client are over by then


def test_a_standstill_has_a_second() -> None:
    late = [BAD] * 15 + [GOOD] * 20
    still = replace(made("pause", 10, 500, bins=late).load, normal_s=1.0)
    normal = told(replace(made("pause", 10, 500, bins=late), load=still), made("pause", 10, 500, bins=late))[0]
    assert normal.ours == pytest.approx(0.75)
    assert normal.ok
    assert not told(made("pause", 10, 500, bins=late), made("pause", 10, 500))[0].ok


def test_closed_loops_are_measured_by_the_best() -> None:
    goodput, normal, reference = told(made("closed", 64, 980), made("closed", 64, 20))
    assert goodput.ratio == pytest.approx(0.98)
    assert (goodput.target, goodput.ok) == (0.95, True)
    assert (goodput.baseline_value, normal.ok, reference.ok) == (500.0, True, None)
    assert "waited for a core 10% of the load" in reference.case
    worse = told(made("closed", 64, 980), made("closed", 64, 1200))[0]
    assert (worse.baseline_value, worse.ok) == (600.0, False)  # admission off did better
    few = told(made("closed", 4, 600), made("closed", 4, 610))[0]
    assert (few.baseline_value, few.ok) == (305.0, True)  # 8 clients are no measure for 4


def test_open_loops_are_measured_by_the_best_and_by_their_worst_second() -> None:
    goodput, worst, normal, _ = told(made("poisson", 10.0, 620), made("poisson", 10.0, 2, bins=[BAD] * 20))
    assert (goodput.target, goodput.ok, worst.ok, normal.ok) == (0.6, True, True, True)
    assert told(made("poisson", 3.0, 620), made("poisson", 3.0, 2))[0].ok is False
    assert told(made("poisson", 1.0, 20), made("poisson", 1.0, 2))[0].ok is None
    slow = told(made("poisson", 10.0, 620, bins=[BAD] * 6 + [GOOD] * 14), made("poisson", 10.0, 2))[2]
    assert slow.ours == pytest.approx(0.3)
    assert slow.ok is False


def test_nothing_against_nothing_reaches_no_target() -> None:
    goodput = told(made("closed", 64, 0, reference_per_s=0.0), made("closed", 64, 0, reference_per_s=0.0))[0]
    assert goodput.ok is False
    assert math.isnan(goodput.ratio)


@pytest.mark.parametrize(
    ("size", "refused", "lost", "lost_off", "ok"),
    [(24, 0, 9, 0, True), (24, 1, 0, 50, False), (32, 9, 0, 9, True), (32, 30, 0, 9, False)],
)
def test_a_burst_is_refused_nothing_or_no_more_than_off(
    size: int, refused: int, lost: int, lost_off: int, ok: bool
) -> None:
    on = made("bursts", size, 400 - refused - lost, refused=refused, lost=lost)
    assert told(on, made("bursts", size, 400 - lost_off, lost=lost_off))[0].ok is ok


def test_the_small_tenant_is_compared_with_itself_alone() -> None:
    def fair(p99: float, refused: int) -> list[bool | None]:
        rows = [
            made("fair", 1, 40, answered_ms=times(10.0)),
            made("fair", 2, 40, refused=refused, answered_ms=times(p99)),
        ]
        return [line.ok for line in of_loads([{"on": row, "off": row} for row in rows], "", ("on", "off"), [])]

    assert fair(12.9, 0) == [True, True]
    assert fair(13.1, 0) == [True, False]
    assert fair(12.9, 1) == [False, True]


def test_refusals_are_counted_times_their_cost() -> None:
    runs = [made("closed", 64, 900, refused=1000), made("closed", 256, 900, refused=4000)]
    cheap = of_refusals(RefusalCost(2e-5, 900.0, 3000.0), runs)
    assert cheap.ours == pytest.approx(4.0)  # 2,000/s x 20 us
    assert cheap.ok is True
    assert of_refusals(RefusalCost(3e-5, 900.0, 3000.0), runs).ok is False
    assert of_refusals(None, runs).ok is False  # refused, at a cost that nobody knows
    assert of_refusals(None, [made("closed", 4, 9)]).ok is True


@pytest.mark.parametrize(
    ("refused", "cpu_s", "cost_s"), [(3000, 1.6, 100e-6), (1150, 1.6, None), (3000, 1.4, None), (3000, 0.4, None)]
)
def test_a_refusal_costs_what_the_server_takes_more(refused: int, cpu_s: float, cost_s: float | None) -> None:
    """A rank takes 1 ms, by the references; of 1.1 s more, 900 ranks more take .9. No cost at all tells nothing."""
    around = [counts(name=name, in_time=500, late=500, server_cpu_s=1.0) for name in ("before", "after")]

    def open_loop(refused: int, served: int, cpu_s: float) -> LoadRun:
        found = made("poisson", 3.0, served, refused=refused, server_cpu_s=cpu_s)
        client = ClientReport(cpu_s=0.1, ran_s=4.0, late_tick_ms=times(), streams=[found.main, *around])
        return replace(found, client=client)

    cost = refusal_cost(open_loop(1000, 100, 0.5), open_loop(refused, 1000, cpu_s))
    assert (None if cost is None else cost.cpu_s) == (cost_s if cost_s is None else pytest.approx(cost_s))
    if cost is not None:
        assert (cost.from_per_s, cost.to_per_s) == (500.0, 1500.0)


def test_density_is_measured_by_the_better_peer() -> None:
    found = {"ours": Density(900.0, 16, 1000.0, 40.0), "off": None, "one": Density(600.0, 8, 600.0, 40.0), "two": None}
    ours, off, *_ = of_density(found, "ours", ["one", "two"], 0.05)
    assert ours.ratio == pytest.approx(1.5)
    assert (ours.baseline, ours.ok, off.ok) == ("one", True, None)
    alone = next(of_density({"ours": found["ours"]}, "ours", [], 0.05))
    assert (alone.baseline, alone.ok) == ("no peer ran", None)


def test_an_ablation_is_a_line_of_its_own() -> None:
    rows = {"on": made("closed", 64, 900), "off": made("closed", 64, 10), "no brown-out": made("closed", 64, 450)}
    line = list(of_loads([rows], "", ("on", "off"), ["no brown-out"]))[-1]
    assert (line.baseline, line.ratio) == ("no brown-out", 2.0)


def test_ablations_are_read() -> None:
    assert parse_ablations(["no brown-out:brownout.enabled=false kv.dram_bytes=0"]) == {
        "no brown-out": ("brownout.enabled=false", "kv.dram_bytes=0")
    }
    for wrong in ("brownout.enabled=false", ":a=b", "name:", "name:word"):
        with pytest.raises(ConfigError, match="expected NAME:KEY=VALUE"):
            parse_ablations([wrong])
