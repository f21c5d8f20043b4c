"""The state of a training in files, from which it goes on after `kill -9` with the same bits.

    FOLDER/<stage>.state    16 bytes xxh3-128 of the rest, then a dictionary by `torch.save`

A file is written at intervals and replaced by a rename, so it is whole or the one before. A file
that is damaged or of another training is ignored: the stage begins anew.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from npu_gr import __version__
from npu_gr.core.errors import DataError
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.train.stored_log import StoredLog

STATES = ".states"  # subfolder of the folder that a command trains a single model into
EVERY_S = 30.0
MOST_SHARE = 0.05  # of the time of a training that writing may take
DIGEST_BYTES = 16


class TrainingStates:
    """The states of the stages of one training. Without a folder nothing is kept."""

    def __init__(
        self,
        folder: Path | None = None,
        made_from: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Name the folder; the first write makes it.

        Args:
            folder: Folder of the files; None = keep no state.
            made_from: Digest of everything that decides the training.
            now: Clock, in seconds.
        """
        self._folder = folder
        self._made_from = f"{__version__} {made_from}"
        self._now = now
        self._due_at = now() + EVERY_S

    def read(self, stage: str, key: str) -> dict[str, Any] | None:
        """Read the state of a stage, and set torch's global random state to its.

        Args:
            stage: Name of the stage.
            key: What else decides the stage; see `write`.

        Returns:
            The dictionary that `write` got; None = the stage begins anew.
        """
        if self._folder is None:
            return None
        try:
            content = self._path(stage).read_bytes()
        except OSError:
            return None
        if xxhash.xxh3_128_digest(content[DIGEST_BYTES:]) != content[:DIGEST_BYTES]:
            return None
        found: dict[str, Any] = torch.load(io.BytesIO(content[DIGEST_BYTES:]), weights_only=True)
        if (found["made_from"], found["key"]) != (self._made_from, key):
            return None
        torch.set_rng_state(found["random"])
        state: dict[str, Any] = found["state"]
        return state

    def is_due(self) -> bool:
        """Whether it is time for another write."""
        return self._folder is not None and self._now() >= self._due_at

    def write(self, stage: str, key: str, state: dict[str, Any]) -> None:
        """Replace the state of a stage; torch's global random state is added.

        Args:
            stage: Name of the stage.
            key: What else decides the stage: its options.
            state: Tensors, numbers, texts, and lists and dictionaries of these.

        Raises:
            DataError: the file cannot be written.
        """
        if self._folder is None:
            return
        began_at = self._now()
        content = io.BytesIO()
        about = {"made_from": self._made_from, "key": key, "random": torch.get_rng_state()}
        torch.save({**about, "state": state}, content)
        path = self._path(stage)
        temporary = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(xxhash.xxh3_128_digest(content.getbuffer()))
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from error
        took_s = self._now() - began_at
        self._due_at = began_at + took_s + max(EVERY_S, took_s / MOST_SHARE)

    def remove(self) -> None:
        """Delete all states, after the training has ended."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, stage: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{stage.replace(': ', '-').replace(' ', '-')}.state"


NO_STATES = TrainingStates()


def kept_states(
    folder: Path, log: Interactions | StoredLog, features: Sequence[ItemValues], codes: Path | None
) -> TrainingStates:
    """Name the states of a command that trains a single model.

    Args:
        folder: Folder of the model; the states are in its subfolder `STATES`.
        log: The whole log.
        features: Side features of items.
        codes: File of ready-made codes.
    """
    columns = [f"{one.name} {one.values} {sorted(one.of_item.items())}" for one in features]
    given = codes.read_bytes().hex() if codes is not None and codes.is_file() else ""
    if isinstance(log, StoredLog):
        parts: tuple[str | np.ndarray[Any, Any], ...] = (log.made_from, str(log.most_events))
    else:
        names = "\n".join([*log.user_names, *log.action_names])
        parts = (log.users, log.items, log.values, log.timestamps, names)
    return TrainingStates(folder / STATES, digest_of(*parts, *columns, given))


def digest_of(*parts: str | np.ndarray[Any, Any]) -> str:
    """Compute a digest of texts and arrays."""
    state = xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, str):
            state.update(f"{len(part)} {part}".encode())
        else:
            state.update(f"{part.dtype} {part.shape}".encode())
            state.update(np.ascontiguousarray(part).tobytes())
    return state.hexdigest()
