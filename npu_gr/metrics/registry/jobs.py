"""What single jobs count beyond what every kind has: candidates, beams, stages of a cascade, drift."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import Counter

from npu_gr.core.feature_schema.schema import OFS
from npu_gr.core.history import HistoryReport
from npu_gr.core.request import GenerateAnswer, MatchAnswer, RankAnswer, RecommendAnswer, StageResult, Verdict
from npu_gr.core.served import CatalogueInfo
from npu_gr.metrics.registry.families import LATENCY_S, POWERS, Families, children


class RankMetrics:
    """Histories, candidates and the self-check of ranks."""

    def __init__(self, make: Families) -> None:
        unknown = make.counter("unknown_items_total", "Items that the catalogue lacks.", ("where",))
        self._unknown = {where: unknown.labels(where) for where in ("history", "candidates")}
        missing = make.counter("missing_features_total", "Features of the ranker that a rank had nowhere.", ("of",))
        self._missing: dict[str, Counter] = {of: missing.labels(of) for of in OFS if of != "item"}
        self._candidates = make.histogram(
            "rank_candidates", "Candidates of a rank.", (1, 10, 50, 100, 200, 500, 1000, 5000)
        )
        self._prefix_tokens = make.counter("prefix_tokens_total", "History tokens of ranks read from cached KV.")
        self._history_tokens = make.counter("history_tokens_total", "History tokens of ranks.")
        self._cut_tokens = make.counter("history_cut_tokens_total", "Oldest tokens dropped by the length rule.")
        self._drift = make.histogram(
            "drift_ratio",
            "Self-check: difference of cached from cold scores over their standard deviation.",
            (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        )
        self._drift_failures = make.counter("selfcheck_failures_total", "Self-checks beyond the allowed drift.")
        self._new_items = make.gauge(
            "new_items",
            "Items of the catalogue that the ranker was not trained with: scored by features and codes, or unscored.",
            ("state",),
        )
        self._spare_items = make.gauge("spare_item_rows", "Rows of the ranker's table that are left for new items.")

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

    def observe_items(self, scored: Callable[[], int], unscored: Callable[[], int], spare: Callable[[], int]) -> None:
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


class SignalMetrics:
    """What the trigger said."""

    def __init__(self, make: Families) -> None:
        verdicts = make.counter("signal_verdicts_total", "Signals by what the trigger said.", ("verdict",))
        self._verdicts = {verdict: verdicts.labels(verdict.value) for verdict in Verdict}

    def decided(self, verdict: Verdict) -> None:
        """Count a verdict."""
        self._verdicts[verdict].inc()


class GenerateMetrics:
    """Beams, generated items, and the catalogue that they come from."""

    def __init__(self, make: Families) -> None:
        self._generated = make.counter("generated_items_total", "Items that generate answered.")
        self._exhausted = make.counter("generate_exhausted_total", "Generates with fewer items than were asked for.")
        self._beams = make.histogram("generate_beam_width", "Beams of a search.", POWERS[:11])
        self._version = make.gauge("catalogue_info", "1 for the version of the catalogue that is served.", ("version",))
        self._items = make.gauge("catalogue_items", "Items of the catalogue that can be generated.")
        self._bytes = make.gauge("catalogue_bytes", "Host memory of the catalogue's tables.")
        self._age_s = make.gauge("catalogue_age_seconds", "Since this version was published.")
        self._paths = make.gauge(
            "catalogue_valid_paths", "Semantic-ID paths of that many codes that lead on.", ("level",)
        )
        self._read_catalogue: Callable[[], CatalogueInfo] | None = None

    def answered(self, answer: GenerateAnswer) -> None:
        """Count the items of a generate."""
        self._generated.inc(len(answer.item_ids))
        self._exhausted.inc(answer.status == "exhausted")

    def searched(self, width: int) -> None:
        """Count a search of that many beams."""
        self._beams.observe(width)

    def observe_catalogue(self, read: Callable[[], CatalogueInfo], num_paths: Callable[[], tuple[int, ...]]) -> None:
        """Export the catalogue that is served, read at each scrape: its figures, and its valid paths a level."""
        self._read_catalogue = read
        self._items.set_function(lambda: read().num_items)
        self._bytes.set_function(lambda: read().num_bytes)
        self._age_s.set_function(lambda: read().age_s)
        for level in range(len(num_paths())):
            self._paths.labels(str(level + 1)).set_function(partial(_element, num_paths, level))

    def refresh(self) -> None:
        """Name the version that is served: one series, whatever number of versions there were."""
        if self._read_catalogue is not None:
            self._version.clear()
            self._version.labels(self._read_catalogue().version).set(1)


class MatchMetrics:
    """Matched items, and how many matches shared a pass."""

    def __init__(self, make: Families) -> None:
        self._matched = make.counter("matched_items_total", "Items that match answered.")
        self._pass = make.histogram("match_pass_requests", "Matches in one pass.", (1, 2, 4, 8, 16, 32, 64))

    def answered(self, answer: MatchAnswer) -> None:
        """Count the items of a match."""
        self._matched.inc(len(answer.item_ids))

    def pass_done(self, num_requests: int) -> None:
        """Count a pass over the items that this many matches shared."""
        self._pass.observe(num_requests)


class RecommendMetrics:
    """Stages of a cascade: how each ended, and how long it took."""

    def __init__(self, make: Families) -> None:
        self._stages = children(
            make.counter("recommend_stages_total", "Stages of recommends by how they ended.", ("stage", "result"))
        )
        self._stage_s = children(
            make.histogram(
                "recommend_stage_duration_seconds",
                "One stage of a recommend, where it did its part.",
                LATENCY_S,
                ("stage",),
            )
        )
        self._recommended = make.counter("recommended_items_total", "Items that recommend answered.")
        self._unknown = children(
            make.counter(
                "recommend_unknown_items_total",
                "Items found for recommends that the ranker does not know: placed last, or dropped.",
                ("source",),
            )
        )
        self._coverage = children(
            make.gauge("catalogue_coverage_ratio", "Share of a source's items that the ranker knows.", ("source",))
        )

    def answered(self, answer: RecommendAnswer) -> None:
        """Count a cascade's items and stages. Its signal, generates, matches and ranks are counted as such."""
        for report in answer.stages:
            self._stages(report.stage, report.result.value).inc()
            if report.result in (StageResult.OK, StageResult.EMPTY, StageResult.PARTIAL):
                self._stage_s(report.stage).observe(report.took_s)
        self._recommended.inc(len(answer.item_ids))
        for source, count in answer.unknown.items():
            self._unknown(source).inc(count)

    def covers(self, source: str, ratio: float) -> None:
        """Record which share of a source's items the ranker knows."""
        self._coverage(source).set(ratio)


def _element(read: Callable[[], tuple[int, ...]], place: int) -> float:
    return read()[place]
