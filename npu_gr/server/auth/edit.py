"""Changes a key file atomically, while instances read it and other commands change it.

Readers see the old file or the new one, never a mixture. Concurrent changes are serialised by a
lock on the file's folder, held from before the read until after the write.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from npu_gr.core.errors import ConfigError
from npu_gr.server.auth.keys import KeyEntry, KeyFile, read_keys, to_yaml


def add_key(path: Path, entry: KeyEntry) -> None:
    """Add a key to a file, which is created if it does not exist.

    Raises:
        ConfigError: The file has the name or the key already, or cannot be read or written.
    """

    def add(keys: list[KeyEntry]) -> list[KeyEntry]:
        for other in keys:
            if other.name == entry.name:
                raise ConfigError(
                    f"{path} has a key {entry.name!r} already; revoke it, or choose another name"
                )
            if other.sha256 == entry.sha256:
                raise ConfigError(f"{path} has the same key already, under the name {other.name!r}")
        return [*keys, entry]

    _change(path, add)


def revoke_key(path: Path, name: str) -> int:
    """Remove a key from a file, and return how many are left.

    Raises:
        ConfigError: The file has no key of that name, or cannot be read or written.
    """

    def revoke(keys: list[KeyEntry]) -> list[KeyEntry]:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise ConfigError(f"{path} has no key {name!r}; `npu-gr keys list` shows the names")
        return left

    return _change(path, revoke)


def _change(path: Path, change: Callable[[list[KeyEntry]], list[KeyEntry]]) -> int:
    target = path.resolve()  # replace the target of a symbolic link, not the link
    try:
        with _locked(target.parent):
            keys = change(read_keys(target).keys if target.exists() else [])
            _replace(target, to_yaml(KeyFile(keys=keys)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return len(keys)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the kernel releases it if the process dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically and durably, with mode 0600 and the old file's owner."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                old = path.stat()
                if (old.st_uid, old.st_gid) != (os.getuid(), os.getgid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
