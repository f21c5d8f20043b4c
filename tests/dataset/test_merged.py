"""Datasets of a log's parts, merged: what one run over the parts' logs makes."""

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
from npu_gr.dataset import PrepareOptions, merge, merged, prepare, read_dataset
from npu_gr.dataset.logs import BATCH_ROWS
from tests.dataset.logs import assert_same_events

START = 1_700_000_000
NUM_PARTS = 3
SAME = (
    *("first_time", "last_time", "actions", "events", "users", "items", "item_key", "features"),
    *("user_features", "log_features", "filtered", "duplicates", "trimmed", "examples"),
    *("impressions", "users_without_row", "columns", "times", "options"),
)


def rows_of(seed: int, num_rows: int = 1500) -> list[str]:
    """Rows with ties in time, repeated rows, missing cells, lists, and rows to reject."""
    random = np.random.default_rng(seed)
    rows: list[str] = []
    for _ in range(num_rows):
        if rows and random.random() < 0.03:
            rows.append(rows[random.integers(len(rows))])
            continue
        user = f"u{random.integers(90)}" if random.random() > 0.01 else ""
        at = START + int(random.integers(400)) / 4
        action = random.choice(["view", "buy", "View", "wish"] if len(rows) > 700 else ["view"])
        dwell = random.choice(["", "1.5", "2"])
        rows.append(
            f"{user},i{random.integers(40)},{at},{action},{dwell},"
            f"{random.choice(['', 'web', 'app'])},{random.choice(['', 'a|b', 'c'])}"
        )
    return rows


def split(rows: Sequence[str], folder: Path, header: str) -> list[Path]:
    """Write a file for each part: all rows of its users, in the order of the log."""
    folder.mkdir()
    found: list[list[str]] = [[header] for _ in range(NUM_PARTS)]
    for row in rows:
        user = row.partition(",")[0]
        found[sum(user.encode()) % NUM_PARTS].append(row)
    paths = [folder / f"{place}.csv" for place in range(NUM_PARTS)]
    for path, lines in zip(paths, found, strict=True):
        path.write_text("\n".join(lines) + "\n")
    return paths


def parts_and_whole(
    tmp_path: Path, rows: Sequence[str], header: str, options: PrepareOptions, **files: Any
) -> dict[str, Any]:
    """Prepare each part and all at once, merge the parts; returns the merged manifest."""
    paths = split(rows, tmp_path / "logs", header)
    prepare(tmp_path / "logs", tmp_path / "whole", options, **files)
    for place, path in enumerate(paths):
        prepare(path, tmp_path / "parts" / str(place), options, **files)
    return merge(str(tmp_path / "parts" / "*"), tmp_path / "merged").manifest


def assert_equal(merged: Path, whole: Path) -> None:
    for name in ("events", "users", "items"):
        one, other = (pq.read_table(folder / f"{name}.parquet") for folder in (merged, whole))
        assert one.equals(other), name
    groups = [
        pq.ParquetFile(folder / "events.parquet").num_row_groups for folder in (merged, whole)
    ]
    assert groups[0] == groups[1]
    a, b = read_dataset(merged), read_dataset(whole)
    assert_same_events(a, b)
    for key in SAME:
        assert a.manifest.get(key) == b.manifest.get(key), key
    counts = [{name: one["rows"] for name, one in d.manifest["rejected"].items()} for d in (a, b)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_a_log_prepared_at_once(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "SORTED_ROWS", [100, 1000, 2_000_000][seed])
    items = tmp_path / "items.csv"
    items.write_text("item_id,title,brand\n" + "".join(f"i{n},T{n},b{n % 3}\n" for n in range(50)))
    users = tmp_path / "users.csv"
    users.write_text("user_id,age\n" + "".join(f"u{n},{20 + n}\n" for n in range(0, 90, 2)))
    header = "user_id,item_id,timestamp,event_type,dwell,device,tags"
    options = PrepareOptions(
        event_features=("dwell:number",),
        request_features=("device:category", "tags:category"),
        drop=("item_id=i7",),
    )
    parts_and_whole(tmp_path, rows_of(seed), header, options, items=items, users=users)
    assert_equal(tmp_path / "merged", tmp_path / "whole")
    # the merged dataset grows by days, and is merged again, like any other
    day = tmp_path / "day.csv"
    day.write_text(f"{header}\nu1,i3,{START + 500},view,,,\n")
    result = CliRunner().invoke(main, ["prepare", str(day), "--add-to", str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("values", [("1", "3", "4.5"), ("2",)])
def test_ratings_and_one_action(tmp_path: Path, values: Sequence[str]) -> None:
    random = np.random.default_rng(0)
    rows = [
        f"u{random.integers(30)},{(item := random.integers(40))},{START + n},"
        f"{random.choice(values)},T{n},{random.choice(['', f'b{item % 3}'])}"
        for n in range(600)
    ]
    # the last title of an item counts, and its brand where a row has it
    header = "user_id,item_id,timestamp,rating,title,brand"
    manifest = parts_and_whole(tmp_path, rows, header, PrepareOptions())
    assert [one["name"] for one in manifest["features"]] == ["brand"]
    assert manifest["item_key"] == ""  # all names are numbers
    assert_equal(tmp_path / "merged", tmp_path / "whole")


def test_impressions(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows = [
        f"u{random.integers(30)},i{random.integers(20)},{START + n},{random.integers(2)},"
        f"{random.integers(9)}"
        for n in range(900)
    ]
    header = "user_id,item_id,timestamp,click,position"
    options = PrepareOptions(positive=("click=1",))
    parts_and_whole(tmp_path, rows, header, options)
    assert_equal(tmp_path / "merged", tmp_path / "whole")
    one, other = (
        pq.read_table(tmp_path / name / "impressions.parquet") for name in ("merged", "whole")
    )
    assert one.equals(other)


def test_ranges_need_parts_like_one_of_them(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    rows = [
        f"u{random.integers(30)},i{random.integers(20)},{START + n},{random.random() * n:.3f}"
        for n in range(900)
    ]
    paths = split(rows, tmp_path / "logs", "user_id,item_id,timestamp,dwell")
    options = PrepareOptions()
    parts = [tmp_path / "parts" / str(place) for place in range(NUM_PARTS)]
    for path, part in zip(paths, parts, strict=True):
        prepare(path, part, options)
    with pytest.raises(DataError, match=r"1: its actions are .* --like THAT_PART"):
        merge(parts, tmp_path / "merged")
    like = replace(options, like=str(parts[0]))
    for path, part in zip(paths[1:], parts[1:], strict=True):
        prepare(path, part, like)
    merge(parts, tmp_path / "merged", like)
    prepare(tmp_path / "logs", tmp_path / "whole", like)
    assert_equal(tmp_path / "merged", tmp_path / "whole")


def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    def part(name: str, text: str, options: PrepareOptions | None = None) -> Path:
        (tmp_path / f"{name}.csv").write_text(text)
        prepare(tmp_path / f"{name}.csv", tmp_path / name, options)
        return tmp_path / name

    log = "user_id,item_id,timestamp,device\n"
    a = part("a", f"{log}u1,i1,{START},x\nu2,i2,{START},y\n")
    b = part("b", f"{log}u2,i1,{START},x\nu3,i1,{START},x\n")
    with pytest.raises(DataError, match=r"b: the user 'u2' is in .*a, too \(1 user in all\)"):
        merge([a, b], tmp_path / "out")
    c = part("c", f"{log}u9,i1,{START},x\n", PrepareOptions(request_features=("device",)))
    with pytest.raises(DataError, match=r"c: its log_features .* device:one, not none"):
        merge([a, c], tmp_path / "out")
    d = part("d", "user_id,item_id\nu7,i1\nu7,i2\n", PrepareOptions(has_time=False))
    with pytest.raises(DataError, match="d: its log has no times"):
        merge([a, d], tmp_path / "out")
    with pytest.raises(DataError, match="no folder has that name"):
        merge(str(tmp_path / "none*"), tmp_path / "out")
    (tmp_path / "logs").mkdir()
    with pytest.raises(DataError, match=r"logs: no dataset"):
        merge([a, tmp_path / "logs"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ranges_of_items_in_parts_of_the_log_are_not_mixed(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    rows = [
        f"u{random.integers(30)},i{(item := random.integers(40))},{START + n},{item * 1.5 + 0.25}"
        for n in range(600)
    ]
    paths = split(rows, tmp_path / "logs", "user_id,item_id,timestamp,price")
    parts = [tmp_path / "parts" / path.stem for path in paths]
    for path, part in zip(paths, parts, strict=True):
        prepare(path, part, PrepareOptions(features=("price",), value="none"))
    with pytest.raises(DataError, match="0: the ranges of price are those of its own rows"):
        merge(parts, tmp_path / "merged")
    for path, part in zip(paths, parts, strict=True):
        prepare(path, part, PrepareOptions(features=("none",), value="none"))
    assert merge(parts, tmp_path / "merged").manifest["features"] == []


def test_the_command(tmp_path: Path) -> None:
    header = "user_id,item_id,timestamp,event_type,dwell,device,tags"
    for path in split(rows_of(7, 300), tmp_path / "logs", header):
        prepare(path, tmp_path / "parts" / path.stem)
    pattern, out = tmp_path / "parts" / "*", tmp_path / "data"
    arguments = ["prepare", str(pattern), "--merge", "--out", str(out)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("3 parts: ")
    refused = CliRunner().invoke(main, [*arguments, "--user", "user_id"])
    assert refused.exit_code == 2
    assert "--user: give it when the parts are prepared" in refused.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert BATCH_ROWS > manifest["events"] > 250
