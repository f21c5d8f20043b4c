"""The same log makes the same dataset in every format, compression and split into batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.feature_schema.values import BLANKS, MISSING
from npu_gr.core.names import item_ids
from npu_gr.dataset import PreparedDataset, PrepareOptions, prepare
from npu_gr.dataset.write import _by_second, _grouped, _is_again
from tests.dataset.logs import WRITERS, Event, table

# a column of nothing else is taken for measurements
FRACTION = re.compile(r".*\.0|[\d_]+[eE][+-]?[\d_]+")
NAMES = (
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zl", "Zp"]),
        min_size=1,
        max_size=12,
    )
    .map(lambda name: name.strip(BLANKS))
    .filter(
        lambda name: (
            name not in MISSING
            and '"' not in name
            and "\t" not in name
            and not FRACTION.fullmatch(name)
        )
    )
)
ROWS = st.lists(
    st.builds(
        Event,
        user=NAMES,
        item=NAMES,
        time=st.integers(1_600_000_000, 1_600_000_050),
        event=st.sampled_from("abc"),
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
    """Each distinct row once: by time, then by the first occurrence of the user, then by row."""
    users = list(dict.fromkeys(event.user for event in events))
    return sorted(dict.fromkeys(events), key=lambda event: (event.time, users.index(event.user)))


@settings(max_examples=10, deadline=None)
@given(events=ROWS)
def test_a_format_changes_nothing(
    events: list[Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    digests = set()
    folder = tmp_path_factory.mktemp("x")
    sources = [write(folder / name, events) for name, write in WRITERS.items()]
    for number, source in enumerate([*sources, table(events)]):
        prepared = prepare(source, folder / f"data{number}", PrepareOptions(event="event_type"))
        assert content(prepared) == reference(events)
        assert prepared.manifest["duplicates"]["rows"] == len(events) - len(set(events))
        digests.add(prepared.manifest["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_long_number_is_the_item_of_its_text(name: str, tmp_path: Path) -> None:
    numbers = [42, 2**53 + 1, 1234567890123456789, 7301234567890123457]
    events: list[Any] = [
        ("ann", number, 1_700_000_000 + place, "view") for place, number in enumerate(numbers)
    ]
    source = WRITERS[name](tmp_path / name, [Event(*event) for event in events])
    dataset = prepare(source, tmp_path / "data", PrepareOptions(event="event_type")).dataset
    items = dataset.interactions().items
    key = dataset.item_key
    assert items.tolist() == item_ids(numbers, key).tolist()
    assert items.tolist() == item_ids(list(map(str, numbers)), key).tolist()
    assert list(map(str, dataset.names.names(items))) == list(map(str, numbers))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=60),
    chunk=st.integers(1, 20),
)
def test_what_repeats_is_found_across_batches(rows: list[tuple[int, int, int]], chunk: int) -> None:
    """For any batches of sorted rows, the first of equal rows stays, and groups are complete."""
    rows = sorted(rows, key=lambda row: row[:2])
    parts = [rows[at : at + chunk] for at in range(0, len(rows), chunk)]
    columns = ("user", "time_us", "item")
    batches = [dict(zip(columns, np.array(part).T, strict=True)) for part in parts]
    found = []
    for part in _by_second(batches):
        is_again = _is_again(part)
        found += [
            tuple(row) for row in np.stack([part[name] for name in columns]).T[~is_again].tolist()
        ]
    assert found == list(dict.fromkeys(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("npu_gr.dataset.write.GROUP_ROWS", 7)
        sizes = [len(group["user"]) for group in _grouped(iter(batches))]
    assert sum(sizes) == len(rows)
    assert set(sizes[:-1]) <= {7}


def test_rows_keep_the_order_of_their_file_on_many_threads(tmp_path: Path) -> None:
    """Larger than what one thread of DuckDB reads at once."""
    num_rows = 400_000
    rows = "".join(f"u{at % 3},item-{at:07d},1700000000,view\n" for at in range(num_rows))
    (tmp_path / "log.csv").write_text("user_id,item_id,ts,event\n" + rows)
    dataset = prepare(tmp_path / "log.csv", tmp_path / "data").dataset
    log = dataset.interactions()
    assert log.user_names == ["u0", "u1", "u2"]
    names = dataset.names.names(log.items)
    assert names == [f"item-{at:07d}" for user in range(3) for at in range(user, num_rows, 3)]


def test_pandas_and_polars_say_the_same(tmp_path: Path) -> None:
    """Frames of the two libraries, where they are installed."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    polars = pytest.importorskip("polars", reason="polars is not installed")
    events = [
        Event("ann", "SKU-1", 1_700_000_000, "view"),
        Event("bob", "42", 1_700_000_060, "buy"),
    ]
    rows = [
        dict(zip(("user_id", "item_id", "timestamp", "event_type"), event, strict=True))
        for event in events
    ]
    digests = {
        prepare(frame, tmp_path / name).manifest["digest"]
        for name, frame in {
            "arrow": table(events),
            "pandas": pandas.DataFrame(rows),
            "categories": pandas.DataFrame(rows).astype(
                {"user_id": "category", "event_type": "category"}
            ),
            "times": pandas.DataFrame(rows).assign(
                timestamp=lambda it: pandas.to_datetime(it.timestamp, unit="s")
            ),
            "polars": polars.DataFrame(rows),
        }.items()
    }
    assert len(digests) == 1
