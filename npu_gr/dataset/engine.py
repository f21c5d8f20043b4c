"""DuckDB connections for `prepare`: limits, and errors as `DataError`."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import cut
from npu_gr.dataset.cells import duckdb

# DuckDB gets a third of the log's size within these limits; the rest spills to disk
LEAST_MB, MOST_MB = 100, 512
PACKED_RATIO = 5  # assumed compression ratio of packed files
MAX_THREADS = 4
_CONFIG: dict[str, Any] = {
    "threads": min(MAX_THREADS, os.cpu_count() or 1),
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


def memory_for(num_bytes: int) -> int:
    """Return the MB of memory for reading a log of this size."""
    return min(MOST_MB, max(LEAST_MB, num_bytes // 3_000_000))


@contextmanager
def opened(folder: Path, memory_mb: int) -> Iterator[Any]:
    """Yield a connection that spills large tables to a folder, deleted at the end.

    Args:
        folder: Created with mode 0700.
        memory_mb: Memory limit of DuckDB.
    """
    folder.mkdir(mode=0o700)
    try:
        with in_memory(memory_mb, folder) as con:
            yield con
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def in_memory(memory_mb: int = LEAST_MB, folder: Path | None = None) -> Iterator[Any]:
    """Yield a connection without files, or one that may spill into a folder."""
    limits = {"memory_limit": f"{memory_mb}MB", "temp_directory": str(folder or "")}
    with duckdb.connect(config=_CONFIG | limits) as con:
        con.execute("SET TimeZone = 'UTC'")
        # `query_progress` works only with the progress bar enabled. In a notebook, DuckDB wants
        # ipywidgets for that; without it there is no progress.
        with suppress(duckdb.InvalidInputException):
            con.execute("SET enable_progress_bar = true")
            con.execute("SET enable_progress_bar_print = false")
        yield con


@contextmanager
def duckdb_errors(name: str, memory_mb: int, remedy: str = "") -> Iterator[None]:
    """Translate errors of DuckDB.

    Raises:
        DataError: the source is broken or too large.
        OSError: the disk is full.
        KeyboardInterrupt: the query was interrupted.
    """
    try:
        yield
    except duckdb.InterruptException as error:
        raise KeyboardInterrupt from error
    except duckdb.OutOfMemoryException as error:
        raise DataError(
            f"{name}: reading it needs more than DuckDB's limit of {memory_mb} MB; raise it with "
            "--memory (in MB), or prepare the log in parts"
        ) from error
    except duckdb.Error as error:
        raise_if_full(error)
        first = str(error).partition("\n")[0]
        raise DataError(
            f"{name}: {cut(first.partition('Error: ')[2] or first, 200)}{remedy}"
        ) from error


def raise_if_full(error: Exception) -> None:
    """Raise OSError if an error of DuckDB says that the disk is full."""
    if os.strerror(errno.ENOSPC) in str(error):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
