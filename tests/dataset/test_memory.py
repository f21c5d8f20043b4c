"""Memory does not grow with the rows of a log: ten times as many need as much."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

NUM_USERS = 500
ROW_BYTES = 8 + 8 + 8  # what a reader that held the users, items and times of all rows would hold at least
CODE = """
import resource, sys
from npu_gr.dataset import prepare
print(prepare(sys.argv[1], sys.argv[2]).manifest["events"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write(path: Path, num_rows: int) -> None:
    random = np.random.default_rng(0)
    users = random.integers(NUM_USERS, size=num_rows).tolist()
    items = random.integers(1000, size=num_rows).tolist()
    with path.open("w") as file:
        file.write("user_id,item_id,timestamp\n")
        file.writelines(
            f"u{user},{item},{1_600_000_000 + at}\n" for at, (user, item) in enumerate(zip(users, items, strict=True))
        )


def peak_bytes(folder: Path, num_rows: int) -> int:
    write(folder / "log.csv", num_rows)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder / "log.csv"), str(folder / "data")],
        capture_output=True,
        text=True,
        check=True,
    )
    num_events, kib = map(int, done.stdout.split())
    assert num_events == num_rows
    return kib * 1024


def test_ten_times_the_rows_need_no_more_memory(tmp_path: Path) -> None:
    few, many = 200_000, 2_000_000
    grown = peak_bytes(tmp_path, many) - peak_bytes(tmp_path, few)
    assert grown < (many - few) * ROW_BYTES / 2
