"""Fit the order of a cascade: count which items follow which and which are had together, and weigh what is known.

    P(i | j) = (sum over lags 1 .. 5 of .6^(lag - 1) n(j, then i) + 10 pop(i)) / (the sum over all i + 10)

The weights of the sum make the validation's next items most likely within their own lists: a
conditional logit, which is concave, so its best weights are found in milliseconds. A ridge keeps
them near retrieval alone; it matters where few users have their next item in their list. It counts
a weight in deviations of its term: a weight of the click logit, which hardly differs between items
after an epoch, may be 20 where another's is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import F32, I64
from npu_gr.model.blend import DECAY, LAST_EVENTS, MAX_SUCCESSORS, PRIOR, WEIGHTS, ScoreBlend
from npu_gr.model.hstu import HSTU
from npu_gr.model.item_similarity import Neighbours
from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.metrics import F64
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.item_similarity import USUAL, Entries, NeighbourKind
from npu_gr.train.rank.losses import user_vectors

RETRIEVAL_ALONE = dict.fromkeys(WEIGHTS, 0.0) | {"retrieval": 1.0}
# of the squared distances from retrieval alone, each weight times its term's deviation within lists
RIDGE = 1.0


class ItemList(NamedTuple):
    """What is known of the items retrieved for a user, each term by its name among `WEIGHTS`. c = items."""

    items: I64  # [c] rows, ascending
    retrieval: F32  # [c] u . e
    click: F32  # [c] logit of the next item
    transitions: F32  # [c] log of the probability that it follows
    neighbours: F32  # [c] how much it has in common with the history
    popularity: F32  # [c] log of its share of the events
    seen: F32  # [c] 1 = in the history

    def scores(self, order: ScoreBlend) -> F32:
        """Sum up by the order's weights, [c]."""
        return order.scores(
            self.retrieval,
            self.click,
            self.transitions,
            self.neighbours,
            self.popularity,
            self.seen,
        )

    def over_all(self, scores: F32, num_items: int) -> F64:
        """Spread the list's scores, [c], over the catalogue: float64 [num_items]; -inf for what is not in the list."""
        row = np.full(num_items, -np.inf)
        row[self.items] = scores
        return row


def count_blend(log: InteractionLog, task: str, kind: NeighbourKind = USUAL) -> ScoreBlend:
    """Count the transitions and the neighbours of the trained events.

    The order's weights are retrieval's alone.

    Args:
        log: its trained events count.
        task: that predicts the next item.
        kind: of the neighbours.
    """
    return replace(count_transitions(log, task), neighbours=kind.counted(log))


def count_transitions(log: InteractionLog, task: str) -> ScoreBlend:
    """Count the transitions of the trained events; the order's weights are retrieval's alone.

    Args:
        log: its trained events count.
        task: that predicts the next item.
    """
    num_items = log.num_items
    trained = log.trained
    users = log.users
    uses = np.bincount(log.items[trained], minlength=num_items)
    share = (uses + 1) / (uses.sum() + num_items)  # an item without events may follow too
    pairs: I64 = np.empty(0, np.int64)
    counts: F64 = np.empty(0)
    for lag in range(1, LAST_EVENTS + 1):
        near = np.flatnonzero(trained[lag:] & (users[lag:] == users[:-lag]))
        keys, number = np.unique(
            log.items[near] * num_items + log.items[near + lag], return_counts=True
        )
        together, place = np.unique(np.concatenate([pairs, keys]), return_inverse=True)
        weights = np.concatenate([counts, DECAY ** (lag - 1) * number])
        counts = np.bincount(place, weights, len(together)).astype(np.float64)
        pairs = together
    source, target = np.divmod(pairs, num_items)
    total = np.bincount(source, counts, num_items)
    log_prob = np.log((counts + PRIOR * share[target]) / (total[source] + PRIOR))
    kept = Entries(source, target, log_prob).best_of_rows(MAX_SUCCESSORS)
    successors, probabilities = kept.table(num_items, -np.inf)
    return ScoreBlend(
        task=task,
        weights=RETRIEVAL_ALONE,
        successors=successors,
        log_prob=probabilities,
        popularity=np.log(share).astype(np.float32),
    )


NUM_FOLLOWERS = 100  # items of a list that follow the user's last events, beside the retrieved ones


class ListSizes(NamedTuple):
    """How long a list is."""

    retrieved: int  # most items by u . e, of all and of the unseen ones
    followers: int  # most items that follow the last events
    neighbours: int  # most items that have something in common with the history


def retrieved_lists(
    inputs: LogInputs,
    model: HSTU,
    counted: ScoreBlend,
    targets: Sequence[NextItem],
    sizes: ListSizes,
    done: Callable[[int, int], None] = lambda *_: None,
    others: Sequence[Neighbours] = (),
) -> Iterator[ItemList]:
    """Retrieve for each target the best items by u . e, followers and neighbours, and tell what is known of each.

    Args:
        inputs: with the users' histories.
        model: in evaluation mode, its items frozen.
        counted: the transitions and the neighbours.
        targets: the next items.
        sizes: of the lists.
        done: called with (users so far, users in all) after every user.
        others: neighbours of other kinds, whose best are in the lists too.
    """
    log = inputs.log
    backend = CPUBackend()
    task = model.config.tasks.index(counted.task)
    is_linear = counted.neighbours is not None and counted.neighbours.is_linear

    def most_alike(history: I64) -> int:
        """How many neighbours: of linear ones, which may be all of the order, as many unseen ones as are asked for."""
        return sizes.neighbours + (len(np.unique(history)) if is_linear else 0)

    table = model.items.vectors()
    vectors = user_vectors(inputs, model, targets)
    for count, ((user, event), u) in enumerate(zip(targets, vectors, strict=True), 1):
        history = log.items[log.starts[user] : event]
        retrieval = table @ u
        seen = torch.zeros(log.num_items)
        seen[torch.from_numpy(history)] = 1
        followers = torch.from_numpy(counted.top(history, sizes.followers))
        neighbours = [
            counted.nearest(history, most_alike(history)),
            *(o.top(history, sizes.neighbours) for o in others),
        ]
        found = [
            *_best(retrieval, seen, sizes.retrieved),
            followers,
            *map(torch.from_numpy, neighbours),
        ]
        items = torch.unique(torch.cat(found))
        yield ItemList(
            items.numpy(),
            retrieval[items].numpy(),
            model(backend, [inputs.segment(event, items)])[0][:, task].numpy(),
            counted.transitions(history, items.numpy()),
            counted.alike(history, items.numpy()),
            counted.popular(items.numpy()),
            seen[items].numpy(),
        )
        done(count, len(targets))


def _best(retrieval: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows of the best items of all, and of the unseen ones."""
    unseen = retrieval.masked_fill(seen > 0, -torch.inf)
    num_unseen = int((seen == 0).sum())
    of_all = retrieval.topk(min(count, len(retrieval))).indices
    return of_all, unseen.topk(min(count, num_unseen)).indices


def fit_blend(
    counted: ScoreBlend,
    log: InteractionLog,
    lists: Sequence[ItemList],
    targets: Sequence[NextItem],
    start: Mapping[str, float] = RETRIEVAL_ALONE,
    free: Sequence[str] = WEIGHTS,
) -> ScoreBlend:
    """Fit the weights by the likelihood of the next items within their lists.

    Args:
        counted: the transitions and the neighbours.
        log: holds the events.
        lists: of the targets.
        targets: next items that nothing was trained on; those that their lists lack say nothing.
        start: weights that the ridge keeps the others near.
        free: names of the weights that are fitted; others stay.
    """
    own = log.items[np.array([event for _, event in targets], np.int64)]
    rows = [
        (found, np.flatnonzero(found.items == item)) for found, item in zip(lists, own, strict=True)
    ]
    rows = [(found, place) for found, place in rows if len(place)]
    if not rows:
        return replace(counted, weights=dict(start))
    longest = max(len(found.items) for found, _ in rows)
    terms = torch.zeros(len(rows), longest, len(WEIGHTS), dtype=torch.float64)
    is_padding = torch.ones(len(rows), longest, dtype=torch.bool)
    for index, (found, _) in enumerate(rows):
        together = np.stack([getattr(found, name) for name in WEIGHTS], axis=1)
        terms[index, : len(together)] = torch.from_numpy(together)
        is_padding[index, : len(together)] = False
    chosen = torch.tensor([int(place[0]) for _, place in rows])[:, None]
    before = torch.tensor([start[name] for name in WEIGHTS], dtype=torch.float64)
    is_free = torch.tensor([name in free for name in WEIGHTS])
    ridge = RIDGE * _variances(terms, is_padding)
    weights = before.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def surprise() -> Tensor:
        optimizer.zero_grad()
        scores = (terms @ torch.where(is_free, weights, before)).masked_fill(is_padding, -torch.inf)
        each = torch.logsumexp(scores, dim=1) - scores.gather(1, chosen)[:, 0]
        loss = each.sum() + (ridge * (weights - before).square()).sum() / 2
        loss.backward()
        return loss

    optimizer.step(surprise)
    return replace(counted, weights=dict(zip(WEIGHTS, weights.tolist(), strict=True)))


def _variances(terms: Tensor, is_padding: Tensor) -> Tensor:
    """Compute how much each term varies within a list, [rows, c, terms] and [rows, c] -> [terms]."""
    kept = (~is_padding)[..., None]
    means = (terms * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
    return ((terms - means) * kept).square().sum((0, 1)) / kept.sum()
