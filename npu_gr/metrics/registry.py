"""Every metric in one place: name, unit, help, labels, buckets. A test builds as many as it likes.

Labels are bounded enums, never a user or an item. Latency histograms have a bucket edge on each objective, so SLO
attainment is an exact ratio of counters; their exemplars name the trace of a request in that bucket. Label children
are made once: a `.labels()` call costs more than the count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache, partial
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.process_collector import ProcessCollector

from npu_gr import __version__
from npu_gr.core.kinds import KINDS
from npu_gr.core.request import (
    Basis,
    CatalogueInfo,
    GenerateAnswer,
    HistoryReport,
    MatchAnswer,
    ModelInfo,
    Outcome,
    RankAnswer,
    RecommendAnswer,
    Verdict,
)
from npu_gr.metrics.slo import Counts, Objective, Promise, Result, Rolling, judge
from npu_gr.metrics.trace import exemplar

M = TypeVar("M", bound=MetricWrapperBase)

LATENCY_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
LAG_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
POWERS = tuple(2**n for n in range(13))
STAGES = ("history", "lease", "queue", "device", "door")  # door: reading, parsing and writing
WORKS = ("rank", "prefill", "generate", "copy", "other")
WINDOWS_S = {"5m": 300.0, "1h": 3600.0}


class Admission(StrEnum):
    """How a request got through the door; the value of the `verdict` metric label."""

    ADMITTED = "admitted"
    OVERLOADED = "overloaded"  # 429: the limiter or the device's queue is full
    UNAVAILABLE = "unavailable"  # 503: starting, draining, or a dependency is down
    OUT_OF_TIME = "out_of_time"  # 504
    ABANDONED = "abandoned"  # the caller hung up
    INVALID = "invalid"  # another 4xx: the caller's fault
    BROKEN = "broken"  # another 5xx: ours

    @classmethod
    def of(cls, status: int) -> Admission:
        """Of an HTTP status; 499 is the caller's hanging up."""
        if status < 400:
            return cls.ADMITTED
        return _ADMISSIONS.get(status, cls.INVALID if status < 500 else cls.BROKEN)


_ADMISSIONS = {
    429: Admission.OVERLOADED,
    499: Admission.ABANDONED,
    503: Admission.UNAVAILABLE,
    504: Admission.OUT_OF_TIME,
}


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
        objectives: of each kind of request, one each.
        clock: seconds that never go back.
    """

    def __init__(
        self, registry: CollectorRegistry, objectives: Iterable[Objective], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry, self._clock = registry, clock
        self.process = ProcessCollector(registry=CollectorRegistry())  # apart: it reads files when it is asked
        self.objectives = {objective.kind: objective for objective in objectives}
        self.rolling = {kind: Rolling() for kind in self.objectives}
        self.tiers: dict[str, dict[str, Callable[[], int]]] = {}
        self._before_scrape: list[Callable[[], None]] = []
        self._queue: dict[str, Callable[[], float]] = {}
        edges_s = {kind: sorted({*LATENCY_S, o.threshold_s}) for kind, o in self.objectives.items()}
        all_edges_s = sorted({*LATENCY_S, *(o.threshold_s for o in self.objectives.values())})

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"npu_gr_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"npu_gr_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"npu_gr_{name}", text, labels, buckets=tuple(buckets), registry=registry)

        # ---- the door and the objectives
        self._requests = _cached(counter("requests_total", "HTTP requests by route and status.", ("route", "code")))
        self.in_flight = gauge("requests_in_flight", "HTTP requests being served now.")
        self._admissions = _cached(
            counter("admissions_total", "Requests by how they got through the door.", ("kind", "verdict"))
        )
        self._request_s = _cached(
            histogram("request_duration_seconds", "From the first byte to the answer.", all_edges_s, ("kind",))
        )
        results = counter("slo_requests_total", "Requests as the objectives count them.", ("kind", "result"))
        self._results = {(k, r): results.labels(k, r.value) for k in self.objectives for r in Result}
        self._promise(gauge)

        # ---- rank, signal, generate: in the service, behind the door
        ranks = histogram("rank_duration_seconds", "Rank, end to end in the service.", edges_s["rank"], ("outcome",))
        self._rank_s = {outcome: ranks.labels(outcome.value) for outcome in Outcome}
        self._signal_s = histogram("signal_duration_seconds", "Signal, until its verdict.", edges_s["signal"])
        generates = histogram("generate_duration_seconds", "Generate, end to end.", edges_s["generate"], ("outcome",))
        self._generate_s = {outcome: generates.labels(outcome.value) for outcome in Outcome}
        matches = histogram("match_duration_seconds", "Match, end to end.", LATENCY_S, ("basis",))
        self._match_s = {basis: matches.labels(basis.value) for basis in Basis}
        self._matched = counter("matched_items_total", "Items that match answered.")
        self._match_pass = histogram("match_pass_requests", "Matches in one pass.", (1, 2, 4, 8, 16, 32, 64))
        stages = histogram("stage_duration_seconds", "Time by stage.", all_edges_s, ("kind", "stage"))
        self._stages = {(k.name, s): stages.labels(k.name, s) for k in KINDS.values() for s in (*k.stages, "door")}
        recommends = histogram(
            "recommend_duration_seconds", "Recommend, end to end in the service.", edges_s["recommend"], ("degraded",)
        )
        self._recommend_s = {degraded: recommends.labels(str(degraded).lower()) for degraded in (False, True)}
        self._recommend_stages = _cached(
            counter("recommend_stages_total", "Stages of recommends by how they ended.", ("stage", "result"))
        )
        self._recommend_stage_s = _cached(
            histogram("recommend_stage_duration_seconds", "One stage of a recommend.", LATENCY_S, ("stage",))
        )
        self._recommended = counter("recommended_items_total", "Items that recommend answered.")
        self._outcome_counters = {
            kind: counter(f"{kind}_outcomes_total", text, ("outcome", "reason"))
            for kind, text in (
                ("rank", "Ranks by how they got their prefix."),
                ("generate", "Generates by how they got their prompt."),
            )
        }
        self._outcomes = {kind: _cached(family) for kind, family in self._outcome_counters.items()}
        verdicts = counter("signal_verdicts_total", "Signals by what the trigger said.", ("verdict",))
        self._verdicts = {verdict: verdicts.labels(verdict.value) for verdict in Verdict}
        unknown = counter("unknown_items_total", "Items that the catalogue lacks.", ("where",))
        self._unknown = {where: unknown.labels(where) for where in ("history", "candidates")}
        self._candidates = histogram("rank_candidates", "Candidates of a rank.", (1, 10, 50, 100, 200, 500, 1000, 5000))
        self._prefix_tokens = counter("prefix_tokens_total", "History tokens of ranks read from cached KV.")
        self._history_tokens = counter("history_tokens_total", "History tokens of ranks.")
        self._cut_tokens = counter("history_cut_tokens_total", "Oldest tokens dropped by the length rule.")
        self._drift = histogram(
            "drift_ratio",
            "Self-check: difference of cached from cold scores over their standard deviation.",
            (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        )
        self._drift_failures = counter("selfcheck_failures_total", "Self-checks beyond the allowed drift.")

        # ---- the relay and the memory tiers
        self._kv = gauge("kv_bytes", "Bytes of a memory tier by state.", ("tier", "state"))
        self._kv_budget = gauge("kv_budget_bytes", "Bytes a memory tier may hold.", ("tier",))
        self._kv_entries = gauge("kv_entries", "Prefixes that a memory tier holds.", ("tier",))
        self._producers = gauge("producers_in_flight", "Prefixes on their way into a tier.", ("kind", "work"))
        self._t_life = gauge("t_life_seconds", "How long a produced prefix waits for its rank: T_life.")
        self._t_life_p99 = gauge("t_life_p99_seconds", "From a signal to the end of its rank, measured.", ("kind",))
        self._prefill_rate = gauge("admitted_prefills_per_second", "What the trigger admits.", ("kind",))
        self._brownout = gauge("brownout_level", "What is given up under overload: 0 nothing, 4 most.", ("kind",))
        self._waited_s = histogram("prefix_wait_seconds", "From a prefix's production to its first use.", WAIT_S)
        wasted = counter("prefill_wasted_total", "Prefixes evicted before any request used them.", ("kind",))
        self._wasted = {kind: wasted.labels(kind) for kind in ("rank", "generate")}
        errors = counter("relay_errors_total", "Failures that a request did without.", ("where",))
        self._errors = {where: errors.labels(where) for where in ("prefill", "reload", "spill", "read")}
        recorded = counter("recorded_total", "Requests offered to the recorder.", ("result",))
        self._recorded = {result: recorded.labels(result) for result in ("written", "dropped", "failed")}
        directions = ("reload", "spill")
        copied = counter("copy_bytes_total", "Bytes copied between the tiers.", ("direction",))
        self._copied = {direction: copied.labels(direction) for direction in directions}
        copies = histogram("copy_duration_seconds", "Copies between the tiers, on the device.", LAG_S, ("direction",))
        self._copy_s = {direction: copies.labels(direction) for direction in directions}
        queued = histogram("copy_queue_seconds", "Copies waiting for the device.", LATENCY_S, ("direction",))
        self._copy_queue_s = {direction: queued.labels(direction) for direction in directions}

        # ---- the engine
        self._queue_depth = gauge("queue_depth", "Jobs waiting for the device.")
        self._batch = histogram("batch_requests", "Requests scored in one pass.", POWERS[:6])
        self._batch_rows = histogram("batch_rows", "Rows in one pass; passes are ragged, no row is padding.", POWERS)
        busy = counter("device_busy_seconds_total", "Time the device thread worked.", ("work",))
        self._busy = {work: busy.labels(work) for work in WORKS}

        self._ops = gauge("backend_op_info", "1 for what runs an op of the backend.", ("op", "impl"))
        self._fallbacks = counter("backend_fallbacks_total", "Calls that an op's implementation did not take.", ("op",))

        # ---- beams and the catalogue of items
        self._generated = counter("generated_items_total", "Items that generate answered.")
        self._exhausted = counter("generate_exhausted_total", "Generates with fewer items than were asked for.")
        self._beams = histogram("generate_beam_width", "Beams of a search.", POWERS[:11])
        self._catalogue = gauge("catalogue_info", "1 for the version of the catalogue that is served.", ("version",))
        self._catalogue_items = gauge("catalogue_items", "Items of the catalogue that can be generated.")
        self._catalogue_bytes = gauge("catalogue_bytes", "Host memory of the catalogue's tables.")
        self._catalogue_age = gauge("catalogue_age_seconds", "Since this version was published.")
        self._paths = gauge("catalogue_valid_paths", "Semantic-ID paths of that many codes that lead on.", ("level",))

        # ---- the process
        self._lag_s = histogram("event_loop_lag_seconds", "Delay of a callback on the event loop.", LAG_S)
        pauses = histogram("gc_pause_seconds", "Pauses of the garbage collector.", LAG_S, ("generation",))
        self._gc_s = [pauses.labels(str(generation)) for generation in range(3)]
        self._limits = gauge("limit", "Effective limits: requests, jobs, rows, tokens, bytes, seconds.", ("name",))
        self._ready = gauge("ready", "1 while new work is welcome.")
        self._build = Info("npu_gr_build", "What is running.", registry=registry)

    def _promise(self, gauge: Callable[[str, str, tuple[str, ...]], Gauge]) -> None:
        """What is promised, and how well it is kept, computed here: a look at one instance needs no Prometheus."""
        threshold = gauge("slo_threshold_seconds", "A request is in time within this.", ("kind",))
        wanted = gauge("slo_objective_ratio", "Share of requests that must keep the promise.", ("kind", "slo"))
        kept = gauge("slo_attainment_ratio", "Share of requests that kept it.", ("kind", "slo", "window"))
        left = gauge("slo_budget_remaining_ratio", "Error budget left since the start.", ("kind", "slo"))
        for kind, objective in self.objectives.items():
            threshold.labels(kind).set(objective.threshold_s)
            for slo in Promise:
                wanted.labels(kind, slo.value).set(objective.ratio(slo))
                left.labels(kind, slo.value).set_function(partial(self._budget_left, kind, slo))
                for name, window_s in WINDOWS_S.items():
                    kept.labels(kind, slo.value, name).set_function(partial(self._attained, kind, slo, window_s))

    def _budget_left(self, kind: str, slo: Promise) -> float:
        return self.rolling[kind].total.budget_remaining(slo, self.objectives[kind].ratio(slo))

    def _attained(self, kind: str, slo: Promise, window_s: float) -> float:
        return self.over(kind, window_s).attainment(slo)

    # ---- the door

    def request_done(
        self, kind: str | None, route: str, status: int, took_s: float, stages_s: Mapping[str, float] | None = None
    ) -> Result | None:
        """An HTTP request has ended; `kind` = rank, generate or signal. What it counts as."""
        self._requests(route, status).inc()
        if kind is None:
            return None
        self._admissions(kind, Admission.of(status)).inc()
        self._request_s(kind).observe(took_s, exemplar())
        if stages_s:
            self._stages[kind, "door"].observe(max(took_s - sum(stages_s.values()), 0.0))
        result = None if status == 499 else judge(status, took_s, self.objectives[kind].threshold_s)
        if result is not None:
            self._results[kind, result].inc()
            self.rolling[kind].add(self._clock(), result)
        return result

    # ---- the service

    def signal_decided(self, verdict: Verdict, duration_s: float) -> None:
        """A signal was answered."""
        self._verdicts[verdict].inc()
        self._signal_s.observe(duration_s)

    def rank_done(self, answer: RankAnswer, duration_s: float) -> None:
        """A rank was answered."""
        self._rank_s[answer.outcome].observe(duration_s)
        self._outcomes["rank"](answer.outcome, answer.reason).inc()
        for stage, seconds in answer.stages_s.items():
            self._stages["rank", stage].observe(seconds)
        self._prefix_tokens.inc(answer.prefix_tokens)
        self._history_tokens.inc(answer.history.num_tokens)
        if answer.unknown_candidates:
            self._unknown["candidates"].inc(answer.unknown_candidates)
        for scores in answer.scores.values():
            self._candidates.observe(len(scores))
            break  # every task scores the same ones

    def generate_done(self, answer: GenerateAnswer, duration_s: float) -> None:
        """A generate was answered."""
        self._generate_s[answer.outcome].observe(duration_s)
        self._outcomes["generate"](answer.outcome, answer.reason).inc()
        for stage, seconds in answer.stages_s.items():
            self._stages["generate", stage].observe(seconds)
        self._generated.inc(len(answer.item_ids))
        self._exhausted.inc(answer.status == "exhausted")

    def match_done(self, answer: MatchAnswer, duration_s: float) -> None:
        """A match was answered."""
        self._match_s[answer.basis].observe(duration_s)
        self._matched.inc(len(answer.item_ids))

    def match_pass_done(self, num_requests: int) -> None:
        """That many matches shared a pass over the items."""
        self._match_pass.observe(num_requests)

    def recommend_done(self, answer: RecommendAnswer, duration_s: float) -> None:
        """A recommend was answered. Its signal, generate and rank have been counted as such."""
        self._recommend_s[bool(answer.degraded)].observe(duration_s)
        for stage, seconds in answer.stages_s.items():
            self._stages["recommend", stage].observe(seconds)
        for report in answer.stages:
            self._recommend_stages(report.stage, report.result.value).inc()
            self._recommend_stage_s(report.stage).observe(report.took_s)
        self._recommended.inc(len(answer.item_ids))

    def history_read(self, report: HistoryReport) -> None:
        """A history was tokenized, for a signal or a rank."""
        if report.unknown_items:
            self._unknown["history"].inc(report.unknown_items)
        if report.cut_tokens:
            self._cut_tokens.inc(report.cut_tokens)

    def drift(self, ratio: float, failed: bool) -> None:
        """A self-check compared cached with cold scores."""
        self._drift.observe(ratio)
        self._drift_failures.inc(failed)

    # ---- relay, tiers, engine: connected by `app.observe`

    def relay_error(self, where: str) -> None:
        """A request did without something: prefill, reload, spill or read failed."""
        self._errors[where].inc()

    def recorded(self, result: str, num: int) -> None:
        """The recorder has written, dropped or failed to write so many requests. From any thread."""
        self._recorded[result].inc(num)

    def prefill_wasted(self, kind: str = "rank") -> None:
        """A prefix was produced for nobody."""
        self._wasted[kind].inc()

    def prefix_waited(self, seconds: float) -> None:
        """A prefix found its first reader that long after it was produced."""
        self._waited_s.observe(seconds)

    def copy_done(self, direction: str, num_bytes: int, queue_s: float, device_s: float) -> None:
        """A prefix was copied between the tiers."""
        self._copied[direction].inc(num_bytes)
        self._copy_queue_s[direction].observe(queue_s)
        self._copy_s[direction].observe(device_s)

    def batch_done(self, num_requests: int, num_rows: int) -> None:
        """The device scored that many requests in one pass."""
        self._batch.observe(num_requests)
        self._batch_rows.observe(num_rows)

    def device_worked(self, work: str, seconds: float) -> None:
        """The device thread was busy."""
        self._busy[work].inc(seconds)

    def backend_ops(self, ops: Mapping[str, str]) -> None:
        """What runs each op that has a choice."""
        for op, impl in ops.items():
            self._ops.labels(op, impl).set(1)
            self._fallbacks.labels(op)

    def op_fell_back(self, op: str) -> None:
        """A call ran as torch ops because the op's implementation did not take it."""
        self._fallbacks.labels(op).inc()

    def beams_searched(self, width: int) -> None:
        """A search had that many beams."""
        self._beams.observe(width)

    def loop_lagged(self, seconds: float) -> None:
        """A callback waited that long for its turn."""
        self._lag_s.observe(seconds)

    def gc_paused(self, generation: int, seconds: float) -> None:
        """The garbage collector stopped everything."""
        self._gc_s[generation].observe(seconds)

    # ---- for the status page

    def over(self, kind: str, window_s: float) -> Counts:
        """Results of the last `window_s` seconds."""
        return self.rolling[kind].over(self._clock(), window_s)

    def outcomes(self, kind: str) -> dict[str, int]:
        """Requests since the start by how they got their prefix; those that never happened are left out."""
        sums = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        for family in self._outcome_counters[kind].collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    sums[sample.labels["outcome"]] += int(sample.value)
        return {outcome: count for outcome, count in sums.items() if count}

    def queue(self) -> dict[str, float]:
        """What waits, what runs, and the limits of both."""
        return {name: read() for name, read in self._queue.items()}

    # ---- what is read at each scrape

    def observe_queue(self, depth: Callable[[], int]) -> None:
        """The queue's depth."""
        self._queue_depth.set_function(depth)
        self._queue["jobs_waiting"] = depth

    def observe_tier(self, name: str, tier: Tier, states: Mapping[str, Callable[[], int]]) -> None:
        """A tier's bytes by state, its budget and its entries."""
        self._kv_budget.labels(name).set(tier.budget_bytes)
        self._kv_entries.labels(name).set_function(lambda: len(tier))
        for state, read in states.items():
            self._kv.labels(name, state).set_function(read)
        self.tiers[name] = {**states, "budget": lambda: tier.budget_bytes, "entries": lambda: len(tier)}

    def observe_relay(
        self,
        kind: str,
        works: Mapping[str, Callable[[], int]],
        *,
        t_life_s: Callable[[], float],
        prefills_per_s: Callable[[], float],
        brownout: Callable[[], int],
    ) -> None:
        """Prefills, reloads and spills in flight; what the relay has measured and what it gives up."""
        self._t_life_p99.labels(kind).set_function(t_life_s)
        self._prefill_rate.labels(kind).set_function(prefills_per_s)
        self._brownout.labels(kind).set_function(brownout)
        for work, read in works.items():
            self._producers.labels(kind, work).set_function(read)
            self._queue[f"{kind}_{work}s_in_flight"] = read

    def observe_catalogue(self, read: Callable[[], CatalogueInfo], paths: Callable[[], tuple[int, ...]]) -> None:
        """The catalogue that is served: its figures now and at each scrape, its paths a level."""
        self._catalogue_items.set_function(lambda: read().num_items)
        self._catalogue_bytes.set_function(lambda: read().num_bytes)
        self._catalogue_age.set_function(lambda: read().age_s)
        for level in range(len(paths())):
            self._paths.labels(str(level + 1)).set_function(partial(_item, paths, level))
        self._before_scrape.append(lambda: self._version(read()))

    def _version(self, info: CatalogueInfo) -> None:
        """One series, whatever number of versions there were."""
        self._catalogue.clear()
        self._catalogue.labels(info.version).set(1)

    def refresh(self) -> None:
        """What has to be set anew before a scrape."""
        for work in self._before_scrape:
            work()

    # ---- what does not change

    def observe_ready(self, read: Callable[[], tuple[bool, str]]) -> None:
        """Whether new work is welcome, read at each scrape."""
        self._ready.set_function(lambda: read()[0])

    def limits(self, named: Mapping[str, float]) -> None:
        """The limits in force."""
        for name, value in named.items():
            self._limits.labels(name).set(value)

    def t_life(self, seconds: float) -> None:
        """How long a produced prefix waits."""
        self._t_life.set(seconds)

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


def _item(read: Callable[[], tuple[int, ...]], place: int) -> float:
    return read()[place]


def _cached(family: M) -> Callable[..., M]:
    """The children of a family whose label values come up one by one; there are few."""
    return cache(family.labels)
