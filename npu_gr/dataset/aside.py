"""Write a folder beside its place, then put it there: an interrupted run leaves what stood there before.

.data.new   what is being written; deleted when the run ends, or by the next one
.data.old   what stood there, for the moment between two renames; the next run puts it back
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from npu_gr.core.errors import DataError


@contextmanager
def written_aside(out: Path, is_ours: Callable[[Path], bool], files: tuple[str, ...]) -> Iterator[Path]:
    """Yield an empty folder, which takes the place of `out` at the end of the block.

    Args:
        out: the folder; it is missing, empty, or one that we wrote.
        is_ours: whether a folder is one that we wrote.
        files: all names that such a folder may hold.

    Raises:
        DataError: `out` holds something else, another process writes it, or it cannot be written; it stays as it is.
    """
    out = out.resolve()  # of a link, the folder that it leads to
    new, old = (out.with_name(f".{out.name}.{word}") for word in ("new", "old"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir(exist_ok=True)
        held = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror}") from error
    try:
        _lock(held, new, out)
        try:
            if old.exists() and not out.exists():
                old.rename(out)
            shutil.rmtree(old, ignore_errors=True)
            _check(out, is_ours, files)
            for path in new.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield new
            for path in new.iterdir():
                _sync(path)
            _sync(new)
            if out.exists():
                out.rename(old)
            new.rename(out)
            _sync(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error
        finally:
            if _is_held(held, new):  # another run's folder may be there as soon as ours is in its place
                shutil.rmtree(new, ignore_errors=True)
    finally:
        os.close(held)


def _lock(held: int, new: Path, out: Path) -> None:
    """Hold the folder while the process lives. It may have been another run's, which has just put it into its place."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = _is_held(held, new)
    except BlockingIOError:
        is_ours = False
    if not is_ours:
        raise DataError(f"{out}: another npu-gr prepare writes it; run this one again when that has ended")


def _is_held(held: int, new: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), new.stat())
    except FileNotFoundError:
        return False


def _check(out: Path, is_ours: Callable[[Path], bool], files: tuple[str, ...]) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out}: a file; --out names a folder")
    others = sorted(path.name for path in out.iterdir() if path.name not in files)
    if others or (any(out.iterdir()) and not is_ours(out)):
        what = f"holds {others[0]}, which is no part of a dataset" if others else "holds no dataset"
        raise DataError(f"{out}: {what}; --out names a new folder, or one that npu-gr prepare wrote")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
