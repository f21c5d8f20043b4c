"""What is written is read back in time order, and whatever is wrong with a log is a DataError that says where."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import zstandard

from npu_gr.errors import DataError
from npu_gr.replay import log
from npu_gr.replay.log import LoggedHistory, Record, read, write

HISTORY = LoggedHistory(items=[1, 2], actions=[0, 1], timestamps=[10, 11])
RECORDS = [
    Record(ts=0.0, kind="signal", user_id="a", tenant="t", history=HISTORY),
    Record(ts=0.5, kind="rank", user_id="a", candidates=[4, 9], labels={"click": [1, None]}, deadline_ms=50.0),
    Record(ts=0.5, kind="events", user_id="a", events=HISTORY),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_log_comes_back_as_it_was_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log{suffix}"
    write(path, RECORDS)
    assert list(read(path)) == RECORDS
    assert list(tmp_path.iterdir()) == [path]


def test_records_are_read_in_time_order_and_ties_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, RECORDS[::-1])
    assert [record.kind for record in read(path)] == ["signal", "events", "rank"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"ts": 1, "kind": "rank", "user_id": "a"}', "candidates"),
        ('{"ts": 1, "kind": "events", "user_id": "a"}', "events: missing"),
        ('{"ts": 1, "kind": "look", "user_id": "a"}', "look"),
        ('{"ts": 1, "kind": "signal", "user_id": "a", "colour": 1}', "colour"),
        ('{"ts": 1, "kind": "rank", "user_id": "a", "candidates": [1], "labels": {"x": []}}', "labels.x"),
        ('{"ts": 1, "kind": "rank", "user_id": "a", "candidates": [1], "labels": {"x": [2]}}', "<= 1"),
        (
            '{"ts":1,"kind":"signal","user_id":"a","history":{"items":[1],"actions":[],"timestamps":[1]}}',
            "1, 0 and 1 entries",
        ),
        ('{"ts": 1,', "truncated"),
        ('{"ts": 1, "kind": "signal", "user_id": "\udcff"}', "utf-8"),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "log.jsonl"
    good = '{"ts": 0, "kind": "signal", "user_id": "a"}\n\n'
    path.write_bytes((good + line).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"log\.jsonl, line 3: .*{reason}"):
        list(read(path))


def test_a_missing_file_and_an_unknown_suffix_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        list(read(tmp_path / "log.jsonl"))
    (tmp_path / "log.csv").write_text("")
    with pytest.raises(DataError, match=r"expected a name in \.jsonl"):
        list(read(tmp_path / "log.csv"))


@pytest.mark.parametrize("cut", [0.3, 0.9])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_was_cut_short_is_not_taken_for_the_whole(tmp_path: Path, suffix: str, cut: float) -> None:
    path = tmp_path / f"log.jsonl{suffix}"
    lines = b"".join(b'{"ts": %d, "kind": "signal", "user_id": "u%d"}\n' % (i, i * i) for i in range(20_000))
    packed = gzip.compress(lines) if suffix == ".gz" else zstandard.compress(lines)
    path.write_bytes(packed[: int(len(packed) * cut)])
    with pytest.raises(DataError, match=path.name):
        list(read(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_logs_that_were_packed_apart_and_joined_are_read_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.jsonl{suffix}"
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    path.write_bytes(b"".join(pack(b'{"ts": %d, "kind": "signal", "user_id": "a"}\n' % i) for i in range(3)))
    assert [record.ts for record in read(path)] == [0, 1, 2]


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(log, "import_module", absent)
    with pytest.raises(DataError, match=r"npu_gr\[zstd\]"):
        write(tmp_path / "log.jsonl.zst", RECORDS)
