"""One small company's log, and how each format writes it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from npu_gr.dataset import Dataset


class Event(NamedTuple):
    """A row of a log, as the company names things."""

    user: str
    item: str
    time: int  # unix seconds
    event: str


EVENTS = [
    Event("7b1c-ann", "SKU-000242-C", 1_700_000_000, "view"),
    Event("9f00-bob", "SKU-000007-A", 1_700_000_060, "view"),
    Event("7b1c-ann", "SKU-000007-A", 1_700_000_120, "cart"),
    Event("7b1c-ann", "SKU-000007-A", 1_700_000_180, "purchase"),
    Event("9f00-bob", "SKU-000242-C", 1_700_000_000, "view"),
]
HEADER = ("user_id", "item_id", "timestamp", "event_type")


def write_csv(path: Path, events: Sequence[Event], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([HEADER, *events])
    return path


def write_jsonl(path: Path, events: Sequence[Event]) -> Path:
    path.write_text("".join(json.dumps(row(event)) + "\n" for event in events), encoding="utf-8")
    return path


def write_json_list(path: Path, events: Sequence[Event]) -> Path:
    path.write_text(json.dumps([row(event) for event in events]), encoding="utf-8")
    return path


def write_parquet(path: Path, events: Sequence[Event]) -> Path:
    pq.write_table(table(events), path)
    return path


def write_atomic(path: Path, events: Sequence[Event]) -> Path:
    header = "user_id:token\titem_id:token\ttimestamp:float\tevent_type:token\n"
    path.write_text(
        header + "".join("\t".join(map(str, event)) + "\n" for event in events), encoding="utf-8"
    )
    return path


def table(events: Sequence[Event]) -> Any:
    users, items, times, names = zip(*events, strict=True)
    return pa.table(
        {
            "user_id": users,
            "item_id": items,
            "timestamp": pa.array(times, pa.int64()),
            "event_type": names,
        }
    )


def row(event: Event) -> dict[str, str | int]:
    return dict(zip(HEADER, event, strict=True))


WRITERS: dict[str, Callable[[Path, Sequence[Event]], Path]] = {
    "log.csv": write_csv,
    "log.tsv": lambda path, events: write_csv(path, events, "\t"),
    "log.jsonl": write_jsonl,
    "log.json": write_json_list,
    "log.parquet": write_parquet,
    "log.inter": write_atomic,
}


def assert_same_events(one: Dataset, other: Dataset) -> None:
    """Training reads the same events, names and features of both datasets."""
    x, y = one.interactions(), other.interactions()
    for name in ("users", "items", "values", "timestamps"):
        assert np.array_equal(getattr(x, name), getattr(y, name)), name
    assert (x.user_names, x.action_names) == (y.user_names, y.action_names)
    assert [column.name for column in x.columns] == [column.name for column in y.columns]
    for p, q in zip(x.columns, y.columns, strict=True):
        assert np.array_equal(p.values, q.values, equal_nan=p.is_number), p.name
