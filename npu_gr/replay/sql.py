"""A query log of whatever DuckDB reads: access logs by a regular expression, JSON lines, CSV, Parquet, databases.

A query in SQL gives one row a request, whose columns are the fields of a record (`npu_gr/replay/log.py`). DuckDB does
the reading, the times, the filters and the joins. What it cannot know is done here: items become ids by their names,
and actions the places that a checkpoint has for theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import ActionNames, item_ids
from npu_gr.core.words import near, quoted
from npu_gr.replay.log import QueryRecord

ROWS = 1024  # that are fetched together
_ITEMS = ("candidates", "items", "allow_items", "deny_items")
_FIELDS = tuple(QueryRecord.__struct_fields__)


class SqlSource:
    """The records of a query, in the order of its rows; iterating counts them by kind."""

    def __init__(self, query: str, actions: ActionNames | None = None) -> None:
        """Run nothing yet.

        Args:
            query: for DuckDB; paths in it are relative to the working directory.
            actions: of the model, for histories whose actions are names; None = they are places already.
        """
        self._query = query
        self._actions = actions
        self.kinds: Counter[str] = Counter()

    def __iter__(self) -> Iterator[QueryRecord]:
        """Run the query.

        Raises:
            DataError: the query fails, gives no row, or a row that is no record. ConfigError: there is no DuckDB.
        """
        try:
            import duckdb
        except ImportError as error:
            raise ConfigError(f"convert sql: needs pip install 'npu_gr[parquet]': {error}") from error
        self.kinds.clear()
        try:
            with duckdb.connect(config={"autoinstall_known_extensions": "false"}) as database:
                database.execute("SET TimeZone = 'UTC'")
                rows = database.execute(self._query)
                names = [column[0] for column in rows.description or ()]
                _check(names)
                while chunk := rows.fetchmany(ROWS):
                    for row in chunk:
                        yield self._record(dict(zip(names, row, strict=True)))
        except duckdb.Error as error:
            raise DataError(f"the query: {error}") from error
        if not self.kinds:
            raise DataError("the query: it gives no row")

    def _record(self, row: dict[str, Any]) -> QueryRecord:
        try:
            record = msgspec.convert(self._plain(row), QueryRecord)
        except (msgspec.MsgspecError, ValueError) as error:
            raise DataError(f"row {self.kinds.total() + 1} of the query: {error}") from error
        self.kinds[record.kind] += 1
        return record

    def _plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Make a row, or a struct within it, what a record has; NULL is absent."""
        return {name: self._value(name, value) for name, value in row.items() if value is not None}

    def _value(self, name: str, value: Any) -> Any:
        convert: Callable[[Any], Any]
        if name in _ITEMS:
            convert = _ids
        elif name == "actions" and self._actions is not None:
            convert = self._places
        elif name == "timestamps":
            convert = _seconds
        elif isinstance(value, Mapping):
            convert = self._plain
        else:
            convert = _scalar if name == "ts" else _whole
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None

    def _places(self, names: Any) -> list[int]:
        assert self._actions is not None
        places: list[int] = self._actions.indices([_scalar(one) for one in names]).tolist()
        return places


def _check(names: list[str]) -> None:
    for name in names:
        if name not in _FIELDS:
            raise DataError(f"the query: a record has no {name}{near(name, _FIELDS)}; it has {', '.join(_FIELDS)}")
    lacking = [name for name in ("ts", "kind", "user_id") if name not in names]
    if lacking:
        raise DataError(f"the query: gives no {', '.join(lacking)}")


def _ids(names: Any) -> list[int]:
    if not isinstance(names, list):
        raise ValueError(f"{quoted(names)} is no list of items; string_split makes one of a text")
    ids: list[int] = item_ids(names).tolist()
    return ids


def _seconds(moments: Any) -> list[int]:
    return [int(_scalar(one)) for one in moments]


def _whole(value: Any) -> Any:
    """A time is whole seconds but in `ts`, and a list is one of plain values."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(_scalar(value)) if isinstance(value, datetime) else _scalar(value)


def _scalar(value: Any) -> Any:
    """Make a value of DuckDB plain; a time without a zone is UTC."""
    match value:
        case datetime():
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case UUID():
            return str(value)
        case _:
            return value
