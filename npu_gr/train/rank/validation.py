"""What a ranker that retrieves says of the next items: user vectors, likelihood, and lists to be put in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_gr.model.hstu import HSTU
from npu_gr.train.data import InteractionLog, NextItem, Window, batches
from npu_gr.train.rank.forward import CLOSED, EncodedHistories, HistoryBatch

BATCH_TOKENS = 2048
_TARGETS_AT_ONCE = 256


@torch.no_grad()
def user_vectors(log: InteractionLog, model: HSTU, targets: Sequence[NextItem]) -> Tensor:
    """Compute u of each target's user just before the event, at its time: float32 [targets, dim].

    Args:
        log: with the users' histories.
        model: with `retrieval`, in evaluation mode.
        targets: the next items.
    """
    u = torch.empty(len(targets), model.config.dim)
    row_of = {target.event: index for index, target in enumerate(targets)}
    parts = []
    for user, event in targets:
        begin = max(int(log.starts[user]), event - model.config.max_history_tokens)
        parts.append(Window(begin, event + 1 - begin))
    for batch in batches(log, parts, BATCH_TOKENS):
        encoded = EncodedHistories(model, HistoryBatch(items=batch.items, actions=batch.actions, times=batch.times))
        last = batch.valid.sum(1, keepdim=True) - 1
        following = encoded.rows(torch.full_like(last, model.config.num_items)[..., None], last)
        rows = [row_of[event] for event in batch.events.gather(1, last)[:, 0].tolist()]
        u[rows] = model.user_vectors(following[:, 0, 0])
    return u


@torch.no_grad()
def likelihood(log: InteractionLog, model: HSTU, targets: Sequence[NextItem]) -> float:
    """Compute the mean log-probability of the next items among the unseen ones.

    An item of the history is unseen where it is the next item itself.
    """
    u = user_vectors(log, model, targets)
    table = model.embed_items(torch.arange(log.num_items))
    total = 0.0
    for start in range(0, len(targets), _TARGETS_AT_ONCE):
        part = targets[start : start + _TARGETS_AT_ONCE]
        logits = u[start : start + len(part)] @ table.T
        own = torch.from_numpy(log.items[[event for _, event in part]])[:, None]
        score = logits.gather(1, own)
        for row, (user, event) in enumerate(part):
            logits[row, torch.from_numpy(log.items[log.starts[user] : event])] = CLOSED
        logits.scatter_(1, own, score)
        total += float((score[:, 0] - torch.logsumexp(logits, dim=1)).double().sum())
    return total / len(targets)
