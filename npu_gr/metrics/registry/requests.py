"""What is counted while a request is served: of every kind, of ranks, and of the passes of the device.

Latency histograms hold answered requests only: a rejection in .2 ms is no fast answer, and a panel
must not improve while requests are rejected. What was not answered is counted apart, by what became
of it.

Each latency histogram has a bucket edge on the kind's objective, so SLO attainment is an exact
ratio of counters. Exemplars of `npu_gr_request_duration_seconds` name the trace of a request in
that bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, cast

from prometheus_client import Counter, Histogram

from npu_gr.core.errors import Rejection
from npu_gr.core.feature_schema.schema import OFS
from npu_gr.core.history import HistoryReport
from npu_gr.core.kinds import KINDS, MATCH, Kind
from npu_gr.core.logs import exemplar
from npu_gr.core.request import Answer, LeasedAnswer, Outcome, RankAnswer
from npu_gr.metrics.registry.families import LATENCY_S, POWERS, Families, children
from npu_gr.metrics.slo import (
    Counts,
    Objective,
    Promise,
    RecentAnswers,
    Result,
    Rolling,
    evaluate,
    is_promised,
)

EVALUATED = "slo_requests_total"
HTTP_STAGE = "http"  # the stage that HTTP adds: reading, parsing and writing
WINDOWS_S = {"5m": 300.0, "1h": 3600.0}
ABANDONED = 499  # the status of a request whose caller hung up, as nginx counts them


class AdmissionResult(StrEnum):
    """What became of a request at the door; the value of the `verdict` metric label."""

    ADMITTED = "admitted"
    OVERLOADED = "overloaded"  # 429: admission control or the device's queue rejected it
    UNAVAILABLE = "unavailable"  # 503: starting, draining, or a dependency is down
    OUT_OF_TIME = "out_of_time"  # 504
    # 429 or 504, and its caller granted less time than anything is promised for
    IMPOSSIBLE = "impossible"
    # 429: its API key was over its rate, or its tenant over the signals that it had earned
    OVER_RATE = "over_rate"
    ABANDONED = "abandoned"  # the caller hung up
    INVALID = "invalid"  # another 4xx: the caller's fault
    BROKEN = "broken"  # another 5xx: ours

    @classmethod
    def of(cls, status: int) -> AdmissionResult:
        """Translate an HTTP status; 499 means that the caller hung up."""
        if status < 400:
            return cls.ADMITTED
        return _RESULTS.get(status, cls.INVALID if status < 500 else cls.BROKEN)


# the caller sends more than is its due, so nobody failed it
_CALLERS = (Rejection.RATE, Rejection.SHARE)
_RESULTS = {
    429: AdmissionResult.OVERLOADED,
    ABANDONED: AdmissionResult.ABANDONED,
    503: AdmissionResult.UNAVAILABLE,
    504: AdmissionResult.OUT_OF_TIME,
}


class RequestMetrics:
    """Metrics that each kind of the table has."""

    def __init__(
        self, make: Families, objectives: Iterable[Objective], clock: Callable[[], float]
    ) -> None:
        """Make the families.

        Args:
            make: on which registry.
            objectives: exactly one for each kind.
            clock: seconds that never go back.
        """
        self._clock = clock
        self.objectives = {objective.kind: objective for objective in objectives}
        self.rolling = {kind: Rolling() for kind in self.objectives}
        self.recent = RecentAnswers(clock)
        all_edges_s = sorted({*LATENCY_S, *(o.threshold_s for o in self.objectives.values())})
        self.in_flight = make.gauge("requests_in_flight", "HTTP requests being served now.")
        self._requests = children(
            make.counter("requests_total", "HTTP requests by route and status.", ("route", "code"))
        )
        admissions = make.counter(
            "admissions_total", "Requests by what became of them at the door.", ("kind", "verdict")
        )
        self._admissions = {
            (kind, v): admissions.labels(kind, v.value) for kind in KINDS for v in AdmissionResult
        }
        rejections = make.counter(
            "rejections_total", "Requests rejected for load (429), by reason.", ("kind", "reason")
        )
        self._rejections = {
            (kind, r): rejections.labels(kind, r.value) for kind in KINDS for r in Rejection
        }
        answered = make.histogram(
            "request_duration_seconds",
            "Answered requests, from the last byte to the answer.",
            all_edges_s,
            ("kind",),
        )
        self._request_s = {kind: answered.labels(kind) for kind in KINDS}
        results = make.counter(
            EVALUATED, "Requests as the objectives count them.", ("kind", "result")
        )
        self._results = {
            (kind, r): results.labels(kind, r.value) for kind in self.objectives for r in Result
        }
        stages = make.histogram(
            "stage_duration_seconds", "Time by stage.", all_edges_s, ("kind", "stage")
        )
        self._stage_s = {
            (kind.name, stage): stages.labels(kind.name, stage)
            for kind in KINDS.values()
            for stage in (*kind.stages, HTTP_STAGE)
        }
        self._service_s = {name: self._durations(make, kind) for name, kind in KINDS.items()}
        self._outcome_families = {
            kind.name: make.counter(
                f"{kind.name}_outcomes_total",
                f"{kind.plural.title()} by how they got their prefix KV.",
                ("outcome", "reason"),
            )
            for kind in KINDS.values()
            if kind.leases_prefix
        }
        self._outcomes = {name: children(family) for name, family in self._outcome_families.items()}
        self._promise(make)

    def _durations(self, make: Families, kind: Kind[Any, Any]) -> Callable[[str], Histogram]:
        """The kind's own histogram, behind the door.

        Made whole at once, so that a scrape shows every child.
        """
        edges_s = sorted({*LATENCY_S, self.objectives[kind.name].threshold_s})
        text = f"{kind.title}, end to end in the service."
        labels = () if kind.label is None else (kind.label,)
        family = make.histogram(f"{kind.name}_duration_seconds", text, edges_s, labels)
        if kind.label is None:
            return lambda _value: family
        return {value: family.labels(value) for value in kind.labels}.__getitem__

    def _promise(self, make: Families) -> None:
        """Export objectives and how well they are kept.

        Computed here, so one instance needs no Prometheus.
        """
        threshold = make.gauge(
            "slo_threshold_seconds", "A request is in time within this.", ("kind",)
        )
        wanted = make.gauge(
            "slo_objective_ratio", "Share of requests that must keep the promise.", ("kind", "slo")
        )
        kept = make.gauge(
            "slo_attainment_ratio", "Share of requests that kept it.", ("kind", "slo", "window")
        )
        left = make.gauge(
            "slo_budget_remaining_ratio", "Error budget left since the start.", ("kind", "slo")
        )
        for kind, objective in self.objectives.items():
            threshold.labels(kind).set(objective.threshold_s)
            for slo in Promise:
                wanted.labels(kind, slo.value).set(objective.ratio(slo))
                left.labels(kind, slo.value).set_function(partial(self._budget_left, kind, slo))
                for name, window_s in WINDOWS_S.items():
                    kept.labels(kind, slo.value, name).set_function(
                        partial(self._attained, kind, slo, window_s)
                    )

    def _budget_left(self, kind: str, slo: Promise) -> float:
        return self.rolling[kind].total.budget_remaining(slo, self.objectives[kind].ratio(slo))

    def _attained(self, kind: str, slo: Promise, window_s: float) -> float:
        return self.over(kind, window_s).attainment(slo)

    def done(
        self,
        kind: str | None,
        route: str,
        status: int,
        took_s: float,
        stages_s: Mapping[str, float] | None = None,
        rejection: Rejection | None = None,
        has_s: float = float("inf"),
    ) -> Result | None:
        """Count an HTTP request that has ended.

        Args:
            kind: a name of `KINDS`; None = a route that the table does not have.
            route: the path's pattern.
            status: of HTTP; 499 = the caller hung up.
            took_s: from the last byte to the answer.
            stages_s: of the answer; what they leave of `took_s` is the door's.
            rejection: why it was rejected for load, or for its key's rate.
            has_s: what the caller granted, from the last byte on.

        Returns:
            What it counts as for the objective; None = nothing.
        """
        self._requests(route, status).inc()
        if kind is None:
            return None
        threshold_s = self.objectives[kind].threshold_s
        admission = AdmissionResult.of(status)
        if rejection in _CALLERS:
            admission = AdmissionResult.OVER_RATE
        elif status in (429, 504) and not is_promised(has_s, threshold_s):
            admission = AdmissionResult.IMPOSSIBLE
        self._admissions[kind, admission].inc()
        if admission is AdmissionResult.ADMITTED:
            self._request_s[kind].observe(took_s, exemplar())
        if rejection is not None:
            self._rejections[kind, rejection].inc()
        if stages_s:
            self._stage_s[kind, HTTP_STAGE].observe(max(took_s - sum(stages_s.values()), 0.0))
        is_evaluated = admission not in (AdmissionResult.ABANDONED, AdmissionResult.OVER_RATE)
        result = evaluate(status, took_s, threshold_s, has_s) if is_evaluated else None
        if result is not None:
            self._results[kind, result].inc()
            self.rolling[kind].add(self._clock(), result)
        return result

    def rejected_at_admission(
        self, kind: str, num: int, reason: Rejection = Rejection.LATE, *, is_promised: bool = True
    ) -> None:
        """Count requests that were rejected before they were parsed.

        They have no latency: nothing was answered.

        Args:
            kind: a name of `KINDS`.
            num: how many since the last call.
            reason: the door's.
            is_promised: whether their callers granted the time that the objective is about.
        """
        self._requests(KINDS[kind].path, 429).inc(num)
        self._rejections[kind, reason].inc(num)
        if reason in _CALLERS:
            self._admissions[kind, AdmissionResult.OVER_RATE].inc(num)
        elif is_promised:
            self._admissions[kind, AdmissionResult.OVERLOADED].inc(num)
            self._results[kind, Result.FAILED].inc(num)
            self.rolling[kind].add(self._clock(), Result.FAILED, num)
        else:
            self._admissions[kind, AdmissionResult.IMPOSSIBLE].inc(num)

    def abandoned(self, kind: str, num: int = 1) -> None:
        """Count requests whose callers hung up before they were parsed.

        Args:
            kind: a name of `KINDS`.
            num: how many since the last call.
        """
        self._requests(KINDS[kind].path, ABANDONED).inc(num)
        self._admissions[kind, AdmissionResult.ABANDONED].inc(num)

    def broken(self, status: int) -> None:
        """Count a request that ended before its route was known: it was no HTTP, too slow, or too large."""
        self._requests("none", status).inc()

    def served(self, kind: Kind[Any, Any], tenant: str, answer: Answer, took_s: float) -> None:
        """Count an answer that a caller asked for, as `answered`, and by who asked and what answered."""
        self.answered(kind, answer, took_s)
        version = getattr(answer, "model_version", "")
        self.recent.add(
            tenant, version, took_s, is_good=took_s <= self.objectives[kind.name].threshold_s
        )

    def answered(self, kind: Kind[Any, Any], answer: Answer, took_s: float) -> None:
        """Count an answer of the service, whether HTTP or a cascade asked for it."""
        self._service_s[kind.name](answer.label_value).observe(took_s)
        for stage, seconds in answer.stages_s.items():
            self._stage_s[kind.name, stage].observe(seconds)
        outcomes = self._outcomes.get(kind.name)
        if outcomes is not None:
            leased = cast("LeasedAnswer", answer)
            outcomes(leased.label_value, leased.reason).inc()

    def over(self, kind: str, window_s: float) -> Counts:
        """Results of the last `window_s` seconds."""
        return self.rolling[kind].over(self._clock(), window_s)

    def good_per_s(self, kind: str) -> float:
        """Requests answered in time, a second, in the last minute."""
        return self.rolling[kind].good_per_s(self._clock())

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Count requests since the start: kind -> outcome -> requests.

        What never happened is left out.
        """
        return {kind: _sums(family) for kind, family in self._outcome_families.items()}


def _sums(family: Counter) -> dict[str, int]:
    sums = dict.fromkeys((outcome.value for outcome in Outcome), 0)
    for metric in family.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                sums[sample.labels["outcome"]] += int(sample.value)
    return {outcome: count for outcome, count in sums.items() if count}


class RankMetrics:
    """Histories, candidates and the self-check of ranks."""

    def __init__(self, make: Families) -> None:
        unknown = make.counter("unknown_items_total", "Items that the catalogue lacks.", ("where",))
        self._unknown = {where: unknown.labels(where) for where in ("history", "candidates")}
        missing = make.counter(
            "missing_features_total", "Features of the ranker that a rank had nowhere.", ("of",)
        )
        self._missing: dict[str, Counter] = {of: missing.labels(of) for of in OFS if of != "item"}
        self._candidates = make.histogram(
            "rank_candidates", "Candidates of a rank.", (1, 10, 50, 100, 200, 500, 1000, 5000)
        )
        self._prefix_tokens = make.counter(
            "prefix_tokens_total", "History tokens of ranks read from cached KV."
        )
        self._history_tokens = make.counter("history_tokens_total", "History tokens of ranks.")
        self._cut_tokens = make.counter(
            "history_cut_tokens_total", "Oldest tokens dropped by the length rule."
        )
        self._drift = make.histogram(
            "drift_ratio",
            "Self-check: difference of cached from cold scores over their standard deviation.",
            (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        )
        self._drift_failures = make.counter(
            "selfcheck_failures_total", "Self-checks beyond the allowed drift."
        )
        self._new_items = make.gauge(
            "new_items",
            "Items of the catalogue that the ranker was not trained with: scored by features and "
            "codes, or unscored.",
            ("state",),
        )
        self._spare_items = make.gauge(
            "spare_item_rows", "Rows of the ranker's table that are left for new items."
        )

    def answered(self, answer: RankAnswer) -> None:
        """Count what a rank read and scored."""
        self._prefix_tokens.inc(answer.prefix_tokens)
        self._history_tokens.inc(answer.history.num_tokens)
        if answer.unknown_candidates:
            self._unknown["candidates"].inc(answer.unknown_candidates)
        for name in answer.missing_features:
            self._missing[name.partition(".")[0]].inc()
        for scores in answer.scores.values():
            self._candidates.observe(len(scores))
            break  # every task scores the same candidates

    def history_read(self, report: HistoryReport) -> None:
        """Count what was left out of a history that was tokenized, for a signal or a rank."""
        if report.unknown_items:
            self._unknown["history"].inc(report.unknown_items)
        if report.cut_tokens:
            self._cut_tokens.inc(report.cut_tokens)

    def observe_items(
        self, scored: Callable[[], int], unscored: Callable[[], int], spare: Callable[[], int]
    ) -> None:
        """Export how the ranker in service stands to items that it was not trained with, read at each scrape.

        Args:
            scored: new items that have a row.
            unscored: those that have none.
            spare: rows that are left.
        """
        self._new_items.labels("scored").set_function(scored)
        self._new_items.labels("unscored").set_function(unscored)
        self._spare_items.set_function(spare)

    def drifted(self, ratio: float, is_failure: bool) -> None:
        """Record a self-check: how far cached scores are from cold ones, in standard deviations."""
        self._drift.observe(ratio)
        self._drift_failures.inc(is_failure)


WORKS = (*(name for name, kind in KINDS.items() if kind.uses_device), "prefill", "copy", "other")


class EngineMetrics:
    """Reported by the device threads."""

    def __init__(self, make: Families) -> None:
        self.queue_depth: Callable[[], int] = lambda: 0  # for the status page
        self._queue_depth = make.gauge("queue_depth", "Jobs waiting for the device.")
        self._batch = make.histogram("batch_requests", "Requests scored in one pass.", POWERS[:6])
        self._batch_rows = make.histogram(
            "batch_rows", "Rows in one pass; passes are ragged, no row is padding.", POWERS
        )
        self._matches = make.histogram(
            "match_pass_requests", "Matches in one pass.", (1, 2, 4, 8, 16, 32, 64)
        )
        busy = make.counter(
            "device_busy_seconds_total", "Time the device thread worked.", ("work",)
        )
        self._busy = {work: busy.labels(work) for work in WORKS}
        self._chosen: dict[str, str] = {}
        self._ops = make.gauge(
            "backend_op_info", "1 for what runs an op of the backend.", ("op", "impl")
        )
        self._fallbacks = make.counter(
            "backend_fallbacks_total", "Calls that an op's implementation did not take.", ("op",)
        )

    def observe_queue(self, depth: Callable[[], int]) -> None:
        """Export how many jobs wait, read at each scrape."""
        self._queue_depth.set_function(depth)
        self.queue_depth = depth

    def batch_done(self, kind: str, num_requests: int, num_rows: int) -> None:
        """Record a pass that requests of a kind shared.

        A pass of matches goes over items, and has no rows.
        """
        if kind == MATCH.name:
            self._matches.observe(num_requests)
        else:
            self._batch.observe(num_requests)
            self._batch_rows.observe(num_rows)

    def worked(self, work: str, seconds: float) -> None:
        """Count seconds that a device thread was busy; `work` is one of `WORKS`."""
        self._busy[work].inc(seconds)

    def ops_chosen(self, ops: Mapping[str, str]) -> None:
        """Export what runs each operator that has a choice, in place of what was exported before."""
        for op, impl in ops.items():
            if self._chosen.get(op, impl) != impl:
                self._ops.labels(op, self._chosen[op]).set(0)
            self._chosen[op] = impl
            self._ops.labels(op, impl).set(1)
            self._fallbacks.labels(op)

    def fell_back(self, op: str) -> None:
        """Count a call that ran as torch operators because the op's implementation did not take it."""
        self._fallbacks.labels(op).inc()
