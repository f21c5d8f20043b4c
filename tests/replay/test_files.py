"""Written logs are read in time order, and errors are DataErrors with the line."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from npu_gr.core import lines
from npu_gr.core.errors import DataError
from npu_gr.replay.files import QueryLog, read, write
from npu_gr.replay.log import LoggedAnswer, LoggedGenerate, LoggedHistory, QueryRecord
from npu_gr.replay.plan import ReplayOptions, plan

HISTORY = LoggedHistory(items=[1, 2], actions=[0, 1], timestamps=[10, 11])
RECORDS = [
    QueryRecord(ts=0.0, kind="signal", user_id="a", tenant="t", history=HISTORY),
    QueryRecord(
        ts=0.5,
        kind="rank",
        user_id="a",
        candidates=[4, 9],
        labels={"click": [1, None]},
        deadline_ms=50.0,
    ),
    QueryRecord(ts=0.5, kind="events", user_id="a", events=HISTORY),
]


FULL = [
    *RECORDS,
    QueryRecord(
        ts=0.75,
        kind="rank",
        user_id="ü",
        base="f" * 32,
        history=HISTORY,
        candidates=[7],
        timestamp=3,
        top_k=1,
        delay_ms=20.0,
        answer=LoggedAnswer(outcome="hbm_hit", digest="d", scores={"click": b"\0\0\0\0"}),
    ),
    QueryRecord(ts=0.8, kind="signal", user_id="a", num_candidates=9),
    QueryRecord(
        ts=0.9,
        kind="generate",
        user_id="a",
        generate=LoggedGenerate(beam_width=4, allow_items=[1], attributes={"genre": ["x", 3]}),
    ),
]


def test_a_file_keeps_every_field(tmp_path: Path) -> None:
    raw = LoggedHistory.of(HISTORY.events())
    packed = [msgspec.structs.replace(r, history=raw if r.history else None) for r in FULL]
    for name in ("log.jsonl", "log.jsonl.gz", "log.jsonl.zst"):
        for records in (FULL, packed):
            assert write(tmp_path / name, records) == len(FULL)
            assert list(read(tmp_path / name)) == records


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_bad_lines_are_skipped_by_choice_and_told_with_their_numbers(
    tmp_path: Path, suffix: str
) -> None:
    lines = [b'{"ts": %d, "kind": "signal", "user_id": "u%d"}' % (i, i * i) for i in range(3000)]
    lines[1] = lines[1][:20]
    lines[7] = b"\xff\xfe"
    data = b"\n".join(lines)[:-5]  # and the last line is cut
    packs: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    pack = packs.get(suffix[6:], bytes)
    path = tmp_path / f"log{suffix}"
    path.write_bytes(pack(data))
    log = QueryLog(path, "skip")
    assert len(list(log)) == 2997
    assert log.num_bad == 3
    assert [text.split("line ")[1].split(":")[0] for text in log.bad] == ["2", "8", "3000"]
    assert log.read_ratio == 1.0
    with pytest.raises(DataError, match=r"line 2: .*--bad-lines skip"):
        list(QueryLog(path))
    if suffix != ".jsonl":
        path.write_bytes(pack(data)[: len(pack(data)) // 2])
        cut = QueryLog(path, "skip")
        assert 0 <= len(list(cut)) < 2997
        assert "end" in cut.bad[-1]


def test_what_is_a_little_late_is_put_in_order_and_what_is_very_late_rejected(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    order = [(i // 100) * 100 + (99 - i % 100) for i in range(10_000)]
    write(path, (QueryRecord(ts=float(i), kind="signal", user_id="a") for i in order))
    assert [record.ts for record in read(path)] == list(range(10_000))
    late = [*range(1, 5000), 0]
    write(path, (QueryRecord(ts=float(i), kind="signal", user_id="a") for i in late))
    with pytest.raises(DataError, match=r"line 5000: more than 4096"):
        list(read(path))


def test_a_log_of_any_length_is_planned_and_written_in_the_same_memory(tmp_path: Path) -> None:
    def peak_bytes(num: int) -> int:
        path = tmp_path / f"{num}.jsonl.gz"
        record = QueryRecord(ts=0.0, kind="rank", user_id="a", candidates=[1], history=HISTORY)
        tracemalloc.start()
        write(
            path,
            (
                msgspec.structs.replace(record, ts=i * 0.01, user_id=f"u{i % 1000}")
                for i in range(num)
            ),
        )
        options = ReplayOptions(base_url="http://127.0.0.1:1", signal_lead_s=0.05)
        assert sum(1 for _ in plan(read(path), options)) == 2 * num
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(100)
    short, long = peak_bytes(6_000), peak_bytes(18_000)
    assert long < short * 1.2


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
        (
            '{"ts": 1, "kind": "rank", "user_id": "a", "candidates": [1], "labels": {"x": []}}',
            "labels.x",
        ),
        (
            '{"ts": 1, "kind": "rank", "user_id": "a", "candidates": [1], "labels": {"x": [2]}}',
            "<= 1",
        ),
        (
            '{"ts":1,"kind":"signal","user_id":"a","history":{"items":[1],"actions":[],"timestamps":[1]}}',
            "1, 0 and 1 entries",
        ),
        ('{"ts": 1,', "truncated"),
        ('{"ts": 1, "kind": "signal", "user_id": "\udcff"}', "(?i:utf-8)"),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "log.jsonl"
    good = '{"ts": 0, "kind": "signal", "user_id": "a"}\n\n'
    path.write_bytes((good + line).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"log\.jsonl, line 3: .*{reason}"):
        list(read(path))


def test_a_missing_file_and_an_unknown_suffix_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        list(read(tmp_path / "log.jsonl"))
    (tmp_path / "log.csv").write_text("")
    with pytest.raises(DataError, match=r"the suffix must be one of \.jsonl"):
        list(read(tmp_path / "log.csv"))


@pytest.mark.parametrize("cut", [0.3, 0.9])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_was_cut_short_is_not_taken_for_the_whole(
    tmp_path: Path, suffix: str, cut: float
) -> None:
    path = tmp_path / f"log.jsonl{suffix}"
    lines = b"".join(
        b'{"ts": %d, "kind": "signal", "user_id": "u%d"}\n' % (i, i * i) for i in range(20_000)
    )
    packed = gzip.compress(lines) if suffix == ".gz" else zstandard.compress(lines)
    path.write_bytes(packed[: int(len(packed) * cut)])
    with pytest.raises(DataError, match=path.name):
        list(read(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_logs_that_were_packed_apart_and_joined_are_read_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.jsonl{suffix}"
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    path.write_bytes(
        b"".join(pack(b'{"ts": %d, "kind": "signal", "user_id": "a"}\n' % i) for i in range(3))
    )
    assert [record.ts for record in read(path)] == [0, 1, 2]


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(lines, "import_module", absent)
    with pytest.raises(DataError, match=r"npu_gr\[zstd\]"):
        write(tmp_path / "log.jsonl.zst", RECORDS)
