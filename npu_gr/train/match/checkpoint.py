"""A training's state in a file, so that it goes on after an interruption. One file; written beside it and renamed."""

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
    """Write the state; a reader, or a kill at any moment, never sees half of one.

    Raises:
        DataError: it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(_MAGIC + identity(trainer) + trainer.state())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def resume(trainer: Trainer, path: Path) -> bool:
    """Load the state if there is one.

    Raises:
        DataError: it is of other data or options, or no state at all.
    """
    if not path.exists():
        return False
    data = path.read_bytes()
    head = len(_MAGIC) + len(identity(trainer))
    if not data.startswith(_MAGIC):
        raise DataError(f"{path}: not the state of a training")
    if data[len(_MAGIC) : head] != identity(trainer):
        raise DataError(f"{path}: of other data or options; remove it to start anew")
    trainer.load(data[head:])
    return True


def every(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Calls `action` unless it did less than so many seconds ago."""
    last_s = time.monotonic()

    def call() -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= seconds:
            action()
            last_s = time.monotonic()

    return call


def identity(trainer: Trainer) -> bytes:
    """32 hex digits of the data and the options."""
    digest = xxhash.xxh3_128(msgspec.json.encode(trainer.options))
    data: MatchData = trainer.data
    for graph in (data.source, data.target):
        digest.update(f"{graph.num_users} {graph.num_items}".encode())
        digest.update(graph.users.data)
        digest.update(graph.items.data)
    digest.update(data.validation.users.data)
    digest.update(data.validation.items.data)
    return digest.hexdigest().encode()
