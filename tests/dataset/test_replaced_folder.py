"""An interrupted, killed or failed run leaves the previous dataset, and nothing half-done."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset import files, prepare, read_dataset, table, write
from tests.dataset.logs import EVENTS, write_csv


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "log.csv", EVENTS)


@pytest.fixture
def out(tmp_path: Path, log: Path) -> Path:
    """A dataset."""
    prepare(log, tmp_path / "site/data")
    return tmp_path / "site/data"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_of_duckdb(*_: object) -> None:
    raise duckdb.IOException('IO Error: Could not write file "spill/more": No space left on device')


@pytest.mark.parametrize("what", ["duckdb", "write_users", "fsync"])
def test_a_full_disk_keeps_what_was_there(
    what: str, log: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(out)
    if what == "duckdb":
        monkeypatch.setattr(table.SourceTable, "load", no_space_of_duckdb)
    elif what == "write_users":
        monkeypatch.setattr("npu_gr.dataset.build.write_users", no_space)
    else:
        monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(DataError, match=f"{out}: cannot be written: No space left on device"):
        prepare(log, out)
    assert snapshot(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["data"]


def test_an_interrupt_keeps_what_was_there(
    log: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = snapshot(out)
    monkeypatch.setattr(write, "_grouped", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(log, out)
    assert snapshot(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["data"]


def test_what_a_killed_run_left_is_cleared_by_the_next(log: Path, out: Path) -> None:
    before = snapshot(out)
    code = (
        "import os, signal, sys, npu_gr.dataset.build as build\nbuild.write_users = lambda *_: "
        "os.kill(os.getpid(), signal.SIGKILL)\nbuild.prepare(sys.argv[1], sys.argv[2])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(log), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert snapshot(out) == before
    assert sorted(path.name for path in out.parent.iterdir()) == [".data.new", "data"]
    prepare(log, out)
    assert snapshot(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["data"]


def test_a_run_that_was_killed_between_its_renames_is_undone(log: Path, out: Path) -> None:
    out.rename(out.with_name(".data.old"))
    log.write_text("user_id,item_id,timestamp\nu,,1700000000\n")
    with pytest.raises(DataError, match="no row"):
        prepare(log, out)
    assert read_dataset(out).manifest["events"] == 5
    assert [path.name for path in out.parent.iterdir()] == ["data"]


def test_two_runs_never_write_the_same_folder(log: Path, out: Path) -> None:
    other = out.with_name(".data.new")
    other.mkdir()
    (other / "half").touch()
    descriptor = os.open(other, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another npu-gr prepare is writing it"):
            prepare(log, out)
        assert (other / "half").exists()
    finally:
        os.close(descriptor)
    prepare(log, out)


def test_a_run_that_begins_as_another_ends_keeps_its_folder(
    log: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run has renamed its folder, another run may make one of the same name."""
    other = out.with_name(".data.new")

    def sync(path: Path) -> None:
        if path == out.parent:
            other.mkdir()
            (other / "half").touch()

    monkeypatch.setattr(files, "_sync", sync)
    prepare(log, out)
    assert (other / "half").exists()


def test_a_folder_of_something_else_is_never_replaced(log: Path, out: Path, tmp_path: Path) -> None:
    (out / "notes.txt").touch()
    with pytest.raises(
        DataError,
        match=r"holds notes\.txt, which is no file of a dataset; --out "
        r"must name a new folder",
    ):
        prepare(log, out)
    with pytest.raises(DataError, match=r"holds log\.csv"):
        prepare(log, tmp_path)
    with pytest.raises(DataError, match="a file; --out must name a folder"):
        prepare(log, log)
    (tmp_path / "events.parquet").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "events.parquet").touch()
    with pytest.raises(DataError, match="holds no dataset"):
        prepare(log, other)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written: "):
        prepare(log, tmp_path / "file/data")


def test_an_empty_folder_is_filled(log: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert prepare(log, tmp_path / "data").manifest["events"] == 5


def test_a_link_goes_on_leading_to_the_dataset(log: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(out)
    prepare(log, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in out.parent.iterdir()] == ["data"]
    assert read_dataset(tmp_path / "link").manifest["events"] == 5
