"""`python -m benchmarks prepare`: speed and peak memory of `npu-gr prepare`, against plain SQL.

A log of UUID-like users, SKUs, times and event types is written in each format. The arms run in
turn, each in its own process; times exclude the imports, memory is the peak of the process. The SQL
in DuckDB guesses no columns, does not report bad rows, and does not clean names; it numbers users
and items, sorts, and writes the same Parquet tables. All arms must find the same events, users and
items before a line is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.frame import COUNT, FILE, SEED, Line, compared, only, option, tell
from npu_gr.core.errors import DataError

FORMATS = {"csv": "log.csv", "gz": "log.csv.gz", "jsonl": "log.jsonl", "parquet": "log.parquet"}
OPTIONS = (
    option("--rows", "num_rows", default=2_000_000, type=COUNT, help="Rows of each log."),
    option(
        "--runs", "num_runs", default=3, type=COUNT, help="Runs of each arm; the median counts."
    ),
    option("--before", type=FILE, help="Checkout of older code: one more arm."),
    only(tuple(FORMATS)),
    SEED,
)
TWICE = 2.0  # target: speed relative to the code of before
MOST_MB = 400.0
LOG = """
SELECT printf('%08x-user', hash(i, {seed}) % ({rows} // 20 + 1)) AS user_id,
    printf('SKU-%06d', hash(i, {seed} + 1) % 20000) AS sku,
    1600000000 + hash(i, {seed} + 2) % 30000000 AS timestamp,
    ['view', 'view', 'view', 'cart', 'purchase'][CAST(hash(i, {seed} + 3) % 5 AS BIGINT) + 1]
        AS event_type
FROM range({rows}) t(i)
"""
FRAME = """
import json, re, sys, time
log, out = sys.argv[1:]
{imports}
began_at = time.perf_counter(), time.process_time()
{work}
seconds, cpu_s = time.perf_counter() - began_at[0], time.process_time() - began_at[1]
peak = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024
print(json.dumps({{"seconds": seconds, "cpu_s": cpu_s, "peak_mb": peak, "found": found}}))
"""
OURS = FRAME.format(
    imports="from npu_gr.dataset import prepare",
    work="""manifest = prepare(log, out).manifest
found = [manifest["events"], manifest["users"], manifest["items"]["all"]]""",
)
SQL = FRAME.format(
    imports="import duckdb, os",
    work='''os.mkdir(out)
read = {"csv": "csv", "gz": "csv", "jsonl": "json", "parquet": "parquet"}[log.rpartition(".")[2]]
rows = f"read_{read}('{log}'{'' if read == 'parquet' else ', ignore_errors = true'})"
con = duckdb.connect(config={"memory_limit": "512MB", "threads": 2, "temp_directory": out})
con.execute(f"""
CREATE TABLE log AS SELECT DISTINCT user_id, sku, timestamp, event_type FROM {rows};
CREATE TABLE users AS SELECT user_id AS name, row_number() OVER () - 1 AS code
    FROM (SELECT DISTINCT user_id FROM log);
CREATE TABLE items AS SELECT sku AS name, row_number() OVER () - 1 AS code
    FROM (SELECT DISTINCT sku FROM log);
CREATE TABLE events AS SELECT event_type AS name, row_number() OVER () - 1 AS code
    FROM (SELECT DISTINCT event_type FROM log);
COPY (SELECT u.code AS user, i.code AS item, e.code AS action, timestamp AS time
    FROM log JOIN users u ON u.name = user_id JOIN items i ON i.name = sku
    JOIN events e ON e.name = event_type
    ORDER BY u.code, time) TO '{out}/events.parquet';
COPY (SELECT name FROM users ORDER BY code) TO '{out}/users.parquet';
COPY (SELECT name FROM items ORDER BY code) TO '{out}/items.parquet';
""")
found = [
    con.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0]
    for name in ("log", "users", "items")
]''',
)


def lines(
    num_rows: int, num_runs: int, before: Path | None, parts: Sequence[str], seed: int
) -> Iterator[Line]:
    """Compare rows a second of wall and CPU time, and memory, in each format.

    Raises:
        DataError: An arm fails, or two arms found different events.
    """
    arms = {"DuckDB, 14 lines of SQL": (SQL, None), "ours": (OURS, Path(__file__).parents[1])}
    if before is not None:
        arms["before"] = (OURS, before.absolute())
    with TemporaryDirectory() as name:
        for part in parts:
            log = Path(name) / FORMATS[part]
            write_log(log, num_rows, seed)
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
            for at in range(num_runs):
                tell("prepare", f"{part}, run {at + 1} of {num_runs}")
                for arm, (code, root) in arms.items():
                    runs[arm].append(run_arm(code, log, root))
            log.unlink()
            yield from _compared(f"{num_rows:,} rows, {part}", num_rows, runs)


def _compared(case: str, num_rows: int, runs: dict[str, list[dict[str, Any]]]) -> Iterator[Line]:
    found = {arm: own[0]["found"] for arm, own in runs.items()}
    if len(set(map(tuple, found.values()))) > 1:
        raise DataError(f"bench prepare: {case}: not the same events, users and items: {found}")
    for unit, clock in (("rows/s", "seconds"), ("rows/CPU s", "cpu_s")):
        speed = {arm: num_rows / median(one[clock] for one in own) for arm, own in runs.items()}
        for arm, value in speed.items():
            if arm != "ours":
                target = TWICE if arm == "before" else None
                yield compared(
                    "prepare", case, speed["ours"], unit, arm, value, speed["ours"] / value, target
                )
    peaks = {arm: max(one["peak_mb"] for one in own) for arm, own in runs.items()}
    for arm, value in (("the limit", MOST_MB), *peaks.items()):
        if arm != "ours":
            target = 1.0 if arm == "the limit" else None
            yield compared(
                "prepare",
                case,
                peaks["ours"],
                "MB at its peak",
                arm,
                value,
                value / peaks["ours"],
                target,
            )


def write_log(path: Path, num_rows: int, seed: int) -> None:
    """Write a log in the format of its suffix."""
    import duckdb

    kind = {".csv": "CSV", ".gz": "CSV, COMPRESSION gzip", ".jsonl": "JSON", ".parquet": "PARQUET"}[
        path.suffix
    ]
    with duckdb.connect() as con:
        con.execute(f"COPY ({LOG.format(rows=num_rows, seed=seed)}) TO '{path}' (FORMAT {kind})")


def run_arm(code: str, log: Path, root: Path | None) -> dict[str, Any]:
    """Run an arm in its own process.

    Args:
        code: Python code of the arm.
        log: Log to read.
        root: Checkout whose package is imported.

    Raises:
        DataError: The arm failed.
    """
    with TemporaryDirectory(dir=log.parent) as folder:
        environment = os.environ | ({"PYTHONPATH": str(root)} if root is not None else {})
        command = [sys.executable, "-c", code, str(log), str(Path(folder) / "out")]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=folder, check=False
        )
    if done.returncode:
        raise DataError(f"bench prepare: {log.name}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
