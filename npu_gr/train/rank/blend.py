"""Fit the score blend of a cascade: a weighted sum of nine terms of each retrieved item.

The terms are those of `ItemList`: retrieval score, click logit, transitions, neighbours (items of
the same users), popularity, of an item of the history that it is one, how often the user had it
and how long ago, and whether it comes again or follows. Transitions are counted as

    c(j, i)  = sum over lags 1 .. 5 of  decay^(lag - 1) n_lag(j, i)
    P(i | j) = (c(j, i) + 10 pop(i)) / (sum over i of c(j, i) + 10)

The weights maximise the likelihood of the validation's next items within their users' lists. This
is a conditional logit, which is concave, so the fit takes milliseconds. A ridge penalty keeps the
weights near retrieval alone, which matters if few users have their next item in their list. The
penalty measures each weight in standard deviations of its term, because terms differ in scale: the
click logit hardly varies after one epoch, and may need a weight of 20.
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
from npu_gr.model.blend import (
    DECAY,
    LAST_EVENTS,
    MAX_SUCCESSORS,
    OWN_OR_NEXT,
    PRIOR,
    WEIGHTS,
    ScoreBlend,
    own_or_next,
)
from npu_gr.model.hstu import HSTU
from npu_gr.model.item_similarity import Neighbours
from npu_gr.model.own_items import OwnItems
from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.metrics import F64
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.item_similarity import USUAL, Entries, NeighbourKind
from npu_gr.train.rank.losses import user_vectors

RETRIEVAL_ALONE = dict.fromkeys(WEIGHTS, 0.0) | {"retrieval": 1.0}
USUAL_WEIGHTS = tuple(name for name in WEIGHTS if name != OWN_OR_NEXT)
RIDGE = 1.0  # weight of the penalty, see `fit_blend`


class ItemList(NamedTuple):
    """The terms of the items retrieved for a user; the field names are those of `WEIGHTS`.

    c = items.
    """

    items: I64  # [c] rows, ascending
    retrieval: F32  # [c] inner product u . e
    click: F32  # [c] logit of the next-item task
    transitions: F32  # [c] log of the probability that the item follows the last events
    neighbours: F32  # [c] similarity to the items of the history
    popularity: F32  # [c] log of the item's share of the events
    seen: F32  # [c] 1 = in the history; this and the next two as `OwnItems.terms`
    own_count: F32  # [c] log of how much the user had the item lately
    own_age: F32  # [c] log of 1 + the number of events since then
    own_or_next: F32  # [c] log of how much the user had the item lately, or of what follows

    def scores(self, blend: ScoreBlend) -> F32:
        """Sum the terms with the blend's weights, [c]."""
        return blend.scores(
            self.retrieval,
            self.click,
            self.transitions,
            self.neighbours,
            self.popularity,
            blend.own_sum(self.seen, self.own_count, self.own_age)
            + np.float32(blend.weights[OWN_OR_NEXT]) * self.own_or_next,
        )

    def over_all(self, scores: F32, num_items: int) -> F64:
        """Scatter the list's scores, [c], to all items: float64 [num_items], -inf for others."""
        row = np.full(num_items, -np.inf)
        row[self.items] = scores
        return row


def count_blend(
    log: InteractionLog, task: str, kind: NeighbourKind = USUAL, decay: float = DECAY
) -> ScoreBlend:
    """Count the transitions and the neighbours of the trained events, with unfitted weights.

    Args:
        log: Log whose trained events are counted.
        task: Name of the task that predicts the next item.
        kind: Similarity of the neighbours.
        decay: As `count_transitions`.
    """
    return replace(count_transitions(log, task, decay), neighbours=kind.counted(log))


def count_transitions(log: InteractionLog, task: str, decay: float = DECAY) -> ScoreBlend:
    """Count the transitions of the trained events, with unfitted weights and no neighbours.

    Args:
        log: Log whose trained events are counted.
        task: Name of the task that predicts the next item.
        decay: `DECAY`, or `LAST_ALONE` to count neighbouring events alone.
    """
    num_items = log.num_items
    trained = log.trained
    users = log.users
    uses = np.bincount(log.items[trained], minlength=num_items)
    share = (uses + 1) / (uses.sum() + num_items)  # plus 1: an item without events may follow too
    pairs: I64 = np.empty(0, np.int64)
    counts: F64 = np.empty(0)
    for lag in range(1, LAST_EVENTS + 1 if decay else 2):
        near = np.flatnonzero(trained[lag:] & (users[lag:] == users[:-lag]))
        keys, number = np.unique(
            log.items[near] * num_items + log.items[near + lag], return_counts=True
        )
        together, place = np.unique(np.concatenate([pairs, keys]), return_inverse=True)
        weights = np.concatenate([counts, decay ** (lag - 1) * number])
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
        decay=decay,
    )


NUM_FOLLOWERS = 100  # items of a list that are retrieved because they follow the last events
NUM_OWN = 100  # items of a list that the user had, in a log in which users have items again


class ListSizes(NamedTuple):
    """Most items of a list, by how they are retrieved."""

    retrieved: int  # by u . e: so many of all items, and so many of the unseen ones
    followers: int  # by transitions from the last events
    neighbours: int  # by similarity to the items of the history
    own: int = 0  # by how often and how lately the user had them


def retrieved_lists(
    inputs: LogInputs,
    model: HSTU,
    counted: ScoreBlend,
    targets: Sequence[NextItem],
    sizes: ListSizes,
    done: Callable[[int, int], None] = lambda *_: None,
    others: Sequence[Neighbours] = (),
) -> Iterator[ItemList]:
    """Retrieve a list of items for each target's user, and compute the terms of each item.

    Args:
        inputs: Inputs that hold the users' histories.
        model: Ranker in evaluation mode, its items frozen.
        counted: Transitions and neighbours.
        targets: Next items; a list is made for the user just before the event.
        sizes: Most items of a list.
        done: Callback with (users so far, users in all) after every user.
        others: Neighbours of other kinds, whose best items are added to the lists.
    """
    log = inputs.log
    backend = CPUBackend()
    task = model.config.tasks.index(counted.task)
    is_linear = counted.neighbours is not None and counted.neighbours.is_linear

    def most_alike(history: I64) -> int:
        """Return how many neighbours to retrieve.

        A blend of linear neighbours may consist of them alone. So its list needs `sizes.neighbours`
        unseen items, in addition to those of the history.
        """
        return sizes.neighbours + (len(np.unique(history)) if is_linear else 0)

    table = model.items.vectors()
    vectors = user_vectors(inputs, model, targets)
    for count, ((user, event), u) in enumerate(zip(targets, vectors, strict=True), 1):
        history = log.items[log.starts[user] : event]
        retrieval = table @ u
        seen = torch.zeros(log.num_items)
        seen[torch.from_numpy(history)] = 1
        own = OwnItems.of(history)
        followers = torch.from_numpy(counted.top(history, sizes.followers))
        neighbours = [
            counted.nearest(history, most_alike(history)),
            *(o.top(history, sizes.neighbours) for o in others),
        ]
        found = [
            *_best(retrieval, seen, sizes.retrieved),
            followers,
            torch.from_numpy(own.best(sizes.own)),
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
            *own.terms(items.numpy()),
            own_or_next(counted, own, items.numpy(), history, items.numpy()),
        )
        done(count, len(targets))


def _best(retrieval: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the rows of the best items among all, and among the unseen ones."""
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
    free: Sequence[str] = USUAL_WEIGHTS,
) -> ScoreBlend:
    """Fit the weights by the likelihood of the next items within their lists.

    Minimises -log likelihood + RIDGE / 2 x sum over the terms of
    (term's variance within lists) x (weight - start)^2.

    Args:
        counted: Blend with the transitions and the neighbours.
        log: Log that holds the events.
        lists: List of each target.
        targets: Next items that the model and the counts were not trained on. A target that is not
            in its list is ignored.
        start: Weights near which the ridge keeps the fitted ones.
        free: The weights to fit, by name; the others stay.
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
    if not any(found.seen[place[0]] for found, place in rows):
        # nothing says which seen items are better, so that they are seen is all that counts
        free = [name for name in free if name not in ("own_count", "own_age", OWN_OR_NEXT)]
    is_free = torch.tensor([name in free for name in WEIGHTS])
    ridge = RIDGE * _variances(terms, is_padding)
    weights = before.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def penalised_loss() -> Tensor:
        optimizer.zero_grad()
        scores = (terms @ torch.where(is_free, weights, before)).masked_fill(is_padding, -torch.inf)
        each = torch.logsumexp(scores, dim=1) - scores.gather(1, chosen)[:, 0]
        loss = each.sum() + (ridge * (weights - before).square()).sum() / 2
        loss.backward()
        return loss

    optimizer.step(penalised_loss)
    return replace(counted, weights=dict(zip(WEIGHTS, weights.tolist(), strict=True)))


def _variances(terms: Tensor, is_padding: Tensor) -> Tensor:
    """Compute each term's variance within lists: [rows, c, terms], [rows, c] -> [terms]."""
    kept = (~is_padding)[..., None]
    means = (terms * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
    return ((terms - means) * kept).square().sum((0, 1)) / kept.sum()
