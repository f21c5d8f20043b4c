"""The report's numbers are those of the samples: percentiles, goodput, hits, quality.

Errors count against the SLO.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from npu_gr.replay.log import QueryRecord
from npu_gr.replay.report import Report, summarise
from npu_gr.replay.requests import ReplayedAnswer, Sample
from npu_gr.replay.tally import Tally


def report(
    samples: Iterable[Sample], slo_s: float, settings: dict[str, Any], interrupted: bool = False
) -> Report:
    tally = Tally(slo_s)
    for one in samples:
        tally.add(one)
    return summarise(tally, settings, interrupted)


def sample(
    due_at: float = 0.0, latency_s: float = 0.01, error: str = "", lag_s: float = 0.0, **values: Any
) -> Sample:
    labels = values.pop("labels", {})
    answer: ReplayedAnswer = {
        "outcome": "hbm_hit", "reason": "", "scores": {"click": [3.0, 2.0, 1.0]},
        "stages_s": {"device": 0.002},
        "prefix_tokens": 30, "history": {"num_tokens": 40},
    }  # fmt: skip
    answer.update(values)  # type: ignore[typeddict-item]
    return Sample(
        record=QueryRecord(ts=0, kind="rank", user_id="a", candidates=[1, 2, 3], labels=labels),
        due_at=due_at,
        lag_s=lag_s,
        latency_s=latency_s,
        error=error,
        answer=None if error else answer,
    )


def test_percentiles_are_of_the_answered_and_split_by_outcome() -> None:
    latencies_s = np.linspace(0.001, 0.1, 100)
    samples = [
        sample(latency_s=float(s), outcome="hbm_hit" if i % 2 else "miss_full")
        for i, s in enumerate(latencies_s)
    ]
    table = report([*samples, sample(latency_s=9.0, error="timeout")], 0.05, {}).as_dict()
    total = table["latencies_ms"]["rank"]
    assert total["count"] == 100
    for p in (50, 95, 99, 99.9):
        assert total[f"p{p:g}"] == pytest.approx(
            np.percentile(latencies_s, p, method="inverted_cdf") * 1e3, rel=1e-3
        )
    assert table["latencies_ms"]["rank hbm_hit"]["p50"] == pytest.approx(
        np.percentile(latencies_s[1::2], 50, method="inverted_cdf") * 1e3, rel=1e-3
    )
    assert table["hit_ratios"] == {"hbm_hit": 0.5, "joined": 0, "dram_hit": 0}


def test_goodput_counts_only_answers_in_time_and_attainment_every_rank() -> None:
    samples = [sample(0.0), sample(1.0, 0.2), sample(1.5, error="504"), sample(1.99)]
    found = report(samples, 0.1, {})
    assert found.goodput_per_s == pytest.approx(2 / 2.0)
    assert found.as_dict()["slo_attainment_ratio"] == 0.5
    assert found.errors == {"rank 504": 1}


def test_quality_is_pooled_auc_and_mean_ndcg_over_the_labelled() -> None:
    samples = [
        sample(labels={"click": [1, 0, None]}),
        sample(labels={"click": [0, 1, 0]}),
        sample(labels={"click": [0, 0, 0]}),
        sample(),
        sample(labels={"click": [1, 0, 0]}, error="500"),
    ]
    found = report(samples, 0.1, {})
    assert found.num_labelled == {"click": 2}
    assert found.ndcg_at_10["click"] == pytest.approx((1 + 1 / np.log2(3)) / 2)
    # positives at 3 and 2; negatives at 2, 3, 1, 3, 2, 1
    assert found.auc["click"] == pytest.approx((0.5 * 2 + 4 + 0.5 * 2 + 2) / 12)


def test_reuse_stages_and_lateness() -> None:
    found = report(
        [sample(lag_s=0.02), sample(lag_s=0.02, prefix_tokens=0, stages_s={"device": 0.004})],
        0.1,
        {},
    )
    assert found.prefix_tokens_ratio == 30 / 80
    assert found.stages_p50_ms == {"device": pytest.approx(2.0, rel=1e-3)}
    assert found.was_late
    assert not report([sample()], 0.1, {}).was_late


def test_it_is_valid_json_and_a_table_even_of_nothing() -> None:
    for samples in ([], [sample()], [sample(error="timeout")]):
        found = report(samples, 0.1, {"seed": 5}, interrupted=True)
        table = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))
        assert table["environment"]["seed"] == 5
        assert table["interrupted"] is True
        text = io.StringIO()
        Console(file=text, width=200).print(found.render())
        assert "goodput" in text.getvalue()


def test_the_table_warns_of_a_late_generator() -> None:
    text = io.StringIO()
    Console(file=text, width=200).print(report([sample(lag_s=0.02)], 0.1, {}).render())
    assert "THE LOAD GENERATOR WAS LATE" in text.getvalue()
