"""Memory does not grow with the rows of a log: ten times as many need as much."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_USERS = 500
ROW_BYTES = 32  # of a reader that held all rows, at least
CODE = """
import resource, sys
from npu_gr.dataset import prepare
print(prepare(sys.argv[1], sys.argv[2]).manifest["events"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write(path: Path, num_rows: int) -> None:
    random = np.random.default_rng(0)
    table = {
        "user_id": random.integers(NUM_USERS, size=num_rows),
        "item_id": random.integers(1000, size=num_rows),
        "timestamp": 1_600_000_000 + np.arange(num_rows),
    }
    pq.write_table(pa.table(table), path, row_group_size=1 << 17)


def peak_bytes(folder: Path, num_rows: int) -> int:
    write(folder / "log.parquet", num_rows)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder / "log.parquet"), str(folder / "data")],
        capture_output=True,
        text=True,
        check=True,
    )
    num_events, kib = map(int, done.stdout.split())
    assert num_events == num_rows
    return kib * 1024


def test_ten_times_the_rows_need_no_more_memory(tmp_path: Path) -> None:
    few, many = 120_000, 1_200_000
    grown = peak_bytes(tmp_path, many) - peak_bytes(tmp_path, few)
    assert grown < (many - few) * ROW_BYTES * 0.75
