"""Bound how long a request may take: `async with deadline(budget_s) as deadline_at`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from npu_gr.core.errors import DeadlineExceeded


@asynccontextmanager
async def deadline(budget_s: float) -> AsyncIterator[float]:
    """Cancel the block when its time is over; yield the instant (time.monotonic) at which that is.

    Raises:
        DeadlineExceeded: the budget ran out; the block was cancelled and has unwound.
    """
    deadline_at = time.monotonic() + budget_s
    try:
        async with asyncio.timeout(budget_s):
            yield deadline_at
    except TimeoutError as error:
        raise DeadlineExceeded(f"not done within {budget_s * 1e3:.0f} ms") from error
