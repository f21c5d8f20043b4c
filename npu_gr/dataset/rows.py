"""Batches of a log into rows of codes: what can be used goes on, what cannot is rejected with its reason."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_gr.core.errors import DataError
from npu_gr.core.words import quoted
from npu_gr.dataset.actions import ValueSample
from npu_gr.dataset.arrow import as_numbers, pa, pc
from npu_gr.dataset.columns import MAX_EVENT_TYPES, Column, LogColumns, choose_log_columns
from npu_gr.dataset.json_rows import PLACE, NestedSource
from npu_gr.dataset.log_features import log_features
from npu_gr.dataset.names import (
    EVENT_LIMIT,
    ITEM_LIMIT,
    USER_LIMIT,
    Codes,
    LoggedItems,
    codes_of,
    has_point,
    is_rounded,
    texts_of,
    too_long,
)
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.rejects import CODES, RejectReason, Rejects
from npu_gr.dataset.source import RowBatch, Source
from npu_gr.dataset.spill import Rows, row_dtype
from npu_gr.dataset.times import US_PER_S, TimeKind, recognise
from npu_gr.features.interactions import LogFeatureOf

_REASONS = list(RejectReason)


class RowReader:
    """Knows the columns of a log, and every name that came."""

    def __init__(self, source: Source, options: PrepareOptions) -> None:
        """Choose the columns, from the first rows.

        Raises:
            DataError: as `choose_log_columns` and `recognise`.
        """
        sample = source.sample()
        self._source = source
        self.columns = _choose(source, sample, options)
        self.time_kind = _recognise(source, sample, self.columns.time, options)
        wanted: dict[LogFeatureOf, tuple[str, ...]] = {
            "event": options.event_features,
            "request": options.request_features,
            "cross": options.cross_features,
        }
        self.features = log_features(sample.columns, wanted, source)
        self.dtype = row_dtype([one.dtype for one in self.features])
        self._with_point = {
            one.name: has_point(sample.columns[one.name]) for one in (self.columns.user, self.columns.item)
        }
        self.users = Codes()
        self.items = LoggedItems()
        self.events = Codes()
        self.values = ValueSample()
        self.num_rows = 0  # that can be used

    def column_names(self) -> list[str]:
        """Names of the columns that are read."""
        return list(dict.fromkeys([*self.columns.names(), *(one.name for one in self.features)]))

    def read(self, batch: RowBatch, rejects: Rejects) -> Rows:
        """Translate the rows of a batch that can be used; reject the others.

        Raises:
            DataError: the column of events holds too many different ones.
        """
        columns = self.columns
        reasons = np.zeros(len(batch.numbers), np.int8)
        value = np.zeros(len(reasons))
        event = None
        if columns.event is not None:
            event = self._names(batch, columns.event, reasons, RejectReason.NO_EVENT, EVENT_LIMIT)
        elif columns.value is not None:
            value = _numbers(batch.columns[columns.value.name], reasons)
        if self.time_kind is None or columns.time is None:
            time_us = batch.numbers * US_PER_S
        else:
            time_us, bad = self.time_kind.read(batch.columns[columns.time.name])
            reasons = np.where(bad, bad, reasons)
        item = self._names(batch, columns.item, reasons, RejectReason.NO_ITEM, ITEM_LIMIT)
        user = self._names(batch, columns.user, reasons, RejectReason.NO_USER, USER_LIMIT)
        is_good = reasons == 0
        for row in np.flatnonzero(~is_good).tolist():
            rejects.add(int(batch.numbers[row]), _REASONS[reasons[row] - 1], batch.text(row))
        rows = np.zeros(int(is_good.sum()), self.dtype)
        rows["user"] = codes_of(_kept(user, is_good), self.users.code)
        rows["item"] = codes_of(_kept(item, is_good), self.items.id)
        rows["time_us"] = time_us[is_good]
        rows["value"] = value[is_good]
        for place, one in enumerate(self.features):
            rows[f"f{place}"] = one.read(batch.columns[one.name].filter(pa.array(is_good)))
        if event is not None:
            rows["action"] = codes_of(_kept(event, is_good), self.events.code)
            self._check_events()
        elif columns.value is not None:
            self.values.add(rows["value"])
        self.num_rows += len(rows)
        return rows

    def _names(
        self,
        batch: RowBatch,
        column: Column,
        reasons: npt.NDArray[np.int8],
        missing: RejectReason,
        limit: tuple[RejectReason, int, bool],
    ) -> Any:
        encoded, is_missing = texts_of(batch.columns[column.name], with_point=self._with_point.get(column.name, False))
        reason, most, in_bytes = limit
        reasons[too_long(encoded, most, in_bytes=in_bytes)] = CODES[reason]
        reasons[is_missing] = CODES[missing]
        if column is not self.columns.event:
            reasons[is_rounded(encoded)] = CODES[RejectReason.ROUNDED]
        return encoded

    def _check_events(self) -> None:
        if len(self.events) > MAX_EVENT_TYPES and self.columns.event is not None:
            some = ", ".join(quoted(name, 24) for name in islice(self.events.names(), 5))
            raise DataError(
                f"{self._source.name}: {quoted(self.columns.event.name)} has over {MAX_EVENT_TYPES} distinct values "
                f"({some} ...), so it is no event type; --event names another column, --event none says there is none"
            )


def _choose(source: Source, sample: RowBatch, options: PrepareOptions) -> LogColumns:
    names = {role: getattr(options, role) for role in ("user", "item", "time", "event", "value")}
    told = {role: name for role, name in names.items() if name}
    if not isinstance(source, NestedSource):
        return choose_log_columns(sample.columns, told, has_time=options.has_time, source=source.name)
    if told:
        raise DataError(f"{source.name}: --{next(iter(told))}: {source.format} has no columns")
    columns = choose_log_columns(sample.columns, {}, has_time=False, source=source.name)
    place = Column(PLACE, "the place of an item in its user's list")
    return LogColumns(user=columns.user, item=columns.item, time=place, event=None, value=None)


def _recognise(source: Source, sample: RowBatch, time: Column | None, options: PrepareOptions) -> TimeKind | None:
    if time is None:
        return None
    if isinstance(source, NestedSource):
        return TimeKind(unit="s", words="places in lists, taken as seconds", is_guess=False, least_us=0)
    name = f"{source.name}: {time.name}"
    return recognise(sample.columns[time.name], name, options.time_unit, options.time_format)


def _kept(encoded: Any, is_good: npt.NDArray[np.bool_]) -> Any:
    """Leave out rows, and the names that only they have."""
    return encoded if is_good.all() else encoded.filter(pa.array(is_good)).dictionary_decode().dictionary_encode()


def _numbers(array: Any, reasons: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
    numbers = as_numbers(array)
    is_number = pc.is_valid(numbers).to_numpy(zero_copy_only=False)
    reasons[~is_number] = CODES[RejectReason.NO_NUMBER]
    is_missing = pc.is_null(array, nan_is_null=pa.types.is_floating(array.type)).to_numpy(zero_copy_only=False)
    reasons[is_missing] = CODES[RejectReason.NO_VALUE]
    filled: npt.NDArray[np.float64] = pc.fill_null(numbers, 0.0).to_numpy(zero_copy_only=False)
    return filled
