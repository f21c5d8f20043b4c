"""Memory grows neither with the rows of a log nor with what a small file claims to hold."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NUM_USERS = 500
ROW_BYTES = 32  # of a reader that held all rows, at least
MB = 1 << 20
MOST_MB = 400  # DuckDB's 100 MB, and the longest line or member in its forms
# a process that has imported everything forks for each log, whose memory begins at that of now
CODE = """
import os, sys
from npu_gr.core.errors import DataError
from npu_gr.dataset import prepare
import npu_gr.dataset.build, duckdb, pyarrow.compute

def peak_kib():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])

for line in sys.stdin:
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            print(code, 0, 0, flush=True)
        continue
    log, folder = line.rstrip("\\n").split("\\t")
    before = peak_kib()
    try:
        result = prepare(log, folder).manifest["events"]
    except DataError as error:
        result = -1
        print(error, file=sys.stderr)
    print(result, before, peak_kib(), flush=True)
    os._exit(0)
"""


def write(path: Path, num_rows: int) -> None:
    random = np.random.default_rng(0)
    table = {
        "user_id": random.integers(NUM_USERS, size=num_rows),
        "item_id": random.integers(1000, size=num_rows),
        "timestamp": 1_600_000_000 + np.arange(num_rows),
    }
    pq.write_table(pa.table(table), path, row_group_size=1 << 17)


Run = Callable[[Path], tuple[int, int, int]]
"""Prepares a log: its number of events, and the peaks of memory in bytes before and after."""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=pipe, stdout=pipe, text=True
    ) as process:

        def prepared(path: Path) -> tuple[int, int, int]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{path}\t{path.parent / 'data'}\n")
            process.stdin.flush()
            num_events, before, after = map(int, process.stdout.readline().split())
            assert before, f"it ended with code {num_events}"
            return num_events, before * 1024, after * 1024

        yield prepared


def peak_bytes(run: Run, folder: Path, num_rows: int) -> int:
    write(folder / "log.parquet", num_rows)
    num_events, _, after = run(folder / "log.parquet")
    assert num_events == num_rows
    return after


def test_more_rows_than_duckdb_may_hold_need_no_more_memory(tmp_path: Path, run: Run) -> None:
    few, many = 1_200_000, 3_000_000
    most = peak_bytes(run, tmp_path, few) + (many - few) * ROW_BYTES * 0.75
    # what threads hold at the same time differs from run to run, so the lower of two peaks counts
    assert peak_bytes(run, tmp_path, many) < most or peak_bytes(run, tmp_path, many) < most


def repeated(text: str, num: int) -> Any:
    return pa.DictionaryArray.from_arrays(np.zeros(num, np.int8), [text])


def table(path: Path, num: int, **columns: Any) -> Path:
    known = {
        "user_id": repeated("u", num),
        "item_id": repeated("i", num),
        "timestamp": np.arange(1_600_000_000, 1_600_000_000 + num),
    }
    file = path / "log.parquet"
    pq.write_table(pa.table(known | columns), file, compression="zstd")
    return file


def lists(path: Path) -> Path:
    values = repeated("a", 30 * MB)
    offsets = np.linspace(0, len(values), 301).astype(np.int32)
    return table(path, 300, tags=pa.ListArray.from_arrays(offsets, values))


def packed(name: str, head: bytes, body: bytes, times: int, tail: bytes = b"") -> Any:
    def write_packed(path: Path) -> Path:
        with gzip.open(path / name, "wb", compresslevel=6) as file:
            file.write(head)
            for _ in range(times):
                file.write(body)
            file.write(tail)
        return path / name

    return write_packed


CSV = b"user_id,item_id,timestamp,event\n"
KEYS = b'{"user_id": "u", ' + b", ".join(b'"k%d": 1' % at for at in range(2_000)) + b"}\n"
HOSTILE: dict[str, Callable[[Path], Path]] = {
    "cells of a dictionary": lambda path: table(path, 300, item_id=repeated("x" * MB, 300)),
    "one long cell": lambda path: table(path, 3, item_id=["x" * (200 * MB), "a", "b"]),
    "long lists": lists,
    "wide columns": lambda path: table(
        path, 10_000, **{f"c{at}": repeated("x" * 4000, 10_000) for at in range(100)}
    ),
    "a list of nothing": packed("log.json.gz", b"[", b" " * MB, 300, b"1]"),
    "a list of one object": packed("log.json.gz", b'[{"a": "', b"x" * MB, 300, b'"}]'),
    "a list of long objects": packed(
        "log.json.gz", b"[", b'{"user_id": "' + b"x" * MB + b'"},', 100, b"{}]"
    ),
    "a user of many items": packed("log.json.gz", b'{"u": [1', b",1" * (MB // 2), 300, b"]}"),
    "a line": packed("log.csv.gz", CSV, b"x" * MB, 300),
    "lines of a cell": packed("log.csv.gz", CSV, b"u,i,1600000000," + b"x" * MB + b"\n", 100),
    "lines of cells": packed("log.csv.gz", CSV, b"," * (MB - 1000) + b"\n", 100),
    "long lines of cells": packed("log.csv.gz", CSV, b"," * (7 * MB) + b"\n", 20),
    "open quotes": packed("log.csv.gz", CSV, b'u,i,1600000000,"' + b"x" * MB + b"\n", 100),
    "a line of JSON": packed("log.jsonl.gz", b'{"user_id": "', b"x" * MB, 300, b'"}'),
    "lines of keys": packed("log.jsonl.gz", b"", KEYS, 3000),
    "lines of depth": packed("log.jsonl.gz", b"", b'{"user_id":' * (MB // 12) + b"\n", 300),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_memory_is_bounded_whatever_a_small_file_claims(
    make: Callable[[Path], Path], tmp_path: Path, run: Run
) -> None:
    path = make(tmp_path)
    assert path.stat().st_size < 2 * MB
    _, before, after = run(path)
    assert after - before < MOST_MB * MB
