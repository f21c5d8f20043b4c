"""Metrics of requests: of every kind, of ranks, and of the passes on the device.

Latency histograms contain answered requests only, so that fast rejections do not improve them.
Requests that were not answered are counted by result.

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
from npu_gr.metrics.registry.families import LATENCY_S, POWERS, Families, ReadCounter, children
from npu_gr.metrics.slo import (
    ABANDONED,
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
HTTP_STAGE = "http"  # value of the label `stage` for reading, parsing and writing HTTP
WINDOWS_S = {"5m": 300.0, "1h": 3600.0}


class AdmissionResult(StrEnum):
    """The result of a request's admission; the value of the metric label `verdict`."""

    ADMITTED = "admitted"
    OVERLOADED = "overloaded"  # 429: admission control or the device's queue rejected it
    UNAVAILABLE = "unavailable"  # 503: starting, draining, or a dependency is down
    OUT_OF_TIME = "out_of_time"  # 504
    # 429 or 504, and the client's budget was too short for the objective to apply
    IMPOSSIBLE = "impossible"
    # 429: the API key was over its rate, or the tenant over its signal credit
    OVER_RATE = "over_rate"
    ABANDONED = "abandoned"  # the client disconnected
    INVALID = "invalid"  # another 4xx: an error of the client
    BROKEN = "broken"  # another 5xx: an error of the server

    @classmethod
    def of(cls, status: int) -> AdmissionResult:
        """Translate an HTTP status; 499 = the client disconnected."""
        if status < 400:
            return cls.ADMITTED
        return _RESULTS.get(status, cls.INVALID if status < 500 else cls.BROKEN)


# the client exceeded its share: its own fault, so the objective does not count it
_OVER_RATE = (Rejection.RATE, Rejection.SHARE)
_RESULTS = {
    429: AdmissionResult.OVERLOADED,
    ABANDONED: AdmissionResult.ABANDONED,
    503: AdmissionResult.UNAVAILABLE,
    504: AdmissionResult.OUT_OF_TIME,
}


class RequestMetrics:
    """Metrics of every kind in `KINDS`."""

    def __init__(
        self, make: Families, objectives: Iterable[Objective], clock: Callable[[], float]
    ) -> None:
        """Make the families.

        Args:
            make: Families of the registry to use.
            objectives: Exactly one objective for each kind.
            clock: Monotonic clock, in seconds.
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
            "admissions_total", "Requests by result of their admission.", ("kind", "verdict")
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
            "Latency of answered requests, from the last byte of the request to the answer.",
            all_edges_s,
            ("kind",),
        )
        self._request_s = {kind: answered.labels(kind) for kind in KINDS}
        results = make.counter(
            EVALUATED, "Requests by result for the objectives.", ("kind", "result")
        )
        self._results = {
            (kind, r): results.labels(kind, r.value) for kind in self.objectives for r in Result
        }
        stages = make.histogram(
            "stage_duration_seconds",
            "Time of requests in each stage.",
            all_edges_s,
            ("kind", "stage"),
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
        degraded = make.histogram(
            "degraded_read_events",
            "Newest events of the history that a degraded request read.",
            (8, 16, 32, 64, 128, 256, 512, 1024),
            ("kind",),
        )
        self._degraded_events = {kind: degraded.labels(kind) for kind in self._outcomes}
        self._promise(make)

    def _durations(self, make: Families, kind: Kind[Any, Any]) -> Callable[[str], Histogram]:
        """Make the kind's own histogram of latency in the service, without HTTP.

        All children are made at once, so that a scrape shows all of them.

        Returns:
            Function label value -> histogram.
        """
        edges_s = sorted({*LATENCY_S, self.objectives[kind.name].threshold_s})
        text = f"Latency of {kind.plural} in the service, without HTTP."
        labels = () if kind.label is None else (kind.label,)
        family = make.histogram(f"{kind.name}_duration_seconds", text, edges_s, labels)
        if kind.label is None:
            return lambda _value: family
        return {value: family.labels(value) for value in kind.labels}.__getitem__

    def _promise(self, make: Families) -> None:
        """Export the objectives and their attainment, so that one instance needs no Prometheus."""
        threshold = make.gauge(
            "slo_threshold_seconds", "Longest latency within the objective.", ("kind",)
        )
        wanted = make.gauge(
            "slo_objective_ratio", "Share of requests that must be good.", ("kind", "slo")
        )
        attained = make.gauge(
            "slo_attainment_ratio", "Share of requests that were good.", ("kind", "slo", "window")
        )
        left = make.gauge(
            "slo_budget_remaining_ratio",
            "Share of the error budget that is left since the start.",
            ("kind", "slo"),
        )
        for kind, objective in self.objectives.items():
            threshold.labels(kind).set(objective.threshold_s)
            for slo in Promise:
                wanted.labels(kind, slo.value).set(objective.ratio(slo))
                left.labels(kind, slo.value).set_function(partial(self._budget_left, kind, slo))
                for name, window_s in WINDOWS_S.items():
                    attained.labels(kind, slo.value, name).set_function(
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
            kind: Name in `KINDS`; None = a route of no kind.
            route: Pattern of the path.
            status: HTTP status; 499 = the client disconnected.
            took_s: Seconds from the last byte of the request to the answer.
            stages_s: Seconds of each stage; the rest of `took_s` is the HTTP stage.
            rejection: Reason of a rejection for load or for the key's rate.
            has_s: The client's time budget, from the last byte of the request.

        Returns:
            The result for the objective; None = the objective does not count it.
        """
        self._requests(route, status).inc()
        if kind is None:
            return None
        threshold_s = self.objectives[kind].threshold_s
        admission = AdmissionResult.of(status)
        if rejection in _OVER_RATE:
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
        is_counted = admission is not AdmissionResult.OVER_RATE
        result = evaluate(status, took_s, threshold_s, has_s) if is_counted else None
        if result is not None:
            self._results[kind, result].inc()
            self.rolling[kind].add(self._clock(), result)
        return result

    def rejected_at_admission(
        self, kind: str, num: int, reason: Rejection = Rejection.LATE, *, is_promised: bool = True
    ) -> None:
        """Count requests that admission rejected before they were parsed; they have no latency.

        Args:
            kind: Name in `KINDS`.
            num: Number of requests.
            reason: Reason of the rejection.
            is_promised: Whether the objective applies: the clients' budgets were long enough.
        """
        self._requests(KINDS[kind].path, 429).inc(num)
        self._rejections[kind, reason].inc(num)
        if reason in _OVER_RATE:
            self._admissions[kind, AdmissionResult.OVER_RATE].inc(num)
        elif is_promised:
            self._admissions[kind, AdmissionResult.OVERLOADED].inc(num)
            self._results[kind, Result.FAILED].inc(num)
            self.rolling[kind].add(self._clock(), Result.FAILED, num)
        else:
            self._admissions[kind, AdmissionResult.IMPOSSIBLE].inc(num)

    def broken(self, status: int) -> None:
        """Count a request that ended before its route was known: invalid, too slow or too large."""
        self._requests("none", status).inc()

    def served(self, kind: Kind[Any, Any], tenant: str, answer: Answer, took_s: float) -> None:
        """Count an answer to a client, as `answered` does, and by its tenant and model version."""
        self.answered(kind, answer, took_s)
        version = getattr(answer, "model_version", "")
        self.recent.add(
            tenant, version, took_s, is_good=took_s <= self.objectives[kind.name].threshold_s
        )

    def answered(self, kind: Kind[Any, Any], answer: Answer, took_s: float) -> None:
        """Count an answer of the service to a client or to a cascade."""
        self._service_s[kind.name](answer.label_value).observe(took_s)
        for stage, seconds in answer.stages_s.items():
            self._stage_s[kind.name, stage].observe(seconds)
        outcomes = self._outcomes.get(kind.name)
        if outcomes is not None:
            leased = cast("LeasedAnswer", answer)
            outcomes(leased.label_value, leased.reason).inc()
            if leased.label_value == Outcome.DEGRADED:
                self._degraded_events[kind.name].observe(leased.history.read_events)

    def over(self, kind: str, window_s: float) -> Counts:
        """Return the results of the last `window_s` seconds."""
        return self.rolling[kind].over(self._clock(), window_s)

    def good_per_s(self, kind: str) -> float:
        """Return the goodput of the last minute: requests per second answered within the SLO."""
        return self.rolling[kind].good_per_s(self._clock())

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Return the requests since the start by kind and outcome, without zeros."""
        return {kind: _sums(family) for kind, family in self._outcome_families.items()}


def _sums(family: Counter) -> dict[str, int]:
    sums = dict.fromkeys((outcome.value for outcome in Outcome), 0)
    for metric in family.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                sums[sample.labels["outcome"]] += int(sample.value)
    return {outcome: count for outcome, count in sums.items() if count}


class RankMetrics:
    """Metrics of ranks: histories, candidates and the self-check."""

    def __init__(self, make: Families) -> None:
        unknown = make.counter(
            "unknown_items_total", "Items that are not in the catalogue.", ("where",)
        )
        self._unknown = {where: unknown.labels(where) for where in ("history", "candidates")}
        missing = make.counter(
            "missing_features_total", "Features of the ranker that a rank did not have.", ("of",)
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
            "history_cut_tokens_total", "Oldest tokens that were cut from too long histories."
        )
        self._drift = make.histogram(
            "drift_ratio",
            "Self-check: difference of cached and cold scores, in standard deviations.",
            (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        )
        self._drift_failures = make.counter(
            "selfcheck_failures_total", "Self-checks with more than the allowed drift."
        )
        self._switched_off = make.gauge(
            "prefix_cache_switched_off",
            "1 while self-checks have switched the prefix cache of the ranker off.",
        )
        self._new_items = make.gauge(
            "new_items",
            "Items of the catalogue that the ranker was not trained on: scored by features and "
            "codes, or unscored.",
            ("state",),
        )
        self._row_reads: Callable[[], Mapping[str, int]] = dict
        places = {"hits": "hot", "misses": "disk", "changed": "changed", "prefetched": "prefetched"}
        ReadCounter(
            make.registry,
            "npu_gr_item_rows",
            "Distinct item rows of passes by where they were: hot, on disk, changed by a delta; "
            "and those read ahead at signals. 0 unless the checkpoint is sharded.",
            "where",
            lambda: {place: self._row_reads().get(field, 0) for field, place in places.items()},
        )
        ReadCounter(
            make.registry,
            "npu_gr_item_rows_read_bytes",
            "Bytes of item rows that were read from files.",
            "where",
            lambda: {"disk": self._row_reads().get("read_bytes", 0)},
        )
        self._spare_items = make.gauge(
            "spare_item_rows",
            "Rows of the ranker's table that new items can get: free ones, and those of items that "
            "neither the catalogue nor its version before has.",
        )

    def answered(self, answer: RankAnswer) -> None:
        """Count the tokens, candidates and missing features of a rank."""
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
        """Count the unknown items and cut tokens of a history, for a signal or a rank."""
        if report.unknown_items:
            self._unknown["history"].inc(report.unknown_items)
        if report.cut_tokens:
            self._cut_tokens.inc(report.cut_tokens)

    def observe_switch(self, read: Callable[[], bool]) -> None:
        """Export whether self-checks have switched the prefix cache off, read at each scrape."""
        self._switched_off.set_function(read)

    def observe_rows(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Export where item rows of a sharded checkpoint were read, at each scrape.

        Args:
            read: Returns the rows by `RowReads` field.
        """
        self._row_reads = read

    def observe_items(
        self, scored: Callable[[], int], unscored: Callable[[], int], spare: Callable[[], int]
    ) -> None:
        """Export the items that the served ranker was not trained on, read at each scrape.

        Args:
            scored: Function that counts the new items with a row.
            unscored: Function that counts the new items without a row.
            spare: Function that counts the rows that new items can get.
        """
        self._new_items.labels("scored").set_function(scored)
        self._new_items.labels("unscored").set_function(unscored)
        self._spare_items.set_function(spare)

    def drifted(self, ratio: float, is_failure: bool) -> None:
        """Record a self-check: the difference of cached and cold scores, in standard deviations."""
        self._drift.observe(ratio)
        self._drift_failures.inc(is_failure)


WORKS = (
    *(name for name, kind in KINDS.items() if kind.uses_device),
    "prefill",
    "copy",
    "shadow",
    "other",
)


# as `OUTCOMES` of backend/graphs.py, which imports torch
GRAPH_OUTCOMES = ("replayed", "captured", "launched", "dropped")


class EngineMetrics:
    """Metrics of the device threads."""

    def __init__(self, make: Families) -> None:
        self.queue_depth: Callable[[], int] = lambda: 0  # for the status page
        self._queue_depth = make.gauge("queue_depth", "Jobs waiting for the device.")
        self._batch = make.histogram("batch_requests", "Requests scored in one pass.", POWERS[:6])
        self._batch_rows = make.histogram(
            "batch_rows", "Rows of requests in one pass, without padding.", POWERS
        )
        self._matches = make.histogram(
            "match_pass_requests", "Matches in one pass.", (1, 2, 4, 8, 16, 32, 64)
        )
        busy = make.counter(
            "device_busy_seconds_total", "Time that the device thread was busy.", ("work",)
        )
        self._busy = {work: busy.labels(work) for work in WORKS}
        self._chosen: dict[str, str] = {}
        self._ops = make.gauge(
            "backend_op_info", "1 for the implementation of each backend op.", ("op", "impl")
        )
        self._fallbacks = make.counter(
            "backend_fallbacks_total",
            "Calls that ran as torch operators, because the op's implementation did not support "
            "them.",
            ("op",),
        )
        graphs = make.counter(
            "device_graph_calls_total",
            "Work that may run as a device graph: it was replayed, captured, launched without a "
            "graph; or a graph was dropped to make room.",
            ("outcome",),
        )
        self._graphs = {outcome: graphs.labels(outcome) for outcome in GRAPH_OUTCOMES}
        sizes = make.counter(
            "device_graph_size_total",
            "Work of device graphs: rows, or scores (rows x keys) of a ranker's passes on an NPU; "
            "those of requests, and the padding up to the size of the graph.",
            ("of", "part"),
        )
        self._sizes = {
            of: (sizes.labels(of, "used"), sizes.labels(of, "padding")) for of in ("rows", "scores")
        }

    def observe_queue(self, depth: Callable[[], int]) -> None:
        """Export the number of waiting jobs, read at each scrape."""
        self._queue_depth.set_function(depth)
        self.queue_depth = depth

    def batch_done(self, kind: str, num_requests: int, num_rows: int) -> None:
        """Record a pass of requests of one kind; a pass of matches has no rows."""
        if kind == MATCH.name:
            self._matches.observe(num_requests)
        else:
            self._batch.observe(num_requests)
            self._batch_rows.observe(num_rows)

    def worked(self, work: str, seconds: float) -> None:
        """Count seconds that a device thread was busy; `work` is one of `WORKS`."""
        self._busy[work].inc(seconds)

    def ops_chosen(self, ops: Mapping[str, str]) -> None:
        """Export the implementation of each op that has several, in place of earlier values."""
        for op, impl in ops.items():
            if self._chosen.get(op, impl) != impl:
                self._ops.labels(op, self._chosen[op]).set(0)
            self._chosen[op] = impl
            self._ops.labels(op, impl).set(1)
            self._fallbacks.labels(op)

    def graph_used(self, outcome: str) -> None:
        """Count work that may run as a device graph; `outcome` is one of `GRAPH_OUTCOMES`."""
        self._graphs[outcome].inc()

    def graph_padded(self, of: str, used: int, size: int) -> None:
        """Count the rows or scores of a call, and those of the graph that it was padded to."""
        in_use, padding = self._sizes[of]
        in_use.inc(used)
        padding.inc(size - used)

    def fell_back(self, op: str) -> None:
        """Count a call that ran as torch operators; the op's implementation does not support it."""
        self._fallbacks.labels(op).inc()
