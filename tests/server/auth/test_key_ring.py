"""The keys in force are those of the file as it is now.

A file that cannot be read changes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError, Forbidden, Overloaded, Unauthorized
from npu_gr.core.kinds import Scope
from npu_gr.server.auth.keys import (
    ANONYMOUS,
    KeyEntry,
    KeyFile,
    KeyRejection,
    KeyRing,
    hash_of,
    to_yaml,
)
from tests.clock import Clock

SECRET = b"a-key-of-more-than-24-characters"
OTHER = b"another-key-of-more-than-24-characters"


def entry(secret: bytes = SECRET, name: str = "one", **fields: object) -> KeyEntry:
    return KeyEntry(
        name=name,
        sha256=hash_of(secret),
        tenant="shop",
        scopes=[Scope.INFER],
        **fields,  # type: ignore[arg-type]
    )


def write(path: Path, *entries: KeyEntry) -> None:
    path.write_text(to_yaml(KeyFile(keys=list(entries))))


def test_without_a_file_everybody_may_do_everything() -> None:
    ring = KeyRing(None)
    assert ring.find(None) is ANONYMOUS
    assert ANONYMOUS.scopes == set(Scope)
    ring.spend(ANONYMOUS)
    ring.reload_if_changed()


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, KeyRejection.MISSING),
        (b"Basic " + SECRET, KeyRejection.MISSING),
        (SECRET, KeyRejection.MISSING),
        (b"Bearer x", KeyRejection.SHORT),
        (b"Bearer " + OTHER, KeyRejection.UNKNOWN),
        (b"Bearer " + SECRET.upper(), KeyRejection.UNKNOWN),
        (b"Bearer " + SECRET + b"\0", KeyRejection.UNKNOWN),
        (b"Bearer \xff" + SECRET, KeyRejection.UNKNOWN),
    ],
)
def test_what_is_no_key(tmp_path: Path, header: bytes | None, reason: KeyRejection) -> None:
    write(tmp_path / "keys", entry())
    ring = KeyRing(tmp_path / "keys")
    told: list[KeyRejection] = []
    ring.on_rejected = told.append
    with pytest.raises(Unauthorized):
        ring.find(header)
    assert told == [reason]
    assert ring.find(b"bEaReR  " + SECRET + b" ").name == "one"


def test_a_key_expires(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    path = tmp_path / "keys"
    path.write_text(
        to_yaml(KeyFile(keys=[entry()])).replace(
            "  scopes", "  expires: '1970-01-01T00:20:00Z'\n  scopes"
        )
    )
    ring = KeyRing(path, wall_clock=clock)
    assert ring.find(b"Bearer " + SECRET).expires_at == 1200.0
    clock.now_at = 1200.0
    with pytest.raises(Unauthorized):
        ring.find(b"Bearer " + SECRET)


def test_a_rate_is_a_key_s_own(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    write(tmp_path / "keys", entry(rate_per_s=2.0), entry(OTHER, "free"))
    ring = KeyRing(tmp_path / "keys", clock=clock)
    key, free = ring.find(b"Bearer " + SECRET), ring.find(b"Bearer " + OTHER)
    for _ in range(2):
        ring.spend(key)
    with pytest.raises(Overloaded, match="'one' is over its limit of 2 requests a second"):
        ring.spend(key)
    for _ in range(100):
        ring.spend(free)
    clock.now_at += 0.5
    ring.spend(key)
    with pytest.raises(Overloaded):
        ring.spend(key)


def test_a_rate_is_not_won_back_by_touching_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, entry(rate_per_s=1.0))
    ring = KeyRing(path, clock=Clock())
    ring.spend(ring.find(b"Bearer " + SECRET))
    write(path, entry(rate_per_s=1.0), entry(OTHER, "new"))
    ring.reload_if_changed()
    with pytest.raises(Overloaded):
        ring.spend(ring.find(b"Bearer " + SECRET))


def test_another_content_with_the_same_time_of_change_is_in_force(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, entry())
    ring = KeyRing(path)
    stamp = path.stat().st_mtime_ns
    write(path, entry(OTHER))
    os.utime(path, ns=(stamp, stamp))
    ring.reload_if_changed()
    assert ring.find(b"Bearer " + OTHER).name == "one"
    with pytest.raises(Unauthorized):
        ring.find(b"Bearer " + SECRET)


@pytest.mark.parametrize("gone", ["emptied", "deleted"])
def test_a_file_without_keys_revokes_all(tmp_path: Path, gone: str) -> None:
    path = tmp_path / "keys"
    write(path, entry())
    ring = KeyRing(path)
    if gone == "emptied":
        path.write_text("")
    else:
        path.unlink()
    ring.reload_if_changed()
    assert not len(ring)
    with pytest.raises(Unauthorized):
        ring.find(b"Bearer " + SECRET)
    write(path, entry())
    ring.reload_if_changed()
    assert ring.find(b"Bearer " + SECRET).name == "one"


def test_a_file_that_cannot_be_parsed_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, entry())
    ring = KeyRing(path)
    for content in (b"keys: [", b"\xff"):
        path.write_bytes(content)
        ring.reload_if_changed()
        assert ring.is_stale
        assert ring.find(b"Bearer " + SECRET).name == "one"
    write(path, entry(OTHER))
    ring.reload_if_changed()
    assert not ring.is_stale
    assert ring.find(b"Bearer " + OTHER).name == "one"


def test_a_file_that_can_be_read_again_is_not_stale(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, entry())
    ring = KeyRing(path)
    path.rename(tmp_path / "aside")
    path.mkdir()  # as a broken mount
    ring.reload_if_changed()
    assert ring.is_stale
    assert ring.find(b"Bearer " + SECRET).name == "one"
    path.rmdir()
    (tmp_path / "aside").rename(path)
    ring.reload_if_changed()
    assert not ring.is_stale


def test_what_a_key_does_not_allow_is_told(tmp_path: Path) -> None:
    write(tmp_path / "keys", entry())
    ring = KeyRing(tmp_path / "keys")
    told: list[KeyRejection] = []
    ring.on_rejected = told.append
    key = ring.find(b"Bearer " + SECRET)
    ring.require(key, Scope.INFER)
    assert ring.tenant_of(key, "") == ring.tenant_of(key, "shop") == "shop"
    with pytest.raises(Forbidden):
        ring.require(key, Scope.ADMIN)
    with pytest.raises(Forbidden):
        ring.tenant_of(key, "bank")
    assert told == [KeyRejection.SCOPE, KeyRejection.TENANT]


def test_an_expired_key_does_not_count(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    end = "expires: '1970-01-01T00:20:00Z'"
    (tmp_path / "keys").write_text(
        to_yaml(KeyFile(keys=[entry()])).replace("  scopes", f"  {end}\n  scopes")
    )
    ring = KeyRing(tmp_path / "keys", wall_clock=clock)
    assert len(ring) == 1
    clock.now_at = 1200.0
    assert len(ring) == 0


@pytest.mark.parametrize("content", [None, b"", b"keys: []\n", b"one-key-a-line\n", b"\xff"])
def test_no_start_without_a_key(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="api_keys_file: "):
        KeyRing(path)
