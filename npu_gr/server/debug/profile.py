"""Where the threads spend their time: their stacks, sampled for some seconds and folded, one line a stack.

The lines are what flame-graph tools read: frames from the outermost to the innermost, `;` between them, and how often
the stack was seen. Every thread is seen at each sample, also one that waits. The sampler runs when it gets Python's
lock, so work in C that keeps the lock is seen at its end.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from pathlib import PurePath
from types import CodeType, FrameType

from npu_gr.core.errors import Overloaded

PERIOD_S = 0.01  # between two samples: below 1 % of a core with twenty threads
MIN_S = 1
MAX_S = 60


class Profiler:
    """Takes one profile at a time."""

    def __init__(self) -> None:
        self._is_running = False

    async def profile(self, seconds: float) -> str:
        """Sample all threads but its own; a caller that is cancelled ends it.

        Args:
            seconds: how long.

        Raises:
            Overloaded: another profile is being taken.
        """
        if self._is_running:
            raise Overloaded("another profile is being taken", retry_after_s=MAX_S)
        self._is_running = True
        stop = threading.Event()
        try:
            return await asyncio.to_thread(folded_stacks, seconds, stop)
        finally:
            stop.set()
            self._is_running = False


def folded_stacks(seconds: float, stop: threading.Event) -> str:
    """Sample the threads but this one.

    Args:
        seconds: how long.
        stop: ends it early.
    """
    seen: Counter[tuple[int, tuple[CodeType, ...]]] = Counter()
    own = threading.get_ident()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at and not stop.wait(PERIOD_S):
        seen.update((ident, _codes(frame)) for ident, frame in sys._current_frames().items() if ident != own)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = Counter[str]()
    for (ident, codes), count in seen.items():
        lines[";".join([names.get(ident, "ended"), *map(_name, codes)])] += count
    return "".join(f"{line} {count}\n" for line, count in lines.most_common())


def _codes(frame: FrameType | None) -> tuple[CodeType, ...]:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(reversed(codes))


def _name(code: CodeType) -> str:
    path = PurePath(code.co_filename)
    return f"{code.co_qualname} ({path.parent.name}/{path.name})".replace(";", ",")
