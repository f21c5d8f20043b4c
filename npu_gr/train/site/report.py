"""The report of `npu-gr train all`: each model's figures, the strongest baseline, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from rich.table import Table

from npu_gr.core.progress import in_words
from npu_gr.core.request import OrderName, SourceName
from npu_gr.train.baselines import Markov
from npu_gr.train.next_item import BaselineComparison, RetrievalFigures, RetrievalReport
from npu_gr.train.rank.blend_choice import better_source_warnings
from npu_gr.train.rank.evaluate import Evaluation, RankingFigures
from npu_gr.train.rank.options import Task
from npu_gr.train.site.verdict import SiteVerdict

_UNSEEN = {"hr_at_10_unseen": "HR@10 unseen", "ndcg_at_10_unseen": "NDCG@10 unseen"}
SOURCE_OF: dict[str, SourceName] = {"generator": "generate", "vectors": "match"}
_ALL_ITEMS = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}

F = TypeVar("F", RankingFigures, RetrievalFigures)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a model, and the highest value of it among the baselines."""

    name: str
    value: float
    baseline: str
    baseline_value: float


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one model was trained, and how good it is."""

    made_from: str  # digest of the dataset and of the options of this model
    version: str  # version of the weights
    measured_on: str  # training and test events of the evaluated model, in words
    num_events: int  # events that the served model was trained on
    took_s: float
    cpu_s: float = 0.0  # of its process; 0 = made by an older version
    peak_bytes: int = 0  # memory of its process at the most
    figures: tuple[Figure, ...]
    words: tuple[str, ...] = ()  # differences to baselines with intervals, a sentence each
    started_from: str = ""  # version of the model that was trained on; "" = random weights
    tasks: tuple[Task, ...] = ()  # of the ranker
    code_count: tuple[int, ...] = ()  # of the generator: codes of each level
    node_count: tuple[int, ...] = ()  # nodes of each level; empty = its tokens are the codes
    warning: str = ""  # set if the model is not better than a baseline, or than a part of it


class SiteCascade(msgspec.Struct, frozen=True, kw_only=True):
    """The sources and the order of `recommend`, and why they were chosen."""

    made_from: str = ""  # digest of the models and options that decided it
    sources: dict[SourceName, int]  # source -> items to request
    order: OrderName
    words: tuple[str, ...] = ()  # how it was chosen, and its evaluation
    exclude_seen: bool = True  # whether requests exclude the items of the history by default
    excludes: dict[str, bool] = {}  # kind -> the same, where it was chosen
    repeat_ratio: float = 0.0  # share of the held-out events whose item the user had before
    hr_at_10: float | None = None  # of the users who chose and evaluated; None = not chosen
    verdict: SiteVerdict | None = None  # None = made by an older version


class SiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a site was made from, and how good it is."""

    made_at: str  # UTC
    dataset: str  # path of the dataset's folder
    made_by: str = ""  # command line; empty = made by an older version
    preset: str = "full"
    overrides: tuple[str, ...] = ()  # `section.key=value` of the options
    num_events: int
    num_users: int
    num_items: int
    parts: dict[str, PartReport]  # name of the model's folder -> report
    cascade: SiteCascade | None = None  # None = made by an older version
    written: dict[str, str] = {}  # file that operators may edit -> digest of what was written

    def table(self) -> Table:
        """Lay the figures out for a terminal."""
        table = Table(
            "model",
            "figure",
            "value",
            "strongest baseline",
            "measured on",
            title=f"{self.num_events} events of {self.num_users} users with {self.num_items} items",
            caption="Figures are those of models trained without the test events. The served "
            "models were then trained on all events.",
            title_justify="left",
            caption_justify="left",
        )
        for name, part in self.parts.items():
            for index, row in enumerate(part.figures):
                table.add_row(
                    "" if index else name,
                    row.name,
                    f"{row.value:.4f}",
                    f"{row.baseline_value:.4f} {row.baseline}",
                    "" if index else part.measured_on,
                    end_section=index == len(part.figures) - 1,
                )
        return table

    @property
    def verdict(self) -> SiteVerdict | None:
        """The comparison of `recommend` with the strongest baseline."""
        return self.cascade.verdict if self.cascade else None

    def words(self) -> list[str]:
        """Compare the models with the baselines, and explain the choice of the cascade."""
        own = [line for part in self.parts.values() for line in part.words]
        return [*own, *(self.cascade.words if self.cascade else ()), *self._unused()]

    def _unused(self) -> list[str]:
        """Say what the models took that a chosen cascade does not use, and how to save that."""
        if self.cascade is None or self.cascade.hr_at_10 is None:
            return []
        return [
            f"recommend does not use the {name}, whose training took "
            f"{in_words(self.parts[name].took_s)}. If nothing else asks for POST /v1/{source}, add "
            f"--without {name} to the command: no other model is trained again, and npu-gr nightly "
            f"does without the {name}, too"
            for name, source in SOURCE_OF.items()
            if name in self.parts and source not in self.cascade.sources
        ]

    def warnings(self) -> list[str]:
        """List the warnings of models that are not shown to be better than a baseline.

        Models that recommend does not use share one note, as do all if recommend is better than
        every baseline.
        """
        weak = {name: part.warning for name, part in self.parts.items() if part.warning}
        used = self.cascade.sources if self.cascade else None
        unused = [
            name
            for name in weak
            if used is not None and name in SOURCE_OF and SOURCE_OF[name] not in used
        ]
        if self.verdict is not None and self.verdict.is_better:
            names = " and ".join(weak)
            text = f"Note: alone, {names} would not beat every baseline; recommend does."
            return [text] if weak else []
        note = f"Note: recommend does not use {' and '.join(unused)}, which beat no baseline."
        return [text for name, text in weak.items() if name not in unused] + [note] * bool(unused)


def warning_of(comparison: BaselineComparison | None) -> str:
    """Warn that a model is not better than the strongest baseline; empty if it is, or if none."""
    if comparison is None or comparison.is_better:
        return ""
    return (
        f"WARNING: {comparison.model} alone is not shown to beat {comparison.baseline} at the next "
        "item; the verdict says what to serve."
    )


def warning_of_ranker(found: Evaluation) -> str:
    """Warn that a ranker is not better than the strongest baseline, or than one source alone."""
    return "\n".join(
        filter(
            None,
            [warning_of(found.comparison()), *better_source_warnings(found.better_alone)],
        )
    )


def ranker_words(found: Evaluation) -> tuple[str, ...]:
    """Compare the ranker with the strongest baseline and with Markov counts, a sentence each.

    Then say how well it predicts what users do, and what `train all` chose or left out.
    """
    comparisons = filter(None, (found.comparison(), found.compared_with(Markov.name)))
    rows = {each.baseline: each.differences for each in comparisons}
    compared = (
        f"ranker against {name}: "
        + ", ".join(
            f"{figure} {gap.mean:+.4f} (95 %: {gap.low:+.4f} to {gap.high:+.4f})"
            for figure, gap in list(gaps.items())[:2]
        )
        for name, gaps in rows.items()
    )
    labels = "; ".join(line.strip() for line in found.about_labels())
    return (*compared, *(f"ranker: {text}" for text in (*found.notes, labels) if text))


def ranker_figures(found: Evaluation) -> tuple[Figure, ...]:
    """Compare a ranker with the baselines."""
    return _compared(found.ranker, found.baselines, {"auc": f"AUC {found.auc_task}"})


def generator_figures(found: RetrievalReport) -> tuple[Figure, ...]:
    """Compare a generator with the baselines."""
    return _compared(found.own, found.baselines)


def vectors_figures(found: RetrievalReport) -> tuple[Figure, ...]:
    """Compare retrieval vectors with the baselines."""
    return _compared(found.own, found.baselines)


def _compared(
    own: F, baselines: Sequence[F], names: dict[str, str] | None = None
) -> tuple[Figure, ...]:
    """Compare each figure with the best baseline's, where both have it.

    Args:
        own: Figures of the model.
        baselines: Figures of the baselines.
        names: Field -> name of figures to show before those of the next item.
    """
    rows = []
    next_item = _ALL_ITEMS if own.ranks.evaluates_all else _UNSEEN
    for field, name in ((names or {}) | next_item).items():
        value = getattr(own, field)
        others = [row for row in baselines if getattr(row, field) == getattr(row, field)]
        if value != value or not others:
            continue
        best = max(others, key=lambda row: float(getattr(row, field)))
        rows.append(
            Figure(name=name, value=value, baseline=best.model, baseline_value=getattr(best, field))
        )
    return tuple(rows)
