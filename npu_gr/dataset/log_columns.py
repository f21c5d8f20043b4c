"""The columns and times of a log, of any source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import quoted
from npu_gr.dataset.cells import as_text, pc
from npu_gr.dataset.columns import CellKind, Column, LogColumns, choose_log_columns, kind_of
from npu_gr.dataset.line_sources import Source
from npu_gr.dataset.lines import NESTED
from npu_gr.dataset.log_features import split_kind
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.row_filter import check_labels
from npu_gr.dataset.sources import NestedSource
from npu_gr.dataset.time_parts import joined
from npu_gr.dataset.times import TimeKind, recognise


def choose_columns(
    source: Source, options: PrepareOptions, conditioned: Sequence[str]
) -> LogColumns:
    """Choose the columns of a log.

    Args:
        source: The log.
        options: Names of columns; missing ones are guessed.
        conditioned: Columns that conditions name.

    Raises:
        DataError: as `choose_log_columns` and `check_labels`.
    """
    names = {role: getattr(options, role) for role in ("user", "item", "time", "event", "value")}
    named = {role: name for role, name in names.items() if name}
    if not isinstance(source, NestedSource):
        features = (*options.event_features, *options.request_features, *options.cross_features)
        check_labels(
            source.sample,
            [*conditioned, *named.values(), *(split_kind(text)[0] for text in features)],
            bool(options.positive or source.positive),
            bool(options.drop or options.where),
            source.name,
        )
        return choose_log_columns(
            source.sample, named, has_time=options.has_time, source=source.name
        )
    if named:
        raise DataError(f"{source.name}: --{next(iter(named))}: {source.format} has no columns")
    columns = choose_log_columns(source.sample, {}, has_time=False, source=source.name)
    place = Column(NESTED[2], "the index of an item in its user's list")
    user, item = Column(columns.user.name, "whose list it is"), Column(NESTED[1], "in the list")
    return LogColumns(user=user, item=item, time=place, event=None, value=None)


def recognise_times(
    source: Source, time: Column | None, options: PrepareOptions
) -> TimeKind | None:
    """Recognise the times of a log; None = it has none.

    Raises:
        DataError: as `recognise`; or the times are places in an order, and another column has
            times.
    """
    if time is None:
        return None
    if isinstance(source, NestedSource):
        return TimeKind(unit="s", words="places in lists", is_guess=False, least_us=0)
    name = f"{source.name}: {time.name}"
    sample = source.sample
    array = joined([sample[one] for one in time.parts]) if time.parts else sample[time.name]
    found = recognise(array, name, options.time_unit, options.time_format)
    if found.least_us == 0 and found.is_guess and not options.time:
        rivals = [one for one in sample if one != time.name and _has_times(sample[one])]
        if rivals:
            raise DataError(
                f"{name} has small numbers, as places in an order, and {quoted(rivals[0])} has "
                f"times: give --time {rivals[0]}, or --time {time.name} if it is the order"
            )
    return found


def _has_times(array: Any) -> bool:
    """Whether cells are dates, or numbers that are times since 1970."""
    kind = kind_of(array)
    if kind is not CellKind.INTEGER:
        return kind is CellKind.TIME
    texts = pc.drop_null(as_text(array))
    return bool(pc.all(pc.match_substring_regex(texts, r"^1[0-9]{9}([0-9]{3}){0,3}$")).as_py())
