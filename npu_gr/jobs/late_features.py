"""The features that come with a rank, behind the cached prefix: what the request says, and what is computed here."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import Unprocessable
from npu_gr.core.feature_schema.columns import Columns, ModelFeatures, OneRow
from npu_gr.core.feature_schema.computed import CrossFeatures, time_column
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.request import RankRequest
from npu_gr.engine.rank_engine import NONE_LATE, LateFeatures
from npu_gr.model.history_tokens import Tokens


class LateFeatureReader:
    """Reads requests as one version of the ranker wants them."""

    def __init__(self, features: ModelFeatures, computed: CrossFeatures) -> None:
        """Read nothing yet.

        Args:
            features: of the model.
            computed: its cross features that no request brings.
        """
        self._features = features
        self._computed = computed
        self._of_time = [one for one in features.features if one.of == "request" and one.computed]

    def of_request(self, values: OneRow, shown_at: int) -> Encoded | None:
        """Encode the features of a request; None where the model has none.

        Args:
            values: that the request brought.
            shown_at: unix seconds, of which the others are computed.

        Raises:
            Unprocessable: a value does not fit the model.
        """
        for feature in self._of_time:
            computed = int(time_column(feature.computed, np.array([shown_at]))[0])
            values = {**values, feature.name: computed}
        try:
            return self._features.row(self._features.request, values)
        except ValueError as error:
            raise Unprocessable(f"features.request.{error}") from None

    def of_rank(
        self, request: RankRequest, tokens: Tokens, rows: I64, known: np.ndarray[Any, np.dtype[np.bool_]], shown_at: int
    ) -> LateFeatures:
        """Encode the features of a request and its candidates.

        Args:
            request: with them.
            tokens: of its history.
            rows: [n] of the known candidates.
            known: [c] whether a candidate is known.
            shown_at: unix seconds.

        Raises:
            Unprocessable: a value does not fit the model.
        """
        if not self._features.features:
            return NONE_LATE
        cross = request.cross_features if known.all() else request.cross_features.take(known)
        return LateFeatures(
            self.of_request(request.request_features, shown_at), self.of_candidates(cross, tokens, rows, shown_at)
        )

    def of_candidates(self, given: Columns, tokens: Tokens, rows: I64, shown_at: int) -> Encoded | None:
        """Encode the features of candidates; None where the model has none. Any thread may call.

        Args:
            given: [n] that the request brought.
            tokens: of its history.
            rows: [n] of the candidates.
            shown_at: unix seconds.
        """
        if self._computed.rules:
            events = tokens.events
            actions = events.actions.astype(np.int64)
            columns = self._computed.columns(tokens.rows, actions, events.timestamps, rows, shown_at)
            own = {name: column.astype(np.float32) for name, column in columns.items()}
            given = Columns({**given.numbers, **own}, given.names)
        return self._features.rows(self._features.cross, given, len(rows))

    def missing(self, request: RankRequest, tokens: Tokens) -> tuple[str, ...]:
        """Name the features, as `of.name`, that neither history nor request say anything of."""
        if not self._features.features:
            return tokens.report.missing_features
        late = self._features.missing(request=request.request_features, cross=request.cross_features.given)
        return tokens.report.missing_features + late
