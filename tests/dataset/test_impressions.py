"""Rows that `--positive` does not meet: impressions of the dataset, in no history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from npu_gr.core.errors import DataError
from npu_gr.core.names import item_id
from npu_gr.dataset import PrepareOptions, add, prepare, read_dataset

START = 1_700_000_000
HEADER = "user_id,item_id,timestamp,click,position,country\n"
ROWS = [
    "u1,A,0,0,2,DE",
    "u1,B,0,1,0,DE",
    "u1,C,0,0,1,DE",
    "u1,C,0,0,1,DE",  # a retried row
    "u1,D,5,0,,DE",
    "u2,A,6,0,0,DE",  # of a user without a behaviour
    "u3,B,7,1,3,DE",
    "u3,E,7,0,4,US",  # left out by a condition
    "u3,,8,0,0,DE",  # shown, but nothing is known of it
]


def written(path: Path, rows: list[str]) -> Path:
    lines = []
    for row in rows:
        user, item, second, *rest = row.split(",")
        lines.append(",".join([user, item, str(START + int(second)), *rest]))
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return path


def shown(folder: Path) -> list[tuple[str, int, int, int]]:
    log = read_dataset(folder).interactions()
    assert log.impressions is not None
    one = log.impressions
    return [
        (log.user_names[user], item, time - START, position)
        for user, item, time, position in zip(
            one.users.tolist(),
            one.items.tolist(),
            one.timestamps.tolist(),
            one.positions.tolist(),
            strict=True,
        )
    ]


def test_rows_that_are_no_behaviour_are_impressions(tmp_path: Path) -> None:
    options = PrepareOptions(positive=("click=1",), where=("country=DE",))
    manifest = prepare(written(tmp_path / "log.csv", ROWS), tmp_path / "data", options).manifest
    key = read_dataset(tmp_path / "data").item_key
    a, c, d = (item_id(name, key) for name in "ACD")
    assert sorted(shown(tmp_path / "data")) == sorted(
        [("u1", a, 0, 2), ("u1", c, 0, 1), ("u1", d, 5, -1)]
    )
    log = read_dataset(tmp_path / "data").interactions()
    assert log.impressions is not None
    assert log.impressions.of_events is not None
    assert log.impressions.of_events.tolist() == [0, 3]
    assert len(log) == 2
    # models, popularity, neighbours and transitions are made of these items alone
    assert set(log.items.tolist()) == {item_id("B", key)}
    assert read_dataset(tmp_path / "data").names.names(np.array([a])) == [a]  # no item of the log
    assert (manifest["impressions"], manifest["filtered"], manifest["rejected"]) == (3, 7, {})
    assert manifest["columns"]["position"]["name"] == "position"
    assert manifest["items"]["with_events"] == 1
    assert (tmp_path / "data" / "impressions.parquet").stat().st_mode & 0o077 == 0


def test_a_log_without_a_condition_has_no_impressions(tmp_path: Path) -> None:
    log = written(tmp_path / "log.csv", ROWS)
    prepare(log, tmp_path / "data", PrepareOptions(positive=("none",)))
    assert read_dataset(tmp_path / "data").interactions().impressions is None
    assert "position" not in pq.read_schema(tmp_path / "data" / "events.parquet").names
    with pytest.raises(DataError, match="--position nowhere"):
        prepare(log, tmp_path / "d", PrepareOptions(positive=("click=1",), position="nowhere"))


def test_impressions_of_an_added_log(tmp_path: Path) -> None:
    options = PrepareOptions(positive=("click=1",))
    whole = [*ROWS[:7], "u1,A,20,0,5,DE", "u3,F,21,0,0,DE", "u1,F,22,1,1,DE"]
    prepare(written(tmp_path / "all.csv", whole), tmp_path / "all", options)
    like = replace(options, like=str(tmp_path / "all"))  # with the key of its ids
    prepare(written(tmp_path / "0.csv", whole[:7]), tmp_path / "data", like)
    day = written(tmp_path / "1.csv", whole[6:])
    add(day, tmp_path / "data")
    added = add(day, tmp_path / "data").manifest  # the second time nothing is new
    assert sorted(shown(tmp_path / "data")) == sorted(shown(tmp_path / "all"))
    assert added["impressions"] == 5
    assert added["events"] == 3
    # a day on which users were shown items and did nothing new
    quiet = written(tmp_path / "2.csv", ["u1,B,30,0,1,DE", "u3,B,7,1,3,DE"])
    assert add(quiet, tmp_path / "data").manifest["impressions"] == 6
    assert len(read_dataset(tmp_path / "data").interactions()) == 3
    assert ("u1", item_id("B", read_dataset(tmp_path / "data").item_key), 30, 1) in shown(
        tmp_path / "data"
    )
