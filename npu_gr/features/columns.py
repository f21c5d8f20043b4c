"""The values of features beside the events of a log, as callers of the service would send them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

LogFeatureOf = Literal["user", "event", "request", "cross"]
ToldKind = Literal["", "category", "hashed", "number"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureColumn:
    """One feature of a log. Every event answers a request, which showed its item to its user at its time.

    user     what is known of the user
    event    of what happened, known only afterwards
    request  of the request that the event answers, known before its items are
    cross    of the user and the event's own item, known when the item is shown
    """

    name: str
    of: LogFeatureOf
    values: npt.NDArray[Any]  # of each event, or each user: float64 and NaN, or objects: str, list of str, None
    kind: ToldKind = ""  # what its owner says that it is; "" = as its values look

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers."""
        return self.values.dtype != np.object_

    def of_events(self, part: npt.NDArray[Any] | slice) -> FeatureColumn:
        """Keep some events, or put them in another order; a feature of users stays as it is."""
        return self if self.of == "user" else replace(self, values=self.values[part])
