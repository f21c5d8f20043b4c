"""Every metric has a help text and bounded labels, and each objective is a bucket edge."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.errors import ConfigError, Rejection
from npu_gr.core.history import HistoryReport
from npu_gr.core.kinds import KINDS, RANK, Kind
from npu_gr.core.logs import CURRENT, begin
from npu_gr.core.request import Outcome, RankAnswer, Reason, Verdict
from npu_gr.metrics.exposition import expose
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.families import Families
from npu_gr.metrics.registry.process import Reloaded, ReloadMetrics
from npu_gr.metrics.registry.requests import HTTP_STAGE, AdmissionResult
from npu_gr.metrics.slo import Objective


def made(rank_s: float = 0.0421) -> tuple[Metrics, CollectorRegistry]:
    registry = CollectorRegistry()
    own_s = {"rank": rank_s, "signal": 0.0123}
    objectives = [
        Objective(kind=kind.name, threshold_s=own_s.get(kind.name, kind.objective_s))
        for kind in KINDS.values()
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
    metrics.requests.answered(RANK, answer(Outcome.HBM_HIT, Reason.NONE), 0.0421)
    metrics.requests.done("rank", "/v1/rank", 200, 0.0421)
    labels = {"kind": "rank", "le": "0.0421"}
    assert registry.get_sample_value("npu_gr_request_duration_seconds_bucket", labels) == 1
    labels = {"outcome": "hbm_hit", "le": "0.0421"}
    assert registry.get_sample_value("npu_gr_rank_duration_seconds_bucket", labels) == 1
    assert registry.get_sample_value("npu_gr_signal_duration_seconds_bucket", {"le": "0.0123"}) == 0


def test_every_outcome_reason_and_verdict_is_counted_once() -> None:
    metrics, registry = made()
    for outcome in Outcome:
        for reason in Reason:
            metrics.requests.answered(RANK, answer(outcome, reason), 0.01)
            metrics.rank.answered(answer(outcome, reason))
    for verdict in Verdict:
        metrics.signal.decided(verdict)
    families = {
        f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())
    }
    counted = [s for s in families["npu_gr_rank_outcomes"].samples if s.name.endswith("_total")]
    assert len(counted) == len(Outcome) * len(Reason)
    assert {s.value for s in counted} == {1.0}
    verdicts = [s for s in families["npu_gr_signal_verdicts"].samples if s.name.endswith("_total")]
    assert {s.value for s in verdicts} == {1.0}
    assert registry.get_sample_value("npu_gr_prefix_tokens_total") == 7 * len(counted)
    assert registry.get_sample_value(
        "npu_gr_unknown_items_total", {"where": "candidates"}
    ) == 2 * len(counted)


def test_names_and_help() -> None:
    _, registry = made()
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len(families) > 45
    for family in families:
        assert family.name.startswith("npu_gr_")
        assert family.documentation.endswith(".")


def test_two_in_one_process() -> None:
    (a, first), (_, second) = made(), made()
    a.relay.wasted("rank")
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
        metrics.requests.done("rank", "/v1/rank", status, took_s, {"queue": took_s / 2})
    metrics.requests.done("rank", "/v1/rank", 499, 0.05)
    metrics.requests.done("rank", "/v1/rank", 499, 0.3)  # late before its client gave up
    # under half of 50 ms: nothing was promised
    metrics.requests.done("rank", "/v1/rank", 499, 0.3, has_s=0.024)
    metrics.requests.done("rank", "/v1/rank", 504, 0.01, has_s=0.024)
    metrics.requests.done("rank", "/v1/rank", 429, 0.01, rejection=Rejection.RATE)
    metrics.requests.done(None, "/healthz", 200, 0.001)

    def results(result: str) -> float | None:
        return registry.get_sample_value(
            "npu_gr_slo_requests_total", {"kind": "rank", "result": result}
        )

    def admitted(verdict: AdmissionResult) -> float | None:
        return registry.get_sample_value(
            "npu_gr_admissions_total", {"kind": "rank", "verdict": verdict}
        )

    assert [results(r) for r in ("good", "slow", "failed")] == [1, 1, 5]
    assert {v: admitted(v) for v in AdmissionResult} == {
        AdmissionResult.ADMITTED: 2,
        AdmissionResult.OVERLOADED: 1,
        AdmissionResult.UNAVAILABLE: 1,
        AdmissionResult.OUT_OF_TIME: 1,
        AdmissionResult.ABANDONED: 3,
        AdmissionResult.IMPOSSIBLE: 1,
        AdmissionResult.OVER_RATE: 1,
        AdmissionResult.INVALID: 1,
        AdmissionResult.BROKEN: 1,
    }
    attained = {"kind": "rank", "slo": "latency", "window": "5m"}
    assert registry.get_sample_value("npu_gr_slo_attainment_ratio", attained) == 0.5
    door = registry.get_sample_value(
        "npu_gr_stage_duration_seconds_count", {"kind": "rank", "stage": HTTP_STAGE}
    )
    assert door == 7
    assert registry.get_sample_value("npu_gr_request_duration_seconds_count", {"kind": "rank"}) == 2


def test_a_storm_of_rejections_does_not_improve_the_latency() -> None:
    metrics, registry = made(rank_s=0.05)
    for took_s in (0.03, 0.07):
        metrics.requests.done("rank", "/v1/rank", 200, took_s)
    before = buckets(registry)
    for reason in Rejection:
        for _ in range(1000):
            metrics.requests.done("rank", "/v1/rank", 429, 0.0002, rejection=reason)
    for status in (400, 422, 499, 500, 503, 504):
        metrics.requests.done("rank", "/v1/rank", status, 0.0002)
    metrics.requests.rejected_at_admission("rank", 500)
    metrics.requests.rejected_at_admission("rank", 7, is_promised=False)
    assert buckets(registry) == before
    for reason, num in ((Rejection.LATE, 1507), (Rejection.QUEUE, 1000), (Rejection.SHED, 1000)):
        labels = {"kind": "rank", "reason": reason.value}
        assert registry.get_sample_value("npu_gr_rejections_total", labels) == num
    for verdict, num in (("overloaded", 3500), ("over_rate", 2000), ("impossible", 7)):
        labels = {"kind": "rank", "verdict": verdict}
        assert registry.get_sample_value("npu_gr_admissions_total", labels) == num


def buckets(registry: CollectorRegistry) -> dict[str, float]:
    """Of the ranks' latency: all that a quantile is made from."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    (latency,) = (family for family in families if family.name == "npu_gr_request_duration_seconds")
    return {
        sample.labels["le"]: sample.value
        for sample in latency.samples
        if sample.name.endswith("_bucket") and sample.labels["kind"] == "rank"
    }


def test_a_reload_that_is_rejected_shows_until_one_takes_effect() -> None:
    registry = CollectorRegistry()
    now_at = 1000.0
    reloads = ReloadMetrics(Families(registry), clock=lambda: now_at)

    def seen(what: Reloaded) -> tuple[float | None, float | None]:
        names = ("successful", "success_timestamp_seconds")
        one, other = (
            registry.get_sample_value(f"npu_gr_last_reload_{name}", {"what": what.value})
            for name in names
        )
        return one, other

    assert seen(Reloaded.CONFIGURATION) == (None, None)
    reloads.loaded(Reloaded.CONFIGURATION)
    assert seen(Reloaded.CONFIGURATION) == (1, 1000)
    now_at = 2000.0
    with pytest.raises(ConfigError), reloads.attempt(Reloaded.CONFIGURATION):
        raise ConfigError("no")
    assert seen(Reloaded.CONFIGURATION) == (0, 1000)
    now_at = 3000.0
    with reloads.attempt(Reloaded.CONFIGURATION):
        pass
    assert seen(Reloaded.CONFIGURATION) == (1, 3000)
    with pytest.raises(asyncio.CancelledError), reloads.attempt(Reloaded.CONFIGURATION):
        raise asyncio.CancelledError
    assert seen(Reloaded.CONFIGURATION) == (0, 3000)
    assert seen(Reloaded.VECTORS) == (None, None)


async def test_an_exemplar_names_the_trace_and_openmetrics_carries_it() -> None:
    metrics, _ = made()
    trace = begin("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    token = CURRENT.set(trace)
    try:
        metrics.requests.done("rank", "/v1/rank", 200, 0.004)
    finally:
        CURRENT.reset(token)
    text, content_type = await expose(metrics, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert text.count(b"# EOF") == 1
    line = next(
        x
        for x in text.decode().splitlines()
        if x.startswith('npu_gr_request_duration_seconds_bucket{kind="rank",le="0.005"')
    )
    assert '# {trace_id="4bf92f3577b34da6a3ce929d0e0e4736"} 0.004' in line


async def test_the_text_made_in_parts_is_the_text() -> None:
    metrics, registry = made()
    metrics.requests.answered(RANK, answer(Outcome.HBM_HIT, Reason.NONE), 0.004)
    text, _ = await expose(metrics, "")
    whole = generate_latest(registry)
    assert text.startswith(whole)
    assert b"process_cpu_seconds_total" in text[len(whole) :]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_kind_is_measured(kind: Kind[Any, Any]) -> None:
    """Every kind has admissions, histograms with the objective as an edge, and stages."""
    threshold_s = 0.01234
    registry = CollectorRegistry()
    objectives = [Objective(kind=name, threshold_s=threshold_s) for name in KINDS]
    metrics = Metrics(registry, objectives)
    metrics.requests.done(kind.name, kind.path, kind.status, threshold_s, {kind.stages[0]: 0.001})
    metrics.requests.done(kind.name, kind.path, 429, 0.0001)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"npu_gr_{name}", labels)

    assert value("admissions_total", kind=kind.name, verdict="admitted") == 1
    assert value("admissions_total", kind=kind.name, verdict="overloaded") == 1
    assert value("request_duration_seconds_bucket", kind=kind.name, le=str(threshold_s)) == 1
    assert value("slo_requests_total", kind=kind.name, result="good") == 1
    assert value("slo_requests_total", kind=kind.name, result="failed") == 1
    assert value("slo_threshold_seconds", kind=kind.name) == threshold_s
    for label_value in kind.labels or ("",):
        label = {} if kind.label is None else {kind.label: label_value}
        assert value(f"{kind.name}_duration_seconds_bucket", le=str(threshold_s), **label) == 0
    for stage in (*kind.stages, HTTP_STAGE):
        assert value("stage_duration_seconds_count", kind=kind.name, stage=stage) is not None


def test_a_gauge_reads_the_current_value() -> None:
    metrics, registry = made()
    limit = 512
    metrics.process.observe_limits({"inflight_requests": lambda: limit})
    assert registry.get_sample_value("npu_gr_limit", {"name": "inflight_requests"}) == 512
    limit = 7
    assert registry.get_sample_value("npu_gr_limit", {"name": "inflight_requests"}) == 7


async def test_one_metric_may_be_asked_for_alone() -> None:
    metrics, _ = made()
    text, _ = await expose(metrics, "", ["npu_gr_event_loop_freezes_total"])
    assert {
        line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")
    } == {"npu_gr_event_loop_freezes_total"}
    nothing, _ = await expose(metrics, "", ["nothing_of_ours"])
    assert nothing == b""
