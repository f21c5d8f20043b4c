"""The actions of a dataset: event types, ratings, or ranges of a continuous value.

    events   a column of event types: each is an action, in alphabetical order
    ratings  at most `MAX_RATINGS` distinct numbers: each is an action, ascending
    buckets  more distinct numbers (dwell times): ranges with equally many rows ("dwell<=3.2")
    event    neither: every row is the action "event"

Models and histories store the index of an action in the list. Therefore a dataset that is prepared
again keeps the order of its list (and the edges of its buckets), and new actions are appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.names import value_name
from npu_gr.core.text_format import quoted

MAX_RATINGS = 20
ONE = "event"
SAMPLE = 200_000  # values that quantiles are taken from
_NONE = np.empty(0, np.int64)
F64 = npt.NDArray[np.float64]


class ActionKind(StrEnum):
    """What the actions of a dataset are made of; in the manifest."""

    EVENTS = "events"
    RATINGS = "ratings"
    BUCKETS = "buckets"
    ONE = "event"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldActions:
    """The actions, and the key of the items' ids, of the dataset that the new one replaces."""

    folder: str = ""
    kind: str = ""  # "" = there is no such dataset
    names: list[str] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)
    item_key: bytes | None = None  # None = there is no such dataset; empty = it has no key

    def check(self, kind: ActionKind) -> None:
        """Check that new actions are of the same kind.

        Raises:
            DataError: they are not, so the old actions could not keep their indices.
        """
        if self.kind not in ("", kind):
            raise DataError(
                f"{self.folder}: the dataset there has actions of the kind {self.kind}, the new "
                f"one would have {kind}, so its models and histories would be misread; choose "
                "another --out, or delete the folder"
            )


class ValueSample:
    """The distinct values while they are few, and a uniform sample of at most `SAMPLE` values."""

    def __init__(self, seed: int = 0) -> None:
        self.distinct: set[float] = set()
        self._sample = np.empty(SAMPLE)
        self._seen = 0
        self._random = np.random.default_rng(seed)

    def add(self, values: F64) -> None:
        """Add the values of some rows: float64 [n], finite."""
        if len(self.distinct) <= MAX_RATINGS:
            self.distinct.update(np.unique(values).tolist())
        free = values[: max(0, SAMPLE - self._seen)]
        self._sample[self._seen : self._seen + len(free)] = free
        rest = values[len(free) :]
        # Vitter's algorithm R: value number k replaces a sampled one with probability SAMPLE / k.
        numbers = np.arange(self._seen + len(free), self._seen + len(values)) + 1
        places = (self._random.random(len(rest)) * numbers).astype(np.int64)
        is_sampled = places < SAMPLE
        self._sample[places[is_sampled]] = rest[is_sampled]
        self._seen += len(values)

    @property
    def is_few(self) -> bool:
        """Whether there are at most `MAX_RATINGS` distinct values, so that each is an action."""
        return len(self.distinct) <= MAX_RATINGS

    def edges(self, num_buckets: int) -> list[float]:
        """Return the upper edges of all buckets but the last: ascending, inclusive."""
        return bucket_edges(self._sample[: self._seen], num_buckets)


def bucket_edges(values: F64, num_buckets: int) -> list[float]:
    """Find the upper edges of buckets with equally many values, without the last one's.

    float64 [n], n > 0 -> ascending, distinct.
    """
    values = np.sort(values)
    at = np.ceil(np.arange(1, num_buckets) * len(values) / num_buckets).astype(np.int64) - 1
    edges = np.unique(values[at.clip(min=0)])
    return [edge for edge in edges.tolist() if edge < values[-1]]


def bucket_names(column: str, edges: Sequence[float]) -> list[str]:
    """Name the buckets: `column<=edge`, and `column>edge` for the last one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The actions of a dataset, and the rule that maps a row to its action."""

    kind: ActionKind
    names: list[str]
    edges: list[float]  # upper edges of buckets; else empty
    places: I64  # of event types: code of the type -> index in `names`
    notes: list[str]  # for the user of `npu-gr prepare`

    def of(self, rows: Mapping[str, npt.NDArray[Any]]) -> I64:
        """Find the action of each row: [n] -> int64 [n], indices in `names`."""
        match self.kind:
            case ActionKind.EVENTS:
                found: I64 = self.places[rows["action"]]
                return found
            case ActionKind.RATINGS:
                return np.searchsorted(
                    np.array([float(name) for name in self.names]), rows["value"]
                )
            case ActionKind.BUCKETS:
                return bucket_of(rows["value"], self.edges)
            case ActionKind.ONE:
                return np.zeros(len(rows["user"]), np.int64)


def of_events(events: Sequence[str], old: OldActions) -> Actions:
    """Make actions of event types: the previous dataset's in their order, then new ones sorted.

    Args:
        events: Event types; the index of one is its code in the rows.

    Raises:
        DataError: the previous dataset had actions of another kind.
    """
    old.check(ActionKind.EVENTS)
    # types that differ in case or blanks alone are one: the old name, else the one in lower case
    by_fold: dict[str, str] = {}
    for name in [*old.names, *sorted(set(events), key=lambda one: (one != _fold(one), one))]:
        by_fold.setdefault(name if name in old.names else _fold(name), name)
        by_fold.setdefault(_fold(name), name)
    one_of = {name: name if name in old.names else by_fold[_fold(name)] for name in events}
    names = [*old.names, *sorted(set(one_of.values()) - set(old.names))]
    place = {name: at for at, name in enumerate(names)}
    places = np.array([place[one_of[name]] for name in events], np.int64)
    notes = _new(names, old)
    if merged := [f"{quoted(a)} is {quoted(b)}" for a, b in one_of.items() if a != b]:
        notes.append(
            f"event types that differ in case or blanks alone are one: {', '.join(merged)}"
        )
    return Actions(kind=ActionKind.EVENTS, names=names, edges=[], places=places, notes=notes)


def _fold(name: str) -> str:
    return " ".join(name.split()).casefold()


def of_values(column: str, values: ValueSample, num_buckets: int, old: OldActions) -> Actions:
    """Make actions of numbers: one if all are equal, ratings if they are few, else ranges.

    Args:
        column: Name of the column; ranges are named after it.
        num_buckets: Number of ranges of a continuous value.

    Raises:
        DataError: the previous dataset had actions of another kind.
    """
    if values.is_few and len(values.distinct) == 1 and old.kind in ("", ActionKind.ONE):
        only = value_name(next(iter(values.distinct)))
        return one_action(old, [f"{quoted(column)} is {only} in every row, so it is not used"])
    if values.is_few and old.kind != ActionKind.BUCKETS:
        old.check(ActionKind.RATINGS)
        known = {float(name) for name in old.names}
        names = [value_name(value) for value in sorted(known | values.distinct)]
        notes = _new([*old.names, *(name for name in names if name not in old.names)], old)
        if names[: len(old.names)] != old.names:
            notes.append(
                "warning: new ratings lie between those of the previous dataset, so a running "
                "service rejects a reload of a model of this one; prepare into a new folder and "
                "load the histories anew"
            )
        return Actions(kind=ActionKind.RATINGS, names=names, edges=[], places=_NONE, notes=notes)
    old.check(ActionKind.BUCKETS)
    edges = old.edges if old.kind else values.edges(num_buckets)
    names = old.names if old.kind else bucket_names(column, edges)
    origin = "those of the previous dataset" if old.kind else "equally many rows in each"
    note = (
        f"warning: {quoted(column)} is continuous (over {MAX_RATINGS} distinct values): "
        f"{len(names)} ranges are the "
        f"actions ({origin}); --buckets N changes their number, --value none drops the column"
    )
    return Actions(kind=ActionKind.BUCKETS, names=names, edges=edges, places=_NONE, notes=[note])


def one_action(old: OldActions, notes: Sequence[str] = ()) -> Actions:
    """Make the one action of a log without event types and values.

    Raises:
        DataError: the previous dataset had actions of another kind.
    """
    old.check(ActionKind.ONE)
    return Actions(kind=ActionKind.ONE, names=[ONE], edges=[], places=_NONE, notes=list(notes))


def _new(names: Sequence[str], old: OldActions) -> list[str]:
    new = names[len(old.names) :]
    return [f"actions that are new: {', '.join(new)}"] if old.names and new else []
