"""Lines of progress for a pipe, where no bar can move: logs of CI, cron and containers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

EVERY_S = 10.0


@dataclass(slots=True)
class Progress:
    """What the next line says; an empty status writes no line."""

    status: str = ""


@contextmanager
def heartbeat(
    write: Callable[[str], object], status: str = "", every_s: float = EVERY_S
) -> Iterator[Progress]:
    """Write the status at a fixed interval, until the end of the block.

    Args:
        write: Function that prints a line; a thread of its own calls it.
        status: The first status; the block sets a later one on what it gets.
        every_s: Seconds between two lines.
    """
    progress = Progress(status)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(every_s):
            if progress.status:
                write(progress.status)

    thread = threading.Thread(target=work, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        is_over.set()
        thread.join()


def time_left(done: float, total: float, elapsed_s: float) -> str:
    """Estimate in words how long work still takes at the pace so far; empty = nothing is done."""
    if done <= 0 or total <= 0:
        return ""
    return f"about {in_words(elapsed_s * max(0.0, total - done) / done)} left"


def in_words(duration_s: float) -> str:
    """Write a duration: "80 s" or "2 min"."""
    return f"{duration_s:.0f} s" if duration_s < 90 else f"{duration_s / 60:.0f} min"
