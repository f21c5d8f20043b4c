"""Columns of the log and of a users' file become features, with the values a client would send."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, prepare, read_dataset, read_log
from npu_gr.dataset.files import NUM_PARTS
from npu_gr.dataset.summary import summary
from npu_gr.history_store.interactions import FeatureColumn, Interactions
from npu_gr.train.data import build_log

HEADER = (
    "user_id",
    "item_id",
    "timestamp",
    "event_type",
    "seconds",
    "surface",
    "device",
    "tags",
    "affinity",
)
ROWS: list[tuple[Any, ...]] = [
    ("ann", "x", 100_000_300, "view", 1.5, "feed", 2, "red|big", 0.25),
    ("bob", "y", 100_000_100, "view", None, "search", 1, "red", None),
    ("ann", "y", 100_000_200, "cart", 3, None, None, None, 7),
    ("ann", "x", 100_000_300, "view", 1.5, "feed", 2, "red|big", 0.25),
    ("ann", "x", 100_000_300, "view", 1.5, "search", 2, "red|big", 0.25),
    ("bob", "x", 100_000_400, "view", "n/a", "feed", 1, "big", -1),
]
WANTED = PrepareOptions(
    event_features=("seconds:number", "surface"),
    request_features=("device:category", "tags"),
    cross_features=("affinity",),
)


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *ROWS])
    return path


def write_jsonl(path: Path) -> Path:
    """The same; several values are a list, and what is missing is not there."""
    rows = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    for row in rows:
        row["tags"] = row["tags"] and row["tags"].split("|")
    path.write_text(
        "\n".join(
            json.dumps({name: cell for name, cell in row.items() if cell is not None})
            for row in rows
        )
    )
    return path


def columns(log: Interactions) -> dict[str, FeatureColumn]:
    return {column.name: column for column in log.columns}


def cells(column: FeatureColumn) -> list[Any]:
    return [None if value != value else value for value in column.values.tolist()]


@pytest.mark.parametrize("write", [write_csv, write_jsonl])
def test_columns_of_a_log_come_with_their_events(write: Any, tmp_path: Path) -> None:
    prepared = prepare(write(tmp_path / f"log.{write.__name__[6:]}"), tmp_path / "data", WANTED)
    log = read_log(tmp_path / "data")
    assert log.timestamps.tolist() == [
        100_000_100,
        100_000_200,
        100_000_300,
        100_000_300,
        100_000_400,
    ]
    found = columns(log)
    assert {name: (one.of, one.kind, one.is_number) for name, one in found.items()} == {
        "seconds": ("event", "number", True),
        "surface": ("event", "", False),
        "device": ("request", "category", False),
        "tags": ("request", "", False),
        "affinity": ("cross", "", True),
    }
    assert cells(found["seconds"]) == [None, 3.0, 1.5, 1.5, None]
    assert cells(found["surface"]) == ["search", None, "feed", "search", "feed"]
    assert cells(found["device"]) == ["1", None, "2", "2", "1"]
    assert cells(found["tags"]) == [["red"], None, ["red", "big"], ["red", "big"], ["big"]]
    assert cells(found["affinity"]) == [None, 7.0, 0.25, 0.25, -1.0]
    # another surface is another event
    assert prepared.manifest["duplicates"] == {"rows": 1, "kept": False}
    printed = summary(prepared.manifest, tmp_path / "data")
    assert "of the event   'surface' (one)" in printed
    assert "of the request 'device' (category)" in printed


def test_a_part_of_the_log_keeps_its_columns_and_every_users(tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text("user_id,age,country\nann,30,DE\nbob,,FR\n")
    prepare(
        write_csv(tmp_path / "log.csv"), tmp_path / "data", WANTED, users=tmp_path / "users.csv"
    )
    log = read_log(tmp_path / "data")
    part = columns(log[log.timestamps > 100_000_250])
    assert cells(part["surface"]) == ["feed", "search", "feed"]
    assert cells(part["age"]) == [30.0, None]
    by_user = {column.name: cells(column) for column in build_log(log, [], "leave-one-out").columns}
    assert by_user["surface"] == [None, "feed", "search", "search", "feed"]
    trained = build_log(log, [], "leave-one-out").only_trained("leave-one-out")
    assert {len(column.values) for column in trained.columns if column.of != "user"} == {3}


def test_users_have_the_features_of_their_file(tmp_path: Path) -> None:
    rows = [
        f"u{at},{at},{'MF'[at % 2]},zip-{at},{'a|b' if at % 3 else ''},{at % 4}" for at in range(30)
    ]
    (tmp_path / "users.csv").write_text(
        "id,age,sex,zip,hobbies,segment\n" + "\n".join(rows) + "\n,1,M,,,\n"
    )
    log = pa.table(
        {
            "user_id": ["u3", "u40", "u4"],
            "item_id": ["x", "x", "y"],
            "ts": [100_000_001, 100_000_002, 3e8],
        }
    )
    prepared = prepare(log, tmp_path / "data", users=tmp_path / "users.csv")
    found = columns(prepared.dataset.interactions())
    assert prepared.manifest["skipped_users"] == {
        "zip": "30 distinct values for 30 users: nearly a different one for each"
    }
    assert prepared.manifest["users_without_row"] == 1
    assert prepared.manifest["rejected_users"] == {"no user": {"rows": 1, "first": 32}}
    assert {name: cells(column) for name, column in found.items()} == {
        "age": [3.0, None, 4.0],
        "sex": ["F", None, "M"],
        "hobbies": [None, None, ["a", "b"]],
        "segment": [3.0, None, 0.0],
    }
    again = prepare(
        log,
        tmp_path / "data",
        PrepareOptions(user_features=("zip", "age:hashed")),
        users=tmp_path / "users.csv",
    )
    found = columns(again.dataset.interactions())
    assert {name: (column.kind, cells(column)) for name, column in found.items()} == {
        "zip": ("", ["zip-3", None, "zip-4"]),
        "age": ("hashed", ["3", None, "4"]),
    }


def test_a_log_without_features_is_written_as_before(tmp_path: Path) -> None:
    prepare(write_csv(tmp_path / "log.csv"), tmp_path / "data")
    assert pq.read_table(tmp_path / "data/events.parquet").column_names == [
        "user",
        "item",
        "action",
        "time",
    ]
    assert pq.read_table(tmp_path / "data/users.parquet").column_names == ["name"]
    assert read_log(tmp_path / "data").columns == ()


def test_a_dataset_that_is_older_than_features_has_none(tmp_path: Path) -> None:
    prepare(write_csv(tmp_path / "log.csv"), tmp_path / "data")
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    for key in (
        "user_features",
        "log_features",
        "users_without_row",
        "skipped_users",
        "rejected_users",
    ):
        del manifest[key]
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest))
    assert len(read_dataset(tmp_path / "data").interactions()) == 4


def test_features_stay_with_their_events_when_these_are_sorted(tmp_path: Path) -> None:
    users = np.arange(100) % 5 * NUM_PARTS
    times = 100_000_000 + np.random.default_rng(0).permutation(100)
    frame = {
        "user_id": users.astype(str),
        "item_id": ["x"] * 100,
        "ts": times,
        "place": times % 7,
        "name": times.astype(str),
    }
    options = PrepareOptions(event_features=("place", "name:category"))
    log = prepare(pa.table(frame), tmp_path / "data", options).dataset.interactions()
    found = columns(log)
    assert found["place"].values.tolist() == (log.timestamps % 7).tolist()
    assert found["name"].values.tolist() == log.timestamps.astype(str).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            PrepareOptions(event_features=("colour",)),
            "--event-features colour: there is no such column; there",
        ),
        (
            PrepareOptions(event_features=("device",), cross_features=("device",)),
            "device: it is a feature already",
        ),
        (PrepareOptions(user_features=("age",)), "give it with --users"),
        (PrepareOptions(request_features=("tags:blue",)), "tags:blue: there is no such column"),
    ],
)
def test_what_cannot_be_a_feature_is_named(
    options: PrepareOptions, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(write_csv(tmp_path / "log.csv"), tmp_path / "data", options)


def test_two_features_never_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text("user_id,device\nann,phone\n")
    with pytest.raises(DataError, match="two features have the name 'device'"):
        prepare(
            write_csv(tmp_path / "log.csv"), tmp_path / "data", WANTED, users=tmp_path / "users.csv"
        )


def test_a_text_that_describes_is_no_value(tmp_path: Path) -> None:
    log = pa.table(
        {"user_id": ["a"], "item_id": ["x"], "ts": [100_000_000], "note": ["long " * 200 + "."]}
    )
    with pytest.raises(
        DataError,
        match=r"feature 'note': 'long .* has 1,001 bytes, the limit "
        r"is 512",
    ):
        prepare(log, tmp_path / "data", PrepareOptions(event_features=("note",)))


@pytest.mark.parametrize(
    ("wanted", "why"), [(("age",), "empty"), (("town",), "there is no such column")]
)
def test_a_wanted_feature_of_users_that_says_nothing_is_rejected(
    wanted: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    (tmp_path / "users.csv").write_text("user_id,age\nann,\nbob,\n")
    with pytest.raises(DataError, match=f"--user-features {wanted[0]}: {why}"):
        prepare(
            write_csv(tmp_path / "log.csv"),
            tmp_path / "data",
            PrepareOptions(user_features=wanted),
            users=tmp_path / "users.csv",
        )
