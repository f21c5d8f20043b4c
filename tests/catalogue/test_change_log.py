"""What a log has acknowledged is there after a crash; damage is an error in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.catalogue import change_log
from npu_gr.catalogue.change_log import NO_CHANGES, ChangeLog, Changes, log_path, read_log
from npu_gr.core.errors import CatalogueError, ConfigError, StoreInUse, Unavailable
from npu_gr.core.served import CatalogueChange, NewItem

BASE = Changes(base="of the file")


def ids(*items: int) -> Any:
    return np.array(items, np.int64)


def item(number: int, **fields: Any) -> NewItem:
    settings: dict[str, Any] = {"sid": (1, number % 7), "features": {"genre": ["war"]}}
    return NewItem(item_id=number, **{**settings, **fields})


CHANGES = [
    CatalogueChange(
        add=(item(1, name="a line\nbreak", title="Titel \u00e4", order=0.5), item(2, sid=(1, 2)))
    ),
    CatalogueChange(withdraw=ids(7, 2**62 + 1)),
    CatalogueChange(add=(item(3, attributes={"stock": True, "price": 1.0, "brand": "x"}),)),
    CatalogueChange(withdraw=ids(3, 4), restore=ids(4)),
]


def filled(path: Path, changes: list[CatalogueChange] | None = None) -> list[Changes]:
    """Write changes. Returns the net effect before each and after the last."""
    log = ChangeLog(path)
    states = [BASE]
    for change in CHANGES if changes is None else changes:
        states.append(states[-1].then(change))
        log.append(change, states[-1])
    log.close()
    return states


def loaded(path: Path) -> Changes:
    log = ChangeLog(path)
    try:
        return log.load()
    finally:
        log.close()


def plain(changes: Changes) -> Any:
    added = {key: repr(new) for key, new in changes.added.items()}
    return changes.base, added, changes.removed, changes.withdrawn


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "log"
    states = filled(path)
    assert plain(loaded(path)) == plain(states[-1])
    found = read_log(path)
    assert found is not None
    assert found.sequence == len(CHANGES)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_log(tmp_path / "none") is None
    assert ChangeLog(tmp_path / "none").load() is NO_CHANGES
    assert not (tmp_path / "none.lock").exists()


def test_the_net_effect_follows_the_order_of_a_change() -> None:
    after = BASE.then(CHANGES[0]).then(CatalogueChange(withdraw=ids(1, 9)))
    assert after.withdrawn == {1, 9}
    assert not after.removed
    after = after.then(CatalogueChange(add=(item(3),)))  # takes the withdrawn ones out
    assert after.added.keys() == {2, 3}
    assert after.removed == {1, 9}
    assert not after.withdrawn
    again = after.then(CatalogueChange(add=(item(1),), withdraw=ids(2, 3), restore=ids(3)))
    assert again.added.keys() == {1, 2, 3}
    assert again.withdrawn == {2}


def test_an_unfinished_change_is_cut_off_wherever_the_crash_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    states = filled(path)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start + 1, len(whole)):
        for torn in (whole[:end], whole[:end] + bytes(len(whole) - end)):
            path.write_bytes(torn)
            assert plain(loaded(path)) == plain(states[-2]), (end, torn[start:])
            assert path.read_bytes() == whole[:start]
    assert "unfinished change" in caplog.text
    log = ChangeLog(path)
    log.load()
    log.append(CHANGES[-1], states[-1])
    log.close()
    assert path.read_bytes() == whole


def test_damage_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    filled(path)
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 3):
        damaged = bytearray(whole)
        damaged[place] ^= 0x04
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"generate.change_log: .*log, line \d+: "):
            loaded(path)
    lines = whole.splitlines(keepends=True)
    for text, why in (
        (b"", "line 1: is damaged"),
        (b"".join([lines[0], *lines[2:]]), "line 2: change 3 follows 1, so some are missing"),
        (b"".join([lines[0], lines[1], lines[1]]), "line 3: change 2 follows 2"),
        (lines[1], "line 1: "),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=why):
            loaded(path)


def test_a_later_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "FORMAT", 2)
    filled(tmp_path / "log")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="its format is 2, and this version reads 1"):
        loaded(tmp_path / "log")


def test_its_length_is_bounded_by_what_differs_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_log, "COMPACT_BYTES", 2000)
    path = tmp_path / "log"
    log = ChangeLog(path)
    state = BASE
    for number in range(300):
        for change in (
            CatalogueChange(withdraw=ids(5)),
            CatalogueChange(add=(item(5, features={"price": number}),)),
        ):
            state = state.then(change)
            log.append(change, state)
            assert path.stat().st_size <= 2000
    log.close()
    assert plain(loaded(path)) == plain(state)
    found = read_log(path)
    assert found is not None
    assert found.sequence == 600


def test_a_full_disk_fails_the_change_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    log = ChangeLog(path)
    state = BASE.then(CHANGES[0])
    log.append(CHANGES[0], state)
    before = path.read_bytes()
    write = os.pwrite

    def half(handle: int, data: bytes, at: int) -> int:
        if at > len(before):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[: len(data) // 2], at)

    after = state.then(CHANGES[1])
    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(Unavailable, match=r"nothing is changed, .*No space left on device"):
        log.append(CHANGES[1], after)
    assert path.read_bytes() == before
    monkeypatch.undo()
    log.append(CHANGES[1], after)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)  # nor can the rest be cut off for good
    with pytest.raises(Unavailable, match="Input/output error"):
        log.append(CHANGES[2], after.then(CHANGES[2]))
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="could not be undone; restart"):
        log.append(CHANGES[2], after.then(CHANGES[2]))
    log.close()
    assert plain(loaded(path)) == plain(after)


def test_a_log_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = ChangeLog(path), ChangeLog(path)
    assert not first.load()
    assert not second.load()
    first.append(CHANGES[0], BASE.then(CHANGES[0]))
    with pytest.raises(Unavailable, match="in use by another process"):
        second.append(CHANGES[1], BASE.then(CHANGES[1]))
    with pytest.raises(StoreInUse, match=r"generate.change_log: .*log is in use by another"):
        ChangeLog(path).load()
    first.close()
    # the second serves other items than the file has
    with pytest.raises(Unavailable, match="another process has written"):
        second.append(CHANGES[1], BASE.then(CHANGES[1]))
    second.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = ChangeLog(tmp_path / "file" / "log")
    assert log.load() is NO_CHANGES
    with pytest.raises(Unavailable, match=r"generate.change_log: .* cannot be used"):
        log.append(CHANGES[0], BASE.then(CHANGES[0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_a_log_cannot_hold_is_rejected(tmp_path: Path, value: float) -> None:
    change = CatalogueChange(add=(item(1, features={"price": value}),))
    with pytest.raises(CatalogueError, match=r"item 1: (nan|inf) is not a finite number"):
        ChangeLog(tmp_path / "log").append(change, BASE.then(change))
    assert not (tmp_path / "log").exists()


def test_another_log_is_taken_over_with_its_sequence(tmp_path: Path) -> None:
    state = filled(tmp_path / "old")[-1]
    filled(tmp_path / "new", CHANGES[:1])
    old, new = ChangeLog(tmp_path / "old"), ChangeLog(tmp_path / "new")
    old.load()
    new.take_over(old, state)
    old.close()
    new.close()
    found = read_log(tmp_path / "new")
    assert found is not None
    assert plain(found.changes) == plain(state)
    assert found.sequence == len(CHANGES) + 1


def test_the_path_is_next_to_the_catalogue_or_as_set() -> None:
    assert log_path("a/items.jsonl", None) == Path("a/items.jsonl.changes")
    assert log_path("a/items.jsonl", "b/log") == Path("b/log")
    assert log_path("a/items.jsonl", "none") is None
