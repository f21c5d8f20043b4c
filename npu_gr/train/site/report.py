"""What `npu-gr train all` says of a site: each model beside the strongest baseline, and what the figures stand on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from rich.table import Table

from npu_gr.core.request import OrderName, SourceName
from npu_gr.train.baselines import Markov
from npu_gr.train.next_item import BaselineComparison, RetrievalFigures, RetrievalReport
from npu_gr.train.rank.blend_choice import in_words
from npu_gr.train.rank.evaluate import Evaluation, RankingFigures

_UNSEEN = {"hr_at_10_unseen": "HR@10 unseen", "ndcg_at_10_unseen": "NDCG@10 unseen"}
_SOURCE_OF: dict[str, SourceName] = {"generator": "generate", "vectors": "match"}
_ALL_ITEMS = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}

F = TypeVar("F", RankingFigures, RetrievalFigures)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a model, and the same figure of the baseline that is best at it."""

    name: str
    value: float
    baseline: str
    baseline_value: float


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one model was trained, and how good it is."""

    made_from: str  # digest of the dataset and of the options that matter for it
    version: str  # of the weights
    measured_on: str  # in words: what the evaluated model was trained on, and what it was asked
    num_events: int  # that the served model was trained on
    took_s: float
    figures: tuple[Figure, ...]
    words: tuple[str, ...] = ()  # the same with intervals
    warning: str = ""  # that it is no better than the strongest baseline, or than a part of it


class SiteCascade(msgspec.Struct, frozen=True, kw_only=True):
    """What a recommend asks, how it orders, and why."""

    made_from: str = ""  # digest of the models and options that decided it
    sources: dict[SourceName, int]  # items asked of each
    order: OrderName
    words: tuple[str, ...] = ()  # how it was chosen, and what it is worth


class SiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a site was made from, and how good it is."""

    made_at: str  # UTC
    dataset: str  # folder
    made_by: str = ""  # the command; empty = made by an older version
    num_events: int
    num_users: int
    num_items: int
    parts: dict[str, PartReport]  # by the name of the folder
    cascade: SiteCascade | None = None  # None = made by an older version
    written: dict[str, str] = {}  # file that people may edit -> digest of what was written

    def table(self) -> Table:
        """Lay the figures out for a terminal."""
        table = Table(
            "model",
            "figure",
            "value",
            "strongest baseline",
            "measured on",
            title=f"{self.num_events} events of {self.num_users} users with {self.num_items} items",
            caption="Figures are of models that had not seen the newest events. The served models "
            "were then trained again on all events.",
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

    def words(self) -> list[str]:
        """Say how the models stand beside the baselines, and why the cascade is as it is."""
        own = [line for part in self.parts.values() for line in part.words]
        return [*own, *(self.cascade.words if self.cascade else ())]

    def warnings(self) -> list[str]:
        """Name the models that are not shown to be better than a baseline.

        A model that recommend does not ask is a note, not a warning.
        """
        asked = self.cascade.sources if self.cascade else None
        found = []
        for name, part in self.parts.items():
            text = part.warning
            source = _SOURCE_OF.get(name)
            if text and source and asked is not None and source not in asked:
                text = f"{text} recommend does not ask this model.".replace("WARNING", "Note")
            found.append(text)
        return [text for text in found if text]


def warning_of(comparison: BaselineComparison | None) -> str:
    """Say that a model is no better than the strongest baseline.

    Empty = it is better, or there is none.
    """
    if comparison is None or comparison.is_better:
        return ""
    return (
        f"WARNING: {comparison.model} is not shown to be better than {comparison.baseline} at the "
        f"next item ({comparison.grounds}). More events or more epochs may help."
    )


def warning_of_ranker(found: Evaluation) -> str:
    """Say that a ranker is no better than the strongest baseline, and which sources are better alone, a line each."""
    return "\n".join(filter(None, [warning_of(found.comparison()), *in_words(found.better_alone)]))


def ranker_words(found: Evaluation) -> tuple[str, ...]:
    """Compare the fitted order, which a recommend uses, with the best baseline and Markov counts."""
    beside = filter(None, (found.comparison(), found.beside(Markov.name)))
    rows = {each.baseline: each.differences for each in beside}
    return tuple(
        f"ranker against {name}: "
        + ", ".join(
            f"{figure} {gap.mean:+.4f} (95 %: {gap.low:+.4f} to {gap.high:+.4f})"
            for figure, gap in list(gaps.items())[:2]
        )
        for name, gaps in rows.items()
    )


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
    """Compare figures with those of the best baseline; leave out what one of the two does not have.

    Args:
        own: figures of the model.
        baselines: those of the baselines.
        names: field -> name of figures beside those of the next item.
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
