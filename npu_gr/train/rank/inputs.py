"""A log as a ranker reads it: events, and features of users, events, requests and candidates, by the server's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.errors import DataError
from npu_gr.core.feature_schema.computed import OF_TIME, time_column
from npu_gr.core.feature_schema.encode import FeatureEncoder, Values
from npu_gr.core.feature_schema.schema import OFS, Of
from npu_gr.model.feature_rows import FeatureValues
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_input import cross_features
from npu_gr.model.hstu_segments import Segment
from npu_gr.train.data import Batch, InteractionLog
from npu_gr.train.rank.forward import HistoryBatch
from npu_gr.train.rank.logged_cross import FoldFactors, LoggedCross


class LogInputs:
    """The inputs of one schema over one log. A feature of the schema that the log lacks is missing everywhere."""

    def __init__(self, log: InteractionLog, model: HSTU, folds: FoldFactors | None = None) -> None:
        """Encode the features of all users and events.

        Args:
            log: the events.
            model: whose schema, actions, item features and factors count; its weights do not.
            folds: to train on, in the place of the model's factors.

        Raises:
            DataError: a value does not fit its feature; the message names the feature, the row and the limit.
        """
        self.log = log
        self.max_events = model.config.max_history_tokens - bool(model.config.features_of("user"))
        self._encoders = {of: FeatureEncoder(model.config.features_of(of)) for of in OFS}
        self._logged = LoggedCross(log, cross_features(model), self.max_events, folds)
        self._users = torch.from_numpy(log.users)
        every = np.arange(len(log.items))
        self._of_user = self._encoded("user", {}, log.num_users)
        self._of_event = self._encoded("event", {}, len(every))
        times = {
            feature.name: time_column(feature.computed, log.times)
            for feature in model.config.features_of("request")
            if feature.computed in OF_TIME
        }
        self._of_request = self._encoded("request", times, len(every))
        own = self._logged.columns(every, log.items[:, None]) if self._logged.names else {}
        computed = {name: column[:, 0] for name, column in own.items()}
        self._of_cross = self._encoded("cross", computed, len(every))

    def histories(self, batch: Batch) -> HistoryBatch:
        """Read the windows of a batch as histories."""
        return HistoryBatch(
            items=batch.items,
            actions=batch.actions,
            times=batch.times,
            user=_rows(self._of_user, self._users[batch.events[:, 0]]),
            events=_rows(self._of_event, batch.events),
        )

    def request(self, events: Tensor) -> FeatureValues | None:
        """Features of the requests that events [...] answer; None = the model has none."""
        return _rows(self._of_request, events)

    def cross(self, events: Tensor) -> FeatureValues | None:
        """Features of the users and the own items of events [...], shape [..., 1]; None = the model has none."""
        return _rows(self._of_cross, events[..., None])

    def cross_of(self, events: Tensor, candidates: Tensor) -> FeatureValues | None:
        """Features of users and any items, as far as we compute them: a log says nothing else of what it did not show.

        Args:
            events: int64 [...] index of the events that the requests come just before.
            candidates: int64 [..., c] item rows. An event's own item is one like the others.

        Returns:
            [..., c]; None = the model has none.
        """
        if self._of_cross is None:
            return None
        rows = candidates.reshape(-1, candidates.shape[-1]).numpy()
        columns = self._logged.columns(events.reshape(-1).numpy(), rows)
        flat = {name: column.ravel() for name, column in columns.items()}
        found = FeatureValues.of(self._encoders["cross"].encode(flat, rows.size))
        return FeatureValues(*(part.view(*candidates.shape, -1) for part in found))

    def segment(self, event: int, candidates: Tensor, *, is_shown: bool = False) -> Segment:
        """Ask a model just before an event, as the server does.

        Args:
            event: index in the log.
            candidates: int64 [c] item rows.
            is_shown: the event's own item is the one candidate, with what the log says of it.
        """
        log = self.log
        recent = slice(self.first_read(event), event)
        at = torch.tensor([event])
        times = log.times[recent]
        user = _rows(self._of_user, self._users[at])
        if user is not None:  # its token has the time of the first event, or of the request
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
        """Index of the oldest event of the history that a request just before an event reads."""
        start = int(self.log.starts[int(self._users[event])])
        return max(start, event - self.max_events)

    def _encoded(self, of: Of, computed: Mapping[str, Values], num_rows: int) -> FeatureValues | None:
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
