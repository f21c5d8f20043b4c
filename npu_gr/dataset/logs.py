"""A log in DuckDB: the needed cells of each row, why it is rejected, and integer codes of names.

log    a row of the log: reason, user, item, time_us, event or value, and features f0, f1, ...
users, items, events, feature_0, ...    each distinct text and its code, by first occurrence
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from npu_gr.core.errors import DataError
from npu_gr.core.names import KEY_BYTES, MAX_NAME_BYTES, is_hashed, item_ids, repeated
from npu_gr.core.text_format import quoted
from npu_gr.dataset.actions import (
    Actions,
    OldActions,
    ValueSample,
    of_events,
    of_values,
    one_action,
)
from npu_gr.dataset.cells import (
    has_blanks_sql,
    has_point,
    is_missing_sql,
    name_sql,
    number_sql,
    pa,
)
from npu_gr.dataset.columns import (
    MAX_EVENT_TYPES,
    CellKind,
    Column,
    choose_position,
    choose_title,
    kind_of,
    unused_columns,
)
from npu_gr.dataset.files import NUM_PARTS
from npu_gr.dataset.item_columns import candidates, with_feature_options
from npu_gr.dataset.line_sources import Source
from npu_gr.dataset.lines import OnProgress
from npu_gr.dataset.log_columns import choose_columns, recognise_times
from npu_gr.dataset.log_features import LogFeature, log_features
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.rejects import (
    CODES,
    LEFT_OUT,
    MAX_EVENT_CHARS,
    MAX_ROW_CHARS,
    MAX_USER_CHARS,
    SHOWN,
    UNSURE,
    RejectReason,
    Rejects,
)
from npu_gr.dataset.row_filter import NONE, parse
from npu_gr.dataset.sources import NestedSource
from npu_gr.dataset.table import SourceTable
from npu_gr.dataset.time_parts import joined_sql
from npu_gr.dataset.times import US_PER_S
from npu_gr.history_store.interactions import LogFeatureOf

MAX_TITLE_CHARS = 256
BATCH_ROWS = 1 << 17
# a name that a spreadsheet turned into a rounded number: its last digits are lost
ROUNDED = r"^\d(\.\d+)?[eE]\+\d+$"
Rows = Mapping[str, npt.NDArray[Any]]
"""Columns of some rows: user, item, time_us, action or value, and f0, f1, ... of features."""


def joined_name_sql(
    source: Source, cell: Mapping[str, str], names: Sequence[str], *, has_points: bool = True
) -> str:
    """Return the SQL of a name: the first of some columns that is set.

    Args:
        source: The log.
        cell: SQL of the cells, by column.
        names: The columns.
        has_points: Whether a whole number may be written as 42.0.
    """
    sample = source.sample  # first: the kinds are known afterwards
    texts = [
        name_sql(cell[name], kind, with_point=has_points and has_point(sample[name]))
        for name, kind in zip(names, source.kinds(names), strict=True)
    ]
    return f"coalesce({', '.join(texts)})" if len(texts) > 1 else texts[0]


class Log:
    """Reads a log into DuckDB: its chosen columns, features and names."""

    def __init__(
        self,
        source: Source,
        options: PrepareOptions,
        kinds: Mapping[str, str] | None = None,
        *,
        describes_items: bool = False,
        decided: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, from the first rows.

        Args:
            source: The log.
            options: Settings that are otherwise guessed.
            kinds: Kinds of features by name, where a dataset has decided them.
            describes_items: Whether to look for features of items among its columns.
            decided: Names of these, where a dataset has decided them.

        Raises:
            DataError: as `choose_log_columns`, `recognise` and `candidates`.
        """
        sample = source.sample
        self._source = source
        self._options = options
        conditions = {
            option: [
                parse(text, f"{source.name}: --{option}", sample) for text in texts if text != NONE
            ]
            for option, texts in (
                ("positive", options.positive or source.positive),
                ("drop", options.drop),
                ("where", options.where),
            )
        }
        self._positive, self._kept_if = conditions["positive"], conditions["where"]
        self._dropped_if = conditions["drop"]
        every = (*self._positive, *self._kept_if, *self._dropped_if)
        conditioned = [one.name for one in every]
        self.columns = choose_columns(source, options, conditioned)
        self.time_kind = recognise_times(source, self.columns.time, options)
        wanted: dict[LogFeatureOf, tuple[str, ...]] = {
            "event": options.event_features,
            "request": options.request_features,
            "cross": options.cross_features,
        }
        self.features = log_features(sample, wanted, source, kinds or {})
        used = [*self.columns.names(), *(one.name for one in self.features), *conditioned]
        self.position: Column | None = None
        if self._positive:
            self.position = choose_position(sample, options.position, used, source.name)
        used += [self.position.name] if self.position is not None else []
        self.title = choose_title(sample, used)
        titles = [self.title.name] if self.title is not None else []
        self._names = list(dict.fromkeys([*used, *titles]))
        self.unused = unused_columns(sample, self._names)
        self.item_columns: tuple[LogFeature, ...] = ()
        if describes_items and not isinstance(source, NestedSource):
            chosen = options.features
            if decided is not None:
                chosen = tuple(name for name in decided if name in sample)
            item = self.columns.item.name
            self.item_columns = candidates(source, item, self.unused, chosen)
        roles = self.columns.user.name, self.columns.item.name
        self.unused = with_feature_options(
            sample, self.unused, *roles, describes_items=describes_items
        )
        self._names += [one.name for one in self.item_columns]
        self.num_left_out = 0  # rows, by conditions
        self.item_key = b""  # of the items' ids; empty = they have none
        self._known_users: Any = None
        self._con: Any = None
        self.num_rows = 0  # without the rejected ones
        self.num_trimmed = 0  # of these, with blanks around a user, an item or an event
        self.feature_values: list[Any] = []  # of each feature, by code; None for numbers

    def load(
        self,
        con: Any,
        rejects: Rejects,
        show: OnProgress,
        known_users: Any = None,
        known_items: Sequence[str] = (),
        item_key: bytes | None = None,
    ) -> None:
        """Read the log into DuckDB, and assign codes to names.

        Args:
            con: Connection of DuckDB.
            rejects: Receives the rows that cannot be used.
            show: Callback for the progress.
            known_users: Names of the users who have the first codes, an Arrow array; None = none.
            known_items: Names of items that count as earlier where two names have one id.
            item_key: Key of the items' ids, of an earlier dataset; None = there is none.

        Raises:
            DataError: the log cannot be read to its end, too many rows are rejected, or there are
                too many event types.
        """
        self._con = con
        table = SourceTable(con, "log", self._source, self._names, self._wrap)
        table.load(show)
        self._give_codes("items", "item")
        names = self.item_names()
        facts = (
            f"SELECT item, min(time_us // {US_PER_S}), max(time_us // {US_PER_S}), min(user), "
            "max(user) FROM log WHERE reason = 0 GROUP BY item ORDER BY item"
        )
        self.item_key = items_key(names, con, facts, item_key)
        known = set(known_items)
        every = [*known_items, *(name for name in names if name not in known)]
        if again := repeated(item_ids(every, self.item_key)):
            table.reject("item", [every[place] for place in again], RejectReason.SAME_ID)
            con.execute("DROP TABLE items")
            self._give_codes("items", "item")
            names = self.item_names()
        table.take_rejects(rejects)
        ((self.num_rows, self.num_trimmed, self.num_left_out),) = con.execute(
            "SELECT count(*) FILTER (WHERE reason = 0), "
            "count(*) FILTER (WHERE reason = 0 AND has_blanks), "
            f"count(*) FILTER (WHERE reason IN ({LEFT_OUT}, {SHOWN})) FROM log"
        ).fetchall()
        self._check_rejected(rejects)
        self._give_codes("users_of_log", "user")
        self._known_users = pa.array([], pa.string()) if known_users is None else known_users
        codes = range(len(self._known_users))
        con.register("known", pa.table({"name": self._known_users, "code": codes}))
        con.execute(
            "CREATE TABLE users AS SELECT u.name, coalesce(k.code, "
            f"{len(self._known_users)} - 1 + row_number() OVER (PARTITION BY k.code IS NULL ORDER "
            "BY u.code)) AS code FROM users_of_log u LEFT JOIN known k ON k.name = u.name"
        )
        ids = item_ids(names, self.item_key)
        con.register("ids", pa.table({"name": pa.array(names, pa.string()), "id": ids}))
        con.execute("CREATE TABLE item_ids AS SELECT * FROM ids")
        con.unregister("ids")
        if self.columns.event is not None:
            self._give_codes("events", "event")
            self._check_events()
        for place, one in enumerate(self.features):
            if one.kind == "number":
                self.feature_values.append(None)
            else:
                self._give_codes(f"feature_{place}", f"f{place}")
                self.feature_values.append(one.values(self._texts(f"feature_{place}")))

    def user_names(self) -> Any:
        """Return the names of users by code, as an Arrow array."""
        known = len(self._known_users)
        new = self._con.sql(f"SELECT name FROM users WHERE code >= {known} ORDER BY code")
        return pa.concat_arrays([self._known_users, *new.to_arrow_table()["name"].chunks])

    def item_names(self) -> list[str]:
        """Return the names of items by code."""
        return self._texts("items")

    def titles(self) -> dict[str, str]:
        """Return the titles of items by name, the last one of each; {} = the log has none."""
        if self.title is None:
            return {}
        return dict(
            self._con.execute(
                "SELECT item, arg_max(title, n) FROM log WHERE reason = 0 AND title IS NOT NULL "
                "GROUP BY item"
            ).fetchall()
        )

    def actions(self, old: OldActions) -> Actions:
        """Make the actions.

        Raises:
            DataError: the previous dataset had actions of another kind.
        """
        if self.columns.event is not None:
            return of_events(self._texts("events"), old)
        if self.columns.value is None:
            return one_action(old)
        values = ValueSample()
        for batch in self._con.sql("SELECT value FROM log WHERE reason = 0").to_arrow_reader(
            BATCH_ROWS
        ):
            values.add(batch["value"].to_numpy(zero_copy_only=False))
        return of_values(self.columns.value.name, values, self._options.num_buckets, old)

    def sorted_rows(self) -> Iterator[Rows]:
        """Read all usable rows by user and time; rows of equal times keep the order of the log."""
        time_us = self._time_sql()
        columns = ["CAST(u.code AS INTEGER) AS user", "i.id AS item", f"{time_us} AS time_us"]
        joins = [
            "JOIN (FROM users UNION FROM known) u ON u.name = l.user",
            "JOIN item_ids i ON i.name = l.item",
        ]
        if self.columns.event is not None:
            columns.append("CAST(e.code AS INTEGER) AS action")
            joins.append("JOIN events e ON e.name = l.event")
        elif self.columns.value is not None:
            columns.append("l.value")
        if self.position is not None:
            columns.append("CAST(coalesce(l.position, -1) AS SMALLINT) AS position")
        for place, one in enumerate(self.features):
            if one.kind == "number":
                columns.append(f"coalesce(l.f{place}, 'nan') AS f{place}")
            else:
                columns.append(f"coalesce(CAST(f{place}.code AS INTEGER), -1) AS f{place}")
                joins.append(f"LEFT JOIN feature_{place} f{place} ON f{place}.name = l.f{place}")
        query = (
            f"SELECT {', '.join(columns)} FROM log l {' '.join(joins)} WHERE l.reason = 0 "
            f"ORDER BY (u.code % {NUM_PARTS}) * {2**32} + u.code, {time_us}, l.n"
        )
        for batch in self._con.sql(query).to_arrow_reader(BATCH_ROWS):
            yield {name: batch[name].to_numpy(zero_copy_only=False) for name in batch.schema.names}

    @property
    def has_impressions(self) -> bool:
        """Whether rows that are no behaviour are impressions."""
        return bool(self._positive)

    def impressions(self) -> Any:
        """Return the rows without a behaviour of users who have some, by user and time.

        Arrow table of user, item, time and position; -1 = it is not known. Rows that repeat
        another one are left out.
        """
        position = "coalesce(l.position, -1)" if self.position is not None else "-1"
        time_us = self._time_sql()
        names = self._con.execute(
            f"SELECT DISTINCT l.item FROM log l WHERE reason = {SHOWN}"
        ).fetchnumpy()["item"]
        ids = item_ids(names.tolist(), self.item_key)
        self._con.register("shown", pa.table({"name": pa.array(names, pa.string()), "id": ids}))
        found = self._con.sql(
            f"SELECT DISTINCT CAST(u.code AS INTEGER) AS user, i.id AS item, {time_us} // "
            f"{US_PER_S} AS time, CAST({position} AS SMALLINT) AS position FROM log l JOIN "
            "(FROM users UNION FROM known) u ON u.name = l.user JOIN shown i ON i.name = l.item "
            f"WHERE l.reason = {SHOWN} ORDER BY ALL"
        ).to_arrow_table()
        self._con.unregister("shown")
        return found

    def _time_sql(self) -> str:
        if self.columns.time is not None:
            return "l.time_us"
        return f"(l.n + {self._source.first_number}) * {US_PER_S}"

    def _wrap(self, cells: str) -> str:
        """Return the SQL of the needed cells and the reject reason of each row.

        The first of several reasons counts: of the user, then the item, the time, the action.
        """
        columns = self.columns
        kinds = dict(zip(self._names, self._source.kinds(self._names), strict=True))
        cell = {name: f"c{place}" for place, name in enumerate(self._names)}
        found: dict[str, str] = {}  # column -> SQL of the cells
        reasons: list[str] = []
        has_blanks: list[str] = []
        for role, column in (
            ("user", columns.user),
            ("item", columns.item),
            ("event", columns.event),
        ):
            if column is None:
                continue
            names = column.parts or (column.name,)
            found[role] = joined_name_sql(self._source, cell, names, has_points=role != "event")
            has_blanks += [has_blanks_sql(cell[name], kinds[name]) for name in names]
        reasons += _name_reasons("user", RejectReason.LONG_USER, f"length(user) > {MAX_USER_CHARS}")
        reasons += _name_reasons("item", RejectReason.LONG_ITEM, f"strlen(item) > {MAX_NAME_BYTES}")
        # in a log without times, `sorted_rows` makes the time of the row number
        time_us, time_reason = "0", "0"
        if columns.time is not None and self.time_kind is not None:
            if columns.time.parts:
                parts_of_time = [(cell[name], kinds[name]) for name in columns.time.parts]
                found["time_text"] = joined_sql(parts_of_time)
                time = self.time_kind.sql("time_text", "VARCHAR")
            else:
                time = self.time_kind.sql(cell[columns.time.name], kinds[columns.time.name])
            found |= time.parts
            time_us, time_reason = time.us, time.reason
            reasons.append("WHEN time_reason <> 0 THEN time_reason")
        of_shown = len(reasons)  # what a row without a behaviour has to have, too
        if columns.event is not None:
            long = f"length(event) > {MAX_EVENT_CHARS}"
            reasons += _name_reasons("event", RejectReason.LONG_EVENT, long)
        elif columns.value is not None:
            name = columns.value.name
            has_comma = kind_of(self._source.sample[name]) is CellKind.COMMA
            found["value"] = number_sql(cell[name], kinds[name], has_comma=has_comma)
            missing = is_missing_sql(cell[name], kinds[name])
            reasons.append(f"WHEN {missing} THEN {CODES[RejectReason.NO_VALUE]}")
            reasons.append(f"WHEN value IS NULL THEN {CODES[RejectReason.NO_NUMBER]}")
        for place, one in enumerate(self.features):
            found[f"f{place}"] = one.sql(cell[one.name], kinds[one.name])
        for place, one in enumerate(self.item_columns):
            found[f"g{place}"] = one.sql(cell[one.name], kinds[one.name])
        found["has_blanks"] = " OR ".join(has_blanks)
        if self.title is not None:
            text = name_sql(cell[self.title.name], kinds[self.title.name])
            found["title"] = f"left({text}, {MAX_TITLE_CHARS})"
        if self.position is not None:
            number = number_sql(cell[self.position.name], kinds[self.position.name])
            found["position"] = f"CAST({number} AS INTEGER)"
        if self._positive:
            met = " AND ".join(one.sql(cell[one.name], kinds[one.name]) for one in self._positive)
            shown = " ".join(reasons[:of_shown])
            shown = f"CASE WHEN CASE {shown} ELSE 0 END = 0 THEN {SHOWN} ELSE {LEFT_OUT} END"
            reasons.insert(0, f"WHEN NOT ({met}) THEN {shown}")
        if self._kept_if or self._dropped_if:
            kept = [one.sql(cell[one.name], kinds[one.name]) for one in self._kept_if]
            dropped = [one.sql(cell[one.name], kinds[one.name]) for one in self._dropped_if]
            is_kept = " AND ".join([*kept, *(f"NOT {one}" for one in dropped)])
            reasons.insert(0, f"WHEN NOT ({is_kept}) THEN {LEFT_OUT}")
        parts = ", ".join(f"{sql} AS {name}" for name, sql in found.items())
        sql = f"SELECT *, {parts} FROM ({cells})"
        sql = f"SELECT *, {time_us} AS time_us FROM ({sql})"
        sql = f"SELECT *, {time_reason} AS time_reason FROM ({sql})"
        reason = f"CASE WHEN state <> 0 THEN state {' '.join(reasons)} ELSE 0 END"
        sql = f"SELECT *, CAST({reason} AS TINYINT) AS reason FROM ({sql})"
        needed = [
            "user",
            "item",
            "time_us",
            *(
                name
                for name in found
                if name in ("event", "value", "title", "has_blanks", "position") or name[0] in "fg"
            ),
        ]
        # the event of a rejected row says which types are lost
        is_short = f" OR length(event) <= {MAX_EVENT_CHARS}"
        good = ", ".join(
            f"CASE WHEN reason IN (0, {SHOWN}){is_short * (name == 'event')} THEN {name} END AS "
            f"{name}"
            for name in needed
        )
        line = self._source.line_sql(self._names)
        line = (
            f"CASE WHEN reason = {UNSURE} THEN {line} WHEN reason > 0 THEN left({line}, "
            f"{MAX_ROW_CHARS}) END"
        )
        return f"SELECT reason, {good}, {line} AS line FROM ({sql})"

    def _give_codes(self, table: str, column: str) -> None:
        self._con.execute(
            f"CREATE TABLE {table} AS SELECT name, row_number() OVER (ORDER BY n) - 1 AS code "
            f"FROM (SELECT {column} AS name, min(n) AS n FROM log "
            f"WHERE reason = 0 AND {column} IS NOT NULL GROUP BY ALL)"
        )

    def _texts(self, table: str, most: int = -1) -> list[str]:
        limit = f"LIMIT {most}" if most >= 0 else ""
        found = self._con.sql(f"SELECT name FROM {table} ORDER BY code {limit}").to_arrow_table()
        texts: list[str] = found["name"].to_pylist()
        return texts

    def _check_rejected(self, rejects: Rejects) -> None:
        if not self.num_rows:
            raise DataError(
                f"{self._source.name}: no row can be used: {rejects.words() or 'there is none'}"
            )
        ratio = rejects.total / (rejects.total + self.num_rows)
        most = self._options.max_rejected_ratio
        if ratio > most:
            raise DataError(
                f"{self._source.name}: {ratio:.0%} of the rows cannot be used, the limit is "
                f"{most:.0%}: {rejects.words()}; name the right columns, or raise the limit: "
                f"--max-rejected {min(1.0, ratio + 0.01):.2f}"
            )

    def _check_events(self) -> None:
        names = self._texts("events", MAX_EVENT_TYPES + 1)
        if len(names) > MAX_EVENT_TYPES and self.columns.event is not None:
            some = ", ".join(quoted(name, 24) for name in names[:5])
            raise DataError(
                f"{self._source.name}: {quoted(self.columns.event.name)} has over "
                f"{MAX_EVENT_TYPES} distinct values ({some} ...), so it is no event type; name "
                "another column with --event, or give --event none"
            )


def _name_reasons(role: str, long: RejectReason, is_long: str) -> list[str]:
    missing = {
        "user": RejectReason.NO_USER,
        "item": RejectReason.NO_ITEM,
        "event": RejectReason.NO_EVENT,
    }[role]
    found = [f"WHEN {role} IS NULL THEN {CODES[missing]}"]
    if role != "event":
        found.append(
            f"WHEN contains({role}, '+') AND regexp_matches({role}, '{ROUNDED}') THEN "
            f"{CODES[RejectReason.ROUNDED]}"
        )
    return [*found, f"WHEN {is_long} THEN {CODES[long]}"]


def items_key(names: Sequence[str], con: Any, facts: str, known: bytes | None) -> bytes:
    """Return the key of the items' ids: an earlier one, else one derived from the log.

    One log always has the same key, so a dataset can be made again. Who knows only some of the
    events cannot compute it. Its facts do not depend on repeated rows or on the order of rows, so
    the parts of a log can tell them (`merged.py`).

    Args:
        names: Names of the items; if all are numbers, no key is needed, and it is empty.
        con: Connection of DuckDB.
        facts: Query by item: name, first and last second, first and last user by name.
        known: Key of an earlier dataset; None = there is none.
    """
    if known is not None:
        return known
    if not is_hashed(item_ids(names)).any():
        return b""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"npu_gr.key")
    rows = con.execute(facts)
    while found := rows.fetchmany(BATCH_ROWS):
        digest.update(ascii(found).encode())
    return digest.digest()
