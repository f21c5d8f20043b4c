"""Baselines: simple models that a trained model has to beat, measured by the same protocol.

Every baseline is fitted to the trained events alone. To score an event it may read, like the
ranker, all earlier events of the user, also those after the trained ones. `fit_baselines` fits the
next-item baselines, and chooses the settings of the linear ones on a validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DataError
from npu_gr.core.feature_schema.factors import NUM_FACTORS, PENALTY, expected, solve_each
from npu_gr.model.blend import FOLLOWING
from npu_gr.model.own_items import OwnItems
from npu_gr.train.data import InteractionLog, Split
from npu_gr.train.evaluate import Evaluator, Graph, HeldOut, unique_edges
from npu_gr.train.linear import (
    Candidate,
    LinearModel,
    PureSVD,
    Tuned,
    ease_is_too_large,
    eases,
    item_knns,
    spectrum,
    tune,
)
from npu_gr.train.metrics import F64
from npu_gr.train.next_item import MANY_REPEATS, Baseline, sample_targets

LAGS = 5  # longest distance of a transition in events, and the number of last events that are read
DECAY = 0.6  # factor of a transition's weight per event in between, of an event's per newer event
PRIOR = 10.0  # pseudo-count of transitions by popularity


class Popularity:
    """Ranks items by their number of trained events."""

    name = "popularity"

    def __init__(self, log: InteractionLog) -> None:
        self._counts = np.bincount(log.items[log.trained], minlength=log.num_items).astype(
            np.float64
        )

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        return self._counts


class Markov:
    """Ranks items by how often they followed the user's last item; ties go by popularity."""

    name = "Markov counts"

    def __init__(self, log: InteractionLog) -> None:
        self._popularity = Popularity(log)
        follows = log.trained & (np.diff(log.users, prepend=-1) == 0)
        at = np.flatnonzero(follows)
        self._pairs, self._counts = np.unique(
            log.items[at - 1] * log.num_items + log.items[at], return_counts=True
        )

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        last = log.items[log.starts[user] + log.num_trained[user] - 1]
        popularity = self._popularity.next_items(log, user)
        # less than one count in all, so it only breaks ties
        scores: F64 = popularity / (popularity.sum() + 1)
        mine = slice(
            *np.searchsorted(self._pairs, [last * log.num_items, (last + 1) * log.num_items])
        )
        scores[self._pairs[mine] - last * log.num_items] += self._counts[mine]
        return scores


class OwnHistory:
    """Ranks items by how often and how lately the user had them, and by what follows the last one.

        score(i) = sum over the user's events of item i of  .97^age  +  .3 P(i | last item)

    It is the baseline to beat where people repeat, and Markov counts where they do not.
    """

    name = "own recency and frequency"

    def __init__(self, markov: Markov) -> None:
        self._markov = markov

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        scores = self._markov.next_items(log, user)
        scores *= FOLLOWING / scores.sum()
        start = log.starts[user]
        own = OwnItems.of(log.items[start : start + log.num_trained[user]])
        scores[own.items] += own.weights
        return scores


class DecayedTransitions:
    """Ranks items by what follows the user's last five items.

        c(j, i)  = sum over lags 1 .. 5 of  0.6^(lag - 1) n_lag(j, i)
        P(i | j) = (c(j, i) + 10 pop(i)) / (sum over i of c(j, i) + 10)
        score(i) = sum over the last five items j of  0.6^age P(i | j)

    n_lag(j, i) counts how often i came `lag` events after j in a user's trained events, pop(i) is
    the share of item i in the trained events.
    """

    name = "decayed transitions"

    def __init__(self, log: InteractionLog) -> None:
        self._popularity = Popularity(log).next_items(log, 0) / max(1, int(log.trained.sum()))
        num_items = log.num_items
        keys = [np.empty(0, np.int64)]
        weights: list[F64] = [np.empty(0)]
        for lag in range(1, LAGS + 1):
            near = log.trained[lag:] & (log.users[lag:] == log.users[:-lag])
            pairs, counts = np.unique(
                log.items[:-lag][near] * num_items + log.items[lag:][near], return_counts=True
            )
            keys.append(pairs)
            weights.append(counts * np.float64(DECAY ** (lag - 1)))
        pairs, place = np.unique(np.concatenate(keys), return_inverse=True)
        leads, self._follows = np.divmod(pairs, num_items)
        self._weights: F32 = np.bincount(place, np.concatenate(weights), len(pairs)).astype(
            np.float32
        )
        self._starts = np.searchsorted(leads, np.arange(num_items + 1))
        self._sums = np.bincount(leads, self._weights, num_items)

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        stop = int(log.starts[user] + log.num_trained[user])
        last = log.items[max(int(log.starts[user]), stop - LAGS) : stop][::-1].tolist()
        scores = np.zeros(log.num_items)
        for age, item in enumerate(last):
            share = DECAY**age / (self._sums[item] + PRIOR)
            mine = slice(self._starts[item], self._starts[item + 1])
            scores[self._follows[mine]] += share * self._weights[mine]
            scores += share * PRIOR * self._popularity
        return scores


class Means:
    """Predicts the item's mean plus the user's mean so far, both shrunk to the global mean."""

    name = "user + item means"
    shrinkage = 5.0  # pseudo-count of the global mean, in events

    def __init__(self, log: InteractionLog) -> None:
        items = log.items[log.trained]
        values = log.values[log.trained]
        self._mean = float(values.mean())
        sums = np.bincount(items, values - self._mean, minlength=log.num_items)
        self._items = sums / (np.bincount(items, minlength=log.num_items) + self.shrinkage)

    def liking(self, log: InteractionLog) -> F64 | None:
        item = self._items[log.items]
        residual = log.values - self._mean - item
        user = np.zeros(len(item))  # mean residual of the user's events before each
        for start, stop in zip(log.starts[:-1], log.starts[1:], strict=True):
            before = np.cumsum(residual[start:stop]) - residual[start:stop]
            user[start:stop] = before / (np.arange(stop - start) + self.shrinkage)
        return item + user

    def next_items(self, log: InteractionLog, user: int) -> F64:
        return self._items


class MatrixFactorisation:
    """Factorises the action values with biases, by alternating least squares.

        value ~ mean + b_user + b_item + p_user . q_item,   with ridge terms on factors and biases

    To predict an event, the user's row is solved from the user's earlier events.
    """

    name = "matrix factorisation"
    num_sweeps = 12

    def __init__(self, log: InteractionLog, seed: int = 0) -> None:
        users = log.users[log.trained]
        items = log.items[log.trained]
        values = log.values[log.trained]
        self.mean = float(values.mean())
        by_user = _events_of_each(users, log.num_users)
        by_item = _events_of_each(items, log.num_items)
        random = np.random.default_rng(seed)
        self.items = random.normal(0, 0.1, (log.num_items, 1 + NUM_FACTORS))  # bias, then factors
        self.items[:, 0] = 0
        of_users = np.zeros((log.num_users, 1 + NUM_FACTORS))
        for _ in range(self.num_sweeps):
            for mine, other, events, at in (
                (of_users, self.items, by_user, items),
                (self.items, of_users, by_item, users),
            ):
                for row, chosen in enumerate(events):
                    seen = other[at[chosen]]
                    design = np.concatenate([np.ones((len(seen), 1)), seen[:, 1:]], axis=1)
                    residual = values[chosen] - self.mean - seen[:, 0]
                    mine[row] = np.linalg.solve(design.T @ design + PENALTY, design.T @ residual)

    def _fold_in(self, items: I64, values: F64) -> F64:
        """Solve the user's row after 0, 1, ... m of these events: float64 [m + 1, 1 + factors]."""
        seen = self.items[items]
        design = np.concatenate([np.ones((len(seen), 1)), seen[:, 1:]], axis=1)
        last = np.arange(len(seen) + 1)
        return solve_each(design, values - self.mean - seen[:, 0], np.zeros_like(last), last)

    def liking(self, log: InteractionLog) -> F64 | None:
        scores = np.zeros(len(log.items))  # predicted values, less the mean
        for start, stop in zip(log.starts[:-1], log.starts[1:], strict=True):
            part = slice(start, stop)
            rows = self._fold_in(log.items[part], log.values[part])[:-1]
            scores[part] = expected(rows, self.items[log.items[part]])
        return scores

    def next_items(self, log: InteractionLog, user: int) -> F64:
        # by the predicted value: the items liked best, which need not come next
        part = slice(log.starts[user], log.starts[user] + log.num_trained[user])
        row = self._fold_in(log.items[part], log.values[part])[-1]
        return expected(row, self.items)


def _events_of_each(owners: I64, count: int) -> list[I64]:
    """List the events of each of `count` owners, in the log's order."""
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.searchsorted(owners[order], np.arange(1, count)))


VALIDATION_USERS = 1000  # most users of the validation
MAX_EDGES = 2_000_000  # of a linear model, which takes minutes to tune; of more, a sample
ITEM_EXPONENTS = (0.0, 0.5)  # PureSVD's item exponents
NUM_VALUES = (16, 32, 64)  # PureSVD's numbers of singular values
ITEM_KNN = "ItemKNN"

# graph, number of scored items (the first ones) -> candidates
Models = Callable[[Graph, int], Iterator[Candidate[LinearModel]]]


@dataclass(slots=True, eq=False)
class LinearBaseline:
    """A linear collaborative filter, which ignores the order of events."""

    name: str
    tuned: Tuned[LinearModel]
    models: Models  # the candidates that it was chosen from
    scale_users: I64  # rows of the users whose scores decide the scale

    def refitted(self, log: InteractionLog) -> LinearBaseline:
        """Fit the same settings to the trained events of another log with these users and items."""
        graph = graph_of(log)
        tuned = self.tuned.refitted(
            self.models(graph, graph.num_items), graph.degrees()[1], self.scale_users
        )
        return replace(self, tuned=tuned)

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        scores: F64 = self.tuned.scores(torch.tensor([user]))[0].double().numpy()
        return scores


def fit_baselines(log: InteractionLog, split: Split, seed: int) -> Iterator[Baseline]:
    """Fit the next-item baselines to the trained events, one after the other.

    These are popularity, Markov counts, the user's own recency and frequency, decayed transitions,
    and those of `fit_linear`, less those of `skipped_baselines`.

    Args:
        log: The log, split into trained and tested events.
        split: The rule of that split, which also splits the trained events.
        seed: Seed of the validation users' sample.
    """
    markov = Markov(log)
    yield from (Popularity(log), markov, OwnHistory(markov), DecayedTransitions(log))
    if len(graph_of(log).users) <= MAX_EDGES:
        yield from fit_linear(log, split, seed)


def fit_linear(log: InteractionLog, split: Split, seed: int) -> Iterator[LinearBaseline]:
    """Fit ItemKNN, EASE and PureSVD; arguments as `fit_baselines`.

    To choose their settings, the trained events are split again. The settings with the best smooth
    HIT win: on unseen items, or on all items if most next items are repeats.
    """
    graph = graph_of(log)
    kinds: dict[str, Models] = {ITEM_KNN: item_knns, "EASE": eases, "PureSVD": _svds}
    if ease_is_too_large(graph) is not None:
        del kinds["EASE"]
    earlier, evaluator = _validation(log, split, seed)
    for name, models in kinds.items():
        chosen = tune(models(earlier, earlier.num_items), earlier.degrees()[1], evaluator)
        yield LinearBaseline(name, chosen, models, evaluator.held_out.users).refitted(log)


def skipped_baselines(log: InteractionLog) -> tuple[str, ...]:
    """Say which baselines `fit_baselines` skips, and why, a sentence for each reason."""
    graph = graph_of(log)
    if len(graph.users) > MAX_EDGES:
        return (
            f"ItemKNN, EASE and PureSVD are skipped: the log has {len(graph.users)} pairs of user "
            f"and item, and the limit is {MAX_EDGES}",
        )
    too_large = ease_is_too_large(graph)
    return () if too_large is None else (too_large,)


def sample_users(log: InteractionLog, tested: I64, seed: int) -> I64:
    """Choose users of a log that is too large for `fit_linear`: the tested ones, others at random.

    Returns:
        int64 [u] ascending, with at most `MAX_EDGES` pairs of user and item; empty = the log is
        not too large, or the tested users alone are.
    """
    degrees = graph_of(log).degrees()[0]
    if degrees.sum() <= MAX_EDGES:
        return tested[:0]
    drawn = np.random.default_rng(seed).permutation(log.num_users)
    order = np.concatenate([tested, drawn[~np.isin(drawn, tested)]])
    total = np.cumsum(degrees[order])
    num_users = int(np.searchsorted(total, MAX_EDGES, "right"))
    return np.sort(order[:num_users]) if num_users >= len(tested) else tested[:0]


def _validation(log: InteractionLog, split: Split, seed: int) -> tuple[Graph, Evaluator]:
    """Split the trained events again; the validation of a log that is too small is empty."""
    try:
        earlier = log.only_trained(split)
    except DataError:
        earlier = log.all_trained()
    targets = sample_targets(earlier.next_items(), VALIDATION_USERS, seed)
    users = np.array([target.user for target in targets], np.int64)
    items = earlier.items[np.array([target.event for target in targets], np.int64)]
    graph = graph_of(earlier)
    had = np.isin(users * graph.num_items + items, graph.users * graph.num_items + graph.items)
    evaluates_all = len(had) > 0 and had.mean() > MANY_REPEATS
    return graph, Evaluator.make(HeldOut(users, items), graph.none() if evaluates_all else graph)


def graph_of(log: InteractionLog) -> Graph:
    """Make the user-item graph of the trained events."""
    trained = log.trained
    return unique_edges(log.users[trained], log.items[trained], log.num_users, log.num_items)


def _svds(graph: Graph, num_scored: int) -> Iterator[Candidate[LinearModel]]:
    for exponent in ITEM_EXPONENTS:
        found = spectrum(graph, exponent, max(NUM_VALUES))
        for num_values in NUM_VALUES:
            make = partial(PureSVD, found, num_scored, num_values, 1.0)
            yield Candidate(f"item exponent {exponent:g}, {num_values} values", make)
