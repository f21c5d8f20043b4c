"""Evaluate a ranker beside the baselines: AUC of liking on later events, HR@10 and NDCG@10 of the next item.

Protocol:
  AUC       every event after the trained ones, pooled over users, with all of the user's events before it as history.
            Positive: the event's value reaches the task's threshold.
  HR, NDCG  the next item of each user, ranked against every item of the catalogue; see `train/next_item.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.model.hstu import HSTU, Segment
from npu_gr.train.baselines import Baseline
from npu_gr.train.data import InteractionLog, NextItem, Split, Window, batches, what_stands
from npu_gr.train.metrics import F64, NAN, auc, cells, hit_ratio, known, ndcg
from npu_gr.train.next_item import NO_RANKS, NextItemRanks, rank_next_items
from npu_gr.train.paired import BaselineComparison, compare
from npu_gr.train.rank.forward import HistoryBatch, Moments, encode

K = 10
RANKER = "HSTU ranker"
BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingFigures:
    """One model's figures. NaN = the model does not have that figure."""

    model: str
    auc: float
    hr_at_10: float
    ndcg_at_10: float
    hr_at_10_unseen: float
    ndcg_at_10_unseen: float
    ranks: NextItemRanks = field(default=NO_RANKS, repr=False, compare=False)  # behind HR and NDCG


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The ranker's figures, the baselines', and the data behind them."""

    split: Split
    num_trained: int  # events that the models were trained on
    num_served: int  # events that the served ranker was trained on
    num_judged: int  # events behind the AUC
    num_next: int  # users behind HR and NDCG
    tasks: str  # why the ranker has these tasks
    auc_task: str  # the task that AUC is of; "" = none
    ranker: RankingFigures
    baselines: tuple[RankingFigures, ...]

    def as_dict(self) -> dict[str, float]:
        """Name the ranker's figures by themselves, each baseline's as `<model>/<figure>`; leave out those of NaN."""
        counts = ("num_trained", "num_served", "num_judged", "num_next")
        figures = {name: float(getattr(self, name)) for name in counts}
        for prefix, row in [("", self.ranker), *((f"{row.model}/", row) for row in self.baselines)]:
            figures |= {f"{prefix}{name}": value for name, value in known(asdict(row)).items() if name != "model"}
        return figures

    def comparison(self) -> BaselineComparison | None:
        """Compare the ranker with the strongest baseline of the next item; None = no task scores it."""
        return compare(self.ranker.model, self.ranker.ranks, {row.model: row.ranks for row in self.baselines})

    def text(self) -> str:
        """Say in words why the ranker has its tasks, and how it stands beside the strongest baseline."""
        comparison = self.comparison()
        return f"tasks: {self.tasks}" + ("" if comparison is None else f"\n{comparison.text()}")

    def table(self) -> Table:
        """Lay the figures out for a terminal."""
        table = Table(
            "model",
            f"AUC {self.auc_task}".strip(),
            f"HR@{K}",
            f"NDCG@{K}",
            f"HR@{K} unseen",
            f"NDCG@{K} unseen",
            title=what_stands(self.split, self.num_trained, self.num_served),
            caption=f"AUC over {self.num_judged} later events; HR and NDCG over {self.num_next} next items",
        )
        for row in (*self.baselines, self.ranker):
            figures = (row.auc, row.hr_at_10, row.ndcg_at_10, row.hr_at_10_unseen, row.ndcg_at_10_unseen)
            table.add_row(row.model, *cells(figures))
        return table


def evaluate_baseline(
    log: InteractionLog, baseline: Baseline, likes: npt.NDArray[np.bool_], targets: Sequence[NextItem]
) -> RankingFigures:
    """Evaluate a baseline.

    Args:
        log: tested on its events after the trained ones.
        baseline: fitted to the log.
        likes: [n] label of every event of the log.
        targets: the next items to rank.
    """
    liking = baseline.liking(log)
    area = NAN if liking is None else auc(liking[~log.trained], likes[~log.trained])
    return _figures(baseline.name, area, log, targets, (baseline.next_items(log, user) for user, _ in targets))


def evaluate_ranker(
    log: InteractionLog,
    model: HSTU,
    likes: npt.NDArray[np.bool_],
    targets: Sequence[NextItem],
    *,
    click_task: int | None,
    like_task: int | None,
    done: Callable[[int, int], None],
) -> RankingFigures:
    """Evaluate a ranker.

    Args:
        log: tested on its events after the trained ones.
        model: in evaluation mode.
        likes: [n] label of every event of the log.
        targets: the next items to rank.
        click_task: the task that scores the next item; None = the model has none, and no HR and NDCG.
        like_task: the task that predicts `likes`; None = the model has none, and no AUC.
        done: called with (users so far, users in all) after every user's next item.
    """
    area = NAN if like_task is None else auc(judged_logits(log, model, like_task), likes[~log.trained])
    if click_task is None:
        return _figures(RANKER, area, log, [], [])
    return _figures(RANKER, area, log, targets, _catalogue_logits(log, model, click_task, targets, done))


@torch.inference_mode()
def judged_logits(log: InteractionLog, model: HSTU, task: int) -> F64:
    """Compute one task's logit of every event after the trained ones.

    Args:
        log: with the users' histories.
        model: in evaluation mode.
        task: index of the logit.

    Returns:
        float64 [events after the trained ones], in the log's order.
    """
    longest = model.config.max_history_tokens
    logits = np.full(len(log.items), np.nan)
    parts = []
    for start, stop, trained in zip(log.starts, log.starts[1:], log.num_trained, strict=False):
        first_judged = start + trained
        # One window ends at the user's last event. Where the judged events are more than the model reads at once,
        # several windows share them.
        for at in range(int(first_judged), int(stop), longest):
            begin = max(int(start), min(int(stop), at + longest) - longest)
            parts.append(Window(begin, min(int(stop), at + longest) - begin))
    for batch in batches(log, parts, BATCH_TOKENS):
        every = torch.arange(batch.items.shape[1]).expand_as(batch.items)
        histories = HistoryBatch(items=batch.items, actions=batch.actions, times=batch.times)
        rows = encode(model, histories, [Moments(at=every, candidates=batch.items[..., None])])[0]
        found = model.task_logits(rows)[:, :, 0, task]
        logits[batch.events[batch.valid].numpy()] = found[batch.valid].double().numpy()
    judged: F64 = logits[~log.trained]
    return judged


def _catalogue_logits(
    log: InteractionLog, model: HSTU, task: int, targets: Sequence[NextItem], done: Callable[[int, int], None]
) -> Iterable[F64]:
    """Compute [num_items] logits for each target, by the code that serves."""
    backend = CPUBackend()
    catalogue = torch.arange(log.num_items)
    for count, (user, event) in enumerate(targets, 1):
        history = slice(max(int(log.starts[user]), event - model.config.max_history_tokens), event)
        segment = Segment(
            items=torch.from_numpy(log.items[history]),
            actions=torch.from_numpy(log.actions[history]),
            times=torch.from_numpy(log.times[history]),
            candidates=catalogue,
            candidate_time=int(log.times[event]),
        )
        yield model(backend, [segment])[0][:, task].double().numpy()
        done(count, len(targets))


def _figures(
    model: str, area: float, log: InteractionLog, targets: Sequence[NextItem], scores: Iterable[F64]
) -> RankingFigures:
    ranks = rank_next_items(log, targets, scores)
    return RankingFigures(
        model=model,
        auc=area,
        hr_at_10=hit_ratio(ranks.overall, K) if targets else NAN,
        ndcg_at_10=ndcg(ranks.overall, K) if targets else NAN,
        hr_at_10_unseen=hit_ratio(ranks.unseen, K) if targets else NAN,
        ndcg_at_10_unseen=ndcg(ranks.unseen, K) if targets else NAN,
        ranks=ranks,
    )
