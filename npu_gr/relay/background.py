"""The background work of a relay: its tasks, and the overwriting of erased users' pages.

The work belongs to the relay, not to the request that started it: a request that is cancelled
cancels no task, and a task that fails is counted and logged, and fails no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Overloaded
from npu_gr.core.lifetime import cancel_all
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.queue import JobResult
from npu_gr.relay.encoder import Encoder, P

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks that run until they end, or until `stop`. Event loop only."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        """Call `on_error` with the name of each task that fails with an `NpuGrError`."""
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
            # Under overload every request may cause one of these, and the metrics count them: log
            # them at DEBUG only.
            level = (
                logging.DEBUG
                if isinstance(error, DeadlineExceeded | Overloaded)
                else logging.WARNING
            )
            log.log(
                level, "a background task of the relay failed: %s: %s", type(error).__name__, error
            )

    async def finished(self) -> None:
        """Wait for the tasks that run now. A failed task raises nothing here."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel the tasks that run now, and wait for them for a moment: a pass may hang."""
        await cancel_all(self._tasks)


class Overwrites:
    """Zeroes the pages of erased users before the tiers may reuse them. Event loop only.

    If several relays share the tiers, that of the current version overwrites the pages.
    """

    def __init__(self, engine: Encoder[P], tiers: Tiers) -> None:
        self._zero = engine.zero
        self._pending: set[asyncio.Future[JobResult[None]]] = set()
        self.take_over(tiers)

    def take_over(self, tiers: Tiers) -> None:
        """Overwrite the pages of these tiers, in the place of another relay."""
        for tier in tiers:
            if tier is not None:
                tier.on_erased = partial(self._overwrite, tier.arena)

    def __len__(self) -> int:
        """Count the overwrites that are queued or run."""
        return len(self._pending)

    def _overwrite(
        self, arena: KVArena, runs: tuple[PageRun, ...], free: Callable[[], None]
    ) -> None:
        future = self._zero(arena, runs)
        self._pending.add(future)

        def ended(future: asyncio.Future[JobResult[None]]) -> None:
            self._pending.discard(future)
            free()
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("the pages of an erased user were not overwritten with zeros: %s", error)

        future.add_done_callback(ended)

    async def finished(self) -> None:
        """Wait for the overwrites that are queued or run now.

        Raises:
            NpuGrError: one of them failed.
        """
        if self._pending:
            # unlike gather, wait() cancels no overwrite if this coroutine is cancelled
            done, _ = await asyncio.wait(self._pending)
            for future in done:
                future.result()

    async def settled(self) -> None:
        """Wait for the overwrites that are queued or run now, ignoring failures."""
        if self._pending:
            await asyncio.wait(self._pending)
