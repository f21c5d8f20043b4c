"""Files that survive a crash: atomic replacement, synced folders, a lock for one owner."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from npu_gr.core.errors import ConfigError, StoreInUse
from npu_gr.core.file_permissions import make_private, open_private


def lock(path: Path, setting: str) -> IO[str]:
    """Open the lock file of a file; closing it, or the end of the process, releases the lock.

    The lock is a file of its own (`.lock`), since the file itself may be replaced.

    Args:
        path: The file; its folder is created.
        setting: Name of the setting that has the path, for messages.

    Raises:
        StoreInUse: another process has the lock.
        ConfigError: the folder cannot be used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = os.fdopen(open_private(path.with_name(path.name + ".lock")), "w")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
            raise
    except BlockingIOError as error:
        raise StoreInUse(f"{setting}: {path} is in use by another process") from error
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be used: {error.strerror}") from error
    return held


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file, with mode 0600, by another content, atomically and durably.

    Raises:
        OSError: it cannot be written; the old file stays, unless the folder could not be synced.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    make_private(temporary)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
