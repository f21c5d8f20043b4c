"""DuckDB as `prepare` runs it: what it may use, its errors in our words, and a table of what was read."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import cut
from npu_gr.dataset.cells import duckdb

# of memory for DuckDB, a third of the logs between them; what does not fit goes to disk
LEAST_MB, MOST_MB = 100, 512
PACKED_RATIO = 5  # of the bytes of a packed file to what is in it
MAX_THREADS = 4
_CONFIG: dict[str, Any] = {
    "threads": min(MAX_THREADS, os.cpu_count() or 1),
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


def memory_for(num_bytes: int) -> int:
    """MB of memory for what is read, by its size as far as it is known."""
    return min(MOST_MB, max(LEAST_MB, num_bytes // 3_000_000))


@contextmanager
def opened(folder: Path, memory_mb: int) -> Iterator[Any]:
    """Yield a connection whose tables go to a folder where they are large: its owner's alone, deleted in the end.

    Args:
        folder: made.
        memory_mb: that DuckDB may use.
    """
    folder.mkdir(mode=0o700)
    try:
        with in_memory(memory_mb, folder) as con:
            yield con
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def in_memory(memory_mb: int = LEAST_MB, folder: Path | None = None) -> Iterator[Any]:
    """Yield a connection for a first look; or one that may write into a folder."""
    limits = {"memory_limit": f"{memory_mb}MB", "temp_directory": str(folder or "")}
    with duckdb.connect(config=_CONFIG | limits) as con:
        for setting in (
            "TimeZone = 'UTC'",
            "enable_progress_bar = true",
            "enable_progress_bar_print = false",
        ):
            con.execute(f"SET {setting}")  # without a bar there is no `query_progress`
        yield con


@contextmanager
def told(name: str, memory_mb: int, remedy: str = "") -> Iterator[None]:
    """Say an error of DuckDB's in our words.

    Raises:
        DataError: what is read is broken. OSError: the disk is full. KeyboardInterrupt: it was
            interrupted.
    """
    try:
        yield
    except duckdb.InterruptException as error:
        raise KeyboardInterrupt from error
    except duckdb.OutOfMemoryException as error:
        raise DataError(
            f"{name}: to read it takes over {memory_mb} MB, DuckDB's limit here; --memory raises "
            "it (in MB), "
            "or prepare it in parts"
        ) from error
    except duckdb.Error as error:
        raise_if_full(error)
        first = str(error).partition("\n")[0]
        raise DataError(
            f"{name}: {cut(first.partition('Error: ')[2] or first, 200)}{remedy}"
        ) from error


def raise_if_full(error: Exception) -> None:
    """Raise an error of DuckDB's as OSError if the disk is full."""
    if os.strerror(errno.ENOSPC) in str(error):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
