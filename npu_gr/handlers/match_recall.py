"""Checks an approximate index while it serves: one request in many, in idle time.

    a request is answered -> every `EVERY`-th is taken -> exact search in steps, each while nothing
    else is queued or runs -> counted: items that the index should have found, and those it did not

No request waits for a check but for the step that runs, some milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.lifetime import cancel_all
from npu_gr.vector_search.index import ExactSteps
from npu_gr.vector_search.ivf import RECALL_AT

EVERY = 100  # requests, of which one is checked
POLL_S = 0.005  # between two looks for idle time
WAIT_S = 60.0  # that a check may take; then it is left out


class RecallChecks:
    """Runs one check at a time. Event loop only."""

    def __init__(
        self, is_idle: Callable[[], bool], counted: Callable[[int, int], None], every: int = EVERY
    ) -> None:
        """Wait for requests.

        Args:
            is_idle: Whether nothing is queued or running.
            counted: Function that gets the items of an exact search, and how many of them
                the answer lacks.
            every: Requests of which one is checked.
        """
        self._is_idle = is_idle
        self._counted = counted
        self._every = every
        self._num_offered = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(
        self,
        found: I64,
        exactly: Callable[[int], ExactSteps | None],
        is_same: Callable[[], bool] = lambda: True,
    ) -> None:
        """Check what an index has found later, if its turn has come and no check runs.

        Args:
            found: [n] item rows, best first.
            exactly: Begins an exact search for so many items; None = the index has not searched.
            is_same: Whether the items are those that were searched; else nothing is counted.
        """
        if not len(found):
            return
        self._num_offered += 1
        if self._tasks or self._num_offered % self._every:
            return
        task = asyncio.get_running_loop().create_task(self._check(found, exactly, is_same))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(
        self, found: I64, exactly: Callable[[int], ExactSteps | None], is_same: Callable[[], bool]
    ) -> None:
        best = found[:RECALL_AT]
        search = exactly(len(best))
        if search is None:
            return
        ends_at = time.monotonic() + WAIT_S
        while not search.is_over:
            if not self._is_idle():
                if time.monotonic() > ends_at:
                    return
                await asyncio.sleep(POLL_S)
                continue
            await asyncio.to_thread(search.step)
        if is_same():
            self._counted(len(search.rows), len(np.setdiff1d(search.rows, best)))

    async def stop(self) -> None:
        """End the check that runs."""
        await cancel_all(self._tasks)
