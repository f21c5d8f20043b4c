"""Make query logs from ratings, or with a DuckDB query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec
import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.history import Events
from npu_gr.core.kinds import EVENTS, RANK
from npu_gr.core.names import ActionNames, item_ids
from npu_gr.core.text_format import near, quoted
from npu_gr.history_store.interactions import Interactions
from npu_gr.replay.log import LoggedHistory, QueryRecord

LIKE = 4.0  # minimum rating of a like

Labels = dict[str, list[int | None]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelVocabulary:
    """The items and actions of the served model."""

    item_ids: I64  # [n] external ids
    action_values: tuple[float, ...]  # value in the data, by action index

    def events(self, part: Interactions) -> Events:
        """Convert the interactions of one user to events.

        Raises:
            DataError: a value has no action in the model.
        """
        ids = {value: index for index, value in enumerate(self.action_values)}
        try:
            return Events.make(
                part.items, [ids[value] for value in part.values.tolist()], part.timestamps
            )
        except KeyError as error:
            raise DataError(
                f"value {error} is not an action of the model: {self.action_values}"
            ) from error


def _shown(
    next_: Interactions, others: I64, num_candidates: int, random: np.random.Generator
) -> tuple[list[int], Labels]:
    """Draw candidates in a random order: the user's next items, and sampled other items.

    Returns:
        The candidates, and labels: next (a next item; also as click, the name of that task in
        rankers of before 0.2) and like (rated `LIKE` or more; null for sampled items).
    """
    drawn = random.choice(others, num_candidates - len(next_), replace=False)
    shuffled = random.permutation(num_candidates)
    shown = np.concatenate([next_.items, drawn])[shuffled].tolist()
    click = np.concatenate([np.ones(len(next_), int), np.zeros(len(drawn), int)])[shuffled].tolist()
    rated = np.concatenate([next_.values, np.full(len(drawn), np.nan)])[shuffled].tolist()
    likes = [None if v != v else int(v >= LIKE) for v in rated]
    return shown, {"next": click, "click": click, "like": likes}


def from_ratings(
    heldout: Interactions,
    vocabulary: ModelVocabulary,
    *,
    slice_events: int = 20,
    num_candidates: int = 100,
    seed: int = 0,
) -> list[QueryRecord]:
    """Make ranks, each followed by the events of its items, in time order.

    A user's held-out events are cut into slices. Each slice becomes a rank whose candidates include
    its items, and then the events themselves; earlier events must be in the history store. Arrival
    times of ratings are unrealistic (half of MovieLens' timestamps repeat), so replay at a rate.

    Args:
        heldout: Events that become requests.
        vocabulary: Items and actions of the served model.
        slice_events: Events per request.
        num_candidates: Candidates per rank, more than `slice_events`.
        seed: Seed of the sampled items and their order.
    """
    random = np.random.default_rng(seed)
    records = []
    order = np.argsort(heldout.users, kind="stable")
    for places in (
        np.split(order, np.flatnonzero(np.diff(heldout.users[order])) + 1) if len(order) else []
    ):
        part = heldout[places]
        user = part.user_names[part.users[0]]
        others = np.setdiff1d(vocabulary.item_ids, part.items)
        for start in range(0, len(part), slice_events):
            next_ = part[start : start + slice_events]
            shown, labels = _shown(next_, others, num_candidates, random)
            at = int(next_.timestamps[0])
            records.append(
                QueryRecord(
                    ts=float(at),
                    kind=RANK.name,
                    user_id=user,
                    candidates=shown,
                    timestamp=at,
                    labels=labels,
                )
            )
            events = LoggedHistory.of(vocabulary.events(next_))
            records.append(QueryRecord(ts=float(at), kind=EVENTS.name, user_id=user, events=events))
    return sorted(records, key=attrgetter("ts"))


# ---- a query for DuckDB

ROWS = 1024  # per fetch
_ITEMS = ("candidates", "items", "allow_items", "deny_items")
_FIELDS = tuple(QueryRecord.__struct_fields__)


class SqlSource:
    """The records of a query, in the order of its rows. Iterating counts them in `kinds`."""

    def __init__(
        self, query: str, actions: ActionNames | None = None, item_key: bytes = b""
    ) -> None:
        """Prepare the query; iterating runs it.

        Args:
            query: Query for DuckDB; paths are relative to the working directory.
            actions: Action names of the model, if histories name actions; None if they are indices.
            item_key: Key of the ids of the model's items; empty = they have none.
        """
        self._query = query
        self._item_key = item_key
        self._actions = actions
        self.kinds: Counter[str] = Counter()

    def __iter__(self) -> Iterator[QueryRecord]:
        """Run the query.

        Raises:
            DataError: the query fails, returns no row, or a row is not a record.
            ConfigError: DuckDB is not installed.
        """
        try:
            import duckdb
        except ImportError as error:
            raise ConfigError(
                f"convert sql: needs pip install 'npu_gr[parquet]': {error}"
            ) from error
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
            raise DataError(f"the query fails: {error}") from error
        if not self.kinds:
            raise DataError("the query returns no row")

    def _record(self, row: dict[str, Any]) -> QueryRecord:
        try:
            record = msgspec.convert(self._plain(row), QueryRecord)
        except (msgspec.MsgspecError, ValueError) as error:
            raise DataError(f"row {self.kinds.total() + 1} of the query: {error}") from error
        self.kinds[record.kind] += 1
        return record

    def _plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row, or a struct in it, to fields of a record; NULL means absent."""
        return {name: self._value(name, value) for name, value in row.items() if value is not None}

    def _value(self, name: str, value: Any) -> Any:
        convert: Callable[[Any], Any]
        if name in _ITEMS:
            convert = self._ids
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

    def _ids(self, names: Any) -> list[int]:
        if not isinstance(names, list):
            raise ValueError(
                f"{quoted(names)} is not a list of items; split a text with string_split"
            )
        ids: list[int] = item_ids(names, self._item_key).tolist()
        return ids

    def _places(self, names: Any) -> list[int]:
        assert self._actions is not None
        places: list[int] = self._actions.indices([_scalar(one) for one in names]).tolist()
        return places


def _check(names: list[str]) -> None:
    for name in names:
        if name not in _FIELDS:
            raise DataError(
                f"the query: unknown column {name}{near(name, _FIELDS)}; a record has "
                f"{', '.join(_FIELDS)}"
            )
    lacking = [name for name in ("ts", "kind", "user_id") if name not in names]
    if lacking:
        raise DataError(f"the query lacks the columns {', '.join(lacking)}")


def _seconds(moments: Any) -> list[int]:
    return [int(_scalar(one)) for one in moments]


def _whole(value: Any) -> Any:
    """Convert a value, with times (other than `ts`) as whole seconds."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(_scalar(value)) if isinstance(value, datetime) else _scalar(value)


def _scalar(value: Any) -> Any:
    """Convert a DuckDB value to a JSON value; a time without a zone is UTC."""
    match value:
        case datetime():
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case UUID():
            return str(value)
        case _:
            return value
