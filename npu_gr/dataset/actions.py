"""What a user did, as few named actions: event types, ratings, or ranges of a continuous value.

    events   a column of event types: each is an action, in alphabetical order
    ratings  at most `MAX_RATINGS` distinct numbers: each is an action, ascending
    buckets  more distinct numbers, such as dwell times: ranges with equally many rows ("dwell<=3.2")
    event    neither: every row is the action "event"

Models and histories hold the place of an action in the list. So the list of a dataset that is prepared again keeps its
order (and buckets keep their edges), and new actions come at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from npu_gr.core.errors import DataError
from npu_gr.core.request import I64

MAX_RATINGS = 20
ONE = "event"
SAMPLE = 200_000  # values that quantiles are taken from
F64 = npt.NDArray[np.float64]


class ActionKind(StrEnum):
    """What the actions of a dataset are made of; in the manifest."""

    EVENTS = "events"
    RATINGS = "ratings"
    BUCKETS = "buckets"
    ONE = "event"


class ValueSample:
    """Distinct values while they are few, and a uniform sample of all: memory does not grow with the rows."""

    def __init__(self, seed: int = 0) -> None:
        self.distinct: set[float] = set()
        self.has_fraction = False
        self._kept = np.empty(SAMPLE)
        self._seen = 0
        self._random = np.random.default_rng(seed)

    def add(self, values: F64) -> None:
        """Take the values of some rows: float64 [n], finite."""
        if len(self.distinct) <= MAX_RATINGS:
            self.distinct.update(np.unique(values).tolist())
        free = values[: max(0, SAMPLE - self._seen)]
        self._kept[self._seen : self._seen + len(free)] = free
        rest = values[len(free) :]
        # Vitter's algorithm R: value number k replaces a kept one with a chance of SAMPLE / k.
        places = (
            self._random.random(len(rest)) * np.arange(self._seen + len(free) + 1, self._seen + len(values) + 1)
        ).astype(np.int64)
        is_kept = places < SAMPLE
        self._kept[places[is_kept]] = rest[is_kept]
        self._seen += len(values)

    @property
    def is_few(self) -> bool:
        """Whether the distinct values are so few that each is an action."""
        return len(self.distinct) <= MAX_RATINGS

    def edges(self, num_buckets: int) -> list[float]:
        """Upper edges of the buckets but the last: ascending, each the largest value of its bucket."""
        kept = np.sort(self._kept[: self._seen])
        at = np.ceil(np.arange(1, num_buckets) * len(kept) / num_buckets).astype(np.int64) - 1
        edges = np.unique(kept[at.clip(min=0)])
        return [edge for edge in edges.tolist() if edge < kept[-1]]


def bucket_names(column: str, edges: Sequence[float]) -> list[str]:
    """Name buckets by their upper edges; the last one has none."""
    for digits in range(3, 18):
        texts = [f"{edge:.{digits}g}" for edge in edges]
        if len(set(texts)) == len(texts):
            break
    else:
        texts = [repr(edge) for edge in edges]
    return [f"{column}<={text}" for text in texts] + [f"{column}>{texts[-1]}" if texts else column]


def bucket_of(values: F64, edges: Sequence[float]) -> I64:
    """Find the bucket of each value: float64 [n] -> int64 [n]."""
    return np.searchsorted(np.array(edges), values, side="left")


def in_order(names: Sequence[str], old: Sequence[str]) -> list[str]:
    """Order event types: those of the dataset before it as they were, then new ones by the alphabet."""
    return [*old, *sorted(set(names) - set(old))]


def check_kind(kind: ActionKind, old: str, folder: str) -> None:
    """Check that a dataset that is prepared again is made of the same sort of actions.

    Raises:
        DataError: it is not, so its actions could not keep their places.
    """
    if old and old != kind:
        raise DataError(
            f"{folder}: holds a dataset whose actions are {old}, and these would be {kind}: histories and models of it "
            "would mean something else; choose another --out, or delete the folder"
        )
