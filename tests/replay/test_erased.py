"""An erased user is hidden from all readers at once, and removed from all recordings."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import ConfigError, DataError, Unavailable
from npu_gr.core.history import UserKey
from npu_gr.core.lines import raw_lines
from npu_gr.replay import erased, files, purge
from npu_gr.replay.erased import KEY_FILE, made_key, recorded_as
from npu_gr.replay.files import QueryLog, read, write
from npu_gr.replay.recorder import RecordConfig, Recorder
from tests.replay.test_recorder import over

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def unpacked(folder: Path) -> bytes:
    """All files of a folder, whatever packs them."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return b"\n".join(
        b"\n".join(raw_lines(path)) if path.name.startswith("traffic-") else path.read_bytes()
        for path in found
    )


def recorded(folder: Path, **values: Any) -> Path:
    """A finished file with three requests of each of three users."""
    with Recorder(RecordConfig(folder=str(folder), enabled=True, **values)) as one:
        for _ in range(3):
            for user in ("anna", "bert", "carl"):
                one.offer(over(user))
    return next(path for path in folder.iterdir() if path.name.startswith("traffic-"))


def recorded_users(folder: Path) -> list[str]:
    return [record.user_id for path in sorted(folder.glob("traffic-*")) for record in read(path)]


def erase(folder: Path, *names: str, at: float | None = None, key: bytes | None = None) -> None:
    for name in names:
        erased.add(folder, [recorded_as(UserKey("", name), key)], time.time() if at is None else at)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("users", ["hashed", "clear"])
async def test_hidden_at_once_then_removed(tmp_path: Path, suffix: Any, users: Any) -> None:
    path = recorded(tmp_path, suffix=suffix, users=users)
    before = path.read_bytes()
    one = Recorder(RecordConfig(folder=str(tmp_path), users=users, suffix=suffix))
    assert await one.erase(UserKey("", "anna"))
    name = recorded_as(UserKey("", "anna"), None if users == "clear" else made_key(tmp_path)).user
    assert path.read_bytes() == before
    assert name.encode() in unpacked(tmp_path)
    log = QueryLog(path)
    assert len(list(log)) == 6
    assert log.num_erased == 3
    done = purge.purge(tmp_path)
    assert (done.num_files, done.num_rewritten, done.num_removed, done.num_left) == (1, 1, 3, 0)
    assert name.encode() not in unpacked(tmp_path)
    assert len(list(read(path))) == 6
    assert not (tmp_path / erased.LIST).exists()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_what_comes_after_the_erasure_stays(tmp_path: Path) -> None:
    path = recorded(tmp_path, users="clear")
    erase(tmp_path, "anna", at=1.0)
    assert len(list(read(path))) == 9
    assert purge.purge(tmp_path).num_removed == 0
    assert len(list(read(path))) == 9


async def test_queued_requests_of_an_erased_user_are_not_written(tmp_path: Path) -> None:
    one = Recorder(RecordConfig(folder=str(tmp_path), enabled=True, users="clear"))
    one.offer(over("anna"))
    one.offer(over("bert"))
    await one.erase(UserKey("", "anna"))
    one.offer(over("anna"))
    with one:
        pass
    assert recorded_users(tmp_path) == ["bert", "anna"]
    assert (one.status().written, one.status().erased) == (2, 1)


async def test_a_file_that_is_being_written_holds_the_user_in_the_list(tmp_path: Path) -> None:
    path = recorded(tmp_path, users="clear")
    part = path.rename(path.with_name(path.name + ".part"))
    erase(tmp_path, "anna")
    assert purge.purge(tmp_path).num_left == 1
    path = part.rename(part.with_suffix(""))
    assert len(list(read(path))) == 6
    assert (purge.purge(tmp_path).num_removed, purge.purge(tmp_path).num_left) == (3, 0)


def test_a_file_with_nobody_else_goes(tmp_path: Path) -> None:
    path = recorded(tmp_path, users="clear")
    erase(tmp_path, "anna", "bert", "carl")
    assert purge.purge(tmp_path).num_removed == 9
    assert not path.exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_record_is_removed_because_nobody_knows_whose_it_is(
    tmp_path: Path, suffix: str
) -> None:
    path = recorded(tmp_path, users="clear", suffix=suffix)
    if suffix == ".jsonl":
        path.write_bytes(path.read_bytes() + b'{"user_id": "anna", "ts')
    else:
        path.write_bytes(path.read_bytes()[:-3])
    erase(tmp_path, "anna")
    done = purge.purge(tmp_path)
    assert done.num_unreadable == 1
    assert done.num_left == 0
    assert b"anna" not in unpacked(tmp_path)
    assert {record.user_id for record in read(path)} <= {"bert", "carl"}


def test_a_full_disk_leaves_the_file_whole_and_the_user_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path, users="clear", suffix=".jsonl")
    before = path.read_bytes()
    erase(tmp_path, "anna")

    def reject(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", reject)
        done = purge.purge(tmp_path)
    assert len(done.failed) == 1
    assert "No space left" in done.failed[0]
    assert done.num_left == 1
    assert path.read_bytes() == before
    assert len(list(read(path))) == 6
    assert not list(tmp_path.glob(".purge-traffic*"))
    assert purge.purge(tmp_path).num_removed == 3


async def test_an_erasure_that_cannot_be_listed_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, users="clear")
    one = Recorder(RecordConfig(folder=str(tmp_path), users="clear"))

    def reject(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", reject)
    with pytest.raises(
        Unavailable, match=r"could not erase the user.*No space left.*send the request again"
    ):
        await one.erase(UserKey("", "anna"))


def test_a_list_that_was_cut_counts_what_was_acknowledged_and_a_damaged_one_hides_everything(
    tmp_path: Path,
) -> None:
    path = recorded(tmp_path, users="clear")
    erase(tmp_path, "anna", "bert")
    listed = tmp_path / erased.LIST
    listed.write_bytes(listed.read_bytes()[:-5] + b" " * 500)
    assert {record.user_id for record in read(path)} == {"bert", "carl"}
    erase(tmp_path, "carl")
    assert listed.read_bytes().count(b"\n") == 3
    assert listed.read_bytes().endswith(b"}\n")
    assert {record.user_id for record in read(path)} == {"bert"}
    listed.write_bytes(listed.read_bytes().replace(b'"who"', b'"wo"'))
    with pytest.raises(DataError, match="unknown whose records are erased"):
        list(read(path))


def test_a_user_erased_again_during_a_purge_stays_listed(tmp_path: Path) -> None:
    recorded(tmp_path, users="clear")
    erase(tmp_path, "anna", at=5.0)
    done = dict(erased.read(tmp_path).until)
    erase(tmp_path, "anna", at=6.0)
    erased.drop(tmp_path, done)
    assert list(erased.read(tmp_path).until.values()) == [6.0]


def test_the_list_names_nobody(tmp_path: Path) -> None:
    erase(tmp_path, "anna")
    assert b"anna" not in (tmp_path / erased.LIST).read_bytes()
    assert (tmp_path / erased.LIST).stat().st_mode & 0o777 == 0o600


def test_a_conversion_leaves_erased_users_out(tmp_path: Path) -> None:
    path = recorded(tmp_path, users="clear")
    erase(tmp_path, "anna")
    before = os.umask(0)
    try:
        for name in ("log.jsonl.zst", "log.jsonl.gz"):
            assert write(tmp_path / "out" / name, QueryLog(path)) == 6
            assert (tmp_path / "out" / name).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_one_purge_at_a_time_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    recorded(tmp_path, users="clear")
    (tmp_path / ".purge-traffic-1.jsonl.gz").write_bytes(b"anna")
    with purge._alone(tmp_path), pytest.raises(ConfigError, match="another purge is running"):
        purge.purge(tmp_path)
    erase(tmp_path, "anna")
    purge.purge(tmp_path)
    assert not list(tmp_path.glob(".purge-traffic*"))


async def test_an_instance_purges_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path)
    with Recorder(RecordConfig(folder=str(tmp_path))) as one:
        assert await one.erase(UserKey("", "anna"))
        for _ in range(600):
            if one.purger.runs:
                break
            await asyncio.sleep(0.05)
        assert one.purger.runs == {"ok": 1}
        assert one.purger.erased_at is None
    assert not (tmp_path / erased.LIST).exists()
    erase(tmp_path, "bert", key=made_key(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")  # of the next start, which finds the list
    with Recorder(RecordConfig(folder=str(tmp_path))) as one:
        for _ in range(600):
            if one.purger.runs:
                break
            await asyncio.sleep(0.05)
        assert one.purger.runs == {"failed": 1}
        assert one.purger.erased_at is not None


async def test_a_recorder_that_was_never_on_has_nothing_to_forget(tmp_path: Path) -> None:
    assert not await Recorder(RecordConfig(folder=str(tmp_path / "r"))).erase(UserKey("", "anna"))
    assert not (tmp_path / "r" / erased.LIST).exists()


def test_users_are_hashed_by_default_with_a_key_that_is_made_once(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = recorded(tmp_path)
        key = (tmp_path / KEY_FILE).read_bytes()
        assert len(key.strip()) == 64
        assert b"anna" not in unpacked(tmp_path)
        Recorder(RecordConfig(folder=str(tmp_path)))
        assert (tmp_path / KEY_FILE).read_bytes() == key
        assert {file.stat().st_mode & 0o777 for file in (path, tmp_path / KEY_FILE)} == {0o600}
    finally:
        os.umask(before)
    with pytest.raises(ValueError, match="clear excludes hash_key_file"):
        RecordConfig(folder="x", users="clear", hash_key_file="y")


def test_a_file_that_is_being_written_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for suffix in SUFFIXES:
            with files.create(tmp_path / f"a{suffix}.part", Path(suffix).suffix) as file:
                file.write(b"x")
            assert (tmp_path / f"a{suffix}.part").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_the_process_says_how_it_ended(tmp_path: Path) -> None:
    def ended() -> int:
        return subprocess.run(
            [sys.executable, "-m", "npu_gr.replay.purge", str(tmp_path)]
        ).returncode

    path = recorded(tmp_path, users="clear")
    erase(tmp_path, "anna")
    path.rename(path.with_name(path.name + ".part"))
    assert ended() == purge.HELD
    (tmp_path / erased.LIST).write_bytes(b"x\n")
    assert ended() == 1


async def test_a_list_that_somebody_holds_is_no_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path)
    monkeypatch.setattr(erased, "_TRIES", 2)
    one = Recorder(RecordConfig(folder=str(tmp_path)))
    with (
        erased._locked(tmp_path),
        pytest.raises(Unavailable, match="another process has locked it"),
    ):
        await one.erase(UserKey("", "anna"))


async def test_a_folder_that_somebody_has_removed_holds_nothing(tmp_path: Path) -> None:
    one = Recorder(RecordConfig(folder=str(tmp_path / "r"), enabled=True))
    shutil.rmtree(tmp_path / "r")
    assert not await one.erase(UserKey("", "anna"))
