"""What single jobs count beyond what every kind has, and the relay under them: beams, stages, tiers, copies, waste."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from npu_gr.core.kinds import KINDS
from npu_gr.core.request import GenerateAnswer, MatchAnswer, RecommendAnswer, StageResult, Verdict
from npu_gr.core.served import CatalogueInfo
from npu_gr.metrics.registry.families import LAG_S, LATENCY_S, POWERS, WAIT_S, Families, children


class SignalMetrics:
    """What the trigger said."""

    def __init__(self, make: Families) -> None:
        verdicts = make.counter(
            "signal_verdicts_total", "Signals by what the trigger said.", ("verdict",)
        )
        self._verdicts = {verdict: verdicts.labels(verdict.value) for verdict in Verdict}

    def decided(self, verdict: Verdict) -> None:
        """Count a verdict."""
        self._verdicts[verdict].inc()


class GenerateMetrics:
    """Beams, generated items, and the catalogue that they come from."""

    def __init__(self, make: Families) -> None:
        self._generated = make.counter("generated_items_total", "Items that generate answered.")
        self._exhausted = make.counter(
            "generate_exhausted_total", "Generates with fewer items than were asked for."
        )
        self._beams = make.histogram("generate_beam_width", "Beams of a search.", POWERS[:11])
        self._version = make.gauge(
            "catalogue_info", "1 for the version of the catalogue that is served.", ("version",)
        )
        self._items = make.gauge("catalogue_items", "Items of the catalogue that can be generated.")
        self._bytes = make.gauge("catalogue_bytes", "Host memory of the catalogue's tables.")
        self._age_s = make.gauge("catalogue_age_seconds", "Since this version was published.")
        self._paths = make.gauge(
            "catalogue_valid_paths",
            "Semantic-ID paths of that many codes that lead on.",
            ("level",),
        )
        self._read_catalogue: Callable[[], CatalogueInfo] | None = None

    def answered(self, answer: GenerateAnswer) -> None:
        """Count the items of a generate."""
        self._generated.inc(len(answer.item_ids))
        self._exhausted.inc(answer.status == "exhausted")

    def searched(self, width: int) -> None:
        """Count a search of that many beams."""
        self._beams.observe(width)

    def observe_catalogue(
        self, read: Callable[[], CatalogueInfo], num_paths: Callable[[], tuple[int, ...]]
    ) -> None:
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
    """Matched items."""

    def __init__(self, make: Families) -> None:
        self._matched = make.counter("matched_items_total", "Items that match answered.")

    def answered(self, answer: MatchAnswer) -> None:
        """Count the items of a match."""
        self._matched.inc(len(answer.item_ids))


class RecommendMetrics:
    """Stages of a cascade: how each ended, and how long it took."""

    def __init__(self, make: Families) -> None:
        self._stages = children(
            make.counter(
                "recommend_stages_total",
                "Stages of recommends by how they ended.",
                ("stage", "result"),
            )
        )
        self._stage_s = children(
            make.histogram(
                "recommend_stage_duration_seconds",
                "One stage of a recommend, where it did its part.",
                LATENCY_S,
                ("stage",),
            )
        )
        self._recommended = make.counter(
            "recommended_items_total", "Items that recommend answered."
        )
        self._unknown = children(
            make.counter(
                "recommend_unknown_items_total",
                "Items found for recommends that the ranker does not know: placed last, or "
                "dropped.",
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
        """Count a cascade's items and stages.

        Its signal, generates, matches and ranks are counted as such.
        """
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


DIRECTIONS = ("reload", "spill")


class Tier(Protocol):
    """The figures that a memory tier has of itself."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that it may hold."""
        ...

    def __len__(self) -> int: ...


class RelayMetrics:
    """Measure the relays of all models; `kind` is one that leases prefixes."""

    def __init__(self, make: Families) -> None:
        # tier -> what -> now; for the status page
        self.tiers: dict[str, dict[str, Callable[[], int]]] = {}
        self.in_flight: dict[str, Callable[[], int]] = {}  # what is on its way; for the status page
        self._bytes = make.gauge("kv_bytes", "Bytes of a memory tier by state.", ("tier", "state"))
        self._budget = make.gauge("kv_budget_bytes", "Bytes a memory tier may hold.", ("tier",))
        self._entries = make.gauge("kv_entries", "Prefixes that a memory tier holds.", ("tier",))
        self._producers = make.gauge(
            "prefills_in_flight", "Prefixes on their way into a tier.", ("kind", "work")
        )
        self._t_life_s = make.gauge(
            "t_life_seconds", "How long a produced prefix waits for its rank: T_life."
        )
        self._t_life_p99_s = make.gauge(
            "t_life_p99_seconds", "From a signal to the end of its rank, measured.", ("kind",)
        )
        self._prefill_rate = make.gauge(
            "admitted_prefills_per_second", "What the trigger admits.", ("kind",)
        )
        self._brownout = make.gauge(
            "brownout_level", "What is given up under overload: 0 nothing, 4 most.", ("kind",)
        )
        self._waited_s = make.histogram(
            "prefix_wait_seconds", "From a prefix's production to its first use.", WAIT_S
        )
        wasted = make.counter(
            "prefill_wasted_total", "Prefixes evicted before any request used them.", ("kind",)
        )
        self._wasted = {
            name: wasted.labels(name) for name, kind in KINDS.items() if kind.leases_prefix
        }
        errors = make.counter(
            "relay_errors_total", "Failures that a request did without.", ("where",)
        )
        self._errors = {
            where: errors.labels(where) for where in ("prefill", "reload", "spill", "read")
        }
        copied = make.counter("copy_bytes_total", "Bytes copied between the tiers.", ("direction",))
        self._copied = {direction: copied.labels(direction) for direction in DIRECTIONS}
        copies = make.histogram(
            "copy_duration_seconds",
            "Copies between the tiers, on the device.",
            LAG_S,
            ("direction",),
        )
        self._copy_s = {direction: copies.labels(direction) for direction in DIRECTIONS}
        queued = make.histogram(
            "copy_queue_seconds", "Copies waiting for the device.", LATENCY_S, ("direction",)
        )
        self._copy_queue_s = {direction: queued.labels(direction) for direction in DIRECTIONS}

    def failed(self, where: str) -> None:
        """Count a failed prefill, reload, spill or read: a request did without it."""
        self._errors[where].inc()

    def wasted(self, kind: str) -> None:
        """Count a prefix that was evicted before any request used it."""
        self._wasted[kind].inc()

    def first_used(self, waited_s: float) -> None:
        """Record how long a prefix waited for its first reader."""
        self._waited_s.observe(waited_s)

    def copied(self, direction: str, num_bytes: int, queue_s: float, device_s: float) -> None:
        """Record a copy between the tiers.

        Args:
            direction: "reload" (DRAM to HBM) or "spill".
            num_bytes: of the prefix.
            queue_s: it waited for the device.
            device_s: it ran.
        """
        self._copied[direction].inc(num_bytes)
        self._copy_queue_s[direction].observe(queue_s)
        self._copy_s[direction].observe(device_s)

    def observe_t_life(self, read: Callable[[], float]) -> None:
        """Export the T_life in force, read at each scrape."""
        self._t_life_s.set_function(read)

    def observe_tier(self, name: str, tier: Tier, states: Mapping[str, Callable[[], int]]) -> None:
        """Export a tier, read at each scrape.

        Args:
            name: value of the `tier` label.
            tier: its budget and its number of entries.
            states: state of bytes -> how many there are.
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
            kind: rank or generate.
            works: prefill, reload, spill -> how many are in flight.
            t_life_s: from a signal to the end of its rank, P99 as measured.
            prefills_per_s: what the trigger admits.
            brownout: the level in force.
        """
        self._t_life_p99_s.labels(kind).set_function(t_life_s)
        self._prefill_rate.labels(kind).set_function(prefills_per_s)
        self._brownout.labels(kind).set_function(brownout)
        for work, read in works.items():
            self._producers.labels(kind, work).set_function(read)
            self.in_flight[f"{kind}_{work}s_in_flight"] = read
