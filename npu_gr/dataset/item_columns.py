"""Features of items in a log: columns whose cells are the same in every row of an item.

A column is one if at least `LEAST` items were had by two users, and none of the items has two
values. So a column of the user or of the event, such as an age, is none. In the first rows, two
items must have a cell of it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import quoted
from npu_gr.dataset.cells import JOINT, plain_text
from npu_gr.dataset.columns import NONE, CellKind, cells_of, kind_of
from npu_gr.dataset.line_sources import Source
from npu_gr.dataset.log_features import LogFeature
from npu_gr.dataset.side import ItemColumn, feature_of

LEAST = 10
_OWN = 0.5  # a name or number with more distinct values than this share of rows is the row's own
_OF_ROWS = re.compile(
    "(order|session|transaction|basket|cart|checkout|invoice|receipt|request|message|event|visit)"
    "[ _-]?(id|no|nr|number|key|uuid)$",
    re.IGNORECASE,
)
MOST = 64  # columns that are guessed; each is read as a whole


def candidates(
    source: Source, item: str, unused: Sequence[Mapping[str, str]], wanted: Sequence[str] | None
) -> tuple[LogFeature, ...]:
    """List the columns that may be features of items, by the first rows.

    Args:
        source: The log.
        item: Name of its item column.
        unused: Columns without a role, as in the manifest.
        wanted: Names of the features, or NONE; None = all suitable columns.

    Raises:
        DataError: a wanted column does not exist, or has another role.
    """
    free = {one["name"]: one["hint"] for one in unused}
    if wanted is not None:
        if missing := [name for name in wanted if name not in free and name != NONE]:
            raise DataError(
                f"{source.name}: --features {missing[0]}: no column without another role; there "
                f"are {', '.join(free) or 'none'}. With --items it names columns of that file"
            )
        names = [name for name in wanted if name != NONE]
    else:
        items = source.sample[item].to_pylist() if item in source.sample else []
        names = [
            name
            for name, hint in free.items()
            # 0 and 1, ratings and the like say what happened
            if not hint and items and _is_one_each(items, source.sample[name].to_pylist())
        ][:MOST]
    return tuple(
        LogFeature(name, "event", "", cells_of(name, source.sample[name], source.types))
        for name in names
    )


def _is_one_each(owners: Sequence[Any], cells: Sequence[Any]) -> bool:
    known = [(str(owner), str(cell)) for owner, cell in zip(owners, cells, strict=True) if cell]
    num_owners = len({owner for owner, _ in known})
    return num_owners > 1 and len(set(known)) == num_owners


def with_feature_options(
    sample: Mapping[str, Any],
    unused: Sequence[Mapping[str, str]],
    user: str,
    item: str,
    *,
    describes_items: bool,
) -> list[dict[str, str]]:
    """Name the option that makes a feature of each column that has no hint of its own.

    Args:
        sample: The first cells of all columns, by name.
        unused: Columns without a role, as in the manifest.
        user: Name of the user column.
        item: Name of the item column.
        describes_items: Whether columns of the log may be features of items.
    """
    users, items = (sample[name].to_pylist() if name in sample else None for name in (user, item))

    def hint(name: str) -> str:
        kind, cells = kind_of(sample[name]), sample[name].to_pylist()
        known = [str(cell) for cell in cells if cell is not None]
        is_number = kind in (CellKind.NUMBER, CellKind.COMMA)
        if not name or kind in (CellKind.EMPTY, CellKind.TIME):
            return ""
        if _OF_ROWS.search(name):
            return ""  # names what rows have in common, which no later event has again
        if not is_number and len(set(known)) > max(LEAST, _OWN * len(known)):
            return ""  # names or numbers the row
        if items and _is_one_each(items, cells):
            return (
                f"--features {shlex.quote(name)} makes it a feature of items"
                if describes_items
                else "in the file of --items it is a feature of items"
            )
        if users and _is_one_each(users, cells):
            return "in the file of --users it is a feature of users"
        return f"--event-features {shlex.quote(name)} makes it a feature of events"

    return [{**one, "hint": one["hint"] or hint(one["name"])} for one in unused]


def item_features(
    con: Any,
    columns: Sequence[LogFeature],
    names: Sequence[str],
    taken: Collection[str],
    *,
    is_wanted: bool,
    is_decided: bool = False,
) -> tuple[list[ItemColumn], dict[str, str]]:
    """Read the features of items from the table `log`, where column i is `g<i>`.

    Args:
        con: Connection of DuckDB.
        columns: Result of `candidates`.
        names: Names of the items by row.
        taken: Names of other features, which are skipped.
        is_wanted: Whether the user has named the columns.
        is_decided: Whether an earlier log has decided that these are features.

    Returns:
        The features, with a cell for each item; and why other columns are none.

    Raises:
        DataError: a wanted column is no feature.
    """
    row_of = {name: row for row, name in enumerate(names)}
    features, skipped = [], {}
    for place, column in enumerate(columns):
        found = con.execute(
            f'SELECT item, min(g{place}), max(g{place}), count(DISTINCT "user") FROM log WHERE '
            f"reason = 0 AND g{place} IS NOT NULL GROUP BY item ORDER BY min(n)"
        ).fetchall()
        several = [one for one in found if one[1] != one[2]]
        num_shared = sum(one[3] > 1 for one in found)
        why = ""
        if column.name in taken:
            why = "another feature has its name"
        elif several and not is_decided:
            item, first, last, _ = several[0]
            why = f"item {quoted(item)} has {quoted(_text(first))} and {quoted(_text(last))}"
        elif num_shared < LEAST and not is_wanted and not is_decided:
            continue  # too few rows to say so
        else:
            cells: list[Any] = [None] * len(names)
            for item, first, *_ in found:
                if item in row_of:
                    cells[row_of[item]] = first.split(JOINT) if column.cells == "list" else first
            own = feature_of(column.name, column.cells, cells, is_wanted=is_wanted or is_decided)
            if isinstance(own, ItemColumn):
                features.append(own)
                continue
            why = own
        if is_wanted:
            raise DataError(f"--features {column.name}: {why}")
        if not several:
            skipped[column.name] = why
    return features, skipped


def _text(value: Any) -> str:
    return plain_text(value).replace(JOINT, ", ")


def bucket_of_known(
    numbers: Sequence[float | None],
    known: Sequence[float | None],
    names: Sequence[str | None],
) -> list[str | None]:
    """Name the range of new numbers by the known item with the nearest number.

    Args:
        numbers: Numbers of new items.
        known: Numbers of known items.
        names: Names of their ranges.
    """
    pairs = sorted(
        (number, name)
        for number, name in zip(known, names, strict=True)
        if number is not None and name is not None
    )
    if not pairs:
        return [None] * len(numbers)
    values = np.array([number for number, _ in pairs])
    return [
        None if number is None else pairs[int(np.abs(values - number).argmin())][1]
        for number in numbers
    ]
