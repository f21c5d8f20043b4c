"""The last lines of the demo say what was made, whether it was fast enough, and what to type next."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from npu_gr.catalogue.names import EMPTY
from npu_gr.history_store.interactions import Interactions
from npu_gr.replay.report import Latencies, Report
from npu_gr.tools.demo import longest_users, sum_up
from npu_gr.tools.evaluate import ServiceEvaluation
from npu_gr.train.site.report import SiteReport
from tests.replay.test_report import report

LOG = Interactions(
    np.zeros(6, np.int32), np.arange(6), np.full(6, 4.0), np.arange(6) + 800_000_000, ["it's me"]
)


def found(num_within: int, **more: object) -> Report:
    times = [
        Latencies(name="rank", count=100, ms={"p50": 5.4, "p95": 9.0, "p99": 36.0, "p99.9": 40.0})
    ]
    outcomes = {"hbm_hit": 98, "miss_full": 2}
    made = report([], 0.05, {})
    return dataclasses.replace(
        made,
        num_ranks=100,
        num_within_slo=num_within,
        latencies=times,
        outcomes=outcomes,
        **more,  # type: ignore[arg-type]
    )


def lines(measured: Report, recommended: float = 2.0) -> list[str]:
    site = SiteReport(made_at="", dataset="d", num_events=6, num_users=1, num_items=6, parts={})
    ranks = {"generate": [0.0, 30.0], "rank": [3.0, 4.0], "recommend": [1.0, recommended]}
    evaluation = ServiceEvaluation(
        ranks=ranks,
        seconds={way: [0.01, 0.02] for way in ranks},
        sources={"generate": 100},
        order="fused",
        retrieved=1.0,
        outcomes={},
        hides_seen=True,
    )
    slower = dataclasses.replace(
        found(90), num_ranks=30, stages_p50_ms={"queue": 0.1, "device": 2.8}
    )
    return sum_up(Path(".demo"), site, measured, slower, evaluation, LOG, EMPTY, latency_ratio=0.99)


def test_the_summary_is_short_and_says_what_to_type() -> None:
    text = lines(found(99))
    assert len(text) <= 12
    whole = "\n".join(text)
    assert "99.0% of 100 ranks within 50 ms; objective 99%: kept" in whole
    assert "P50 5.4 ms, P99 36.0 ms; without the relay" in whole
    assert "98.0% of the ranks found the user's KV ready" in whole
    assert "recommend 1.000; generate alone 0.500, rank alone 1.000" in whole
    assert "npu-gr serve --config .demo/serve.yaml" in whole
    assert """-d '{"user_id": "it'"'"'s me", """ in whole


def test_what_the_relay_spares_the_device_is_said_where_both_runs_know_it() -> None:
    whole = "\n".join(lines(found(99, stages_p50_ms={"device": 1.24})))
    assert "P50 of a rank on the device 1.2 ms, without the relay 2.8 ms" in whole
    assert "on the device" not in "\n".join(lines(found(99)))


@pytest.mark.parametrize(("num_within", "verdict"), [(98, "MISSED"), (99, "kept")])
def test_a_missed_objective_is_called_so(num_within: int, verdict: str) -> None:
    assert any(verdict in line for line in lines(found(num_within)))
    assert not any("load generator" in line for line in lines(found(num_within)))


def test_a_late_load_generator_is_called_so() -> None:
    late = found(99, lag_ms={"p99": 20.0})
    assert any("the load generator was late" in line for line in lines(late))


def test_the_longest_users_are_those_with_the_most_events() -> None:
    users = np.array([0, 1, 1, 2, 2, 2, 3, 3], np.int32)
    log = Interactions(users, np.arange(8), np.ones(8), np.arange(8), ["a", "b", "c", "d", "never"])
    assert longest_users(log, 2) == {"c", "b"}
    assert longest_users(log, 9) == {"a", "b", "c", "d", "never"}


def test_it_says_how_the_cascade_stands_beside_its_best_part() -> None:
    text = "\n".join(lines(found(99), recommended=30.0))
    assert "recommend does not differ significantly from generate alone, its best part" in text
