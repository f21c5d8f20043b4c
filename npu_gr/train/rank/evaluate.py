"""What a ranker is worth beside the baselines: AUC of liking on later events, HR@10 and NDCG@10 of the next item.

Protocol:
  AUC      every event after the trained ones, pooled over users; history = all of the user's events before it.
           Positive: the event's value reaches the task's threshold.
  HR, NDCG the event right after the trained ones, of users that have both; ranked against every item of the
           catalogue, no sampled negatives. "unseen" leaves out the items of the user's history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.model.hstu import HSTU, Segment
from npu_gr.train.baselines import Baseline
from npu_gr.train.data import Log, Split, Window, batches
from npu_gr.train.metrics import auc, hit_ratio, ndcg, rank_of
from npu_gr.train.rank.forward import Histories, Moments, encode

F64 = npt.NDArray[np.float64]
K = 10
BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model's figures; NaN = it has none."""

    model: str
    auc: float
    hr_at_10: float
    ndcg_at_10: float
    hr_at_10_unseen: float
    ndcg_at_10_unseen: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The ranker's figures, the baselines', and what they were measured on."""

    split: Split
    num_trained: int  # events
    num_judged: int  # events behind the AUC
    num_next: int  # users behind HR and NDCG
    ranker: Row
    baselines: tuple[Row, ...]

    def as_dict(self) -> dict[str, float]:
        """The ranker's figures by name, and each baseline's as `<model>/<figure>`; without those that are NaN."""
        rows = {"": self.ranker, **{f"{row.model}/": row for row in self.baselines}}
        figures = {
            f"{prefix}{name}": getattr(row, name)
            for prefix, row in rows.items()
            for name in Row.__slots__
            if name != "model"
        }
        counts = {name: float(getattr(self, name)) for name in ("num_trained", "num_judged", "num_next")}
        return counts | {name: value for name, value in figures.items() if value == value}

    def table(self) -> Table:
        """For a terminal."""
        table = Table(
            "model",
            "AUC",
            f"HR@{K}",
            f"NDCG@{K}",
            f"HR@{K} unseen",
            f"NDCG@{K} unseen",
            title=f"split {self.split}: {self.num_trained} events trained on",
            caption=f"AUC over {self.num_judged} later events; HR and NDCG over {self.num_next} next items",
        )
        for row in (*self.baselines, self.ranker):
            figures = (row.auc, row.hr_at_10, row.ndcg_at_10, row.hr_at_10_unseen, row.ndcg_at_10_unseen)
            table.add_row(row.model, *("-" if value != value else f"{value:.4f}" for value in figures))
        return table


def evaluate_baseline(log: Log, baseline: Baseline, likes: npt.NDArray[np.bool_]) -> Row:
    """Figures of a fitted baseline; `likes` [n] is the label of every event of the log."""
    liking = baseline.liking(log)
    area = float("nan") if liking is None else auc(liking[~log.trained], likes[~log.trained])
    scores = (baseline.next_items(log, user) for user, _ in log.next_items())
    return _row(baseline.name, area, log, scores)


def evaluate_ranker(
    log: Log,
    model: HSTU,
    likes: npt.NDArray[np.bool_],
    *,
    click_task: int | None,
    like_task: int | None,
    done: Callable[[int, int], None],
) -> Row:
    """Figures of a ranker. `done(users so far, users in all)` is called now and then."""
    asked = log.next_items()
    area = float("nan")
    if like_task is not None:
        area = auc(judged_logits(log, model, like_task), likes[~log.trained])
    if click_task is None:
        asked = []
    return _row("HSTU ranker", area, log, _catalogue_logits(log, model, click_task or 0, asked, done))


@torch.inference_mode()
def judged_logits(log: Log, model: HSTU, task: int) -> F64:
    """[judged] logit of every event after the trained ones, in the log's order."""
    longest = model.config.max_history_tokens
    logits = np.full(len(log.items), np.nan)
    parts = []
    for start, stop, trained in zip(log.starts, log.starts[1:], log.num_trained, strict=False):
        first_judged = start + trained
        for at in range(int(first_judged), int(stop), longest):  # one window unless the history is over-long
            begin = max(int(start), min(int(stop), at + longest) - longest)
            parts.append(Window(begin, min(int(stop), at + longest) - begin))
    for batch in batches(log, parts, BATCH_TOKENS):
        every = torch.arange(batch.items.shape[1]).expand_as(batch.items)
        histories = Histories(items=batch.items, actions=batch.actions, times=batch.times)
        rows = encode(model, histories, [Moments(at=every, candidates=batch.items[..., None])])[0]
        found = model.task_logits(rows)[:, :, 0, task]
        logits[batch.events[batch.valid].numpy()] = found[batch.valid].double().numpy()
    judged: F64 = logits[~log.trained]
    return judged


def _catalogue_logits(
    log: Log, model: HSTU, task: int, asked: list[tuple[int, int]], done: Callable[[int, int], None]
) -> Iterable[F64]:
    """[num_items] logits for the next item of every user asked, by the code that serves."""
    backend, catalogue = CPUBackend(), torch.arange(log.num_items)
    for count, (user, at) in enumerate(asked):
        history = slice(max(int(log.starts[user]), at - model.config.max_history_tokens), at)
        segment = Segment(
            items=torch.from_numpy(log.items[history]),
            actions=torch.from_numpy(log.actions[history]),
            times=torch.from_numpy(log.times[history]),
            candidates=catalogue,
            candidate_time=int(log.times[at]),
        )
        yield model(backend, [segment])[0][:, task].double().numpy()
        done(count + 1, len(asked))


def _row(name: str, area: float, log: Log, scores: Iterable[F64]) -> Row:
    """Ranks of the next items under `scores`, one row a user of `log.next_items()`; none at all = NaN."""
    ranks, ranks_unseen = [], []
    for row, (user, at) in zip(scores, log.next_items(), strict=False):
        target = log.items[at]
        ranks.append(rank_of(row, target))
        unseen = row.copy()
        unseen[log.items[log.starts[user] : at]] = -np.inf
        unseen[target] = row[target]
        ranks_unseen.append(rank_of(unseen, target))
    every, new = np.array(ranks), np.array(ranks_unseen)
    nan = float("nan")
    return Row(
        model=name,
        auc=area,
        hr_at_10=hit_ratio(every, K) if ranks else nan,
        ndcg_at_10=ndcg(every, K) if ranks else nan,
        hr_at_10_unseen=hit_ratio(new, K) if ranks else nan,
        ndcg_at_10_unseen=ndcg(new, K) if ranks else nan,
    )
