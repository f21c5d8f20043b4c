"""Pages of erased users, on their way from an entry back to the allocator: they are zeroed in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from npu_gr.engine.job import JobResult
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.layout import PageRun
from npu_gr.engine.kv.tiers import Tiers
from npu_gr.relay.encoder import Encoder, P

log = logging.getLogger(__name__)


class Overwrites:
    """Zeroes the pages that the tiers report as erased. Event loop only.

    The latest relay over shared tiers takes the reports over from the one before it.
    """

    def __init__(self, engine: Encoder[P], tiers: Tiers) -> None:
        self._zero = engine.zero
        self._pending: set[asyncio.Future[JobResult[None]]] = set()
        for tier in tiers:
            if tier is not None:
                tier.on_erased = partial(self._overwrite, tier.arena)

    def __len__(self) -> int:
        """Count the overwrites that are queued or run."""
        return len(self._pending)

    def _overwrite(self, arena: KVArena, runs: tuple[PageRun, ...], free: Callable[[], None]) -> None:
        future = self._zero(arena, runs)
        self._pending.add(future)

        def ended(future: asyncio.Future[JobResult[None]]) -> None:
            self._pending.discard(future)
            free()
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("pages of an erased user were not overwritten: %s", error)

        future.add_done_callback(ended)

    async def finished(self) -> None:
        """Wait for the overwrites of now.

        Raises:
            NpuGrError: one of them failed.
        """
        if self._pending:
            done, _ = await asyncio.wait(self._pending)  # unlike gather, it cancels none if the waiter is cancelled
            for future in done:
                future.result()

    async def settled(self) -> None:
        """Wait for the overwrites of now. One that fails does not fail the caller."""
        if self._pending:
            await asyncio.wait(self._pending)
