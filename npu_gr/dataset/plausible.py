"""Checks at the end of `prepare`: findings that usually mean a column or a format was misread."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from npu_gr.core.text_format import quoted
from npu_gr.dataset.columns import is_user_name
from npu_gr.dataset.rejects import RejectReason

MIN_EVENTS = 100  # fewer say nothing about shares
_DAY_S = 86_400
_FIRST_S = 315_532_800  # 1980-01-01
_SPAN_S = 3600
_MIN_USERS = 10
_MOST_OF_ONE = 0.2  # share of the rows of one user
_MOST_UNNAMED = 0.02  # and of a user whose name says that it is not known
_MOST_WITHOUT_USER = 0.05  # share of the rows
_UNNAMED = frozenset(("0", "-1", "-", "na", "n/a", "unknown", "guest", "anonymous", "undefined"))
_LISTED = re.compile(r"[^\s|;,]+([|;,][^\s|;,]+)+$")
_MARKS = re.compile(r"[|;,]")
_MOST_NAMES = 10_000  # names that are looked at
_MOST_OWN = 0.8  # share of items or users with one event


def findings(
    manifest: Mapping[str, Any],
    items: Sequence[str],
    lost_events: Sequence[tuple[str, int, int]],
    busiest: tuple[str, int, int],
    *,
    are_days: bool = False,
) -> Iterator[str]:
    """Yield warnings, each with the option that helps.

    Args:
        manifest: The manifest of the new dataset.
        items: Names of the items.
        lost_events: Event types of which most rows were rejected: name, rejected rows, all rows.
        busiest: The user with the most rows: name, rows of the user, rows of all users.
        are_days: Whether all of these look like a month and a day, such as 829 and 1111.
    """
    first, last = manifest["first_time"], manifest["last_time"]
    num_events, num_items = manifest["events"], manifest["items"]["with_events"]
    is_order = manifest.get("is_order", False)  # times are positions
    if not is_order:
        if last > time.time() + 2 * _DAY_S:
            yield (
                f"WARNING: the last event is of {_day(last)}, in the future; name the unit or the "
                "format of the times with --time-unit or --time-format"
            )
        if first < _FIRST_S:
            yield (
                f"WARNING: the first event is of {_day(first)}; if the times are no seconds since "
                "1970, give --time-format (14102100 is %y%m%d%H)"
            )
        if last - first < _SPAN_S and num_events >= MIN_EVENTS:
            yield (
                f"WARNING: all events are within {(last - first) // 60 + 1} minutes; check the "
                "unit of the times with --time-unit"
            )
    if is_order and are_days:
        yield (
            f"WARNING: the times {first} to {last} look like a month and a day (MMDD) without a "
            "year: events of one day have no order among each other, and a log that goes over the "
            "end of a year is sorted wrongly; export full dates, or check the column with --time"
        )
    for what, count in (("item", num_items), ("user", manifest["users"])):
        if num_events >= MIN_EVENTS and count > _MOST_OWN * num_events:
            yield (
                f"WARNING: {count:,} {what}s for {num_events:,} events; if the column has another "
                f"meaning, name the right one with --{what}"
            )
    user, num_own, num_all = busiest
    most = _MOST_UNNAMED if user.casefold() in _UNNAMED else _MOST_OF_ONE
    is_one_of_many = manifest["users"] >= _MIN_USERS or user.casefold() in _UNNAMED
    if num_own >= MIN_EVENTS // 5 and num_own > most * num_all and is_one_of_many:
        column = manifest["columns"]["user"]["name"]
        yield (
            f"WARNING: the user {quoted(user)} has {num_own:,} of {num_all:,} rows; if this stands "
            f"for visitors without a name, give --drop '{column}={user}', or --user "
            f"{column},SESSION to name them by another column"
        )
    for name, num_rejected, num_rows in lost_events:
        yield (
            f"WARNING: {num_rejected:,} of the {num_rows:,} rows of the event type {quoted(name)} "
            "cannot be used, so models learn little or nothing of it"
        )
    if RejectReason.NOT_UTF8 in manifest["rejected"]:
        yield (
            "WARNING: rows that are not UTF-8 were rejected, so items with accents may be missing "
            "as a whole; give --encoding windows-1252 if the file was written on Windows"
        )
    no_user = manifest["rejected"].get(RejectReason.NO_USER, {}).get("rows", 0)
    if rivals := [
        one["name"] for one in manifest["unused"] if no_user and is_user_name(one["name"])
    ]:
        column = manifest["columns"]["user"]["name"]
        yield (
            f"WARNING: {no_user:,} rows without {quoted(column)} cannot be used; --user "
            f"{column},{rivals[0]} names their users by {quoted(rivals[0])}"
        )
    elif no_user > _MOST_WITHOUT_USER * (no_user + num_all):
        column = manifest["columns"]["user"]["name"]
        yield (
            f"WARNING: {no_user:,} rows without {quoted(column)} cannot be used; if only the first "
            "line of an order names its customer, as in Shopify's export, copy the name to the "
            "lines below"
        )
    lists = [name for name in items[:_MOST_NAMES] if _LISTED.match(name)]
    parts = [part for name in lists for part in _MARKS.split(name)]
    if 2 * len(lists) > min(len(items), _MOST_NAMES) and len(set(parts)) < len(parts):
        yield (
            f"WARNING: items such as {quoted(lists[0])} look like lists of items, and each list is "
            "one item here; export a row for each item, or the list as JSON"
        )
    by_fold: dict[str, str] = {}
    for name in items:
        if (other := by_fold.setdefault(" ".join(name.split()).casefold(), name)) != name:
            yield (
                f"WARNING: items {quoted(other)} and {quoted(name)} differ in case or blanks alone "
                "and are two items"
            )
            break


def _day(at: int) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
