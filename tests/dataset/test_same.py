"""The same log makes the same dataset, whatever its format is, and however its rows are packed and parted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.dataset import PreparedDataset, PrepareOptions, prepare
from npu_gr.dataset.names import MISSING
from npu_gr.dataset.spill import ROW, Spill
from tests.dataset.logs import WRITERS, Event, table

FRACTION = re.compile(r".*\.0|[\d_]+[eE][+-]?[\d_]+")  # a column of nothing else is taken for measurements
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=12
).filter(lambda name: name not in MISSING and '"' not in name and "\t" not in name and not FRACTION.fullmatch(name))
ROWS = st.lists(
    st.builds(
        Event, user=NAMES, item=NAMES, time=st.integers(1_600_000_000, 1_600_000_050), event=st.sampled_from("abc")
    ),
    min_size=1,
    max_size=30,
)


def content(prepared: PreparedDataset) -> list[Event]:
    log = prepared.dataset.interactions()
    users = [log.user_names[user] for user in log.users]
    items = map(str, prepared.dataset.names.names(log.items))
    actions = [log.action_names[int(value)] for value in log.values]
    return [*map(Event, users, items, log.timestamps.tolist(), actions)]


def reference(events: list[Event]) -> list[Event]:
    """Each distinct row once: by time, of equal times by the user who came first, then as the log has them."""
    users = list(dict.fromkeys(event.user for event in events))
    return sorted(dict.fromkeys(events), key=lambda event: (event.time, users.index(event.user)))


@settings(max_examples=10, deadline=None)
@given(events=ROWS)
def test_a_format_changes_nothing(events: list[Event], tmp_path_factory: pytest.TempPathFactory) -> None:
    digests = set()
    folder = tmp_path_factory.mktemp("x")
    sources = [write(folder / name, events) for name, write in WRITERS.items()]
    for number, source in enumerate([*sources, table(events)]):
        prepared = prepare(source, folder / f"data{number}", PrepareOptions(event="event_type"))
        assert content(prepared) == reference(events)
        assert prepared.manifest["duplicates"]["rows"] == len(events) - len(set(events))
        digests.add(prepared.manifest["digest"])
    assert len(digests) == 1


@settings(max_examples=40, deadline=None)
@given(
    users=st.lists(st.integers(0, 300), min_size=1, max_size=300),
    most=st.integers(1, 20),
    chunk=st.integers(1, 100),
)
def test_parts_are_sorted_and_whole(
    users: list[int], most: int, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However many rows a part may have: users together, times rising, and equal times in file order."""
    table = np.zeros(len(users), ROW)
    table["user"] = users
    table["item"] = np.arange(len(users))
    table["time_us"] = np.arange(len(users)) % 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("npu_gr.dataset.spill.MAX_ROWS", most)
        patch.setattr("npu_gr.dataset.spill.NUM_PARTS", 4)
        spill = Spill(tmp_path_factory.mktemp("x") / "spill")
        for at in range(0, len(table), chunk):
            spill.add(table[at : at + chunk])
        found = [tuple(row) for row in _all(spill)]
    order = list(dict.fromkeys(row[0] for row in found))  # of the users, whichever it is
    assert found == sorted(table.tolist(), key=lambda row: (order.index(row[0]), row[3], row[2]))
    assert not spill._folder.exists()


def _all(spill: Spill) -> Iterator[Any]:
    for part in spill.parts():
        yield from part.tolist()


def test_pandas_and_polars_say_the_same(tmp_path: Path) -> None:
    """Frames of the two libraries, where they are installed."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    polars = pytest.importorskip("polars", reason="polars is not installed")
    events = [Event("ann", "SKU-1", 1_700_000_000, "view"), Event("bob", "42", 1_700_000_060, "buy")]
    rows = [dict(zip(("user_id", "item_id", "timestamp", "event_type"), event, strict=True)) for event in events]
    digests = {
        prepare(frame, tmp_path / name).manifest["digest"]
        for name, frame in {
            "arrow": table(events),
            "pandas": pandas.DataFrame(rows),
            "categories": pandas.DataFrame(rows).astype({"user_id": "category", "event_type": "category"}),
            "times": pandas.DataFrame(rows).assign(timestamp=lambda it: pandas.to_datetime(it.timestamp, unit="s")),
            "polars": polars.DataFrame(rows),
        }.items()
    }
    assert len(digests) == 1
