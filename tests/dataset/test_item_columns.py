"""Columns of a log that are the same in every row of an item describe the items."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset.build import add, prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.summary import summary

NUM_ITEMS = 30
HEADER = "user_id,sku,ts,title,brand,price,tags,age,order_no,is_new"


def row(user: int, item: int, at: int) -> str:
    brand = ("acme", "bolt", "coil")[item % 3]
    tags = f"{'red' if item % 2 else 'blue'}|{'big' if item % 5 else 'small'}"
    return (
        f"u{user},i{item},{1_700_000_000 + at},Thing {item},{brand},{10 + item}.50,{tags},"
        f"{20 + user},o{at},{item % 2}"
    )


def write(path: Path, rows: Sequence[str]) -> Path:
    path.write_text("\n".join([HEADER, *rows]))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = [row(user, item, 100 * user + item) for user in range(3) for item in range(NUM_ITEMS)]
    return write(tmp_path / "log.csv", rows)


def features(folder: Path) -> dict[str, dict[str, Any]]:
    """The values of each feature by the item's name."""
    dataset = read_dataset(folder)
    found = {}
    for one in dataset.item_features():
        names = dataset.names.names(np.fromiter(one.of_item, np.int64))
        found[one.name] = {
            str(name): sorted(one.values[place] for place in places)
            for name, places in zip(names, one.of_item.values(), strict=True)
        }
    return found


def test_what_is_constant_per_item_is_a_feature_of_it(tmp_path: Path, log: Path) -> None:
    manifest = prepare(log, tmp_path / "data").manifest
    found = features(tmp_path / "data")
    assert found.keys() == {"brand", "price", "tags"}
    assert found["brand"]["i4"] == ["bolt"]
    assert found["tags"]["i5"] == ["red", "small"]
    assert len({tuple(values) for values in found["price"].values()}) == 10, "ranges"
    # the user's, the event's, and 0 and 1 are not the item's
    assert {one["name"] for one in manifest["unused"]} == {"age", "order_no", "is_new"}
    text = summary(manifest, tmp_path)
    assert "feature        'brand' (one)" in text
    assert "titles of the log: 30 of 30 items" in text


def test_an_item_with_two_values_makes_it_no_feature(tmp_path: Path, log: Path) -> None:
    write(log, [*log.read_text().splitlines()[1:], row(7, 4, 9).replace("bolt", "acme")])
    manifest = prepare(log, tmp_path / "data").manifest
    assert features(tmp_path / "data").keys() == {"price", "tags"}
    assert "brand" in {one["name"] for one in manifest["unused"]}
    with pytest.raises(DataError, match="--features brand: item 'i4' has 'acme' and 'bolt'"):
        prepare(log, tmp_path / "other", PrepareOptions(features=("brand",)))


def test_options_choose_the_features_of_the_log(tmp_path: Path, log: Path) -> None:
    prepare(log, tmp_path / "data", PrepareOptions(features=("is_new",)))
    assert features(tmp_path / "data").keys() == {"is_new"}
    prepare(log, tmp_path / "data", PrepareOptions(features=("none",)))
    assert features(tmp_path / "data") == {}
    with pytest.raises(DataError, match="--features colour: no column without another role"):
        prepare(log, tmp_path / "data", PrepareOptions(features=("colour",)))
    few = write(tmp_path / "few.csv", [row(user, item, item) for user in (1, 2) for item in (3, 4)])
    prepare(few, tmp_path / "data")
    assert features(tmp_path / "data") == {}, "of two items it may be chance"


def test_items_of_a_new_day_have_the_features_of_its_log(tmp_path: Path, log: Path) -> None:
    prepare(log, tmp_path / "data")
    before = features(tmp_path / "data")
    day = write(
        tmp_path / "day.csv",
        [row(1, 40, 5000), row(2, 4, 5001).replace("bolt", "acme"), row(2, 41, 5002)],
    )
    add(day, tmp_path / "data")
    found = features(tmp_path / "data")
    assert {name: len(of_item) for name, of_item in found.items()} == dict.fromkeys(found, 32)
    assert found["brand"] == before["brand"] | {"i40": ["bolt"], "i41": ["coil"]}
    assert found["tags"]["i40"] == ["blue", "small"]
    assert found["price"]["i40"] == before["price"]["i29"], "the range of the nearest price"
    prepare(day, tmp_path / "dated", PrepareOptions(like=str(tmp_path / "data")))
    assert features(tmp_path / "dated").keys() == before.keys(), "two rows could not tell"
    # the dataset knows them as its own for the day after, too
    add(write(tmp_path / "day2.csv", [row(1, 42, 6000)]), tmp_path / "data")
    assert features(tmp_path / "data")["brand"]["i42"] == ["acme"]
