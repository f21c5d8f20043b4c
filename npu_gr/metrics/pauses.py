"""Pauses of the garbage collector: its callback notes them, and a periodic task counts them later.

A collection can begin while a thread holds the lock of a metric, so the callback must not take a lock. It appends to a
deque; the periodic task drains the deque.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noted_pauses(observe: Callable[[int, float], None]) -> Iterator[Callable[[], None]]:
    """Note the pauses while the block runs.

    Yields:
        A function that calls `observe(generation, seconds)` for each pause noted since its last call.
    """
    noted: deque[tuple[int, float]] = deque(maxlen=4096)
    began_at = 0.0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal began_at
        if phase == "start":
            began_at = time.perf_counter()
        else:
            noted.append((info["generation"], time.perf_counter() - began_at))

    def drain() -> None:
        while noted:
            observe(*noted.popleft())

    gc.callbacks.append(on_collection)
    try:
        yield drain
    finally:
        gc.callbacks.remove(on_collection)
