"""The files of a checkpoint as they were served, also after they have been replaced or deleted.

A training writes new files and renames them over the old ones. A file that is open keeps its
content until then on disk, so a rollback can read it again. That costs disk space, and no memory.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from npu_gr.core.errors import ConfigError


class HeldFolder:
    """The open files of a folder, without those of its folders."""

    def __init__(self, folder: Path) -> None:
        """Open all files; those that cannot be opened are missing."""
        self._name = folder.name or "checkpoint"
        self._files: dict[str, int] = {}
        with suppress(OSError):
            for path in folder.iterdir():
                if path.is_file():
                    self._files[path.name] = os.open(path, os.O_RDONLY)
        weakref.finalize(self, _close, self._files.values())

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[Path]:
        """Make a temporary folder of the same name with links to the open files, for the block.

        Raises:
            ConfigError: there is no place for temporary files.
        """
        try:
            made = await asyncio.to_thread(self._link)
        except OSError as error:
            raise ConfigError(f"no temporary folder can be made: {error}") from error
        try:
            yield Path(made.name, self._name)
        finally:
            await asyncio.to_thread(made.cleanup)

    def _link(self) -> tempfile.TemporaryDirectory[str]:
        made = tempfile.TemporaryDirectory(prefix="npu-gr-")
        folder = Path(made.name, self._name)
        folder.mkdir()
        for name, number in self._files.items():
            (folder / name).symlink_to(f"/proc/self/fd/{number}")
        return made


def _close(files: Iterable[int]) -> None:
    for number in files:
        os.close(number)
