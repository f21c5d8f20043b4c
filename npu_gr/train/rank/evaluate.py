"""Evaluate a ranker and compare it with the baselines.

AUC       of the events after the trained ones, pooled over users, each with all of the user's
          earlier events as history. Positive: an event that is a positive of the first binary
          task.
HR, NDCG  rank of each user's next item among the whole catalogue, see `train/next_item.py`. The
          retrieval, the transitions and the neighbours find a list of items, as in a cascade. The
          list is ranked by four scores: the retrieval, the click logit and the neighbours, each
          alone, and the fitted score blend. Items that are not in the list rank behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from npu_gr.core.arrays import I64
from npu_gr.model.blend import ScoreBlend
from npu_gr.model.hstu import HSTU
from npu_gr.train.data import InteractionLog, NextItem, Split, Window, batches, evaluation_title
from npu_gr.train.metrics import (
    F64,
    NAN,
    Difference,
    auc,
    calibration_error,
    cells,
    difference_of_auc,
    hit_ratio,
    known,
    ndcg,
)
from npu_gr.train.next_item import (
    NO_RANKS,
    Baseline,
    BaselineComparison,
    NextItemRanks,
    compare,
    rank_next_items,
)
from npu_gr.train.rank.blend import ItemList, ListSizes, retrieved_lists
from npu_gr.train.rank.blend_choice import better_source_warnings
from npu_gr.train.rank.forward import EncodedHistories
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import BATCH_TOKENS
from npu_gr.train.rank.options import Task
from npu_gr.train.rank.shown import ShownFigures

K = 10
RANKER = "ranker"  # the fitted blend, if there is one, or the retrieval
RETRIEVAL = "its retrieval alone"
CLICK = "its click logit alone"
NEIGHBOURS = "neighbours alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingFigures:
    """One model's figures. NaN = the model does not have that figure."""

    model: str
    auc: float
    hr_at_10: float
    ndcg_at_10: float
    hr_at_10_unseen: float
    ndcg_at_10_unseen: float
    ranks: NextItemRanks = field(default=NO_RANKS, repr=False, compare=False)
    # [evaluated events] score of each event, from which the AUC is computed
    liking: F64 | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The figures of the ranker and of the baselines."""

    split: Split
    num_trained: int  # events that the models were trained on
    num_served: int  # events that the served ranker was trained on
    num_evaluated: int  # events of the AUC
    num_next: int  # users of HR and NDCG
    tasks: str  # why the ranker has these tasks
    chosen_tasks: tuple[Task, ...]
    auc_task: str  # name of the task of the AUC; "" = none
    fitting: str  # the number of epochs and the fitted blend, in words
    notes: tuple[str, ...]  # what the ranker reads by the log's nature, or by choice, in words
    # sources that are better than the fitted blend on the validation; see `blend_choice.py`
    better_alone: Mapping[str, Difference]
    skipped: tuple[str, ...]  # a sentence for each baseline that was skipped
    ranker: RankingFigures
    parts: tuple[RankingFigures, ...]  # terms of the ranker's blend, each alone
    baselines: tuple[RankingFigures, ...]
    likes: npt.NDArray[np.bool_] = field(repr=False, compare=False)  # [num_evaluated]
    users: I64 = field(repr=False, compare=False)  # [num_evaluated]
    next_users: I64 = field(repr=False, compare=False)  # [num_next]
    # of the task whose negatives are impressions; None = the model has none
    shown: ShownFigures | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, float]:
        """Return the ranker's figures by name, and those of other models as `<model>/<figure>`.

        Figures that a model does not have (NaN) are left out.
        """
        counts = ("num_trained", "num_served", "num_evaluated", "num_next")
        figures = {name: float(getattr(self, name)) for name in counts}
        others = ((f"{row.model}/", row) for row in (*self.parts, *self.baselines))
        for prefix, row in [("", self.ranker), *others]:
            figures |= {
                f"{prefix}{name}": value
                for name, value in known(asdict(row)).items()
                if name != "model"
            }
        if self.shown is not None:
            figures |= self.shown.as_dict()
        return figures

    def comparison(self) -> BaselineComparison | None:
        """Compare the ranker with the strongest next-item baseline.

        None = the ranker has no next-item task.
        """
        return compare(
            self.ranker.model, self.ranker.ranks, {row.model: row.ranks for row in self.baselines}
        )

    def compared_with(self, baseline: str) -> BaselineComparison | None:
        """Compare the ranker with one baseline, by name.

        None = the ranker has no next-item task, or there is no such baseline.
        """
        return compare(
            self.ranker.model,
            self.ranker.ranks,
            {row.model: row.ranks for row in self.baselines if row.model == baseline},
        )

    def with_parts(self) -> BaselineComparison | None:
        """Compare the fitted blend with the best of its terms alone; None = there is no blend."""
        return compare(
            self.ranker.model, self.ranker.ranks, {row.model: row.ranks for row in self.parts}
        )

    def auc_difference(self) -> tuple[str, Difference] | None:
        """Compare the AUC with the best baseline's; None = one of them has no AUC."""
        others = [row for row in self.baselines if row.auc == row.auc]
        if not others or self.ranker.liking is None:
            return None
        best = max(others, key=lambda row: row.auc)
        found = difference_of_auc(self.ranker.liking, best.liking, self.likes, self.users)
        return None if found is None else (best.model, found)

    def about_labels(self) -> list[str]:
        """Describe how well what users do is predicted, a line for each figure."""
        lines = []
        if self.ranker.liking is not None and (
            own := difference_of_auc(self.ranker.liking, None, self.likes, self.users)
        ):
            lines.append(
                f"AUC {self.auc_task} {own.mean:.4f}  (95 %, by user: {own.low:.4f} .. "
                f"{own.high:.4f})"
            )
            error, low, high = calibration_error(self.ranker.liking, self.likes, self.users)
            lines.append(f"  its calibration error {error:.4f}  (95 %: {low:.4f} .. {high:.4f})")
        if (auc_difference := self.auc_difference()) is not None:
            name, found = auc_difference
            lines.append(f"  minus that of {name}, the best baseline: {_interval(found)}")
            if found.high < 0:
                lines.append(
                    f"WARNING: {name} predicts likes better than {self.ranker.model} on this log. "
                    "More events or epochs may help."
                )
        return lines if self.shown is None else [*lines, self.shown.text()]

    def text(self) -> str:
        """Describe the tasks and the fit, and compare the ranker with the best baselines."""
        lines = [
            f"tasks: {self.tasks}",
            self.fitting,
            *self.notes,
            *better_source_warnings(self.better_alone),
            *self.skipped,
        ]
        lines += self.about_labels()
        if (parts := self.with_parts()) is not None:
            shown = ", ".join(
                f"{name} {_interval(found)}" for name, found in parts.differences.items()
            )
            lines.append(f"{parts.model} minus {parts.baseline}: {shown}")
            if any(found.high < 0 for found in parts.differences.values()):
                lines.append(f"WARNING: the fitted score blend is worse than {parts.baseline}.")
        if (comparison := self.comparison()) is not None:
            lines.append(comparison.text())
        return "\n".join(lines)

    def table(self) -> Table:
        """Lay the figures out for a terminal."""
        table = Table(
            "model",
            f"AUC {self.auc_task}".strip(),
            f"HR@{K}",
            f"NDCG@{K}",
            f"HR@{K} unseen",
            f"NDCG@{K} unseen",
            title=evaluation_title(self.split, self.num_trained, self.num_served),
            caption=f"AUC over {self.num_evaluated} later events; HR and NDCG over {self.num_next} "
            "next items",
        )
        for row in (*self.baselines, *self.parts, self.ranker):
            figures = (
                row.auc,
                row.hr_at_10,
                row.ndcg_at_10,
                row.hr_at_10_unseen,
                row.ndcg_at_10_unseen,
            )
            table.add_row(row.model, *cells(figures))
        return table


def _interval(found: Difference) -> str:
    return f"{found.mean:+.4f} ({found.low:+.4f} .. {found.high:+.4f})"


def evaluate_baseline(
    log: InteractionLog,
    baseline: Baseline,
    likes: npt.NDArray[np.bool_],
    targets: Sequence[NextItem],
) -> RankingFigures:
    """Evaluate a baseline on the events after the trained ones.

    Args:
        log: Log that the baseline was fitted to.
        baseline: Baseline to evaluate.
        likes: bool [n] label of every event of the log.
        targets: Next items to rank.
    """
    liking = baseline.liking(log)
    evaluated = None if liking is None else liking[~log.trained]
    scores = (baseline.next_items(log, user) for user, _ in targets)
    return _figures(baseline.name, log, likes, evaluated, targets, scores)


def evaluate_ranker(
    log: InteractionLog,
    model: HSTU,
    likes: npt.NDArray[np.bool_],
    targets: Sequence[NextItem],
    *,
    blend: ScoreBlend | None,
    counted: ScoreBlend | None,
    like_task: int | None,
    sizes: ListSizes,
    done: Callable[[int, int], None],
) -> tuple[RankingFigures, tuple[RankingFigures, ...]]:
    """Evaluate a ranker, and each term of its blend alone, on the events after the trained ones.

    Args:
        log: Log that holds the users' histories.
        model: Ranker in evaluation mode, its items frozen.
        likes: bool [n] label of every event of the log.
        targets: Next items to rank.
        blend: The fitted blend; None = rank by the retrieval alone.
        counted: Transitions and neighbours; None = the model does not retrieve, and has no HR and
            NDCG.
        like_task: Index of the task that predicts `likes`; None = the model has none, and no AUC.
        sizes: Most items of the lists to rank.
        done: Callback with (users so far, users in all) after every user's next item.
    """
    inputs = LogInputs(log, model)
    evaluated = None if like_task is None else evaluated_logits(inputs, model, like_task)
    if counted is None:
        return _figures(RANKER, log, likes, evaluated, [], []), ()
    lists = list(retrieved_lists(inputs, model, counted, targets, sizes, done))

    def figures(
        name: str, liking: F64 | None, scores: Callable[[ItemList], npt.NDArray[np.float32]]
    ) -> RankingFigures:
        return _figures(
            name,
            log,
            likes,
            liking,
            targets,
            (found.over_all(scores(found), log.num_items) for found in lists),
        )

    if blend is None:
        return figures(RANKER, evaluated, lambda found: found.retrieval), ()
    parts = (
        figures(RETRIEVAL, None, lambda found: found.retrieval),
        figures(CLICK, None, lambda found: found.click),
        figures(NEIGHBOURS, None, lambda found: found.neighbours),
    )
    return figures(RANKER, evaluated, lambda found: found.scores(blend)), parts


@torch.inference_mode()
def evaluated_logits(inputs: LogInputs, model: HSTU, task: int) -> F64:
    """Compute one task's logit of every event after the trained ones.

    Args:
        inputs: Inputs that hold the users' histories.
        model: Ranker in evaluation mode.
        task: Index of the task.

    Returns:
        float64 [events after the trained ones], in the log's order.
    """
    log = inputs.log
    longest = inputs.max_events
    logits = np.full(len(log.items), np.nan)
    parts = []
    for start, stop, trained in zip(log.starts, log.starts[1:], log.num_trained, strict=False):
        first_evaluated = start + trained
        # usually one window, which ends at the user's last event; several windows if there are
        # more evaluated events than the model reads at once
        for at in range(int(first_evaluated), int(stop), longest):
            begin = max(int(start), min(int(stop), at + longest) - longest)
            parts.append(Window(begin, min(int(stop), at + longest) - begin))
    for batch in batches(log, parts, BATCH_TOKENS):
        encoded = EncodedHistories(model, inputs.histories(batch))
        known = inputs.request(batch.events), inputs.cross(batch.events)
        rows = encoded.rows(batch.items[..., None], None, *known)
        found = model.task_logits(rows)[:, :, 0, task]
        logits[batch.events[batch.valid].numpy()] = found[batch.valid].double().numpy()
    evaluated: F64 = logits[~log.trained]
    return evaluated


def _figures(
    model: str,
    log: InteractionLog,
    likes: npt.NDArray[np.bool_],
    evaluated: F64 | None,
    targets: Sequence[NextItem],
    scores: Iterable[F64],
) -> RankingFigures:
    ranks = rank_next_items(log, targets, scores)
    area = NAN if evaluated is None else auc(evaluated, likes[~log.trained])
    return ranked_figures(model, ranks, area, evaluated)


def ranked_figures(
    model: str, ranks: NextItemRanks, area: float = NAN, liking: F64 | None = None
) -> RankingFigures:
    """Compute the figures of a model from its ranks of the next items.

    Args:
        model: Name of the model.
        ranks: Its ranks.
        area: Its AUC.
        liking: float64 [evaluated events] scores of which the AUC is; None = it has none.
    """
    has_ranks = len(ranks.overall) > 0
    return RankingFigures(
        model=model,
        auc=area,
        hr_at_10=hit_ratio(ranks.overall, K) if has_ranks else NAN,
        ndcg_at_10=ndcg(ranks.overall, K) if has_ranks else NAN,
        hr_at_10_unseen=hit_ratio(ranks.unseen, K) if has_ranks else NAN,
        ndcg_at_10_unseen=ndcg(ranks.unseen, K) if has_ranks else NAN,
        ranks=ranks,
        liking=liking,
    )
