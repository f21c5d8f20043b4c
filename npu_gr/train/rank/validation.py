"""What a ranker that retrieves says of the validation's events: user vectors, and how likely the events are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from npu_gr.model.hstu import HSTU
from npu_gr.train.data import InteractionLog, NextItem, Window, batches
from npu_gr.train.metrics import F64
from npu_gr.train.next_item import sample_targets
from npu_gr.train.rank.forward import CLOSED, EncodedHistories
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.options import Labels, TrainOptions

BATCH_TOKENS = 2048
_TARGETS_AT_ONCE = 256


def user_vectors(inputs: LogInputs, model: HSTU, targets: Sequence[NextItem]) -> Tensor:
    """Compute u of each target's user just before the event, at its time: float32 [targets, dim].

    Args:
        inputs: with the users' histories.
        model: with `retrieval`, in evaluation mode.
        targets: the next items.
    """
    with torch.no_grad():
        return model.user_vectors(_rows(inputs, model, targets, is_next=True))


@torch.no_grad()
def _rows(inputs: LogInputs, model: HSTU, targets: Sequence[NextItem], *, is_next: bool) -> Tensor:
    """Compute the final row of NEXT, or of the event's own item, just before each target: float32 [targets, dim]."""
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
        candidates = torch.full_like(events, log.num_items) if is_next else batch.items.gather(1, last)
        cross = None if is_next else inputs.cross(events)
        found = encoded.rows(candidates[..., None], last, inputs.request(events), cross)
        rows[[place_of[event] for event in events[:, 0].tolist()]] = found[:, 0, 0]
    return rows


@torch.no_grad()
def next_item_likelihood(inputs: LogInputs, model: HSTU, targets: Sequence[NextItem]) -> F64:
    """Compute the log-probability of each next item among the unseen ones, float64 [targets].

    An item of the history is unseen where it is the next item itself.
    """
    log = inputs.log
    u = user_vectors(inputs, model, targets)
    table = model.items.embed(torch.arange(log.num_items))
    found = np.empty(len(targets))
    for start in range(0, len(targets), _TARGETS_AT_ONCE):
        part = targets[start : start + _TARGETS_AT_ONCE]
        logits = u[start : start + len(part)] @ table.T
        own = torch.from_numpy(log.items[[event for _, event in part]])[:, None]
        score = logits.gather(1, own)
        for row, (user, event) in enumerate(part):
            logits[row, torch.from_numpy(log.items[log.starts[user] : event])] = CLOSED
        logits.scatter_(1, own, score)
        found[start : start + len(part)] = (score[:, 0] - torch.logsumexp(logits, dim=1)).double().numpy()
    return found


@torch.no_grad()
def event_likelihood(inputs: LogInputs, model: HSTU, targets: Sequence[NextItem], labels: Labels) -> F64:
    """Compute the log-probability of each event: of its item, and of what the user does with it. float64 [targets].

    Args:
        inputs: with the users' histories.
        model: with `retrieval`, in evaluation mode.
        targets: the events.
        labels: of the binary tasks.
    """
    found = next_item_likelihood(inputs, model, targets)
    if labels.served_tasks:
        events = np.array([event for _, event in targets])
        logits = model.task_logits(_rows(inputs, model, targets, is_next=False))[:, labels.served_tasks]
        losses = binary_cross_entropy_with_logits(logits, labels.served[events], reduction="none")
        found -= losses.sum(1).double().numpy()
    return found


class HeldOutEvents(NamedTuple):
    """A log whose validation is not trained on."""

    log: InteractionLog
    targets: Sequence[NextItem]  # the validation's next items


def hold_out(log: InteractionLog, options: TrainOptions) -> HeldOutEvents:
    """Keep the last trained event of each user who has another one, of a large log of some users, for the validation.

    Args:
        log: to train on.
        options: the most users, and the seed that draws them.
    """
    last = log.starts[:-1] + log.num_trained - 1
    users = np.flatnonzero(log.num_trained > 1)
    every = [NextItem(user, event) for user, event in zip(users.tolist(), last[users].tolist(), strict=True)]
    targets = sample_targets(every, options.validation_users, options.seed)
    num_trained = log.num_trained.copy()
    num_trained[[user for user, _ in targets]] -= 1
    return HeldOutEvents(replace(log, num_trained=num_trained), targets)
