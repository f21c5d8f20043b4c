"""The two ways to fill a reserved HBM entry: compute its prefix, or reload it from DRAM."""

from __future__ import annotations

import asyncio
from typing import Generic

from npu_gr.core.errors import DeadlineExceeded
from npu_gr.engine.kv.dram_store import DramEntry
from npu_gr.engine.kv.prefix_pool import PrefixEntry
from npu_gr.engine.kv.tiers import Tiers
from npu_gr.relay.encoder import Encoder, P
from npu_gr.relay.producer import Producer


class PrefixFiller(Generic[P]):
    """Fills the entry of a producer and publishes it. Event loop only."""

    def __init__(self, engine: Encoder[P], tiers: Tiers, max_reloads: int) -> None:
        """`max_reloads`: copies from DRAM at once."""
        self._engine = engine
        self._tiers = tiers
        self._max_reloads = max_reloads
        self._reload_slots = asyncio.Semaphore(max_reloads)

    def reconfigure(self, max_reloads: int) -> None:
        """Change the limit for later reloads. Reloads of now give their slots back to the limit before."""
        if max_reloads != self._max_reloads:
            self._max_reloads = max_reloads
            self._reload_slots = asyncio.Semaphore(max_reloads)

    def reload_s(self, num_tokens: int, num_reloading: int) -> float:
        """Predict the seconds of a reload of `num_tokens` tokens behind `num_reloading` others."""
        copy_s = self._tiers.pool.arena.layout.bytes(num_tokens) / self._engine.copy_bytes_per_s
        return copy_s * (1 + num_reloading // self._max_reloads)

    async def compute(self, tokens: P, base: PrefixEntry | None, deadline_at: float, producer: Producer) -> None:
        """Encode a prefix, from where the producer was stopped before.

        Args:
            tokens: the whole prefix.
            base: a leased resident prefix of the same history, to copy instead of encoding it again; None = none.
            deadline_at: instant of the clock; what has not begun by then is dropped.
            producer: whose entry to fill. If its order is cancelled at a step, its `encoded_tokens` say how far it got.
        """
        entry = producer.entry
        runs = tuple(entry.runs)
        arena = self._tiers.pool.arena
        first = producer.encoded_tokens
        if base is not None and not first:
            await self._engine.copy(arena, base.runs, arena, runs, base.num_tokens, deadline_at, producer.order)
            first = base.num_tokens
        encoded_tokens = await self._engine.prefill(tokens, runs, deadline_at, producer.order, first)
        if encoded_tokens < len(tokens):
            producer.encoded_tokens = encoded_tokens
        elif self._tiers.pool.publish(entry, tokens.timestamps) and base is not None:
            self._tiers.pool.drop(base)  # its readers go on; nobody else needs the shorter prefix

    async def reload(self, copy: DramEntry, patience_s: float, deadline_at: float, producer: Producer) -> None:
        """Copy a prefix back from DRAM.

        Args:
            copy: the prefix in DRAM.
            patience_s: how long to wait for a reload slot.
            deadline_at: instant of the clock; a copy that has not begun by then is dropped.
            producer: whose entry to fill.

        Raises:
            DeadlineExceeded: no slot came free in time. StaleEntry: the DRAM pages were reused during the copy.
        """
        pool, dram = self._tiers
        slots = self._reload_slots  # the slot goes back to the limit that gave it
        assert dram is not None, "the copy lies in it"
        with dram.lease(copy):
            try:
                await asyncio.wait_for(slots.acquire(), patience_s)
            except TimeoutError as error:
                raise DeadlineExceeded("no turn to reload came in time") from error
            try:
                dram.verify(copy)
                runs = producer.entry.runs
                await self._engine.copy(
                    dram.arena, copy.runs, pool.arena, runs, copy.num_tokens, deadline_at, producer.order
                )
                dram.verify(copy)
            finally:
                slots.release()
        assert copy.timestamps is not None, "only complete copies are found"
        pool.publish(producer.entry, copy.timestamps)
