"""Every metric in one place: name, unit, help, labels, buckets. A test builds as many as it likes.

Labels are bounded enums, never a user or an item. Latency histograms have a bucket edge on each objective, so SLO
attainment is an exact ratio of counters. Label children are made once: a `.labels()` call costs more than the count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from npu_gr import __version__
from npu_gr.request import (
    Basis,
    GenerateAnswer,
    HistoryReport,
    MatchAnswer,
    ModelInfo,
    Outcome,
    RankAnswer,
    Reason,
    Verdict,
)

LATENCY_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
LAG_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
STAGES = ("history", "lease", "queue", "device")


class Tier(Protocol):
    """What a memory tier tells about its bytes."""

    @property
    def budget_bytes(self) -> int:
        """All of them."""
        ...

    @property
    def free_bytes(self) -> int:
        """Held by nobody."""
        ...

    @property
    def live_bytes(self) -> int:
        """Held."""
        ...

    def __len__(self) -> int: ...


class Metrics:
    """The catalogue on one registry.

    Args:
        registry: where `/metrics` reads.
        slo_s: latency objective in seconds of "rank" and "signal".
    """

    def __init__(self, registry: CollectorRegistry, slo_s: Mapping[str, float]) -> None:
        self.registry = registry
        rank_s = sorted({*LATENCY_S, slo_s["rank"]})
        signal_s = sorted({*LATENCY_S, slo_s["signal"]})

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"npu_gr_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"npu_gr_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, buckets: list[float] | tuple[float, ...], labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(f"npu_gr_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests_total", "HTTP requests by route and status.", ("route", "code"))
        self.in_flight = gauge("requests_in_flight", "HTTP requests being served now.")
        ranks = histogram("rank_duration_seconds", "Rank, end to end in the service.", rank_s, ("outcome",))
        self._rank_s = {outcome: ranks.labels(outcome.value) for outcome in Outcome}
        self.signal_s = histogram("signal_duration_seconds", "Signal, until its verdict.", signal_s)
        generates = histogram("generate_duration_seconds", "Generate, end to end.", LATENCY_S, ("outcome",))
        self._generate_s = {outcome: generates.labels(outcome.value) for outcome in Outcome}
        self._generated = counter("generated_items_total", "Items that generate answered.")
        matches = histogram("match_duration_seconds", "Match, end to end.", LATENCY_S, ("basis",))
        self._match_s = {basis: matches.labels(basis.value) for basis in Basis}
        self._matched = counter("matched_items_total", "Items that match answered.")
        self._match_pass = histogram("match_pass_requests", "Matches in one pass.", (1, 2, 4, 8, 16, 32, 64))
        self._exhausted = counter("generate_exhausted_total", "Generates with fewer items than were asked for.")
        outcomes = counter("rank_outcomes_total", "Ranks by how they got their prefix.", ("outcome", "reason"))
        self._outcomes = {(o, r): outcomes.labels(o.value, r.value) for o in Outcome for r in Reason}
        verdicts = counter("signal_verdicts_total", "Signals by what the trigger said.", ("verdict",))
        self._verdicts = {verdict: verdicts.labels(verdict.value) for verdict in Verdict}
        stages = histogram("stage_duration_seconds", "Time of a rank by stage.", rank_s, ("stage",))
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._queue_depth = gauge("queue_depth", "Jobs waiting for the device.")
        self._batch = histogram("batch_requests", "Requests scored in one pass.", (1, 2, 4, 8, 16, 32))
        self._kv = gauge("kv_bytes", "Bytes of a memory tier by state.", ("tier", "state"))
        self._kv_budget = gauge("kv_budget_bytes", "Bytes a memory tier may hold.", ("tier",))
        self._kv_entries = gauge("kv_entries", "Prefixes that a memory tier holds.", ("tier",))
        self._wasted = counter("prefill_wasted_total", "Prefixes evicted before any rank used them.")
        unknown = counter("unknown_items_total", "Items that the catalogue lacks.", ("where",))
        self._unknown = {where: unknown.labels(where) for where in ("history", "candidates")}
        self._prefix_tokens = counter("prefix_tokens_total", "History tokens of ranks read from cached KV.")
        self._history_tokens = counter("history_tokens_total", "History tokens of ranks.")
        self._cut_tokens = counter("history_cut_tokens_total", "Oldest tokens dropped by the length rule.")
        self._drift = histogram(
            "drift_ratio",
            "Self-check: difference of cached from cold scores over their standard deviation.",
            (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        )
        self._drift_failures = counter("selfcheck_failures_total", "Self-checks beyond the allowed drift.")
        errors = counter("relay_errors_total", "Failures that a rank did without.", ("where",))
        self._errors = {where: errors.labels(where) for where in ("prefill", "reload", "spill", "read")}
        recorded = counter("recorded_total", "Requests offered to the recorder.", ("result",))
        self._recorded = {result: recorded.labels(result) for result in ("written", "dropped", "failed")}
        self.loop_lag_s = histogram("event_loop_lag_seconds", "Delay of a callback on the event loop.", LAG_S)
        self._build = Info("npu_gr_build", "What is running.", registry=registry)

    def signal_decided(self, verdict: Verdict, duration_s: float) -> None:
        """A signal was answered."""
        self._verdicts[verdict].inc()
        self.signal_s.observe(duration_s)

    def rank_done(self, answer: RankAnswer, duration_s: float) -> None:
        """A rank was answered."""
        self._rank_s[answer.outcome].observe(duration_s)
        self._outcomes[answer.outcome, answer.reason].inc()
        for stage, seconds in answer.stages_s.items():
            self._stages[stage].observe(seconds)
        self._prefix_tokens.inc(answer.prefix_tokens)
        self._history_tokens.inc(answer.history.num_tokens)
        self._unknown["candidates"].inc(answer.unknown_candidates)

    def generate_done(self, answer: GenerateAnswer, duration_s: float) -> None:
        """A generate was answered."""
        self._generate_s[answer.outcome].observe(duration_s)
        self._generated.inc(len(answer.item_ids))
        self._exhausted.inc(answer.status == "exhausted")

    def match_done(self, answer: MatchAnswer, duration_s: float) -> None:
        """A match was answered."""
        self._match_s[answer.basis].observe(duration_s)
        self._matched.inc(len(answer.item_ids))

    def match_pass_done(self, num_requests: int) -> None:
        """That many matches shared a pass over the items."""
        self._match_pass.observe(num_requests)

    def history_read(self, report: HistoryReport) -> None:
        """A history was tokenized, for a signal or a rank."""
        self._unknown["history"].inc(report.unknown_items)
        self._cut_tokens.inc(report.cut_tokens)

    def drift(self, ratio: float, failed: bool) -> None:
        """A self-check compared cached with cold scores."""
        self._drift.observe(ratio)
        self._drift_failures.inc(failed)

    def relay_error(self, where: str) -> None:
        """A rank did without something: prefill, reload, spill or read failed."""
        self._errors[where].inc()

    def recorded(self, result: str, num: int) -> None:
        """The recorder has written, dropped or failed to write so many requests. From any thread."""
        self._recorded[result].inc(num)

    def batch_done(self, num_requests: int) -> None:
        """The device scored that many requests in one pass."""
        self._batch.observe(num_requests)

    def prefill_wasted(self) -> None:
        """A prefix was produced for nobody."""
        self._wasted.inc()

    def observe_queue(self, depth: Callable[[], int]) -> None:
        """Read the queue's depth at each scrape."""
        self._queue_depth.set_function(depth)

    def observe_tier(self, name: str, tier: Tier, states: Mapping[str, Callable[[], int]]) -> None:
        """Read a tier's bytes by state, its budget and its entries at each scrape."""
        self._kv_budget.labels(name).set(tier.budget_bytes)
        self._kv_entries.labels(name).set_function(lambda: len(tier))
        for state, read in states.items():
            self._kv.labels(name, state).set_function(read)

    def build_info(self, model: ModelInfo) -> None:
        """Say what is running."""
        self._build.info(
            {
                "version": __version__,
                "model": model.name,
                "model_version": model.version,
                "device": model.device,
                "native": str(model.kernels != "torch").lower(),
                "kernels": model.kernels,  # torch, or the instruction set of the native ones
            }
        )
