"""An asyncio event loop on a virtual clock: nobody sleeps, time jumps to the next timer.

What runs on it is ordinary asyncio code, so the relay that is simulated is the relay that serves.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from npu_gr.core.errors import NpuGrError

T = TypeVar("T")


class Stalled(NpuGrError):
    """Everything waits and no timer is set: what is simulated is in a deadlock."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0. No file, socket or thread can wake it."""

    def __init__(self) -> None:
        self._now_at = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_at

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now_at += seconds


class _Jump(selectors.BaseSelector):
    """In place of waiting for files, it moves the clock to the loop's next timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """The loop's own pipe, which nobody writes to."""
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget it."""
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Raises Stalled where the loop would wait for ever."""
        if timeout is None:
            raise Stalled("the simulation waits for something that never happens")
        if timeout > 0:
            self._loop.jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """What is registered."""
        return self._keys


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to its end on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
