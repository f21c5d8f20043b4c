"""Save the state of a training, so that it resumes after an interruption: one file, written aside and then renamed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from npu_gr.core.errors import DataError
from npu_gr.train.match.domains import MatchData
from npu_gr.train.match.train import Trainer

_MAGIC = b"npu_gr match 1\n"


def save(trainer: Trainer, path: Path) -> None:
    """Write the state. No reader, and no kill at any moment, finds half of it.

    Raises:
        DataError: the file cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(_MAGIC + identity(trainer) + trainer.state())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def resume(trainer: Trainer, path: Path) -> bool:
    """Load the state into a new trainer, if there is a file.

    Returns:
        Whether there was.

    Raises:
        DataError: the state belongs to other data or options, or the file is no state at all.
    """
    if not path.exists():
        return False
    data = path.read_bytes()
    head = len(_MAGIC) + len(identity(trainer))
    if not data.startswith(_MAGIC):
        raise DataError(f"{path}: not the state of a training")
    if data[len(_MAGIC) : head] != identity(trainer):
        raise DataError(f"{path}: the state of a training on other data or options; remove it to start again")
    trainer.load(data[head:])
    return True


def every(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Make a function that calls `action`, but not within `seconds` of its last call."""
    last_at = time.monotonic()

    def call() -> None:
        nonlocal last_at
        if time.monotonic() - last_at >= seconds:
            action()
            last_at = time.monotonic()

    return call


def identity(trainer: Trainer) -> bytes:
    """Hash the data and the options: 32 hex digits."""
    digest = xxhash.xxh3_128(msgspec.json.encode(trainer.options))
    data: MatchData = trainer.data
    for graph in (data.source, data.target):
        digest.update(f"{graph.num_users} {graph.num_items}".encode())
        digest.update(graph.users.data)
        digest.update(graph.items.data)
    digest.update(data.validation.users.data)
    digest.update(data.validation.items.data)
    return digest.hexdigest().encode()
