"""Blocks of asyncio: a task that runs beside the block, a deadline for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from npu_gr.core.errors import DeadlineExceeded


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the block; cancel it at the block's end, and wait until it has ended."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def deadline(budget_s: float) -> AsyncIterator[float]:
    """Cancel the block when its time is over; the block gets the instant (time.monotonic) at which that is.

    Raises:
        DeadlineExceeded: the budget ran out; the block was cancelled and has unwound.
    """
    at = time.monotonic() + budget_s
    scope = asyncio.timeout(None if budget_s == float("inf") else budget_s)
    try:
        async with scope:
            yield at
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"not done within {budget_s * 1e3:.0f} ms") from error
