"""Copies of used prefixes from HBM into DRAM, in the background."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import Generic

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.engine.job import JobOrder
from npu_gr.engine.kv.dram_store import DramEntry, DramStore
from npu_gr.engine.kv.keys import PrefixKey
from npu_gr.engine.kv.prefix_pool import PrefixEntry
from npu_gr.engine.kv.tiers import Tiers
from npu_gr.relay.background import BackgroundTasks
from npu_gr.relay.encoder import Encoder, P


class Spills(Generic[P]):
    """At most one copy per key is on its way. Event loop only."""

    def __init__(self, engine: Encoder[P], tiers: Tiers, background: BackgroundTasks) -> None:
        self._engine = engine
        self._tiers = tiers
        self._background = background
        self._copies: dict[PrefixKey, DramEntry] = {}

    def __len__(self) -> int:
        """Count the copies on their way."""
        return len(self._copies)

    def start(self, entry: PrefixEntry, order_at: float) -> None:
        """Copy a used prefix to DRAM, unless it is there, or on its way, or DRAM has no room.

        The HBM pages stay readable until somebody needs them.

        Args:
            entry: resident, or nothing happens.
            order_at: the copy's place in the queue: behind every request and prefill of now.
        """
        pool, dram = self._tiers
        key = entry.key
        if dram is None or key in self._copies or dram.get(key) is not None or pool.get(key) is not entry:
            return
        try:
            copy = dram.reserve(key, entry.num_tokens)
        except ResourceError:
            return
        self._copies[key] = copy
        held = ExitStack()
        held.enter_context(pool.lease(entry, consume=False))  # from now on: the task begins later

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            dram.abandon(copy)  # nothing, if it was committed
            if self._copies.get(key) is copy:
                del self._copies[key]

        task = self._background.start("spill", partial(self._copy, dram, copy, entry, order_at))
        task.add_done_callback(ended)

    async def _copy(self, dram: DramStore, copy: DramEntry, entry: PrefixEntry, order_at: float) -> None:
        pool = self._tiers.pool
        await self._engine.copy(
            pool.arena,
            entry.runs,
            dram.arena,
            copy.runs,
            entry.num_tokens,
            float("inf"),
            JobOrder(order_at),
            preemptible=True,
        )
        assert entry.timestamps is not None, "it was published"
        dram.commit(copy, entry.timestamps)

    def forget(self, user: UserKey) -> None:
        """Let later copies of an erased user begin, although copies of before still run. Those come to nothing."""
        self._copies = {key: copy for key, copy in self._copies.items() if key.user != user}
