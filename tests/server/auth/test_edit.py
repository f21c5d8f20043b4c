"""A change of a key file is whole or did not happen, and is never lost to another one."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.server.auth.edit import add_key, revoke_key
from npu_gr.server.auth.keys import KeyRing, read_keys
from tests.keys import bearer, entry, write_keys


def names(path: Path) -> list[str]:
    return [key.name for key in read_keys(path).keys]


def test_keys_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, entry("a"))
    add_key(path, entry("b"))
    assert names(path) == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert revoke_key(path, "a") == 1
    assert names(path) == ["b"]
    assert os.listdir(tmp_path) == ["keys"]


def test_a_ring_follows(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, entry("a"))
    ring = KeyRing(path)
    add_key(path, entry("b"))
    ring.reload_if_changed()
    assert ring.find(bearer("b")["Authorization"].encode()).name == "b"
    revoke_key(path, "a")
    revoke_key(path, "b")
    ring.reload_if_changed()
    assert len(ring) == 0


def test_a_name_and_a_key_are_there_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, entry("a"))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="has a key 'a' already"):
        add_key(path, entry("a", tenant="other"))
    same = entry("a")
    with pytest.raises(ConfigError, match="has the same key already, under the name 'a'"):
        add_key(path, type(same)(name="b", sha256=same.sha256, tenant="", scopes=same.scopes))
    with pytest.raises(ConfigError, match="has no key 'b'"):
        revoke_key(path, "b")
    assert path.read_bytes() == before


def test_changes_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    wanted = [f"key-{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_key(path, entry(name)), wanted))
        assert sorted(names(path)) == sorted(wanted)
        list(pool.map(lambda name: revoke_key(path, name), wanted[1:]))
    assert names(path) == wanted[:1]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "keys"
    add_key(path, entry("a"))
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            add_key(path, entry("b"))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["keys"]
    add_key(path, entry("b"))  # and the lock is free


def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one-key-a-line\n")
    with pytest.raises(ConfigError, match="npu-gr keys new"):
        add_key(path, entry("a"))
    assert path.read_text() == "one-key-a-line\n"
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        add_key(tmp_path / "none" / "keys", entry("a"))


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "keys"
    link.symlink_to(tmp_path / "there" / "keys")
    add_key(link, entry("a"))
    assert link.is_symlink()
    assert names(tmp_path / "there" / "keys") == ["a"]


def test_nobody_reads_a_half(tmp_path: Path) -> None:
    """Whoever opened the file before a change reads the old one to its end."""
    path = tmp_path / "keys"
    add_key(path, entry("a"))
    before = path.read_text()
    with path.open() as file:
        add_key(path, entry("b"))
        assert file.read() == before
