"""What `prepare` found, in words for whoever ran it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from npu_gr.core.words import counted, cut, quoted
from npu_gr.dataset.files import REJECTED
from npu_gr.dataset.rejects import MAX_WRITTEN

MAX_ACTIONS = 20  # named one by one
_OF = {"event": "of the event", "request": "of the request", "cross": "of both"}


def summary(manifest: Mapping[str, Any], out: Path) -> str:
    """Say what was taken and why, and what was left out."""
    return "\n".join(_lines(manifest, out))


def _lines(manifest: Mapping[str, Any], out: Path) -> Iterator[str]:
    yield f"{manifest['log']['name']}: {manifest['log']['format']}"
    for role, column in manifest["columns"].items():
        yield f"  {role:14} {quoted(column['name'])} ({column['why']})"
    yield f"  {'times':14} {manifest['times']}, {_day(manifest['first_time'])} to {_day(manifest['last_time'])}"
    actions = manifest["actions"]
    yield f"  {'actions':14} {', '.join(_actions(actions['names'], actions['events']))}"
    for feature in manifest["features"]:
        yield f"  {'feature':14} {quoted(feature['name'])} ({feature['kind']})"
    for name, why in manifest["left_out"].items():
        yield f"  {'no feature':14} {quoted(name)}: {why}"
    for feature in manifest["user_features"]:
        yield f"  {'of the user':14} {quoted(feature['name'])} ({feature['told'] or feature['kind']})"
    for feature in manifest["log_features"]:
        yield f"  {_OF[feature['of']]:14} {quoted(feature['name'])} ({feature['told'] or feature['kind']})"
    for name, why in manifest["left_out_users"].items():
        yield f"  {'no feature':14} {quoted(name)}: {why}"
    items = manifest["items"]
    counts = {"event": manifest["events"], "user": manifest["users"], "item": items["with_events"]}
    yield ", ".join(counted(count, what) for what, count in counts.items())
    if items["all"] > items["with_events"] or items["without_row"] or items["with_title"]:
        titles = counted(items["with_title"], "title")
        lacked = counted(items["without_row"], "item")
        without_events = f"{items['without_events']:,} without an event"
        yield f"items' file: {titles}; it lacks {lacked} of the log, and has {without_events}"
    if num := manifest["users_without_row"]:
        yield f"users' file: it lacks {counted(num, 'user')} of the log"
    if num := manifest["duplicates"]["rows"]:
        what = "kept" if manifest["duplicates"]["kept"] else "left out (--keep-duplicates keeps them)"
        yield f"{counted(num, 'row')} like another one in user, item, time and action: {what}"
    yield from _rejected("", manifest["rejected"])
    yield from _rejected(" of the items' file", manifest["rejected_items"])
    yield from _rejected(" of the users' file", manifest["rejected_users"])
    if manifest["rejected"] or manifest["rejected_items"] or manifest["rejected_users"]:
        yield f"  the first {MAX_WRITTEN:,} of them: {out / REJECTED}"
    yield from manifest["notes"]


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
