"""The folder of a site while it is made: everything is written aside, and put into its place at the end.

    site/ranker, generator, vectors, popular.txt, serve.yaml, README.md, report.json    in service
    site/.new/...       the same names while they are made; `<name>.json` there says that a model is finished
    site/.new/READY     the names of what is finished: it is being put into its place

Invariants, checked by tests/train/site/test_folder.py:
  S1  before READY nothing of what is in service is touched, whatever ends the process
  S2  after READY the next run first finishes what the interrupted one began, so no site is mixed for longer than that
  S3  a file or folder in service is replaced by a rename: who has it open, or mapped, keeps the old one
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.train.site.report import PartReport, SiteReport

STAGED = ".new"
READY = "READY"
REPLACED = ".old"
LOCK = ".lock"
REPORT = "report.json"


class SiteFolder:
    """One site, and what of it is being made. Only one process at a time makes it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.staged = place / STAGED

    @classmethod
    @contextmanager
    def opened(cls, place: Path) -> Iterator[SiteFolder]:
        """Make the folder, keep other makers out while the block runs, and finish what an interrupted run began.

        Raises:
            DataError: it cannot be made or written into.
            ConfigError: another process makes this site.
        """
        folder = cls(place)
        try:
            folder.staged.mkdir(parents=True, exist_ok=True)
            lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DataError(f"{place}: cannot be written: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{place}: another process makes this site") from error
            folder._finish()
            yield folder
        finally:
            os.close(lock)

    def report(self) -> SiteReport | None:
        """How what is in service was made; None: nothing is, or nobody knows."""
        try:
            return msgspec.json.decode((self.place / REPORT).read_bytes(), type=SiteReport)
        except (OSError, msgspec.MsgspecError):
            return None

    def finished(self, name: str) -> PartReport | None:
        """A model that an interrupted run has finished; None: it has not."""
        try:
            return msgspec.json.decode((self.staged / f"{name}.json").read_bytes(), type=PartReport)
        except (OSError, msgspec.MsgspecError):
            return None

    def begin(self, name: str) -> Path:
        """Make an empty folder to make a model in.

        Raises:
            DataError: it cannot be made.
        """
        self.discard(name)
        try:
            (self.staged / name).mkdir()
        except OSError as error:
            raise DataError(f"{self.staged / name}: cannot be made: {error.strerror}") from error
        return self.staged / name

    def finish(self, name: str, report: PartReport) -> None:
        """Note that a model is whole."""
        self.write(f"{name}.json", msgspec.json.encode(report))

    def discard(self, name: str) -> None:
        """Drop what was made of a model; the note that it is finished first."""
        (self.staged / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(self.staged / name, ignore_errors=True)

    def write(self, name: str, content: bytes) -> Path:
        """Write a file aside.

        Raises:
            DataError: it cannot be written.
        """
        path = self.staged / name
        aside = path.with_name(f"{name}.tmp")
        try:
            aside.write_bytes(content)
            os.replace(aside, path)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from error
        return path

    def put_in_place(self, names: Sequence[str]) -> None:
        """Put what was made into service, in this order, and forget the rest.

        Raises:
            DataError: it cannot be moved; the next run goes on.
        """
        self.write(READY, msgspec.json.encode(names))
        self._finish()

    def _finish(self) -> None:
        """Go on with what READY names: what is no longer there has its place already."""
        replaced = self.place / REPLACED
        try:
            names = msgspec.json.decode((self.staged / READY).read_bytes(), type=list[str])
        except FileNotFoundError:
            return
        try:
            for name in names:
                if not (self.staged / name).exists():
                    continue
                if (self.place / name).is_dir():
                    shutil.rmtree(replaced, ignore_errors=True)
                    os.rename(self.place / name, replaced)
                os.rename(self.staged / name, self.place / name)
            shutil.rmtree(self.staged)
            self.staged.mkdir()
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise DataError(f"{self.place}: cannot be written: {error}") from error


def digest(*texts: str) -> str:
    """32 hex digits over texts."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(texts))


def digest_of_files(folder: Path, pattern: str) -> str:
    """32 hex digits over the names and the contents of the matching files of a folder.

    Raises:
        DataError: one cannot be read.
    """
    state = xxhash.xxh3_128()
    try:
        for path in sorted(folder.glob(pattern)):
            state.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    state.update(block)
    except OSError as error:
        raise DataError(f"{folder}: {error}") from error
    return state.hexdigest()
