"""A file of users: its columns as features of those in the log.

A column with texts that are nearly a name of each user says nothing that another user could learn from; unless it was
asked for it is left out and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_gr.core.errors import DataError
from npu_gr.dataset.cells import Cells, number_of, values_of
from npu_gr.dataset.columns import Column, choose_user_column
from npu_gr.dataset.log_features import MAX_VALUE_BYTES, kind_word, split_kind, told_cells
from npu_gr.dataset.names import has_point, texts_of
from npu_gr.dataset.rejects import OnReject, RejectReason
from npu_gr.dataset.source import OnProgress, Source
from npu_gr.features.interactions import ToldKind

_MIN_DISTINCT = 20  # texts with at most so many distinct values describe
_OWN = 0.5  # share of distinct values among users over which a column names users rather than describes them


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFeature:
    """A column of the users' file as a feature."""

    name: str
    told: ToldKind
    kind: str  # "number", "one" or "many"; in the manifest
    values: list[Any]  # of each user: float, str, list of str, or None


@dataclass(slots=True, kw_only=True)
class UserTable:
    """What the file says of each user; of one that is listed twice the last row counts."""

    key: Column
    num_again: int = 0  # rows of a user whom an earlier one names
    rows: dict[str, int] = field(default_factory=dict)  # name -> place in the values
    features: list[UserFeature] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # column -> why


def read_users(
    source: Source,
    told_key: str,
    log_user: str,
    wanted: Sequence[str] | None,
    on_reject: OnReject,
    on_progress: OnProgress,
) -> UserTable:
    """Read a file of users; it must fit in memory.

    Args:
        source: the file.
        told_key: name of its column of users; "" = guessed.
        log_user: name of the log's column of users.
        wanted: `NAME` or `NAME:KIND` of the columns that become features; None = all that can.
        on_reject: called for rows without a user.
        on_progress: called as the file is read.

    Raises:
        DataError: no column, or more than one, looks like the user; or a wanted one is missing or cannot be used.
    """
    sample = source.sample()
    key = choose_user_column(sample.columns, told_key, log_user, source.name)
    others: dict[str, ToldKind] = (
        {name: "" for name in sample.columns if name != key.name} if wanted is None else dict(map(split_kind, wanted))
    )
    if missing := [name for name in others if name not in sample.columns]:
        there = ", ".join(sample.columns)
        raise DataError(f"{source.name}: --user-features {missing[0]}: there is no such column; there are {there}")
    kinds = {name: told_cells(name, told, sample.columns[name], source) for name, told in others.items()}
    table = UserTable(key=key)
    cells: dict[str, list[Any]] = {name: [] for name in others}
    with_point = has_point(sample.columns[key.name])
    for batch in source.batches(list(dict.fromkeys([key.name, *others])), on_reject, on_progress):
        names, is_missing = texts_of(batch.columns[key.name], with_point=with_point)
        columns = {name: batch.columns[name].to_pylist() for name in others}
        for row, user in enumerate(names.to_pylist()):
            if is_missing[row]:
                on_reject(int(batch.numbers[row]), RejectReason.NO_USER, batch.text(row))
                continue
            table.num_again += user in table.rows
            at = table.rows.setdefault(user, len(table.rows))
            for name, column in cells.items():
                if at == len(column):
                    column.append(None)
                column[at] = columns[name][row]
    for name, told in others.items():
        values = [_value(cell, kinds[name]) for cell in cells.pop(name)]
        if why := _useless(values, is_wanted=wanted is not None):
            if wanted is not None:
                raise DataError(f"{source.name}: --user-features {name}: {why}")
            table.left_out[name] = why
        else:
            table.features.append(UserFeature(name=name, told=told, kind=kind_word(kinds[name]), values=values))
    return table


def _value(cell: Any, cells: Cells) -> float | str | list[str] | None:
    if cells == "number":
        return number_of(cell)
    values = values_of(cell, cells)
    if cells == "text":
        return values[0] if values else None
    return values or None


def _useless(values: Sequence[Any], *, is_wanted: bool) -> str:
    """Say why a column is no feature; "" = it is one."""
    known = [value for value in values if value is not None]
    if not known:
        return "empty"
    texts = [text for value in known if not isinstance(value, float) for text in _texts(value)]
    if any(len(text.encode()) > MAX_VALUE_BYTES for text in texts):
        return f"a value has over {MAX_VALUE_BYTES} bytes"
    counts = Counter(texts)
    if not is_wanted and len(counts) > _MIN_DISTINCT and len(counts) > _OWN * len(known):
        return f"{len(counts):,} distinct values for {len(known):,} users: nearly a name of each"
    return ""


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
