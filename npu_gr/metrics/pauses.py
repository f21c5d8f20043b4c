"""Pauses of the garbage collector, noted by its own callback and counted later.

A collection can begin inside a metric's lock, so its callback may not take one: it appends to a deque, and whoever
has time drains that.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noted_pauses(observe: Callable[[int, float], None]) -> Iterator[Callable[[], None]]:
    """Note pauses while the block runs; yields what hands them to `observe(generation, seconds)`."""
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
