"""Every metric has a help text and bounded labels, and each objective is a bucket edge."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.request import HistoryReport, Outcome, RankAnswer, Reason, Verdict
from npu_gr.metrics.exposition import expose
from npu_gr.metrics.registry import STAGES, Admission, Metrics
from npu_gr.metrics.slo import Objective
from npu_gr.metrics.trace import CURRENT, begin


def made(rank_s: float = 0.0421) -> tuple[Metrics, CollectorRegistry]:
    registry = CollectorRegistry()
    objectives = [
        Objective(kind=kind, threshold_s=s)
        for kind, s in (("rank", rank_s), ("signal", 0.0123), ("generate", 0.2), ("recommend", 0.3))
    ]
    return Metrics(registry, objectives), registry


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
        stages_s={"queue": 0.001, "device": 0.002},
    )


def test_objectives_are_edges() -> None:
    metrics, registry = made()
    metrics.rank_done(answer(Outcome.HBM_HIT, Reason.NONE), 0.0421)
    metrics.request_done("rank", "/v1/rank", 200, 0.0421)
    at_the_door = {"kind": "rank", "le": "0.0421"}
    assert registry.get_sample_value("npu_gr_request_duration_seconds_bucket", at_the_door) == 1
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
    assert len(families) > 45
    for family in families:
        assert family.name.startswith("npu_gr_")
        assert family.documentation.endswith(".")


def test_two_in_one_process() -> None:
    (a, first), (_, second) = made(), made()
    a.prefill_wasted()
    assert first.get_sample_value("npu_gr_prefill_wasted_total", {"kind": "rank"}) == 1
    assert second.get_sample_value("npu_gr_prefill_wasted_total", {"kind": "rank"}) == 0


def test_a_request_counts_once_in_everything_that_counts_requests() -> None:
    metrics, registry = made(rank_s=0.05)
    for status, took_s in (
        (200, 0.05),
        (200, 0.051),
        (429, 0.001),
        (503, 0.001),
        (504, 0.2),
        (500, 0.001),
        (422, 0.001),
    ):
        metrics.request_done("rank", "/v1/rank", status, took_s, {"queue": took_s / 2})
    metrics.request_done("rank", "/v1/rank", 499, 0.3)
    metrics.request_done(None, "/healthz", 200, 0.001)

    def results(result: str) -> float | None:
        return registry.get_sample_value("npu_gr_slo_requests_total", {"kind": "rank", "result": result})

    def admitted(verdict: Admission) -> float | None:
        return registry.get_sample_value("npu_gr_admissions_total", {"kind": "rank", "verdict": verdict})

    assert [results(r) for r in ("good", "slow", "failed")] == [1, 1, 4]
    assert {v: admitted(v) for v in Admission} == {
        Admission.ADMITTED: 2,
        Admission.OVERLOADED: 1,
        Admission.UNAVAILABLE: 1,
        Admission.OUT_OF_TIME: 1,
        Admission.ABANDONED: 1,
        Admission.INVALID: 1,
        Admission.BROKEN: 1,
    }
    attained = {"kind": "rank", "slo": "latency", "window": "5m"}
    assert registry.get_sample_value("npu_gr_slo_attainment_ratio", attained) == 0.5
    door = registry.get_sample_value("npu_gr_stage_duration_seconds_count", {"kind": "rank", "stage": STAGES[-1]})
    assert door == 7


async def test_an_exemplar_names_the_trace_and_openmetrics_carries_it() -> None:
    metrics, _ = made()
    trace = begin("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    token = CURRENT.set(trace)
    try:
        metrics.request_done("rank", "/v1/rank", 200, 0.004)
    finally:
        CURRENT.reset(token)
    text, content_type = await expose(metrics, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert text.count(b"# EOF") == 1
    line = next(x for x in text.decode().splitlines() if x.startswith("npu_gr_request_duration") and 'le="0.005"' in x)
    assert '# {trace_id="4bf92f3577b34da6a3ce929d0e0e4736"} 0.004' in line


async def test_the_text_made_in_parts_is_the_text() -> None:
    metrics, registry = made()
    metrics.rank_done(answer(Outcome.HBM_HIT, Reason.NONE), 0.004)
    text, _ = await expose(metrics, "")
    whole = generate_latest(registry)
    assert text.startswith(whole)
    assert b"process_cpu_seconds_total" in text[len(whole) :]
