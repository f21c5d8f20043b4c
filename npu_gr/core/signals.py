"""Signals that a process is stopped by."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Queue[int]]:
    """Put every SIGTERM and SIGINT into a queue while the block runs."""
    loop = asyncio.get_running_loop()
    received = asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
