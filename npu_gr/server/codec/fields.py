"""Parts that the bodies and answers of several kinds share: columns, names, histories.

A column of integers may be a list, or raw little-endian bytes: base64 in JSON, `bin` in msgpack. Raw columns are
read without making a Python object an element. items, timestamps, candidates: int64; actions: int16.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.core.errors import TooLarge, Unprocessable
from npu_gr.core.request import F32, I64, Events, HistoryRef, HistoryReport, UserKey
from npu_gr.server.config import ServerConfig

Int = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def _a_column(what: str, dtype: str, limit: str) -> msgspec.Meta:
    """Describe a column: its raw elements, and the setting of `server` that bounds it (`bulk.py` reads both)."""
    name = np.dtype(dtype).name
    text = f"{what}, or raw little-endian {name} (base64 in JSON). At most server.{limit}."
    return msgspec.Meta(description=text, extra={"limit": limit, "element_bytes": np.dtype(dtype).itemsize})


Column = Annotated[list[Int] | bytes, _a_column("Integers", "<i8", "max_history_events")]
Actions = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]] | bytes,
    _a_column("Action ids", "<i2", "max_history_events"),
]
Candidates = Annotated[list[Int] | bytes, _a_column("Item ids", "<i8", "max_candidates")]
MAX_NAME = 128  # characters of a user id, a tenant, a version
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Tenant = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Value = bool | int | float | Annotated[str, msgspec.Meta(max_length=1024)]
Values = Annotated[list[Value], msgspec.Meta(min_length=1, max_length=1000)]  # any of them
MOST_NAMES = 100  # of attributes of one item or one filter


class History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Behaviours, oldest first, as columns of the same length."""

    items: Column
    actions: Actions
    timestamps: Column  # unix seconds


class UserBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that names its user."""

    user_id: Name
    tenant: Tenant = ""

    @property
    def user(self) -> UserKey:
        """The user within the tenant."""
        return UserKey(self.tenant, self.user_id)


class HistoryBody(UserBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that brings the user's history or names a known prefix of it. With neither, the history store is read."""

    history: History | None = None  # absent: from the history store
    base: Name | None = None  # fingerprint of a known prefix that `history` continues
    model_version: Name | None = None


class HistoryOut(msgspec.Struct, frozen=True, kw_only=True):
    """How the model read the behaviours: tokens used, tokens cut, items that the catalogue lacks, their source."""

    fingerprint: str
    num_tokens: int
    cut_tokens: int
    unknown_items: int
    source: str  # request | store | last_known | nothing; the last two: the history store failed
    fault: str  # of the history store: store_unavailable | store_slow | ...; "" = none


# ---- reading


def column(values: list[int] | bytes, field: str, dtype: str, limit: int) -> npt.NDArray[Any]:
    """Make an array of a list or of raw bytes. Raw bytes are read in place, without a copy.

    Args:
        values: the column as it was decoded; a list has been checked for its range.
        field: its name in messages.
        dtype: of the array and of the raw bytes: `<i8` or `<i2`.
        limit: elements at most.

    Raises:
        TooLarge: more than `limit` elements. Unprocessable: a part of an element is left over, or one is negative.
    """
    dt = np.dtype(dtype)
    if isinstance(values, bytes):
        if len(values) % dt.itemsize:
            raise Unprocessable(f"{field}: {len(values)} bytes are not whole little-endian {dt.name} values")
        count = len(values) // dt.itemsize
    else:
        count = len(values)
    if count > limit:
        raise TooLarge(f"{field}: {count} entries, the limit is {limit}")
    if not isinstance(values, bytes):
        return np.array(values, dt)
    array = np.frombuffer(values, dt)
    if count and int(array.min()) < 0:
        raise Unprocessable(f"{field}: {int(array.min())} at index {int(array.argmin())} is negative")
    return array


def optional_ids(values: list[int] | bytes | None, field: str, limit: int) -> I64 | None:
    """Read a column of item ids that may be absent. Raises as `column` does."""
    return None if values is None else column(values, field, "<i8", limit)


def parse_events(history: History, field: str, limit: int) -> Events:
    """Make arrays of the three columns of a history.

    Args:
        history: as it was decoded.
        field: its name in messages.
        limit: events at most.

    Raises:
        TooLarge, Unprocessable: as `column` does; Unprocessable also where the columns differ in length.
    """
    items = column(history.items, f"{field}.items", "<i8", limit)
    actions = column(history.actions, f"{field}.actions", "<i2", limit)
    timestamps = column(history.timestamps, f"{field}.timestamps", "<i8", limit)
    if not len(items) == len(actions) == len(timestamps):
        raise Unprocessable(
            f"{field}: items, actions and timestamps have {len(items)}, {len(actions)} and {len(timestamps)} entries"
        )
    return Events(items, actions, timestamps)


def parse_history(body: HistoryBody, config: ServerConfig) -> HistoryRef:
    """Read where a request's behaviours come from. Raises as `parse_events` does."""
    if body.history is None:
        return HistoryRef(base=body.base)
    return HistoryRef(events=parse_events(body.history, "history", config.max_history_events), base=body.base)


# ---- writing


def render_history(report: HistoryReport) -> HistoryOut:
    """Write how the model read the behaviours."""
    return HistoryOut(
        fingerprint=report.fingerprint,
        num_tokens=report.num_tokens,
        cut_tokens=report.cut_tokens,
        unknown_items=report.unknown_items,
        source=report.origin.source.value,
        fault=report.origin.fault or "",
    )


def render_column(values: npt.NDArray[Any], dtype: str, is_raw: bool) -> Any:
    """Write an array as one flat column: raw bytes of the little-endian `dtype` if `is_raw`, or else a list."""
    return values.astype(dtype, copy=False).tobytes() if is_raw else values.ravel().tolist()


def render_scores(values: F32, is_raw: bool) -> list[float | None] | bytes:
    """Write scores as raw float32 if `is_raw`, or else as a list, in which msgspec writes NaN (unknown) as null."""
    scores: list[float | None] | bytes = render_column(values, "<f4", is_raw)
    return scores
