"""A log that is added to a dataset: as if all had been prepared at once, in the day's time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.core.names import item_id
from npu_gr.dataset import PrepareOptions, add, prepare, read_dataset
from npu_gr.dataset.summary import summary
from tests.dataset.logs import assert_same_events

HEADER = "user_id,item_id,timestamp,event_type,dwell,device,tags"
START = 1_700_000_000


def log_of(num_rows: int, seed: int, first: int, num_users: int) -> list[str]:
    """Rows with ties in time, missing cells and lists."""
    random = np.random.default_rng(seed)
    times = first + np.sort(random.integers(0, num_rows // 3, num_rows))
    return [
        f"u{random.integers(num_users)},i{random.integers(40)},{time},"
        f"{random.choice(['view', 'buy'])},{random.choice(['', '1.5', '2'])},"
        f"{random.choice(['', 'web', 'app'])},{random.choice(['', 'a|b', 'c'])}"
        for time in times.tolist()
    ]


def write(path: Path, rows: Sequence[str], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def assert_equal(one: Path, other: Path) -> None:
    """Both datasets mean the same to training, and have the same files of users and items."""
    a, b = read_dataset(one), read_dataset(other)
    assert_same_events(a, b)
    for name in ("users.parquet", "items.parquet"):
        assert pq.read_table(one / name).equals(pq.read_table(other / name)), name
    for key in ("events", "users", "items", "actions", "first_time", "last_time", "features"):
        assert a.manifest[key] == b.manifest[key], key


def test_days_added_are_a_log_prepared_at_once(tmp_path: Path) -> None:
    days = [log_of(900, 1, START, 150), log_of(90, 2, START + 400, 170)]
    days.append(log_of(60, 3, START + 900, 200))
    items = tmp_path / "items.csv"
    items.write_text("item_id,title,brand\n" + "".join(f"i{n},T{n},b{n % 3}\n" for n in range(30)))
    users = tmp_path / "users.csv"
    users.write_text("user_id,age\n" + "".join(f"u{n},{20 + n % 50}\n" for n in range(0, 200, 2)))
    options = PrepareOptions(
        event_features=("dwell",), request_features=("device", "tags"), drop=("item_id=i7",)
    )
    every = write(tmp_path / "all.csv", [row for day in days for row in day])
    whole = prepare(every, tmp_path / "all", options, items=items, users=users)
    like = replace(options, like=str(tmp_path / "all"))  # with the key of its ids
    prepare(write(tmp_path / "0.csv", days[0]), tmp_path / "data", like, items=items, users=users)
    added = whole
    for number in (1, 2):
        # the options of the first log count; a file of users and items is read as a whole
        added = add(
            write(tmp_path / f"{number}.csv", days[number]),
            tmp_path / "data",
            items=items,
            users=users,
        )
    assert_equal(tmp_path / "all", tmp_path / "data")
    assert added.manifest["filtered"] > 0
    assert whole.manifest["users_without_row"] == added.manifest["users_without_row"]
    assert "new events of this log" in summary(added.manifest, tmp_path)
    assert (tmp_path / "data" / "events-0002.parquet").stat().st_mode & 0o077 == 0


def test_a_log_without_files_of_items_and_users_keeps_what_is_known(tmp_path: Path) -> None:
    header = "user_id,item_id,timestamp"
    items = tmp_path / "items.csv"
    items.write_text("item_id,title,price\n" + "".join(f"i{n},T{n},{n}.5\n" for n in range(30)))
    users = tmp_path / "users.csv"
    users.write_text("user_id,age\nu1,30\n")
    log = write(tmp_path / "a.csv", [f"u1,i{n},{START + n}" for n in range(3)], header)
    prepare(log, tmp_path / "data", items=items, users=users)
    day = write(tmp_path / "b.csv", [f"u2,new,{START + 9}", f"u2,i4,{START + 10}"], header)
    manifest = add(day, tmp_path / "data").manifest
    dataset = read_dataset(tmp_path / "data")
    features = {one.name: one for one in dataset.item_features()}
    ids = {name: item_id(name, dataset.item_key) for name in ("i4", "new")}
    assert features["price"].numbers[ids["i4"]] == 4.5
    assert ids["new"] not in features["price"].numbers
    assert dataset.names.titles(np.array([*ids.values()])) == ["T4", None]
    assert manifest["items"] == {
        "all": 31,
        "with_events": 5,
        "with_title": 30,
        "without_row": 1,
        "without_events": 26,
    }
    (age,) = dataset.interactions().columns
    assert age.values[0] == 30
    assert np.isnan(age.values[1])
    assert manifest["users_without_row"] == 1


def test_ratings_between_the_known_ones_move_the_actions(tmp_path: Path) -> None:
    header = "user_id,item_id,timestamp,rating"
    first = [f"u{n % 3},i{n},{START + n},{[1, 3, 5][n % 3]}" for n in range(30)]
    day = [f"u{n % 4},i{n},{START + n},{[2, 3][n % 2]}" for n in range(30, 40)]
    prepare(write(tmp_path / "0.csv", first, header), tmp_path / "data")
    add(write(tmp_path / "1.csv", day, header), tmp_path / "data")
    like = PrepareOptions(like=str(tmp_path / "data"))  # with the key of its ids
    prepare(write(tmp_path / "all.csv", first + day, header), tmp_path / "all", like)
    assert_equal(tmp_path / "all", tmp_path / "data")
    names = read_dataset(tmp_path / "data").action_names
    events = pq.read_table(tmp_path / "data" / "events.parquet")
    assert [float(names[at]) for at in events["action"].to_pylist()] == events["value"].to_pylist()


def test_a_log_added_twice_changes_nothing(tmp_path: Path) -> None:
    first, day = log_of(300, 1, START, 50), log_of(90, 2, START + 50, 60)
    prepare(write(tmp_path / "0.csv", first), tmp_path / "data")
    # a part of it was exported before
    add(write(tmp_path / "1.csv", first[-20:] + day), tmp_path / "data")
    like = PrepareOptions(like=str(tmp_path / "data"))
    prepare(write(tmp_path / "all.csv", first + day), tmp_path / "all", like)
    assert_equal(tmp_path / "all", tmp_path / "data")
    before = {path.name: path.read_bytes() for path in (tmp_path / "data").glob("*.parquet")}
    manifest = add(tmp_path / "1.csv", tmp_path / "data").manifest
    assert manifest["added"] == 0
    assert manifest["duplicates"]["rows"] >= 110
    after = {path.name: path.read_bytes() for path in (tmp_path / "data").glob("*.parquet")}
    assert before == after


def test_an_interrupted_run_leaves_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(write(tmp_path / "0.csv", log_of(90, 1, START, 9)), tmp_path / "data")
    day = write(tmp_path / "1.csv", log_of(90, 2, START + 99, 9))
    before = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}

    def stop(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("npu_gr.dataset.build.write_users", stop)
        with pytest.raises(KeyboardInterrupt):
            add(day, tmp_path / "data")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert add(day, tmp_path / "data").manifest["events"] > 90


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    header = "user_id,item_id,timestamp,event_type"
    log = write(tmp_path / "0.csv", [f"u1,i{n},{START + n},view" for n in range(5)], header)
    prepare(log, tmp_path / "data")
    other = write(tmp_path / "1.csv", ["u1,i1,9"], "member,sku,at")
    with pytest.raises(DataError, match="no such column"):
        add(other, tmp_path / "data")
    with pytest.raises(DataError, match="exclude each other"):
        add(log, tmp_path / "data", PrepareOptions(like=str(tmp_path / "data")))
    with pytest.raises(DataError, match="no dataset"):
        add(log, tmp_path / "nothing")
    prepare(log, tmp_path / "order", PrepareOptions(has_time=False, time="none"))
    with pytest.raises(DataError, match="no times"):
        add(log, tmp_path / "order")
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"u1": ["a", "b"], "u2": ["b"]}))
    prepare(lists, tmp_path / "lists")
    with pytest.raises(DataError, match="no times"):
        add(lists, tmp_path / "lists")


def test_the_command_adds_a_log(tmp_path: Path) -> None:
    log = write(tmp_path / "0.csv", log_of(300, 1, START, 50))
    day = write(tmp_path / "1.csv", log_of(90, 2, START + 200, 50))
    data = str(tmp_path / "data")
    run = CliRunner().invoke
    assert run(main, ["prepare", str(log), "--out", data]).exit_code == 0
    result = run(main, ["prepare", str(day), "--add-to", data])
    assert result.exit_code == 0, result.output
    assert "new events of this log" in result.output
    for wrong in ([], ["--out", data, "--add-to", data]):
        result = run(main, ["prepare", str(day), *wrong])
        assert result.exit_code == 2
        assert "--add-to" in result.output
