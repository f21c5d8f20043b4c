"""What a caller has, as columns of the wire: names of items, names of actions, times.

items       raw int64 ids, computed here by `item_ids`: the service need not hash a name on its event loop
actions     a list of names: only the model that answers knows their indices
timestamps  raw int64 unix seconds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.core.errors import Unprocessable
from npu_gr.core.names import item_ids, value_name
from npu_gr.core.words import quoted
from npu_gr.server.codec import fields

Name = str | int
Names = Sequence[Name] | npt.NDArray[Any]
Cell = bool | int | float | str | Sequence[str | int] | None  # None = missing
Column = Sequence[Cell] | npt.NDArray[Any]
Time = datetime | float  # with a zone; or unix seconds
Times = Sequence[Time] | npt.NDArray[Any]
_MOST_S = 2**62
_TIME = "unix seconds, or a datetime with a zone"


@dataclass(frozen=True, slots=True, eq=False)
class Behaviours:
    """Behaviours of a user, oldest first, as columns of one length, with the names that the company has for them."""

    items: Names  # "SKU-0042-C" or 42; an array of int64 may hold ids
    actions: Sequence[str | float] | npt.NDArray[Any]  # "purchase"; 5 or 4.5 where ratings are the actions
    timestamps: Times  # with a zone, or unix seconds; datetime64 is UTC
    features: Mapping[str, Column] = field(default_factory=dict)  # of each event

    def on_the_wire(self, field: str) -> fields.History:
        """Make the columns of a body.

        Args:
            field: its name in messages.

        Raises:
            Unprocessable: names the field, the place and what is wrong with it.
        """
        return fields.History(
            items=item_column(self.items, f"{field}.items"),
            actions=_action_names(self.actions, f"{field}.actions"),
            timestamps=_raw(seconds(self.timestamps, f"{field}.timestamps")),
            features=feature_columns(self.features, f"{field}.features") or msgspec.UNSET,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Features:
    """What a ranker reads of a user, a request and its candidates; `models()` says what it knows. Absent = missing."""

    user: Mapping[str, Cell] | None = None  # a part of the history; None = those of the base, if there is one
    request: Mapping[str, Cell] = field(default_factory=dict)  # hour, page, device
    cross: Mapping[str, Column] = field(default_factory=dict)  # name -> a value for each candidate


def feature_columns(columns: Mapping[str, Column], field: str) -> dict[str, Any]:
    """Make columns of a body: an array of floats becomes raw float32, in which NaN is missing; all else a list.

    Raises:
        Unprocessable: names the feature and what is wrong with it.
    """
    made: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values, str):
            raise Unprocessable(f"{field}.{name}: one text, where a value for each row belongs")
        if not isinstance(values, np.ndarray):
            made[name] = [cell_of(value) for value in values]
        elif _flat(values, f"{field}.{name}").dtype.kind == "f":
            made[name] = values.astype("<f4", copy=False).tobytes()
        else:
            made[name] = values.tolist()
    return made


def feature_row(row: Mapping[str, Cell]) -> dict[str, Any]:
    """Make the features of one user or request."""
    return {name: cell_of(value) for name, value in row.items()}


def cell_of(value: Any) -> Any:
    """Make a value of numpy, or several, plain."""
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def item_column(names: Names, field: str) -> bytes:
    """Return the raw ids of names. Raises Unprocessable, with the field and the place."""
    return _raw(ids_of(names, field))


def ids_of(names: Names, field: str) -> I64:
    """Return the ids of names: [n] -> int64 [n]. Raises Unprocessable, with the field and the place."""
    if isinstance(names, np.ndarray) and names.dtype.kind in "iu":
        _flat(names, field)
        if names.size and not 0 <= int(names.min()) <= int(names.max()) < 2**63:
            raise Unprocessable(f"{field}: an id is 0 to 2^63 - 1, got {names.min()} to {names.max()}")
        return names.astype(np.int64, copy=False)
    try:
        return item_ids(listed(names, field))
    except ValueError as error:
        raise Unprocessable(f"{field}: {error}") from None


def listed(names: Names, field: str) -> list[Name]:
    """Return names as a list of texts and integers. Raises Unprocessable, with the field and the place."""
    if isinstance(names, str):
        raise Unprocessable(f"{field}: one text, where a list of names belongs")
    items: list[Any] = _flat(names, field).tolist() if isinstance(names, np.ndarray) else list(names)
    for place, name in enumerate(items):
        if type(name) is str or type(name) is int:
            continue
        if isinstance(name, np.integer | np.str_):
            items[place] = name.item()
        else:
            raise Unprocessable(f"{field}: index {place}: {quoted(name)} is no name: it is a text or an integer")
    return items


def _action_names(actions: Sequence[str | float] | npt.NDArray[Any], field: str) -> list[Any]:
    if isinstance(actions, str):
        raise Unprocessable(f"{field}: one text, where a list of names belongs")
    names: list[Any] = list(_flat(actions, field) if isinstance(actions, np.ndarray) else actions)
    for place, name in enumerate(names):
        if type(name) is str or type(name) is int:
            continue
        if isinstance(name, np.integer | np.str_):
            names[place] = name.item()
        elif isinstance(name, float | np.floating):
            names[place] = value_name(float(str(name)))  # of a float32, too, what it was written as
        else:
            raise Unprocessable(f"{field}: index {place}: {quoted(name)} is no name of an action")
    return names


def second(moment: Time, field: str) -> int:
    """Return one time as unix seconds. Raises Unprocessable, with the field."""
    return int(seconds([moment], field)[0])


def seconds(times: Times, field: str) -> I64:
    """Return times as whole unix seconds, rounded down: [n] -> int64 [n]. Raises Unprocessable, with the field."""
    try:
        found = times if isinstance(times, np.ndarray) else np.array(list(times))
    except ValueError as error:
        raise Unprocessable(f"{field}: a list within the list, where a column has times alone") from error
    if not _flat(found, field).size:
        return np.empty(0, np.int64)
    match found.dtype.kind:
        case "i":
            return found.astype(np.int64, copy=False)
        case "u" | "f":
            if not (np.abs(found) < _MOST_S).all():  # not a number is not either
                raise Unprocessable(f"{field}: unix seconds are finite and below 2^62")
            return np.floor(found).astype(np.int64)
        case "M":
            if np.isnat(found).any():
                raise Unprocessable(f"{field}: index {int(np.isnat(found).argmax())}: no time (NaT)")
            return found.astype("datetime64[s]").astype(np.int64)
        case "O":
            return np.array([_unix(moment, place, field) for place, moment in enumerate(found)], np.int64)
        case _:
            raise Unprocessable(
                f"{field}: {quoted(found[0].item())} is no time: unix seconds, or a datetime with a zone"
            )


def _unix(moment: object, place: int, field: str) -> int:
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise Unprocessable(f"{field}: index {place}: {moment.isoformat()} has no time zone; e.g. tzinfo=UTC")
        return int(moment.timestamp() // 1)
    if isinstance(moment, int | float) and not isinstance(moment, bool):
        if not abs(moment) < _MOST_S:
            raise Unprocessable(f"{field}: index {place}: unix seconds are finite and below 2^62")
        return math.floor(moment)
    raise Unprocessable(f"{field}: index {place}: {quoted(moment)} is no time: {_TIME}")


def _flat(values: npt.NDArray[Any], field: str) -> npt.NDArray[Any]:
    if values.ndim != 1:
        raise Unprocessable(f"{field}: an array of {values.ndim} dimensions, where a column has one")
    return values


def _raw(values: I64) -> bytes:
    return values.astype("<i8", copy=False).tobytes()
