"""A folder or a pattern of files is read in the order of names, and a broken file is named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, prepare
from tests.dataset.logs import EVENTS, HEADER, Event, table, write_csv, write_jsonl, write_parquet
from tests.dataset.test_build import named


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """A folder of one CSV file a day, the second of them packed."""
    folder = tmp_path / "logs"
    (folder / "2024").mkdir(parents=True)
    write_csv(folder / "2024/2024-01-01.csv", EVENTS[:2])
    second = write_csv(folder / "2024/2024-01-02.csv", EVENTS[2:4])
    (folder / "2024/2024-01-02.csv.gz").write_bytes(gzip.compress(second.read_bytes()))
    second.unlink()
    write_csv(folder / "2024/2024-01-03.csv", EVENTS[4:])
    return folder


def rejected(out: Path) -> list[tuple[str, int, str]]:
    lines = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    return [(os.path.basename(line["file"]), line["line"], line["text"]) for line in lines]


@pytest.mark.parametrize("log", ["", "2024/*", "2024/2024-01-0[123].csv*", "**/*.csv*"])
def test_a_folder_and_a_pattern_are_the_log_in_one_file(
    log: str, days: Path, tmp_path: Path
) -> None:
    prepare(table(EVENTS), tmp_path / "one")
    prepared = prepare(days / log, tmp_path / "many")
    assert named(tmp_path / "many") == named(tmp_path / "one")
    assert (
        prepared.manifest["digest"] == prepare(table(EVENTS), tmp_path / "one").manifest["digest"]
    )


def test_files_of_one_format_have_any_suffix(days: Path, tmp_path: Path) -> None:
    for name, write in (("jsonl", write_jsonl), ("parquet", write_parquet)):
        folder = tmp_path / name
        folder.mkdir()
        for place in range(len(EVENTS)):
            write(folder / f"part-{place:05}.{name}", EVENTS[place : place + 1])
        (folder / "_SUCCESS").touch()
        (folder / f".part-00000.{name}.crc").write_bytes(b"\0")
        prepare(folder, tmp_path / f"{name}-data")
        prepare(days, tmp_path / "csv-data")
        assert named(tmp_path / f"{name}-data") == named(tmp_path / "csv-data")


def test_files_are_read_by_their_names_where_no_time_says_the_order(tmp_path: Path) -> None:
    for day, item in (("02", "later"), ("01", "first"), ("03", "last")):
        (tmp_path / f"{day}.csv").write_text(f"user_id,item_id\nann,{item}\n")
    prepare(tmp_path / "*.csv", tmp_path / "data", PrepareOptions(has_time=False))
    assert [item for _, item, *_ in named(tmp_path / "data")] == ["first", "later", "last"]


def test_rows_that_are_broken_have_their_own_file_and_line(days: Path, tmp_path: Path) -> None:
    """Also in a file that Python reads between two that DuckDB reads, with a row over two lines."""
    head = ",".join(HEADER).encode()
    odd = head + b'\r\nann,"two\nlines",1700000000,view\nann\xff,x,1700000000,view\nann,x\n'
    (days / "2024/2024-01-02.csv.gz").write_bytes(gzip.compress(odd))
    with (days / "2024/2024-01-03.csv").open("ab") as file:
        file.write(b"garbage\n")
    prepared = prepare(days, tmp_path / "data", PrepareOptions(max_rejected_ratio=1))
    assert rejected(tmp_path / "data") == [
        ("2024-01-02.csv.gz", 4, "ann\ufffd,x,1700000000,view"),
        ("2024-01-02.csv.gz", 5, "ann,x"),
        ("2024-01-03.csv", 3, "garbage"),
    ]
    assert prepared.manifest["events"] == 4
    assert "two\nlines" in {item for _, item, *_ in named(tmp_path / "data")}


def test_a_broken_file_among_them_is_named_and_nothing_is_left(days: Path, tmp_path: Path) -> None:
    whole = (days / "2024/2024-01-02.csv.gz").read_bytes()
    (days / "2024/2024-01-02.csv.gz").write_bytes(whole[:-9])
    with pytest.raises(
        DataError,
        match=r"2024-01-02\.csv\.gz: the gzip file is damaged",
    ):
        prepare(days, tmp_path / "data")
    (days / "2024/2024-01-02.csv.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"2024-01-02\.csv\.gz: the file is empty"):
        prepare(days, tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def test_two_headers_and_two_formats_are_rejected(days: Path, tmp_path: Path) -> None:
    (days / "2024/2024-01-04.csv").write_text(
        "item_id,user_id,timestamp,event_type\nx,ann,1700000000,view\n"
    )
    with pytest.raises(
        DataError,
        match=r"2024-01-04\.csv, line 1: the columns differ from those of .*2024-01-01\.csv",
    ):
        prepare(days, tmp_path / "data")
    (days / "2024/2024-01-04.csv").unlink()
    write_jsonl(days / "2024/2024-01-05.jsonl", EVENTS)
    with pytest.raises(
        DataError,
        match=r"logs: files of 2 formats \(csv, jsonl\); give files of one",
    ):
        prepare(days, tmp_path / "data")
    with pytest.raises(DataError, match="no such file"):
        prepare(days / "*.parquet", tmp_path / "data")


def test_a_name_with_the_letters_of_a_pattern_is_a_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "log[1]*.csv", EVENTS)
    write_csv(tmp_path / "log1.csv", [Event("eve", "other", 1_700_000_000, "view")])
    prepare(tmp_path / "log[1]*.csv", tmp_path / "data")
    prepare(table(EVENTS), tmp_path / "one")
    assert named(tmp_path / "data") == named(tmp_path / "one")
