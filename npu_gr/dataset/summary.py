"""The summary that `npu-gr prepare` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from npu_gr.core.text_format import counted, cut, quoted
from npu_gr.dataset.files import DECLARED_KIND, REJECTED
from npu_gr.dataset.rejects import MAX_WRITTEN

MAX_ACTIONS = 20  # that the summary lists
_OF = {"event": "of the event", "request": "of the request", "cross": "of both"}


def summary(manifest: Mapping[str, Any], out: Path) -> str:
    """Say which columns were chosen and why, and what was rejected."""
    return "\n".join(_lines(manifest, out))


def _lines(manifest: Mapping[str, Any], out: Path) -> Iterator[str]:
    yield f"{manifest['log']['name']}: {manifest['log']['format']}"
    for role, column in manifest["columns"].items():
        yield f"  {role:14} {quoted(column['name'])} ({column['why']})"
    are_places = manifest.get("is_order", False)
    first, last = manifest["first_time"], manifest["last_time"]
    span = f"{first:,} to {last:,}" if are_places else f"{_day(first)} to {_day(last)}"
    yield f"  {'times':14} {manifest['times']}, {span}"
    actions = manifest["actions"]
    yield f"  {'actions':14} {', '.join(_actions(actions['names'], actions['events']))}"
    for feature in manifest["features"]:
        yield f"  {'feature':14} {quoted(feature['name'])} ({feature['kind']})"
    for name, why in manifest["skipped"].items():
        yield f"  {'no feature':14} {quoted(name)}: {why}"
    for feature in manifest["user_features"]:
        yield (
            f"  {'of the user':14} {quoted(feature['name'])} "
            f"({feature[DECLARED_KIND] or feature['kind']})"
        )
    for feature in manifest["log_features"]:
        yield (
            f"  {_OF[feature['of']]:14} {quoted(feature['name'])} "
            f"({feature[DECLARED_KIND] or feature['kind']})"
        )
    for name, why in manifest["skipped_users"].items():
        yield f"  {'no feature':14} {quoted(name)}: {why}"
    for column in manifest["unused"]:
        hint = f"; {column['hint']}" if column["hint"] else ""
        yield f"  {'not used':14} {quoted(column['name'])} ({column['values']}){hint}"
    for example in manifest["examples"]:
        has_time = "time" in manifest["columns"]
        text = _example(example, has_time=has_time, are_places=are_places)
        yield f"  {'for example':14} {text}"
    items = manifest["items"]
    counts = {"event": manifest["events"], "user": manifest["users"], "item": items["with_events"]}
    yield ", ".join(counted(count, what) for what, count in counts.items())
    if "added" in manifest:
        yield f"of these {counted(manifest['added'], 'new event')} of this log"
    if "title" in manifest["columns"]:
        yield f"titles of the log: {items['with_title']:,} of {items['all']:,} items"
    elif items["all"] > items["with_events"] or items["without_row"] or items["with_title"]:
        titles = counted(items["with_title"], "title")
        lacked = counted(items["without_row"], "item")
        without_events = f"{items['without_events']:,} without an event"
        yield f"items' file: {titles}; it lacks {lacked} of the log, and has {without_events}"
    if num := manifest["users_without_row"]:
        yield f"users' file: it lacks {counted(num, 'user')} of the log"
    if num := manifest["duplicates"]["rows"]:
        what = (
            "kept" if manifest["duplicates"]["kept"] else "left out (--keep-duplicates keeps them)"
        )
        yield f"{counted(num, 'row')} like another one in user, item, time and action: {what}"
    if num := manifest["trimmed"]:
        what = "blanks around a user, an item or an event; the blanks are removed"
        yield f"{counted(num, 'row')} with {what}"
    if num := manifest["filtered"]:
        yield f"{counted(num, 'row')} left out by --positive, --drop or --where"
        if shown := manifest.get("impressions"):
            yield f"  {shown:,} of them are impressions: only the ranker's training reads them"
    yield from _rejected("", manifest["rejected"])
    yield from _rejected(" of the items' file", manifest["rejected_items"])
    yield from _rejected(" of the users' file", manifest["rejected_users"])
    if manifest["rejected"] or manifest["rejected_items"] or manifest["rejected_users"]:
        yield f"  the first {MAX_WRITTEN:,} of them: {out / REJECTED}"
    yield from manifest["notes"]


def _example(example: Mapping[str, Any], *, has_time: bool, are_places: bool) -> str:
    """Write the first events of a user in the order that models read."""
    day = ""
    parts = []
    for item, action, time_us in example["events"]:
        at = f"{datetime.fromtimestamp(time_us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}"
        clock = f"at {time_us // 1_000_000:,}" if are_places else at.removeprefix(day)
        clock = clock if has_time else ""
        day = at[:11]
        parts.append(" ".join(filter(None, (action and cut(action, 24), cut(item, 24), clock))))
    return f"{cut(example['user'], 24)}: {', '.join(parts)}"


def _actions(names: list[str], events: list[int]) -> Iterator[str]:
    for name, count in list(zip(names, events, strict=True))[:MAX_ACTIONS]:
        yield f"{cut(name, 32)} ({count:,})"
    if len(names) > MAX_ACTIONS:
        yield f"and {len(names) - MAX_ACTIONS} more"


def _rejected(of: str, reasons: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    if reasons:
        yield f"{counted(sum(one['rows'] for one in reasons.values()), 'row')}{of} cannot be used:"
    for reason, one in reasons.items():
        yield f"  {one['rows']:>9,}  {reason} (first: {one['first']:,})"


def _day(time: int) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d}"
