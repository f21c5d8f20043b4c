"""Files with personal data: mode 0600 from creation, independent of the umask."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_MODE = 0o600
_OTHERS = 0o077


def make_private(path: Path) -> None:
    """Create an empty private file, replacing an old one; opening it for writing keeps the mode.

    Raises:
        OSError: the file cannot be created.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE))


def open_private(path: Path, *, appends: bool = False) -> int:
    """Open a file for reading and writing, created if missing; the caller closes the descriptor.

    Args:
        path: The file.
        appends: Append every write (O_APPEND).

    Raises:
        OSError: the file cannot be opened or created.
    """
    return os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if appends else 0), _MODE
    )


def warn_if_shared(*paths: Path) -> None:
    """Warn of files with personal data that other users may access; missing files are ignored."""
    for path in paths:
        try:
            mode = path.stat().st_mode & 0o777
        except OSError:
            continue
        if mode & _OTHERS:
            log.warning(
                "%s has personal data and mode %04o, so other users may access it; chmod 600 it",
                path,
                mode,
            )


def as_public_as(path: Path, other: Path) -> None:
    """Give a file the mode of another one."""
    path.chmod(other.stat().st_mode & 0o777)
