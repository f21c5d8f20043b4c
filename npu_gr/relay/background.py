"""The tasks of a relay. They belong to the relay, not to the request that started them.

A request that goes away takes no task with it, and a task that fails never reaches a caller: it is counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Overloaded

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks that run until they end, or until `stop`. Event loop only."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        """`on_error` gets the name of a task that failed with one of our own errors."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Count the tasks that run."""
        return len(self._tasks)

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start a task; `name` is the label of its errors: prefill, reload or spill."""
        task = asyncio.get_running_loop().create_task(self._counted(name, work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _counted(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except NpuGrError:
            self._on_error(name)
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # under overload there is one of these a request, and each is counted: not worth a line of the log
            level = logging.DEBUG if isinstance(error, DeadlineExceeded | Overloaded) else logging.WARNING
            log.log(level, "a relay task failed: %s: %s", type(error).__name__, error)

    async def finished(self) -> None:
        """Wait for the tasks of now. A task that fails does not fail the caller."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel the tasks of now and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
