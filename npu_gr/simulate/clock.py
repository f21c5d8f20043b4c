"""An asyncio event loop on a virtual clock, which jumps to the next timer instead of waiting.

Ordinary asyncio code runs on it, so the simulation runs the production relay.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from npu_gr.core.errors import NpuGrError

T = TypeVar("T")


class Stalled(NpuGrError):
    """Every task waits and no timer is set: the simulated code is in a deadlock."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0. No file, socket or thread can wake it."""

    def __init__(self) -> None:
        self._now_at = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now_at

    def jump(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now_at += seconds


class _Jump(selectors.BaseSelector):
    """A selector that moves the clock to the loop's next timer instead of waiting for files."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Register the loop's own pipe, which is never written to."""
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Unregister a file."""
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Jump to the next timer.

        Raises:
            Stalled: No timer is set, so the loop would wait forever.
        """
        if timeout is None:
            raise Stalled("the simulation waits for something that never happens")
        if timeout > 0:
            self._loop.jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return all registered files."""
        return self._keys


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
