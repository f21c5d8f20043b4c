"""Change a key file while instances and other commands read it, and others change it.

Whoever reads the file sees all of it as it was, or all of it as it is. Two changes at once happen
one after the other: each holds the lock of the file's folder from before it reads until after it
has written.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from npu_gr.core.errors import ConfigError
from npu_gr.server.auth.keys import KeyEntry, KeyFile, read_keys, written


def add_key(path: Path, entry: KeyEntry) -> None:
    """Add a key to a file, which is made if need be.

    Raises:
        ConfigError: the file has a key of that name, or the same key; or it cannot be read or
            written.
    """

    def add(keys: list[KeyEntry]) -> list[KeyEntry]:
        for other in keys:
            if other.name == entry.name:
                raise ConfigError(
                    f"{path}: has a key {entry.name!r} already; revoke it, or choose another name"
                )
            if other.sha256 == entry.sha256:
                raise ConfigError(f"{path}: has the same key already, as {other.name!r}")
        return [*keys, entry]

    _change(path, add)


def revoke_key(path: Path, name: str) -> int:
    """Take a key out of a file; returns how many are left.

    Raises:
        ConfigError: the file has no key of that name; or it cannot be read or written.
    """

    def revoke(keys: list[KeyEntry]) -> list[KeyEntry]:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise ConfigError(f"{path}: has no key {name!r}")
        return left

    return _change(path, revoke)


def _change(path: Path, change: Callable[[list[KeyEntry]], list[KeyEntry]]) -> int:
    target = path.resolve()  # a link stays one
    try:
        with _locked(target.parent):
            keys = change(read_keys(target).keys if target.exists() else [])
            _replace(target, written(KeyFile(keys=keys)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return len(keys)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; whoever dies lets go of it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Put a file of mode 0600 in the place of another one, of the same owner, durably.

    Or change nothing.
    """
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                old = path.stat()
                if (old.st_uid, old.st_gid) != (os.getuid(), os.getgid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
