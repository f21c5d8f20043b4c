"""Impressions in the ranker's training: items that were shown, with a behaviour or without.

Of each drawn event, the own item is a positive, and at most `MAX_SHOWN` of the items that were
shown with it are negatives, each weighted by the number of those that it stands for. All are scored
just before the first event of the same second, as a request for that page would: an earlier click
on the same page would give the label away.

What stands on top is clicked more often, whatever it is. A term of each position is added to the
logit in training and left out in service, so the logit is about the item alone.

Source: the position as a separate term, as in PAL (RecSys 2019) and the shallow tower of YouTube's
ranker (RecSys 2019).

B = windows, T = drawn events of each, C = items of each.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from npu_gr.core.arrays import I64
from npu_gr.model.hstu import HSTU
from npu_gr.train.data import Batch, InteractionLog, batches
from npu_gr.train.data import Window as Part
from npu_gr.train.metrics import F64, Difference, auc, difference_of_auc, known
from npu_gr.train.rank.forward import EncodedHistories
from npu_gr.train.rank.inputs import LogInputs, pages_of
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.shown_term import item_odds, pages

MAX_SHOWN = 8  # impressions of an event in one step
MAX_POSITION = 50  # further positions share a term
BIAS_SCALE = 10.0  # the terms learn so much faster than other weights, and first
BATCH_TOKENS = 2048


def position_biases() -> nn.Embedding:
    """Make the terms of the positions; the first one is that of an unknown position."""
    biases = nn.Embedding(MAX_POSITION + 2, 1)
    nn.init.zeros_(biases.weight)
    return biases


def start_bias(model: HSTU, log: InteractionLog, task: int) -> None:
    """Start the task's logit at the share of shown items with a behaviour.

    Else the first steps only learn that most are without one, from the items' common direction.
    """
    assert log.shown is not None
    num_shown = max(1, int(log.trained[log.shown.events].sum()))
    out = model.head[-1]
    assert isinstance(out, nn.Linear)
    with torch.no_grad():
        out.bias[task] = math.log(max(1, int(log.trained.sum())) / num_shown)


def shown_loss(
    model: HSTU,
    encoded: EncodedHistories,
    inputs: LogInputs,
    task: int,
    biases: nn.Embedding,
    batch: Batch,
    options: TrainOptions,
) -> Tensor:
    """Compute the binary cross-entropy of shown items, a mean over the drawn events.

    Args:
        model: Ranker.
        encoded: Histories of the batch.
        inputs: Inputs of a log with impressions.
        task: Index of the task.
        biases: Terms of the positions.
        batch: Windows of the histories.
        options: `shown_ratio`.
    """
    shown = inputs.log.shown
    assert shown is not None
    terms = batch.terms
    num_drawn = max(1, round(options.shown_ratio * terms.shape[1]))
    order = torch.rand(terms.shape).masked_fill(~terms, 2.0).argsort(dim=1)
    some = order[:, :num_drawn]
    events = batch.events.gather(1, some)
    is_drawn = terms.gather(1, some)
    of_events = torch.from_numpy(shown.of_events)[events]
    if (shown.of_events >= 0).any():  # an event without a position was not shown by a page
        is_drawn = is_drawn & (of_events >= 0)
    # its page begins before the clicks of the same second, which tell nothing to a request
    begins = torch.from_numpy(inputs.pages)[events]
    num_clicks = torch.from_numpy(inputs.page_clicks)[events]
    some = (some - (events - begins)).clamp(min=0)
    moments = batch.events.gather(1, some)
    first, last = (
        torch.from_numpy(np.searchsorted(inputs.pages[shown.events], begins.numpy(), side))
        for side in ("left", "right")
    )
    counts = last - first
    drawn = first[..., None] + _draws(counts)
    is_there = torch.arange(MAX_SHOWN) < counts.clamp(max=MAX_SHOWN)[..., None]
    drawn = drawn.where(is_there, 0)
    negatives = torch.from_numpy(shown.items)[drawn]
    own = torch.from_numpy(inputs.log.items)[events]
    candidates = torch.cat([own[..., None], negatives], dim=-1)
    places = torch.cat([of_events[..., None], torch.from_numpy(shown.positions)[drawn]], dim=-1)
    rows = encoded.rows(
        candidates, some, inputs.request(moments), inputs.cross_of(moments, candidates)
    )
    logits = model.task_logits(rows)[..., task] + inputs.shown_term(moments, candidates)
    logits = logits + BIAS_SCALE * biases((places + 1).clamp(0, MAX_POSITION + 1))[..., 0]
    labels = torch.zeros_like(logits)
    labels[..., 0] = 1
    # each click of a page may be drawn, so each takes its part of the others
    stands_for = counts / counts.clamp(min=1, max=MAX_SHOWN) / num_clicks
    weights = torch.cat(
        [torch.ones_like(stands_for)[..., None], stands_for[..., None] * is_there], dim=-1
    )
    weights = weights * is_drawn[..., None]
    losses = binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    return losses / weights.sum().clamp(min=1)


def _draws(counts: Tensor) -> Tensor:
    """Draw at most `MAX_SHOWN` of so many impressions without repetition: [B, T, MAX_SHOWN]."""
    counts = counts[..., None]
    every = torch.arange(MAX_SHOWN)
    start = (torch.rand(counts.shape) * counts).long()
    spread = (start + every * counts // MAX_SHOWN) % counts.clamp(min=1)
    return torch.where(counts > MAX_SHOWN, spread, every).minimum((counts - 1).clamp(min=0))


@torch.no_grad()
def shown_logits(
    log: InteractionLog, model: HSTU, events: I64, candidates: I64, tasks: list[int]
) -> F64:
    """Score one candidate just before each event by some tasks, float64 [m, tasks].

    Args:
        log: Log that holds the users' histories.
        model: Ranker in evaluation mode.
        events: int64 [m] index in the log, ascending.
        candidates: int64 [m] item rows.
        tasks: Indices of the tasks.
    """
    inputs = LogInputs(log, model)
    found = np.empty((len(events), len(tasks)))
    distinct, begin, counts = np.unique(events, return_index=True, return_counts=True)
    parts = []
    for event in distinct.tolist():
        first = inputs.first_read(event)
        parts.append(Part(first, event + 1 - first))
    place_of = {event: place for place, event in enumerate(distinct.tolist())}
    for batch in batches(log, parts, BATCH_TOKENS):
        encoded = EncodedHistories(model, inputs.histories(batch))
        last = batch.valid.sum(1, keepdim=True) - 1
        at = batch.events.gather(1, last)
        places = [place_of[event] for event in at[:, 0].tolist()]
        most = int(counts[places].max())
        index = (begin[places][:, None] + np.arange(most)).clip(max=len(events) - 1)
        rows_of = torch.from_numpy(candidates[index])[:, None]
        rows = encoded.rows(rows_of, last, inputs.request(at), inputs.cross_of(at, rows_of))
        logits = model.task_logits(rows)[:, 0][..., tasks].double().numpy()
        for row, place in enumerate(places):
            own = slice(begin[place], begin[place] + counts[place])
            found[own] = logits[row, : counts[place]]
    for column, task in enumerate(tasks):
        if model.config.tasks[task] == model.config.shown_task:
            found[:, column] += inputs.shown_term(
                torch.from_numpy(events), torch.from_numpy(candidates)[:, None]
            )[:, 0].numpy()
    return found


class ShownFigures:
    """How well the ranker tells items with a behaviour from the others that were shown."""

    def __init__(
        self, log: InteractionLog, model: HSTU, name: str, task: int, next_task: int | None
    ) -> None:
        """Score the events after the trained ones, and the impressions before them.

        Args:
            log: Log with impressions.
            model: Ranker in evaluation mode.
            name: Name of the task of shown items.
            task: Index of that task.
            next_task: Index of the task of the next item; None = there is none.
        """
        self._name = name
        rows = pages(log, ~log.trained)
        order = np.argsort(rows.events, kind="stable")
        self.events, self.items = rows.events[order], rows.items[order]
        self.labels = rows.clicked[order]
        self.users = log.users[self.events]
        tasks = [task] if next_task is None else [task, next_task]
        moments = pages_of(log)[self.events]
        self.logits = shown_logits(log, model, moments, self.items, tasks)
        # the simplest baseline
        self.rates = item_odds(pages(log, log.trained), log.num_items)[self.items]

    @property
    def auc(self) -> float:
        """The AUC; NaN without impressions or without events to evaluate on."""
        return auc(self.logits[:, 0], self.labels)

    @property
    def minus_next(self) -> Difference | None:
        """The AUC minus that of the next item's logit; None = there is none."""
        if self.logits.shape[1] < 2 or not len(self.labels):
            return None
        ours, theirs = self.logits.T
        return difference_of_auc(ours, theirs, self.labels, self.users)

    @property
    def minus_rates(self) -> Difference | None:
        """The AUC minus that of the items' own click rates; None = nothing was evaluated."""
        if not len(self.labels):
            return None
        return difference_of_auc(self.logits[:, 0], self.rates, self.labels, self.users)

    def as_dict(self) -> dict[str, float]:
        """Return the figure by name, without one that is NaN."""
        return known({f"auc_{self._name}": self.auc})

    def text(self) -> str:
        """Describe the figures."""
        num = f"{len(self.labels):,} later events and impressions"
        line = f"AUC {self._name} {self.auc:.4f} over {num}"
        if (found := self.minus_next) is not None:
            line += (
                f"; minus that of the next item's logit: {found.mean:+.4f} ({found.low:+.4f} .. "
                f"{found.high:+.4f})"
            )
        if (found := self.minus_rates) is not None:
            line += (
                f"; minus that of the items' own click rates: {found.mean:+.4f} ({found.low:+.4f} "
                f".. {found.high:+.4f})"
            )
            if found.high < 0:
                line += (
                    f"\nWARNING: do not order pages by {self._name}: how often an item is clicked "
                    "where it is shown tells more than the model, so gradient-boosted trees on "
                    "such counts are better, too."
                )
        return line
