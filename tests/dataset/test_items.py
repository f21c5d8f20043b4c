"""A file of items brings titles, and its other columns as categories.

What says nothing is left out and named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest

from npu_gr.core import names as core_names
from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.names import KEY_BYTES, item_id, item_ids
from npu_gr.dataset import PreparedDataset, PrepareOptions, add, prepare
from npu_gr.dataset.rejects import RejectReason
from npu_gr.dataset.summary import summary
from tests.dataset.logs import EVENTS, Event, table

T = TypeVar("T")
A, B = "SKU-000007-A", "SKU-000242-C"


def with_items(
    tmp_path: Path, items: Any, options: PrepareOptions | None = None
) -> PreparedDataset:
    return prepare(table(EVENTS), tmp_path / "data", options, items=items)


def features(prepared: PreparedDataset) -> dict[str, dict[str, list[str]]]:
    return {
        one.name: by_name(
            prepared,
            {item: [one.values[at] for at in places] for item, places in one.of_item.items()},
        )
        for one in prepared.dataset.item_features()
    }


def by_name(prepared: PreparedDataset, of_item: dict[int, T]) -> dict[str, T]:
    names = prepared.dataset.names.names(np.fromiter(of_item, np.int64, len(of_item)))
    return dict(zip(map(str, names), of_item.values(), strict=True))


def ids(prepared: PreparedDataset, *names: str) -> I64:
    return item_ids(names, prepared.dataset.item_key)


def test_titles_and_counts(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(
        f'item_id,product_name\n{A},"Lamp, green"\nSKU-9,Never bought\n,none\n'
    )
    prepared = with_items(tmp_path, tmp_path / "items.csv")
    names = prepared.dataset.names
    titles = names.titles(ids(prepared, A, B, "SKU-9"))
    assert titles == ["Lamp, green", None, "Never bought"]
    assert prepared.manifest["items"] == {
        "all": 3,
        "with_events": 2,
        "with_title": 2,
        "without_row": 1,
        "without_events": 1,
    }
    assert prepared.manifest["rejected_items"] == {"no item": {"rows": 1, "first": 4}}
    assert ("it lacks 1 item of the log, and has 1 without an event") in summary(
        prepared.manifest, tmp_path / "data"
    )


def test_columns_become_features_by_what_they_hold(tmp_path: Path) -> None:
    rows = [
        {
            "item_id": f"i{at}",
            "name": f"Thing {at}",
            "brand": f"b{at % 3}",
            "genres": ["x", f"y{at % 2}"] if at else None,
            "tags": "red|big" if at % 2 else "red",
            "price": at * 1.5 if at else None,
            "year": 1990 + at % 5,
            "seller_id": at % 7,
            "sku2": f"own{at}",
            "empty": None,
            "same": "all",
            "nested": {"colour": f"c{at % 2}"},
        }
        for at in range(60)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = with_items(tmp_path, tmp_path / "items.jsonl")
    found = features(prepared)
    one, none = "i1", "i0"
    assert found["brand"][one] == ["b1"]
    assert sorted(found["genres"][one]) == ["x", "y1"]
    assert found["genres"][none] == found["price"][none] == []
    assert found["tags"][one] == ["red", "big"]
    assert found["year"][one] == ["1991"]
    assert found["seller_id"][one] == ["1"]
    assert found["nested.colour"][one] == ["c1"]
    assert len({values[0] for values in found["price"].values() if values}) == 10
    assert found["price"][one] == ["price<=9"]
    numbers = {one.name: by_name(prepared, one.numbers) for one in prepared.dataset.item_features()}
    assert numbers["price"] == {f"i{at}": at * 1.5 for at in range(1, 60)}, (
        "none of what is missing"
    )
    assert {name for name, own in numbers.items() if own} == {"price"}
    assert prepared.manifest["skipped"] == {
        "sku2": "60 distinct values for 60 items: nearly a different one for each",
        "empty": "empty",
        "same": "the same for all items: 'all'",
    }
    assert A in found["brand"]  # an item of the log that the file lacks has no value
    assert found["brand"][A] == []


def test_the_same_features_from_a_table(tmp_path: Path) -> None:
    items = pa.table(
        {
            "item_id": [A, B],
            "title": ["a", "b"],
            "genres": [["x", "y"], []],
            "stock": pa.array([1, None], pa.int32()),
        }
    )
    found = features(with_items(tmp_path, items))
    assert found == {
        "genres": {A: ["x", "y"], B: []},
        "stock": {A: ["1"], B: []},
    }


def test_features_are_declared(tmp_path: Path) -> None:
    items = pa.table(
        {"item_id": [A, B], "brand": ["x", "y"], "shade": ["r", "g"], "text": ["t" * 99, "u"]}
    )
    assert set(features(with_items(tmp_path, items, PrepareOptions(features=("shade",))))) == {
        "shade"
    }
    assert features(with_items(tmp_path, items, PrepareOptions(features=()))) == {}
    twice = with_items(tmp_path, items, PrepareOptions(features=("shade", "brand", "shade")))
    assert [*features(twice)] == ["shade", "brand"]
    with pytest.raises(
        DataError, match="--features size: there is no such column; there are brand, shade, text"
    ):
        with_items(tmp_path, items, PrepareOptions(features=("size",)))
    with pytest.raises(DataError, match="--features text: a value has over 64 characters"):
        with_items(tmp_path, items, PrepareOptions(features=("text",)))


def test_an_item_that_is_listed_twice_is_what_its_last_row_says(tmp_path: Path) -> None:
    items = pa.table({"item_id": [A, B, A], "title": ["old", "b", "new"], "brand": ["x", "y", "z"]})
    prepared = with_items(tmp_path, items)
    assert prepared.dataset.names.titles(ids(prepared, A)) == ["new"]
    assert features(prepared)["brand"][A] == ["z"]


def test_ids_with_a_point_are_the_integers_that_they_were(tmp_path: Path) -> None:
    """What pandas writes of a column of integers with gaps, in the log and in the items' file."""
    (tmp_path / "log.csv").write_text(
        "user_id,item_id,ts\n7.0,42.0,1700000000\n8.0,,1700000000\n8.0,43.0,1700000000\n"
    )
    (tmp_path / "items.csv").write_text("item_id,title\n42.0,a\n43.0,b\n")
    prepared = prepare(tmp_path / "log.csv", tmp_path / "data", items=tmp_path / "items.csv")
    assert prepared.dataset.names.ids.tolist() == [42, 43]
    assert prepared.dataset.interactions().user_names == ["7", "8"]
    assert prepared.manifest["items"]["without_row"] == 0


PAIR = ("SKU-2A4E", "~2qx<o0+")  # one id, by the lower 62 bits of xxh3-64


@pytest.fixture
def _has_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names of `PAIR` have one id, with every key."""
    real, (first, second) = core_names._hashes, map(str.encode, PAIR)
    monkeypatch.setattr(
        core_names,
        "_hashes",
        lambda raw, key: real([first if one == second else one for one in raw], key),
    )
    core_names._known.cache_clear()


def test_known_pairs_of_names_have_two_ids_with_a_key(tmp_path: Path) -> None:
    assert item_id(PAIR[0]) == item_id(PAIR[1])
    events = [Event("u", name, 1_700_000_000 + at, "view") for at, name in enumerate(PAIR)]
    prepared = prepare(table(events), tmp_path / "data")
    assert prepared.num_rejected == 0
    assert prepared.dataset.names.names(prepared.dataset.interactions().items) == [*PAIR]


@pytest.mark.parametrize("kept", ["like", "out", "add"])
def test_a_later_dataset_keeps_the_key(kept: str, tmp_path: Path) -> None:
    log = table([Event("u", A, 1_700_000_000, "view")])
    more = table([Event("u", B, 1_700_000_001, "view")])
    first = prepare(log, tmp_path / "data").dataset
    assert len(first.item_key) == KEY_BYTES
    assert prepare(log, tmp_path / "again").dataset.item_key == first.item_key
    assert prepare(more, tmp_path / "other").dataset.item_key not in (b"", first.item_key)
    match kept:
        case "like":
            later = prepare(
                more, tmp_path / "new", PrepareOptions(like=str(tmp_path / "data"))
            ).dataset
        case "out":
            later = prepare(more, tmp_path / "data").dataset
        case _:
            later = add(more, tmp_path / "data").dataset
    assert later.item_key == first.item_key
    assert later.names.key == later.interactions().item_key == first.item_key
    assert later.interactions().items[-1] == item_id(B, first.item_key)


def test_a_dataset_of_an_older_version_stays_without_a_key(tmp_path: Path) -> None:
    log = table([Event("u", A, 1_700_000_000, "view")])
    prepare(log, tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["item_key"]
    path.write_text(json.dumps(manifest))
    later = prepare(log, tmp_path / "data").dataset
    assert later.item_key == b""
    assert later.interactions().items.tolist() == [item_id(A)]


def test_numbers_need_no_key(tmp_path: Path) -> None:
    dataset = prepare(table([Event("u", "7", 1_700_000_000, "view")]), tmp_path / "data").dataset
    assert (dataset.item_key, dataset.names.ids.tolist()) == (b"", [7])


@pytest.mark.usefixtures("_has_pair")
def test_of_two_names_with_one_id_the_later_ones_rows_are_rejected(tmp_path: Path) -> None:
    events = [Event("u", name, 1_700_000_000 + at, "view") for at, name in enumerate("ab")]
    events += [
        Event("u", PAIR[0], 1_700_000_005, "view"),
        Event("v", PAIR[1], 1_700_000_006, "view"),
    ]
    events += [
        Event("u", PAIR[1], 1_700_000_007, "view"),
        Event("u", PAIR[0], 1_700_000_001, "view"),
    ]
    items = pa.table({"item_id": [PAIR[1], "a", PAIR[0]], "title": ["of him", "of a", "of his"]})
    prepared = prepare(table(events), tmp_path / "data", items=items)
    reason = RejectReason.SAME_ID.value
    assert prepared.manifest["rejected"] == {reason: {"rows": 2, "first": 4}}
    assert prepared.manifest["rejected_items"] == {reason: {"rows": 1, "first": 1}}
    assert prepared.num_rejected == 3
    log = prepared.dataset.interactions()
    names = prepared.dataset.names
    assert log.user_names == ["u"]
    assert names.names(log.items) == ["a", "b", PAIR[0], PAIR[0]]
    assert names.titles(ids(prepared, PAIR[0])) == ["of his"]
    lines = (tmp_path / "data/rejected.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert [(one["row"], one["reason"], one["text"]) for one in written] == [
        (4, reason, PAIR[1]),
        (5, reason, PAIR[1]),
        (1, reason, PAIR[1]),
    ]


@pytest.mark.usefixtures("_has_pair")
def test_a_file_of_items_alone_rejects_the_later_row(tmp_path: Path) -> None:
    items = pa.table({"item_id": ["c", *PAIR], "title": ["c", "1", "2"]})
    prepared = with_items(tmp_path, items)
    assert prepared.manifest["rejected_items"] == {
        RejectReason.SAME_ID.value: {"rows": 1, "first": 3}
    }
    assert prepared.dataset.names.titles(ids(prepared, PAIR[1])) == ["1"]
