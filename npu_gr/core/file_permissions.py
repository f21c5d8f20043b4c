"""Files that hold data of users: their owner alone may read them, from their first byte on, whatever the umask is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_MODE = 0o600
_OTHERS = 0o077


def make_private(path: Path) -> None:
    """Make an empty file in the place of one that may be there; opening it to write keeps its mode.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE))


def open_private(path: Path, *, appends: bool = False) -> int:
    """Open a file to read and write, and make it if it is missing.

    The caller closes the descriptor.

    Args:
        path: of the file.
        appends: every write goes to its end, wherever that is by then.

    Raises:
        OSError: it cannot be opened or made.
    """
    return os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if appends else 0), _MODE
    )


def warn_if_shared(*paths: Path) -> None:
    """Warn of files with data of users that others than their owner may read.

    Missing ones are no news.
    """
    for path in paths:
        try:
            mode = path.stat().st_mode & 0o777
        except OSError:
            continue
        if mode & _OTHERS:
            log.warning("%s holds data of users and has mode %04o: chmod 600 it", path, mode)


def as_public_as(path: Path, other: Path) -> None:
    """Give a file the mode of another one, which was made by the umask."""
    path.chmod(other.stat().st_mode & 0o777)
