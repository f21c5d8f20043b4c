"""A log prepared on a cluster of Ray: what one run makes of it, also where a worker dies."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, prepare, read_dataset
from npu_gr.dataset import on_ray as module
from npu_gr.dataset.formats import paths_of
from tests.dataset.logs import assert_same_events

HAS_RAY = importlib.util.find_spec("ray") is not None
START = 1_700_000_000


def table_of(seed: int, num_rows: int = 4000) -> pa.Table:
    """Rows with ties in time, repeated rows, rows without a user, and users with blanks."""
    random = np.random.default_rng(seed)
    users = [
        f"u{one}" + " " * int(one % 7 == place % 2)
        for place, one in enumerate(random.integers(0, 90, num_rows))
    ]
    blank = random.random(num_rows) < 0.01
    return pa.table(
        {
            "user_id": [None if gone else user for user, gone in zip(users, blank, strict=True)],
            "item_id": random.integers(0, 40, num_rows),
            "timestamp": START + random.integers(0, 400, num_rows),
            "event": random.choice(["view", "buy"], num_rows),
            "device": random.choice(["web", "app", ""], num_rows),
        }
    )


def write_log(folder: Path) -> Path:
    folder.mkdir()
    for seed in range(3):
        pq.write_table(table_of(seed), folder / f"{seed}.parquet")
    (folder / "_SUCCESS").write_text("")
    return folder


def shards(log: Path, num_parts: int) -> list[pa.Table]:
    """The rows of each part, in the order of the log."""
    files = sorted(log.glob("*.parquet"))
    split = module._Split(("user_id",), num_parts)
    numbered = pa.table({"number": range(len(files)), "uri": [one.as_uri() for one in files]})
    rows = pa.concat_tables(split(numbered))
    part = rows[module._PART].to_numpy()
    return [rows.filter(pa.array(part == one)) for one in range(num_parts)]


def test_a_user_is_in_one_part_and_no_row_is_lost(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    found = shards(log, 4)
    assert sum(map(len, found)) == 12_000
    users = [{user.strip() for user in one["user_id"].to_pylist() if user} for one in found]
    assert sum(map(len, users)) == len(set.union(*users)) == 90
    assert min(map(len, users)) > 10
    missing = [one["user_id"].null_count for one in found]
    assert min(missing) > 0, "rows without a user are spread"


@pytest.mark.parametrize("given", ["", "/", "/*.parquet", "/0.parquet"])
def test_the_files_of_a_log(tmp_path: Path, given: str) -> None:
    log = write_log(tmp_path / "log")
    for text in (f"{log}{given}", f"{log.as_uri()}{given}"):
        names = [one.uri.rpartition("/")[2] for one in module._files(text)]
        assert names == (["0.parquet"] if "0" in given else [f"{n}.parquet" for n in range(3)])


def test_no_file_is_read_that_prepare_would_not_read(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    for folder in ("_delta_log", "more", ".tmp"):
        (log / folder).mkdir()
        pq.write_table(table_of(0), log / folder / "9.parquet")
    for text in (str(log), f"{log}/*.parquet"):
        names = [Path(one.uri.removeprefix("file://")) for one in module._files(text)]
        assert names == paths_of(Path(f"{log}/*.parquet" if "*" in text else log), "parquet")
    (log / "dt=2026-11-29").mkdir()
    pq.write_table(table_of(0), log / "dt=2026-11-29" / "0.parquet")
    with pytest.raises(DataError, match="one layout"):
        split_of(log)


def split_of(
    log: Path, options: PrepareOptions | None = None
) -> tuple[module._Split, PrepareOptions]:
    return module._split(module._files(str(log)), options or PrepareOptions(), None, 1 << 10)


def write_days(folder: Path) -> Path:
    """Write a file for each day and shop, whose columns are in the names of folders alone."""
    for day in range(3):
        for shop in ("a%20b", "__HIVE_DEFAULT_PARTITION__"):
            path = folder / f"dt=2024-03-0{day + 1}" / f"shop={shop}"
            path.mkdir(parents=True)
            rows = table_of(day, 500).drop_columns(["timestamp", "device"])
            pq.write_table(rows, path / "0.parquet")
    return folder


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    log = write_days(tmp_path / "log")
    by_shop = PrepareOptions(request_features=("shop",))
    split, options = split_of(log, by_shop)
    assert (options.time, options.event, split.user) == ("dt", "event", ("user_id",))
    files = module._files(str(log))
    numbered = pa.table({"number": range(len(files)), "uri": [one.uri for one in files]})
    rows = pa.concat_tables(split(numbered))
    assert len(rows) == 3000
    found = set(zip(rows["dt"].to_pylist(), rows["shop"].to_pylist(), strict=True))
    days = {f"2024-03-0{day}" for day in (1, 2, 3)}
    assert found == {(day, shop) for day in days for shop in ("a b", None)}
    # the rows as a frame make what one run makes of the folders
    kept = rows.drop_columns([module._PART, module._FILE, module._ROW])
    prepare(kept, tmp_path / "frame", options)
    prepare(log, tmp_path / "once", by_shop)
    assert_same_events(read_dataset(tmp_path / "frame"), read_dataset(tmp_path / "once"))


def test_what_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for text, why in (
        (str(tmp_path / "none"), "none"),
        (str(tmp_path / "empty"), "no Parquet file"),
        ("nowhere://bucket/x", "nowhere"),
    ):
        with pytest.raises(DataError, match=why):
            module._files(text)


@pytest.mark.ray
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.parametrize("kills", [False, True])
def test_it_is_what_one_run_makes(tmp_path: Path, kills: bool) -> None:
    log = write_log(tmp_path / "log")
    items = tmp_path / "items.csv"
    items.write_text("item_id,title,price\n" + "".join(f"{n},Item {n},{n}.5\n" for n in range(40)))
    options = PrepareOptions(event_features=("device:category",))
    num_bytes = sum(path.stat().st_size for path in log.glob("*.parquet"))
    call = (
        "from pathlib import Path\n"
        "from npu_gr.dataset import PrepareOptions\n"
        "from npu_gr.dataset.on_ray import prepare_on_ray\n"
        f"prepare_on_ray({str(log)!r}, {str(tmp_path / 'ray')!r}, PrepareOptions("
        f"event_features=('device:category',)), items=Path({str(items)!r}), "
        f"part_bytes={-(-num_bytes // 4)})"
    )
    with subprocess.Popen([sys.executable, "-c", call]) as running:
        if kills:
            _kill_workers(running)
        assert running.wait(timeout=240) == 0
    ordered = tmp_path / "ordered"
    ordered.mkdir()
    for at, part in enumerate(shards(log, 4)):
        rows = part.drop_columns([module._PART, module._FILE, module._ROW])
        pq.write_table(rows, ordered / f"{at}.parquet")
    prepare(ordered, tmp_path / "once", options, items=items)
    for name in ("events", "users", "items"):
        one, other = (
            pq.read_table(tmp_path / folder / f"{name}.parquet") for folder in ("ray", "once")
        )
        assert one.equals(other), name
    assert_same_events(read_dataset(tmp_path / "ray"), read_dataset(tmp_path / "once"))
    assert read_dataset(tmp_path / "ray").manifest["rejected"]


def _kill_workers(running: subprocess.Popen[bytes]) -> None:
    """Kill two processes that prepare a part: Ray runs the parts again."""
    killed: set[int] = set()
    while len(killed) < 2 and running.poll() is None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command = path.read_bytes()
                if b"ray::" in command and b"MapBatches(prepared)" in command:
                    pid = int(path.parent.name)
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        time.sleep(0.005)
    assert len(killed) >= 2


@pytest.mark.ray
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
def test_an_error_of_a_part_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    bad = table_of(9).set_column(2, "timestamp", [[None] * 4000])
    pq.write_table(bad.cast(table_of(0).schema), log / "9.parquet")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "npu_gr", "prepare", str(log), "--on", "ray"]
    command += ["--out", str(out), "--max-rejected", "0.1"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert "26% of the rows cannot be used" in found.stderr
    assert not out.exists()


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from npu_gr.cli.main import main\n"
        f"main(['prepare', {str(log)!r}, '--on', 'ray', '--out', {str(tmp_path / 'out')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'npu_gr[ray]'" in done.stderr
