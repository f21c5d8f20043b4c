"""The inputs of a ranker for the events of a log: histories, and features of all kinds.

Features are encoded by the code of the server, so training and service agree. Computed cross
features are those that a request just before an event would have.

The server computes cross features by reading one history from its start (`CrossFeatures.columns`).
Here the events of all histories are sorted once by user and value. The events of a user with one
value before some moment are then a contiguous run, found by two binary searches.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DataError
from npu_gr.core.feature_schema.computed import (
    NEVER,
    OF_TIME,
    CrossFeatures,
    ItemCodes,
    MatchCounts,
    time_column,
)
from npu_gr.core.feature_schema.encode import FeatureEncoder, Values
from npu_gr.core.feature_schema.factors import MF_SCORE, ItemFactors, expected
from npu_gr.core.feature_schema.schema import OFS, Of
from npu_gr.model.feature_rows import FeatureValues
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_input import cross_features
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.shown_term import SCORES, TASTES
from npu_gr.train.data import Batch, Bools, InteractionLog, count_trained
from npu_gr.train.metrics import F64
from npu_gr.train.rank.forward import HistoryBatch


class _Runs(NamedTuple):
    """The counted events of each (user, value) group, oldest first.

    m = pairs of an event and one of its values.
    """

    keys: I64  # [groups] ascending: user and value in one number
    places: I64  # [m] ascending: index of the group and of the event in one number


class FoldFactors(NamedTuple):
    """Cross-fitted factorisations: a user's fold was factorised without that user's events."""

    folds: tuple[ItemFactors, ...]  # factors of each fold, from the users of all other folds
    fold_of: I64  # [users]


class LoggedCross:
    """The computed cross features of one model over one log."""

    def __init__(
        self,
        log: InteractionLog,
        cross: CrossFeatures,
        max_events: int,
        folds: FoldFactors | None = None,
    ) -> None:
        """Store the arguments; events are sorted on first use.

        Args:
            log: Log that holds the users' histories.
            cross: Cross features of the model.
            max_events: Most events of a history that are read, the newest ones, as in service.
            folds: Factors to use in training in place of the model's, which were fitted to the
                trained events' own values. None = the model's.
        """
        if folds is None and cross.factors is not None:
            folds = FoldFactors((cross.factors,), np.zeros(log.num_users, np.int64))
        self._folds = folds
        self._folded: F64 | None = None
        self._log = log
        self._cross = cross
        self._max_events = max_events
        self._width = len(log.items) + 1
        self._runs: dict[tuple[str, bytes], _Runs] = {}

    @cached_property
    def _users(self) -> I64:
        return self._log.users

    @cached_property
    def _first(self) -> I64:
        """First event of the history that a request just before each event reads, [n]."""
        every = np.arange(len(self._users))
        first: I64 = np.maximum(self._log.starts[self._users], every - self._max_events)
        return first

    @property
    def names(self) -> list[str]:
        """Names of the features."""
        return [name for name, _, _ in self._cross.rules]

    def columns(self, events: I64, candidates: I64) -> dict[str, F32]:
        """Compute the features.

        Args:
            events: [m] index in the log. The user's earlier events are the history, and the
                event's time is that of the request.
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
            columns[name] = MatchCounts(
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
        assert self._folds is not None, "a model that computes mf_score has factors"
        if self._folded is None:
            self._folded = np.concatenate(
                [self._folded_in(user) for user in range(self._log.num_users)]
            )
        fold = self._folds.fold_of[self._users[events]]
        items = np.empty((*candidates.shape, self._folded.shape[1]))
        for place, factors in enumerate(self._folds.folds):
            items[fold == place] = factors.rows(candidates[fold == place])
        return expected(self._folded[events][:, None], items).astype(np.float32)

    def _folded_in(self, user: int) -> F64:
        """Compute a user's factors before each of the user's events: [events, 1 + factors]."""
        assert self._folds is not None
        log = self._log
        own = slice(int(log.starts[user]), int(log.starts[user + 1]))
        factors = self._folds.folds[int(self._folds.fold_of[user])]
        first = self._first[own] - own.start
        return factors.users(log.items[own], log.actions[own], first, np.arange(len(first)))

    def _before(self, by: str, counts: Bools, events: I64, values: ItemCodes) -> tuple[I64, I64]:
        """Count the user's earlier counted events with each value, and find the newest one's time.

        Args:
            by: Item feature whose values are compared; "" = the items themselves.
            counts: bool [actions] the actions whose events are counted.
            events: [m] index in the log.
            values: [m, c, k] values of the candidates.

        Returns:
            The counts and times, int64 [m, c, k]; the time of no event is `NEVER`.
        """
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
            keys, group = np.unique(
                self._key(by, self._users[event], values[is_value]), return_inverse=True
            )
            self._runs[key] = _Runs(keys, np.sort(group * self._width + event))
        return self._runs[key]

    def _key(self, by: str, users: I64, values: ItemCodes) -> I64:
        most = self._cross.num_values(by) if by else self._log.num_items
        return users * (most + 1) + values


def pages_of(log: InteractionLog) -> I64:
    """Return the first event of the same user and second, of each event: int64 [n].

    The items of a page have one time. What was clicked of it is scored, as what was not, by the
    history before the page: the clicks before on the same page would give the label away.
    """
    is_first = (np.diff(log.users, prepend=-1) != 0) | (np.diff(log.times, prepend=-1) != 0)
    begins: I64 = np.maximum.accumulate(np.where(is_first, np.arange(len(log.items)), 0))
    return begins


def tastes_of(log: InteractionLog, read: F32 | F64, max_events: int) -> F64:
    """Sum up p of the history before each event, see `ShownTerm`: float64 [events, k].

    Args:
        log: Log that holds the users' histories.
        read: [num_items, k] the r of each item.
        max_events: Most events of a history that are read, the newest ones.
    """
    sums = np.concatenate([np.zeros((1, read.shape[1])), np.cumsum(read[log.items], 0, np.float64)])
    events = np.arange(len(log.items))
    starts = np.maximum(log.starts[log.users], events - max_events)
    found: F64 = (sums[events] - sums[starts]) / np.sqrt((events - starts).clip(min=1))[:, None]
    return found


class LogInputs:
    """The inputs of one model's schema for one log.

    A feature of the schema that the log does not have is missing in all its rows.
    """

    def __init__(self, log: InteractionLog, model: HSTU, folds: FoldFactors | None = None) -> None:
        """Encode the features of all users and events.

        Args:
            log: Log to encode.
            model: Model whose schema, actions, item features and factors are read; its weights are
                not.
            folds: Factors to use in training in place of the model's; None = the model's.

        Raises:
            DataError: a value does not fit its feature; the message names the feature, the row and
                the limit.
        """
        self.log = log
        self.max_events = model.config.max_history_tokens - bool(model.config.features_of("user"))
        self._shown = model.factors_of_shown if model.config.shown_task else None
        self._encoders = {of: FeatureEncoder(model.config.features_of(of)) for of in OFS}
        self._logged = LoggedCross(log, cross_features(model), self.max_events, folds)
        self._of_user = self._encoded("user", {}, log.num_users)
        self._of_event = self._encoded("event", {}, len(log.items))
        times = {
            feature.name: time_column(feature.computed, log.times)
            for feature in model.config.features_of("request")
            if feature.computed in OF_TIME
        }
        self._of_request = self._encoded("request", times, len(log.items))
        own: dict[str, F32] = {}
        if self._logged.names:
            own = self._logged.columns(np.arange(len(log.items)), log.items[:, None])
        computed = {name: column[:, 0] for name, column in own.items()}
        self._of_cross = self._encoded("cross", computed, len(log.items))

    @cached_property
    def pages(self) -> I64:
        """Result of `pages_of`."""
        return pages_of(self.log)

    @cached_property
    def page_clicks(self) -> I64:
        """Number of events of each event's page, int64 [n]."""
        found: I64 = np.bincount(self.pages, minlength=len(self.pages))[self.pages]
        return found

    @cached_property
    def _tastes(self) -> Tensor:
        assert self._shown is not None
        read = self._shown[:, TASTES].numpy()
        return torch.from_numpy(tastes_of(self.log, read, self.max_events)).float()

    def shown_term(self, events: Tensor, candidates: Tensor) -> Tensor:
        """Compute the term of items shown just before events, as `ShownTerm` does in service.

        Args:
            events: int64 [...] index of the first event of each page.
            candidates: int64 [..., c] item rows.

        Returns:
            float32 [..., c]; 0 if the model has none.
        """
        if self._shown is None:
            return torch.zeros(candidates.shape)
        rows = self._shown[candidates]
        return rows[..., 0] + (rows[..., SCORES] * self._tastes[events][..., None, :]).sum(-1)

    @cached_property
    def draw_shares(self) -> Tensor:
        """Probability of each item in a draw of negatives: float64 [num_items].

        One half is uniform, the other is its share of the trained events. The softmax is mostly of
        popular items, so draws by popularity estimate it with less variance.
        """
        uses = count_trained(self.log, self.log.items, self.log.num_items)
        shares: Tensor = torch.from_numpy(uses / max(1, uses.sum()) + 1 / self.log.num_items)
        return shares / shares.sum()

    def histories(self, batch: Batch) -> HistoryBatch:
        """Turn the windows of a batch into histories with features."""
        return HistoryBatch(
            items=batch.items,
            actions=batch.actions,
            times=batch.times,
            user=_rows(self._of_user, self._users_of(batch.events[:, 0])),
            events=_rows(self._of_event, batch.events),
        )

    def request(self, events: Tensor) -> FeatureValues | None:
        """Return the request features of events [...]; None = the model has none."""
        return _rows(self._of_request, events)

    def cross(self, events: Tensor) -> FeatureValues | None:
        """Return the cross features of events' users and own items, [...] -> [..., 1].

        None = the model has none.
        """
        return _rows(self._of_cross, events[..., None])

    def cross_of(self, events: Tensor, candidates: Tensor) -> FeatureValues | None:
        """Return the computed cross features of users and any candidates, [..., c].

        Logged cross features are missing, because a log has them for shown items only.

        Args:
            events: int64 [...] index of the events; the requests come just before them.
            candidates: int64 [..., c] item rows; an event's own item may be among them.

        Returns:
            None = the model has no cross features.
        """
        if self._of_cross is None:
            return None
        rows = candidates.reshape(-1, candidates.shape[-1]).numpy()
        columns = self._logged.columns(events.reshape(-1).numpy(), rows)
        flat = {name: column.ravel() for name, column in columns.items()}
        found = FeatureValues.of(self._encoders["cross"].encode(flat, rows.size))
        return FeatureValues(*(part.view(*candidates.shape, -1) for part in found))

    def segment(self, event: int, candidates: Tensor, *, is_shown: bool = False) -> Segment:
        """Make the input of a request just before an event, as the server does.

        Args:
            event: Index in the log.
            candidates: int64 [c] item rows.
            is_shown: Whether the event's own item is the only candidate, so that its logged cross
                features apply.
        """
        log = self.log
        recent = slice(self.first_read(event), event)
        at = torch.tensor([event])
        times = log.times[recent]
        user = _rows(self._of_user, self._users_of(at))
        if user is not None:  # the user's token has the time of the first event, or of the request
            times = np.concatenate([log.times[recent.start : recent.start + 1], times])
        cross = self.cross(at) if is_shown else self.cross_of(at, candidates[None])
        return Segment(
            items=torch.from_numpy(log.items[recent]),
            actions=torch.from_numpy(log.actions[recent]),
            times=torch.from_numpy(times),
            candidates=candidates,
            candidate_time=int(log.times[event]),
            user=user,
            events=_rows(self._of_event, torch.arange(recent.start, recent.stop)),
            request=self.request(at),
            cross=None if cross is None else FeatureValues(cross.codes[0], cross.numbers[0]),
        )

    def first_read(self, event: int) -> int:
        """Return the index of the oldest event that a request just before an event reads."""
        user = int(np.searchsorted(self.log.starts, event, "right")) - 1
        return max(int(self.log.starts[user]), event - self.max_events)

    def _users_of(self, events: Tensor) -> Tensor:
        """Find the users of events, int64 [m]."""
        return torch.from_numpy(np.searchsorted(self.log.starts, events.numpy(), "right") - 1)

    def _encoded(
        self, of: Of, computed: Mapping[str, Values], num_rows: int
    ) -> FeatureValues | None:
        encoder = self._encoders[of]
        if not encoder.features:
            return None
        columns: dict[str, Any] = {
            column.name: column.values if column.is_number else column.values.tolist()
            for column in self.log.columns
            if column.of == of and column.name in encoder.features
        }
        try:
            return FeatureValues.of(encoder.encode(columns | dict(computed), num_rows))
        except ValueError as error:
            raise DataError(f"features of {of}: {error}") from error


def _rows(values: FeatureValues | None, places: Tensor) -> FeatureValues | None:
    return None if values is None else FeatureValues(values.codes[places], values.numbers[places])
