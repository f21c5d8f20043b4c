"""`torch.npu`, as much of it as npu_gr uses.

Streams share one queue, whose launches run when somebody waits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

library: Any = None
_numbers = count(1)
_here = threading.local()


class Stream:
    """A number, which the launches of a thread carry."""

    def __init__(self) -> None:
        self.number = next(_numbers)

    def wait_event(self, event: Event) -> None:
        """There is one queue: it keeps the order."""

    def synchronize(self) -> None:
        """Run what is queued."""
        _drain()


class Event:
    """A place in the one queue."""

    def record(self, stream: Stream) -> None:
        """Mark it."""

    def synchronize(self) -> None:
        """Run what is queued."""
        _drain()


def _drain() -> None:
    # a copy to the host waits, and raises what a launch got wrong
    torch.zeros((), device="npu").cpu()


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """There is one."""


def get_device_name(device: int) -> str:
    return "Ascend910B3"


def current_stream() -> Stream:
    if not hasattr(_here, "stream"):
        _here.stream = Stream()
    found: Stream = _here.stream
    return found


@contextmanager
def stream(given: Stream) -> Iterator[None]:
    before = current_stream()
    _here.stream = given
    library.pretended_set_stream(ctypes.c_uint64(given.number))
    try:
        yield
    finally:
        _here.stream = before
        library.pretended_set_stream(ctypes.c_uint64(before.number))


def mem_get_info(device: Any) -> tuple[int, int]:
    return 1 << 36, 1 << 36


def memory_allocated(device: Any) -> int:
    return 0


memory_reserved = memory_allocated


def synchronize() -> None:
    _drain()
