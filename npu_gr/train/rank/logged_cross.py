"""Computed cross features of any event of a log and any candidate, as a request just before the event would have them.

`CrossFeatures.columns` reads one history from its start. Here all histories are sorted once by what their events are
alike in, and a history up to an event is a run of that order, found by two searches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npu_gr.core.arrays import F32, I64
from npu_gr.core.feature_schema.computed import NEVER, Alike, CrossFeatures, ItemCodes
from npu_gr.core.feature_schema.factors import MF_SCORE, ItemFactors, expected
from npu_gr.train.data import Bools, InteractionLog
from npu_gr.train.metrics import F64


class _Runs(NamedTuple):
    """The counted events of each (user, value), oldest first. m = pairs of an event and one of its values."""

    keys: I64  # [groups] ascending: user and value
    places: I64  # [m] ascending: place of the key, and event


class FoldFactors(NamedTuple):
    """Factorisations of a log in which no user's events have shaped what the user's score is made of."""

    folds: tuple[ItemFactors, ...]  # each of the users of all other folds
    fold_of: I64  # [users]


class LoggedCross:
    """The computed cross features of one model over one log."""

    def __init__(
        self, log: InteractionLog, cross: CrossFeatures, max_events: int, folds: FoldFactors | None = None
    ) -> None:
        """Sort nothing yet.

        Args:
            log: with the users' histories.
            cross: the model's features.
            max_events: newest events of a history that are read, as in service.
            folds: in the place of the model's factors, which know what its trained events were worth.
        """
        if folds is None and cross.factors is not None:
            folds = FoldFactors((cross.factors,), np.zeros(log.num_users, np.int64))
        self._folds = folds
        self._folded: F64 | None = None
        self._log = log
        self._cross = cross
        users = log.users
        self._users = users
        self._first = np.maximum(log.starts[users], np.arange(len(users)) - max_events)
        self._width = len(users) + 1
        self._runs: dict[tuple[str, bytes], _Runs] = {}

    @property
    def names(self) -> list[str]:
        """Names of the features."""
        return [name for name, _, _ in self._cross.rules]

    def columns(self, events: I64, candidates: I64) -> dict[str, F32]:
        """Compute the features.

        Args:
            events: [m] index in the log; the user's events before it are the history, and its time is the request's.
            candidates: [m, c] item rows.

        Returns:
            Name -> float32 [m, c], NaN = missing.
        """
        log = self._log
        every = np.ones(len(log.action_values), np.bool_)
        columns = {}
        for name, rule, counts in self._cross.rules:
            if rule.what == MF_SCORE:
                columns[name] = self._mf_scores(events, candidates)
                continue
            values, is_value = self._cross.values_of(rule.by, candidates)
            num_all, newest = self._before(rule.by, every, events, values)
            num_counted = num_all
            if not counts.all():
                num_counted, newest = self._before(rule.by, counts, events, values)
            before = np.concatenate([[0], np.cumsum(counts[log.actions])])
            first = self._first[events]
            columns[name] = Alike(
                num_all,
                num_counted,
                newest,
                is_value,
                (events - first)[:, None],
                (before[events] - before[first])[:, None],
                log.times[events][:, None],
            ).column(rule.what)
        return columns

    def _mf_scores(self, events: I64, candidates: I64) -> F32:
        assert self._folds is not None, "a model with the feature has factors"
        if self._folded is None:
            self._folded = np.concatenate([self._folded_in(user) for user in range(self._log.num_users)])
        fold = self._folds.fold_of[self._users[events]]
        items = np.empty((*candidates.shape, self._folded.shape[1]))
        for place, factors in enumerate(self._folds.folds):
            items[fold == place] = factors.rows(candidates[fold == place])
        return expected(self._folded[events][:, None], items).astype(np.float32)

    def _folded_in(self, user: int) -> F64:
        """Fold a user in before each event: [the user's events, 1 + factors]."""
        assert self._folds is not None
        log = self._log
        own = slice(int(log.starts[user]), int(log.starts[user + 1]))
        factors = self._folds.folds[int(self._folds.fold_of[user])]
        first = self._first[own] - own.start
        return factors.users(log.items[own], log.actions[own], first, np.arange(len(first)))

    def _before(self, by: str, counts: Bools, events: I64, values: ItemCodes) -> tuple[I64, I64]:
        """Count the counted events with each value before each event [m, c, k], and find the time of the newest."""
        keys, places = self._sorted(by, counts)
        wanted = self._key(by, self._users[events][:, None, None], values)
        group = np.searchsorted(keys, wanted).clip(max=max(len(keys) - 1, 0))
        is_there = keys[group] == wanted if len(keys) else np.zeros(wanted.shape, np.bool_)
        begin = np.searchsorted(places, group * self._width + self._first[events][:, None, None])
        end = np.searchsorted(places, group * self._width + events[:, None, None])
        count = np.where(is_there, end - begin, 0)
        newest = places[np.maximum(end - 1, 0)] % self._width if len(places) else np.zeros_like(end)
        return count, np.where(count > 0, self._log.times[newest], NEVER)

    def _sorted(self, by: str, counts: Bools) -> _Runs:
        key = by, counts.tobytes()
        if key not in self._runs:
            counted = np.flatnonzero(counts[self._log.actions])
            values, is_value = self._cross.values_of(by, self._log.items[counted])
            event = np.broadcast_to(counted[:, None], values.shape)[is_value]
            keys, group = np.unique(self._key(by, self._users[event], values[is_value]), return_inverse=True)
            self._runs[key] = _Runs(keys, np.sort(group * self._width + event))
        return self._runs[key]

    def _key(self, by: str, users: I64, values: ItemCodes) -> I64:
        most = self._cross.num_values(by) if by else self._log.num_items
        return users * (most + 1) + values
