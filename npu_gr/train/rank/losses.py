"""The losses of the ranker's training, and the likelihood of its validation.

All losses share one encoding of the histories.

    next item     softmax of u . e over the catalogue at every event, from the NEXT row. Items that
                  came before in the window are excluded, except the true one. For a large
                  catalogue, every step samples items, half of the draws by their share of the
                  events, half uniformly. Each item's logit is raised by -log of its chance to be
                  sampled (logQ correction), so the items represent the whole catalogue
    binary task   binary cross-entropy on the row of the event's own item. An auxiliary head, which
                  is not served, learns one label for every threshold between the action values
                  (ordinal regression: a rating of 5 says more than "liked"), or for every event
                  type
    shown         binary cross-entropy of the items that were shown before an event: the event's own
                  item is the positive, impressions are the negatives. A term of the position on
                  the page is added in training only, so that the logit does not learn that what
                  stands on top is clicked
    next logit    softmax of the next-item logit r over sampled items, at a share of the events.
                  Items are drawn from the retrieval's softmax of the same step, because these are
                  the items that a cascade ranks, and uniformly from all items. Each draw is
                  weighted by the number of items that it represents (importance weight), so r
                  estimates the full softmax

B = users, N = events of the longest window, M = events, n = items in the softmax, T = moments with
a click loss, C = items drawn for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from npu_gr.model.hstu import HSTU
from npu_gr.train.data import Batch, InteractionLog, NextItem, Window, batches
from npu_gr.train.metrics import F64
from npu_gr.train.next_item import sample_targets
from npu_gr.train.rank.forward import CLOSED, EncodedHistories, dropout
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.options import Labels, TrainOptions
from npu_gr.train.rank.shown import shown_loss

NUM_CLICK_DRAWS = 8  # items drawn from the retrieval's softmax, and as many from all items


class Retrieved(NamedTuple):
    """The retrieval's softmax at every event of a batch: the event's own item and the others."""

    u: Tensor  # float32 [M, dim]
    own: Tensor  # float32 [M] logit of the event's own item
    items: Tensor  # int64 [n] rows of the items in the softmax, ascending
    # float32 [M] log of the sum of exp(logit) over the others, scaled up to the whole catalogue
    partition: Tensor
    # float32 [M, n] softmax over the others; 0 for the event's own item and earlier items of the
    # window
    shares: Tensor


def batch_loss(
    model: HSTU,
    auxiliary: nn.Linear,
    biases: nn.Embedding,
    inputs: LogInputs,
    batch: Batch,
    labels: Labels,
    options: TrainOptions,
    *,
    with_click: bool,
) -> Tensor:
    """Sum the losses of a batch, each a mean over its events.

    Args:
        model: Ranker, with `retrieval` if a task predicts the next item.
        auxiliary: Auxiliary head, which is not served.
        biases: Term of each position of a shown item, which is not served.
        inputs: Inputs of the log.
        batch: Windows to train on.
        labels: Labels of the actions.
        options: Weights of the losses, and numbers of samples.
        with_click: Whether to add the click loss.
    """
    encoded = EncodedHistories(model, inputs.histories(batch), options.dropout)
    of_shown = torch.zeros(())
    if labels.shown_task is not None:
        of_shown = options.task_weight * shown_loss(
            model, encoded, inputs, labels.shown_task, biases, batch, options
        )
    kinds = [batch.items] if labels.served_tasks else []
    if labels.next_task is not None:
        kinds.append(torch.full_like(batch.items, model.config.num_items))  # NEXT
    if not kinds:  # a ranker of shown items alone
        return of_shown
    cross = inputs.cross(batch.events) if labels.served_tasks else None
    rows = encoded.rows(torch.stack(kinds, dim=-1), None, inputs.request(batch.events), cross)
    loss = rows.new_zeros(()) + of_shown
    if labels.served_tasks:
        loss = loss + options.task_weight * _binary_loss(
            model, auxiliary, rows[:, :, 0], batch, labels, options
        )
    if labels.next_task is None:
        return loss
    found = retrieve(model, rows[:, :, -1], batch, options, inputs.draw_shares)
    loss = loss + (torch.logaddexp(found.partition, found.own) - found.own).mean()
    if with_click and options.click_weight:
        loss = loss + options.click_weight * _click_loss(
            model, encoded, inputs, labels.next_task, found, batch, options
        )
    return loss


def _binary_loss(
    model: HSTU,
    auxiliary: nn.Linear,
    true: Tensor,
    batch: Batch,
    labels: Labels,
    options: TrainOptions,
) -> Tensor:
    """Sum the losses of the binary tasks and of the auxiliary head.

    `true`, float32 [B, N, dim], are the final rows of the events' own items.
    """
    actions = batch.actions[batch.terms]
    hidden = model.head[:-1](model.norm_head(true[batch.terms]))
    served = binary_cross_entropy_with_logits(
        model.head[-1](hidden)[:, labels.served_tasks], labels.served[actions]
    )
    if not (options.ordinal_weight and labels.auxiliary.shape[1]):
        return served
    return served + options.ordinal_weight * binary_cross_entropy_with_logits(
        auxiliary(hidden), labels.auxiliary[actions]
    )


def retrieve(
    model: HSTU, following: Tensor, batch: Batch, options: TrainOptions, draw_shares: Tensor
) -> Retrieved:
    """Compute the softmax over the catalogue, or over a sample of a large one, at every event.

    Args:
        model: Ranker with `retrieval`.
        following: float32 [B, N, dim] final rows of NEXT.
        batch: Windows of the rows.
        options: `max_softmax_items`, `num_negatives` and `vector_dropout`.
        draw_shares: float64 [num_items] probability of each item in a draw of the sample.
    """
    num_items = model.config.num_items
    u = dropout(model.user_vectors(following[batch.terms]), options.vector_dropout)
    own_items = batch.items[batch.terms]
    if num_items <= options.max_softmax_items:
        items = torch.arange(num_items)
        table = model.items.embed(items)
        own = table[own_items]
        correction = torch.zeros(num_items)
    else:
        places = torch.rand(options.num_negatives, dtype=torch.float64)
        drawn = torch.searchsorted(draw_shares.cumsum(0), places).clamp(max=num_items - 1)
        items = torch.unique(drawn)
        # -log of the chance that at least one draw is the item
        missed = options.num_negatives * torch.log1p(-draw_shares[items])
        correction = -torch.log(-torch.expm1(missed)).float()
        table = model.items.embed(items)
        own = model.items.embed(own_items)
    every = torch.arange(batch.items.shape[1], dtype=torch.int32)
    # "<=" excludes the event's own item too, which `own` has
    is_closed = _first_places(batch, items)[:, None] <= every[:, None]
    partition, shares = _Partition.apply(u, table, correction, is_closed[batch.terms])  # type: ignore[no-untyped-call]
    return Retrieved(u, (u * own).sum(-1), items, partition, shares)


class _Partition(torch.autograd.Function):
    """Log of the sum of exp(u . e + correction) over the items that are not masked.

    Keeps one [M, n] tensor for the backward pass; plain autograd keeps seven.
    """

    @staticmethod
    def forward(
        context: Any, u: Tensor, table: Tensor, correction: Tensor, is_closed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the logs [M], and each item's share of the sum [M, n], which has no gradient."""
        shares = (u @ table.T).add_(correction).masked_fill_(is_closed, CLOSED)
        top = shares.amax(1, keepdim=True)
        total = shares.sub_(top).exp_().sum(1, keepdim=True)
        shares.div_(total)
        context.save_for_backward(u, table, shares)
        context.mark_non_differentiable(shares)
        return (total.log() + top)[:, 0], shares

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        u, table, shares = context.saved_tensors
        of_logits = shares * gradients[0][:, None]
        return of_logits @ table, of_logits.T @ u, None, None


def _first_places(batch: Batch, items: Tensor) -> Tensor:
    """Find the first place of each item in each window: int32 [B, n], N = not in the window.

    `items` are int64 [n] item rows, ascending.
    """
    users, num_tokens = batch.items.shape
    column = torch.searchsorted(items, batch.items).clamp(max=len(items) - 1)
    is_there = (items[column] == batch.items) & batch.valid
    first = torch.full((users, len(items) + 1), num_tokens, dtype=torch.int32)
    every = torch.arange(num_tokens, dtype=torch.int32).expand(users, -1)
    return first.scatter_reduce_(1, column.where(is_there, len(items)), every, "amin")[:, :-1]


def _click_loss(
    model: HSTU,
    encoded: EncodedHistories,
    inputs: LogInputs,
    task: int,
    found: Retrieved,
    batch: Batch,
    options: TrainOptions,
) -> Tensor:
    some = _sample_places(batch.terms, options.click_ratio)
    true = batch.items.gather(1, some)[..., None]
    drawn, log_weight = draw_candidates(model, found, batch, some, NUM_CLICK_DRAWS)
    candidates = torch.cat([true, drawn], dim=-1)
    events = batch.events.gather(1, some)
    rows = encoded.rows(
        candidates, some, inputs.request(events), inputs.cross_of(events, candidates)
    )
    logits = model.task_logits(rows)[..., task]
    counted = logits + torch.cat([torch.zeros_like(log_weight[..., :1]), log_weight], dim=-1)
    losses = torch.logsumexp(counted, dim=-1) - logits[..., 0]
    return losses[batch.terms.gather(1, some)].mean()


@torch.no_grad()
def draw_candidates(
    model: HSTU, found: Retrieved, batch: Batch, some: Tensor, num_draws: int
) -> tuple[Tensor, Tensor]:
    """Draw items for some events from the retrieval's softmax, and as many uniformly from all.

    The weight of a draw is 1 / (expected number of draws of its item). So a weighted sum over the
    draws is an unbiased estimate of the sum over all items, except the event's own item and earlier
    items of the window, whose weight is 0.

    Args:
        model: Ranker that embeds the items.
        found: Softmax of the retrieval.
        batch: Windows of the events.
        some: int64 [B, T] index of the events to draw for, within their windows.
        num_draws: Number of draws from each of the two distributions.

    Returns:
        int64 [B, T, C] item rows, and float32 [B, T, C] the log of each draw's weight.
    """
    num_items = model.config.num_items
    row_of = (batch.terms.flatten().cumsum(0) - 1).clamp(min=0).view_as(batch.terms)
    rows = row_of.gather(1, some)
    likely = torch.multinomial(found.shares[rows.flatten()], num_draws, replacement=True)
    anything = torch.randint(num_items, (*some.shape, num_draws))
    drawn = torch.cat([found.items[likely].view(*some.shape, -1), anything], dim=-1)
    logits = (found.u[rows][..., None, :] * model.items.embed(drawn)).sum(-1)
    share = (logits - found.partition[rows][..., None]).exp()
    log_weight = -(num_draws * (share + 1 / num_items)).log()
    # [B, T, N], the event itself included
    before = torch.arange(batch.items.shape[1]) <= some[..., None]
    is_closed = ((drawn[..., None] == batch.items[:, None, None, :]) & before[:, :, None, :]).any(
        -1
    )
    return drawn, log_weight.masked_fill(is_closed, -math.inf)


def _sample_places(valid: Tensor, ratio: float) -> Tensor:
    """Sample a share of the columns without repetition: int64 [B, T].

    Padding is drawn only if a row has too few events.
    """
    order = torch.rand(valid.shape).masked_fill(~valid, 2.0).argsort(dim=1)
    return order[:, : max(1, round(ratio * valid.shape[1]))]


BATCH_TOKENS = 2048
_TARGETS_AT_ONCE = 256


def user_vectors(inputs: LogInputs, model: HSTU, targets: Sequence[NextItem]) -> Tensor:
    """Compute u of each target's user, just before the event and at its time.

    Args:
        inputs: Inputs that hold the users' histories.
        model: Ranker with `retrieval`, in evaluation mode.
        targets: Next items; a user's vector is that just before the event.

    Returns:
        float32 [targets, dim].
    """
    with torch.no_grad():
        return model.user_vectors(_rows(inputs, model, targets, is_next=True))


@torch.no_grad()
def _rows(inputs: LogInputs, model: HSTU, targets: Sequence[NextItem], *, is_next: bool) -> Tensor:
    """Compute the final row of NEXT, or of the event's own item, just before each target.

    Returns float32 [targets, dim].
    """
    log = inputs.log
    rows = torch.empty(len(targets), model.config.dim)
    place_of = {target.event: place for place, target in enumerate(targets)}
    parts = []
    for _, event in targets:
        begin = inputs.first_read(event)
        parts.append(Window(begin, event + 1 - begin))
    for batch in batches(log, parts, BATCH_TOKENS):
        encoded = EncodedHistories(model, inputs.histories(batch))
        last = batch.valid.sum(1, keepdim=True) - 1
        events = batch.events.gather(1, last)
        candidates = (
            torch.full_like(events, log.num_items) if is_next else batch.items.gather(1, last)
        )
        cross = None if is_next else inputs.cross(events)
        found = encoded.rows(candidates[..., None], last, inputs.request(events), cross)
        rows[[place_of[event] for event in events[:, 0].tolist()]] = found[:, 0, 0]
    return rows


class NextItemLikelihood(NamedTuple):
    """How likely next items are, by a ranker's retrieval."""

    log_probabilities: F64  # float64 [targets]
    ranks: F64  # float64 [targets] unseen items that are more likely


@torch.no_grad()
def next_item_likelihood(
    inputs: LogInputs, model: HSTU, targets: Sequence[NextItem]
) -> NextItemLikelihood:
    """Compute the log-probability and the rank of each next item among the unseen items.

    The next item counts as unseen, even if the user had it before.
    """
    log = inputs.log
    u = user_vectors(inputs, model, targets)
    table = model.items.embed(torch.arange(log.num_items))
    found, ranks = np.empty(len(targets)), np.empty(len(targets))
    for start in range(0, len(targets), _TARGETS_AT_ONCE):
        part = targets[start : start + _TARGETS_AT_ONCE]
        logits = u[start : start + len(part)] @ table.T
        own = torch.from_numpy(log.items[[event for _, event in part]])[:, None]
        score = logits.gather(1, own)
        for row, (user, event) in enumerate(part):
            logits[row, torch.from_numpy(log.items[log.starts[user] : event])] = CLOSED
        logits.scatter_(1, own, score)
        found[start : start + len(part)] = (
            (score[:, 0] - torch.logsumexp(logits, dim=1)).double().numpy()
        )
        ranks[start : start + len(part)] = (logits > score).sum(1).numpy()
    return NextItemLikelihood(found, ranks)


@torch.no_grad()
def event_likelihood(
    inputs: LogInputs, model: HSTU, targets: Sequence[NextItem], labels: Labels
) -> F64:
    """Compute the log-probability of each event's item and of its binary labels, float64 [targets].

    Args:
        inputs: Inputs that hold the users' histories.
        model: Ranker with `retrieval`, in evaluation mode.
        targets: Events to score.
        labels: Labels of the binary tasks.
    """
    found = next_item_likelihood(inputs, model, targets).log_probabilities
    return (
        found + label_likelihood(inputs, model, targets, labels) if labels.served_tasks else found
    )


@torch.no_grad()
def label_likelihood(
    inputs: LogInputs, model: HSTU, targets: Sequence[NextItem], labels: Labels
) -> F64:
    """Compute the log-probability of each event's binary labels; arguments as `event_likelihood`.

    Returns:
        float64 [targets], summed over the tasks, at least one.
    """
    actions = inputs.log.actions[[event for _, event in targets]]
    logits = model.task_logits(_rows(inputs, model, targets, is_next=False))[:, labels.served_tasks]
    losses = binary_cross_entropy_with_logits(logits, labels.served[actions], reduction="none")
    found: F64 = -losses.sum(1).double().numpy()
    return found


class HeldOutEvents(NamedTuple):
    """A log without its validation's events among the trained ones, and the validation."""

    log: InteractionLog
    targets: Sequence[NextItem]  # the validation's next items


def hold_out(log: InteractionLog, options: TrainOptions) -> HeldOutEvents:
    """Hold out the last trained event of users with at least two trained events.

    Args:
        log: Log to train on.
        options: `validation_users`, the most users, who are drawn at random, and the seed.
    """
    last = log.starts[:-1] + log.num_trained - 1
    users = np.flatnonzero(log.num_trained > 1)
    every = [
        NextItem(user, event)
        for user, event in zip(users.tolist(), last[users].tolist(), strict=True)
    ]
    targets = sample_targets(every, options.validation_users, options.seed)
    num_trained = log.num_trained.copy()
    num_trained[[user for user, _ in targets]] -= 1
    return HeldOutEvents(replace(log, num_trained=num_trained), targets)
