"""Metrics of single kinds (signal, generate, match, recommend), and of the relay's memory tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from npu_gr.core.kinds import KINDS
from npu_gr.core.request import (
    Fetched,
    GenerateAnswer,
    LimitedBy,
    MatchAnswer,
    RecommendAnswer,
    StageResult,
    Verdict,
)
from npu_gr.core.served import CatalogueInfo, Refreshed
from npu_gr.metrics.registry.families import LAG_S, LATENCY_S, POWERS, WAIT_S, Families, children


class SignalMetrics:
    """Metrics of signals: the verdicts of the trigger."""

    def __init__(self, make: Families) -> None:
        verdicts = make.counter(
            "signal_verdicts_total", "Signals by verdict of the trigger.", ("verdict",)
        )
        self._verdicts = {verdict: verdicts.labels(verdict.value) for verdict in Verdict}

    def decided(self, verdict: Verdict) -> None:
        """Count a verdict."""
        self._verdicts[verdict].inc()


class GenerateMetrics:
    """Metrics of generates: beams, generated items, and the catalogue."""

    def __init__(self, make: Families) -> None:
        self._generated = make.counter("generated_items_total", "Items that generates returned.")
        exhausted = make.counter(
            "generate_exhausted_total",
            "Generates that returned fewer items than requested, by what ended the list.",
            ("limited_by",),
        )
        limits = (LimitedBy.CATALOGUE, LimitedBy.FILTER, LimitedBy.BEAM)
        self._exhausted = {limit: exhausted.labels(limit.value) for limit in limits}
        self._beams = make.histogram("generate_beam_width", "Beam width of a search.", POWERS[:11])
        self._version = make.gauge(
            "catalogue_info", "1 for the version of the served catalogue.", ("version",)
        )
        self._items = make.gauge("catalogue_items", "Items of the catalogue that can be generated.")
        self._bytes = make.gauge("catalogue_bytes", "Host memory of the catalogue's tables.")
        self._age_s = make.gauge(
            "catalogue_age_seconds", "Seconds since the served version was published."
        )
        self._paths = make.gauge(
            "catalogue_valid_paths",
            "Distinct prefixes of semantic IDs with so many codes.",
            ("level",),
        )
        self._read_catalogue: Callable[[], CatalogueInfo] | None = None

    def answered(self, answer: GenerateAnswer) -> None:
        """Count the items of a generate."""
        self._generated.inc(len(answer.item_ids))
        if answer.limited_by:
            self._exhausted[answer.limited_by].inc()

    def searched(self, width: int) -> None:
        """Count a search of that many beams."""
        self._beams.observe(width)

    def observe_catalogue(
        self, read: Callable[[], CatalogueInfo], num_paths: Callable[[], tuple[int, ...]]
    ) -> None:
        """Export the served catalogue and its valid paths per level, read at each scrape."""
        self._read_catalogue = read
        self._items.set_function(lambda: read().num_items)
        self._bytes.set_function(lambda: read().num_bytes)
        self._age_s.set_function(lambda: read().age_s)
        for level in range(len(num_paths())):
            self._paths.labels(str(level + 1)).set_function(partial(_element, num_paths, level))

    def refresh(self) -> None:
        """Export the served version as the only series, without those of earlier versions."""
        if self._read_catalogue is not None:
            self._version.clear()
            self._version.labels(self._read_catalogue().version).set(1)


class MatchMetrics:
    """Metrics of matches."""

    def __init__(self, make: Families) -> None:
        self._matched = make.counter("matched_items_total", "Items that matches returned.")
        checked = make.counter(
            "match_checked_items_total",
            "Items of the exact searches that an approximate index was checked by.",
            ("index",),
        )
        missed = make.counter(
            "match_missed_items_total", "Items of these searches that the index lacked.", ("index",)
        )
        self._checks = {
            of: (checked.labels(of), missed.labels(of)) for of in ("match", "recommend")
        }

    def answered(self, answer: MatchAnswer) -> None:
        """Count the items of a match."""
        self._matched.inc(len(answer.item_ids))

    def checked(self, index: str, num_items: int, num_missed: int) -> None:
        """Count the items of an exact search, and those that the checked answer lacks.

        `index` is the section that has the index: match or recommend.
        """
        for counter, num in zip(self._checks[index], (num_items, num_missed), strict=True):
            counter.inc(num)


class RecommendMetrics:
    """Metrics of recommends: the results and times of the cascade's stages."""

    def __init__(self, make: Families) -> None:
        self._stages = children(
            make.counter(
                "recommend_stages_total",
                "Stages of recommends by result.",
                ("stage", "result"),
            )
        )
        self._stage_s = children(
            make.histogram(
                "recommend_stage_duration_seconds",
                "Time of a stage of a recommend that returned a result.",
                LATENCY_S,
                ("stage",),
            )
        )
        self._recommended = make.counter(
            "recommended_items_total", "Items that recommends returned."
        )
        self._unknown = children(
            make.counter(
                "recommend_unknown_items_total",
                "Items that a source found and the ranker does not know: placed last or dropped.",
                ("source",),
            )
        )
        self._coverage = children(
            make.gauge(
                "catalogue_coverage_ratio",
                "Share of a source's items that the ranker knows.",
                ("source",),
            )
        )

    def answered(self, answer: RecommendAnswer) -> None:
        """Count a cascade's items and stages; its ranks, generates, ... are counted as such too."""
        for report in answer.stages:
            self._stages(report.stage, report.result.value).inc()
            if report.result in (StageResult.OK, StageResult.EMPTY, StageResult.PARTIAL):
                self._stage_s(report.stage).observe(report.took_s)
        self._recommended.inc(len(answer.item_ids))
        for source, count in answer.unknown.items():
            self._unknown(source).inc(count)

    def covers(self, source: str, ratio: float) -> None:
        """Record the share of a source's items that the ranker knows."""
        self._coverage(source).set(ratio)


def _element(read: Callable[[], tuple[int, ...]], place: int) -> float:
    return read()[place]


DIRECTIONS = ("reload", "spill")


class Tier(Protocol):
    """The figures of a memory tier; its length is its number of prefixes."""

    @property
    def budget_bytes(self) -> int:
        """Most bytes that the tier may hold."""
        ...

    def __len__(self) -> int: ...


class RelayMetrics:
    """Metrics of the relays of all models; `kind` is one that leases prefixes."""

    def __init__(self, make: Families) -> None:
        # for the status page: tier -> figure -> function that reads it
        self.tiers: dict[str, dict[str, Callable[[], int]]] = {}
        self.in_flight: dict[str, Callable[[], int]] = {}  # figure -> function that reads it
        self._bytes = make.gauge("kv_bytes", "Bytes of a memory tier by state.", ("tier", "state"))
        self._budget = make.gauge(
            "kv_budget_bytes", "Most bytes that a memory tier may hold.", ("tier",)
        )
        self._entries = make.gauge("kv_entries", "Prefixes that a memory tier holds.", ("tier",))
        self._producers = make.gauge(
            "prefills_in_flight",
            "Prefixes that are being computed or copied into a tier.",
            ("kind", "work"),
        )
        self._t_life_s = make.gauge(
            "t_life_seconds", "T_life: longest time that a prefix is kept for its rank."
        )
        self._t_life_p99_s = make.gauge(
            "t_life_p99_seconds", "P99 of the time from a signal to the end of its rank.", ("kind",)
        )
        self._prefill_rate = make.gauge(
            "admitted_prefills_per_second",
            "Prefills per second that the trigger admits.",
            ("kind",),
        )
        self._brownout = make.gauge(
            "brownout_level",
            "Brown-out level, the optional work that is skipped: 0 = none, 4 = most.",
            ("kind",),
        )
        self._waited_s = make.histogram(
            "prefix_wait_seconds", "Time from a prefix's publication to its first use.", WAIT_S
        )
        wasted = make.counter(
            "prefill_wasted_total", "Prefixes that were evicted before their first use.", ("kind",)
        )
        self._wasted = {
            name: wasted.labels(name) for name, kind in KINDS.items() if kind.leases_prefix
        }
        errors = make.counter(
            "relay_errors_total",
            "Failures of the relay; the requests were computed without a cached prefix.",
            ("where",),
        )
        self._errors = {
            where: errors.labels(where)
            for where in ("prefill", "reload", "refresh", "spill", "pool", "read")
        }
        fetches = make.counter(
            "kv_pool_fetches_total", "Prefixes asked of the pool, by what it led to.", ("outcome",)
        )
        self._fetches = {outcome: fetches.labels(outcome.value) for outcome in Fetched}
        puts = make.counter(
            "kv_pool_puts_total", "Prefixes put into the pool, by whether it took them.", ("kept",)
        )
        self._puts = {kept: puts.labels("yes" if kept else "no") for kept in (True, False)}
        refreshed = make.counter(
            "prefix_refreshes_total",
            "Prefixes that were looked at after a delta, by what became of them.",
            ("result",),
        )
        self._refreshed = {result: refreshed.labels(result.value) for result in Refreshed}
        self._touched = make.gauge(
            "prefix_refreshes_pending", "Users whose prefixes are to be looked at after a delta."
        )
        copied = make.counter("copy_bytes_total", "Bytes copied between the tiers.", ("direction",))
        self._copied = {direction: copied.labels(direction) for direction in DIRECTIONS}
        copies = make.histogram(
            "copy_duration_seconds",
            "Time of a copy between the tiers on the device.",
            LAG_S,
            ("direction",),
        )
        self._copy_s = {direction: copies.labels(direction) for direction in DIRECTIONS}
        queued = make.histogram(
            "copy_queue_seconds",
            "Time that a copy between the tiers waited for the device.",
            LATENCY_S,
            ("direction",),
        )
        self._copy_queue_s = {direction: queued.labels(direction) for direction in DIRECTIONS}

    def failed(self, where: str) -> None:
        """Count a failed prefill, reload, spill or read."""
        self._errors[where].inc()

    def fetched(self, outcome: Fetched) -> None:
        """Count a prefix that was asked of the pool, or was not for a reason."""
        self._fetches[outcome].inc()

    def put(self, is_kept: bool) -> None:
        """Count a prefix that was put into the pool."""
        self._puts[is_kept].inc()

    def refreshed(self, result: Refreshed) -> None:
        """Count a prefix that was looked at after a delta."""
        self._refreshed[result].inc()

    def observe_refreshes(self, num_pending: Callable[[], int]) -> None:
        """Export the users whose prefixes are to be looked at, read at each scrape."""
        self._touched.set_function(num_pending)

    def wasted(self, kind: str) -> None:
        """Count a prefix that was evicted before its first use."""
        self._wasted[kind].inc()

    def first_used(self, waited_s: float) -> None:
        """Record the time from a prefix's publication to its first use."""
        self._waited_s.observe(waited_s)

    def copied(self, direction: str, num_bytes: int, queue_s: float, device_s: float) -> None:
        """Record a copy between the tiers.

        Args:
            direction: "reload" (DRAM to HBM) or "spill" (HBM to DRAM).
            num_bytes: Size of the prefix.
            queue_s: Seconds that the copy waited for the device.
            device_s: Seconds that the copy took.
        """
        self._copied[direction].inc(num_bytes)
        self._copy_queue_s[direction].observe(queue_s)
        self._copy_s[direction].observe(device_s)

    def observe_t_life(self, read: Callable[[], float]) -> None:
        """Export the current T_life, read at each scrape."""
        self._t_life_s.set_function(read)

    def observe_tier(self, name: str, tier: Tier, states: Mapping[str, Callable[[], int]]) -> None:
        """Export a tier, read at each scrape.

        Args:
            name: Value of the label `tier`.
            tier: Tier to export.
            states: State of bytes -> function that counts them.
        """
        self._budget.labels(name).set_function(lambda: tier.budget_bytes)
        self._entries.labels(name).set_function(lambda: len(tier))
        for state, read in states.items():
            self._bytes.labels(name, state).set_function(read)
        self.tiers[name] = {
            **states,
            "budget": lambda: tier.budget_bytes,
            "entries": lambda: len(tier),
        }

    def observe_relay(
        self,
        kind: str,
        works: Mapping[str, Callable[[], int]],
        *,
        t_life_s: Callable[[], float],
        prefills_per_s: Callable[[], float],
        brownout: Callable[[], int],
    ) -> None:
        """Export a relay, read at each scrape.

        Args:
            kind: "rank" or "generate".
            works: "prefill", "reload", "spill" -> function that counts those in flight.
            t_life_s: Function that returns the P99 of the time from a signal to the end of its
                rank.
            prefills_per_s: Function that returns the rate that the trigger admits.
            brownout: Function that returns the current level.
        """
        self._t_life_p99_s.labels(kind).set_function(t_life_s)
        self._prefill_rate.labels(kind).set_function(prefills_per_s)
        self._brownout.labels(kind).set_function(brownout)
        for work, read in works.items():
            self._producers.labels(kind, work).set_function(read)
            self.in_flight[f"{kind}_{work}s_in_flight"] = read
