"""What a ranker that retrieves says of the validation's events: user vectors, and how likely the events are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from npu_gr.core.arrays import I64
from npu_gr.model.hstu import HSTU
from npu_gr.train.data import InteractionLog, NextItem, Window, batches
from npu_gr.train.metrics import F64
from npu_gr.train.rank.forward import CLOSED, EncodedHistories, HistoryBatch
from npu_gr.train.rank.tasks import Labels

BATCH_TOKENS = 2048
_TARGETS_AT_ONCE = 256


def user_vectors(log: InteractionLog, model: HSTU, targets: Sequence[NextItem]) -> Tensor:
    """Compute u of each target's user just before the event, at its time: float32 [targets, dim].

    Args:
        log: with the users' histories.
        model: with `retrieval`, in evaluation mode.
        targets: the next items.
    """
    with torch.no_grad():
        return model.user_vectors(_rows(log, model, targets, np.full(len(targets), log.num_items)))


@torch.no_grad()
def _rows(log: InteractionLog, model: HSTU, targets: Sequence[NextItem], candidates: I64) -> Tensor:
    """Compute the final row of one candidate just before each target, float32 [targets, dim]."""
    rows = torch.empty(len(targets), model.config.dim)
    place_of = {target.event: place for place, target in enumerate(targets)}
    parts = []
    for user, event in targets:
        begin = max(int(log.starts[user]), event - model.config.max_history_tokens)
        parts.append(Window(begin, event + 1 - begin))
    for batch in batches(log, parts, BATCH_TOKENS):
        encoded = EncodedHistories(model, HistoryBatch(items=batch.items, actions=batch.actions, times=batch.times))
        last = batch.valid.sum(1, keepdim=True) - 1
        places = [place_of[event] for event in batch.events.gather(1, last)[:, 0].tolist()]
        rows[places] = encoded.rows(torch.from_numpy(candidates[places])[:, None, None], last)[:, 0, 0]
    return rows


@torch.no_grad()
def next_item_likelihood(log: InteractionLog, model: HSTU, targets: Sequence[NextItem]) -> F64:
    """Compute the log-probability of each next item among the unseen ones, float64 [targets].

    An item of the history is unseen where it is the next item itself.
    """
    u = user_vectors(log, model, targets)
    table = model.embed_items(torch.arange(log.num_items))
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
def event_likelihood(log: InteractionLog, model: HSTU, targets: Sequence[NextItem], labels: Labels) -> F64:
    """Compute the log-probability of each event: of its item, and of what the user does with it. float64 [targets].

    Args:
        log: with the users' histories.
        model: with `retrieval`, in evaluation mode.
        targets: the events.
        labels: of the binary tasks.
    """
    found = next_item_likelihood(log, model, targets)
    if labels.served_tasks:
        events = np.array([event for _, event in targets])
        logits = model.task_logits(_rows(log, model, targets, log.items[events]))[:, labels.served_tasks]
        losses = binary_cross_entropy_with_logits(logits, labels.served[events], reduction="none")
        found -= losses.sum(1).double().numpy()
    return found
