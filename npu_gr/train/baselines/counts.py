"""Baselines that count: popularity, what follows the last item, and what follows the last items."""

from __future__ import annotations

import numpy as np

from npu_gr.core.arrays import F32
from npu_gr.train.data import InteractionLog
from npu_gr.train.metrics import F64

LAGS = 5  # events between two items that still make a transition, and last events that are read
DECAY = 0.6  # of a transition's weight with each event between, and of an event's weight with each newer one
PRIOR = 10.0  # transitions that an item's popularity counts for


class Popularity:
    """Ranks items by their number of trained events."""

    name = "popularity"

    def __init__(self, log: InteractionLog) -> None:
        self._counts = np.bincount(log.items[log.trained], minlength=log.num_items).astype(np.float64)

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        return self._counts


class Markov:
    """Ranks items by how often they followed the user's last item; equals by popularity."""

    name = "Markov counts"

    def __init__(self, log: InteractionLog) -> None:
        self._popularity = Popularity(log)
        follows = log.trained & (np.diff(log.users, prepend=-1) == 0)
        at = np.flatnonzero(follows)
        self._pairs, self._counts = np.unique(log.items[at - 1] * log.num_items + log.items[at], return_counts=True)

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        last = log.items[log.starts[user] + log.num_trained[user] - 1]
        popularity = self._popularity.next_items(log, user)
        scores: F64 = popularity / (popularity.sum() + 1)  # less than one count, so it decides between equals only
        mine = slice(*np.searchsorted(self._pairs, [last * log.num_items, (last + 1) * log.num_items]))
        scores[self._pairs[mine] - last * log.num_items] += self._counts[mine]
        return scores


class DecayedTransitions:
    """Ranks items by what follows the user's last five.

        P(i | j) = (sum over lags 1 .. 5 of .6^(lag - 1) n(j, then i) + 10 pop(i)) / (the sum over i + 10)
        score(i) = sum over the last five items j of .6^age P(i | j)

    n counts pairs of trained events of one user, pop is an item's share of the trained events.
    """

    name = "decayed transitions"

    def __init__(self, log: InteractionLog) -> None:
        self._popularity = Popularity(log).next_items(log, 0) / max(1, int(log.trained.sum()))
        num_items = log.num_items
        keys = [np.empty(0, np.int64)]
        weights: list[F64] = [np.empty(0)]
        for lag in range(1, LAGS + 1):
            near = log.trained[lag:] & (log.users[lag:] == log.users[:-lag])
            pairs, counts = np.unique(log.items[:-lag][near] * num_items + log.items[lag:][near], return_counts=True)
            keys.append(pairs)
            weights.append(counts * np.float64(DECAY ** (lag - 1)))
        pairs, place = np.unique(np.concatenate(keys), return_inverse=True)
        leads, self._follows = np.divmod(pairs, num_items)
        self._weights: F32 = np.bincount(place, np.concatenate(weights), len(pairs)).astype(np.float32)
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
