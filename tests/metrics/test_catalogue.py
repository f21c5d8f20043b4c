"""Every metric has a help text and bounded labels, and each objective is a bucket edge."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.metrics.catalogue import Metrics
from npu_gr.request import HistoryReport, Outcome, RankAnswer, Reason, Verdict


def made(rank_s: float = 0.0421) -> tuple[Metrics, CollectorRegistry]:
    registry = CollectorRegistry()
    return Metrics(registry, {"rank": rank_s, "signal": 0.0123}), registry


def answer(outcome: Outcome, reason: Reason) -> RankAnswer:
    return RankAnswer(
        model_version="v",
        outcome=outcome,
        reason=reason,
        scores={},
        top=None,
        history=HistoryReport(fingerprint="f", num_tokens=10),
        prefix_tokens=7,
        unknown_candidates=2,
        stages_s={"queue": 0.001},
    )


def test_objectives_are_edges() -> None:
    metrics, registry = made()
    metrics.rank_done(answer(Outcome.HBM_HIT, Reason.NONE), 0.0421)
    labels = {"outcome": "hbm_hit", "le": "0.0421"}
    assert registry.get_sample_value("npu_gr_rank_duration_seconds_bucket", labels) == 1
    assert registry.get_sample_value("npu_gr_signal_duration_seconds_bucket", {"le": "0.0123"}) == 0


def test_every_outcome_reason_and_verdict_is_counted_once() -> None:
    metrics, registry = made()
    for outcome in Outcome:
        for reason in Reason:
            metrics.rank_done(answer(outcome, reason), 0.01)
    for verdict in Verdict:
        metrics.signal_decided(verdict, 0.01)
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    counted = [s for s in families["npu_gr_rank_outcomes"].samples if s.name.endswith("_total")]
    assert len(counted) == len(Outcome) * len(Reason)
    assert {s.value for s in counted} == {1.0}
    verdicts = [s for s in families["npu_gr_signal_verdicts"].samples if s.name.endswith("_total")]
    assert {s.value for s in verdicts} == {1.0}
    assert registry.get_sample_value("npu_gr_prefix_tokens_total") == 7 * len(counted)
    assert registry.get_sample_value("npu_gr_unknown_items_total", {"where": "candidates"}) == 2 * len(counted)


def test_names_and_help() -> None:
    _, registry = made()
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len(families) > 20
    for family in families:
        assert family.name.startswith("npu_gr_")
        assert family.documentation.endswith(".")


def test_two_in_one_process() -> None:
    (a, first), (_, second) = made(), made()
    a.prefill_wasted()
    assert first.get_sample_value("npu_gr_prefill_wasted_total") == 1
    assert second.get_sample_value("npu_gr_prefill_wasted_total") == 0
