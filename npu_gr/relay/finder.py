"""Gets a rank the prefix that `find.choose` chose: at once, or by waiting as long as the rank can afford."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Reason
from npu_gr.engine.job import JobOrder
from npu_gr.engine.kv.dram_store import DramEntry
from npu_gr.engine.kv.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.relay.config import LiveSettings
from npu_gr.relay.encoder import P
from npu_gr.relay.find import AdoptPrefill, ComputeAll, JoinProducer, ReloadCopy, UseResident, choose
from npu_gr.relay.inventory import Inventory
from npu_gr.relay.producer import Adoption, Producer, ProducerKind
from npu_gr.relay.producers import Producers
from npu_gr.relay.rank_time import RankTime


class FoundPrefix(NamedTuple):
    """The prefix of a rank, if there is one, and how it came about."""

    outcome: Outcome
    reason: Reason = Reason.NONE
    entry: PrefixEntry | None = None  # resident; lease it before the next await
    adoption: Adoption | None = None  # the rank encodes the rest; it must release this


def _miss(reason: Reason) -> FoundPrefix:
    return FoundPrefix(Outcome.MISS_FULL, reason)


class PrefixFinder(Generic[P]):
    """Finds the longest usable prefix: resident, else on its way, else in DRAM. Event loop only."""

    def __init__(
        self,
        settings: LiveSettings,
        inventory: Inventory[P],
        producers: Producers[P],
        pool: PrefixPool,
        clock: Callable[[], float],
    ) -> None:
        """Make the finder.

        Args:
            settings: limits.
            inventory: what exists.
            producers: to join, to adopt, and to reload with.
            pool: where a producer publishes.
            clock: the event loop's.
        """
        self._settings = settings
        self._inventory = inventory
        self._producers = producers
        self._pool = pool
        self._clock = clock

    async def find(
        self, user: UserKey, tokens: P, time: RankTime, while_waiting: Callable[[], AbstractContextManager[None]]
    ) -> FoundPrefix:
        """Get the best prefix of a history; never fails, and never takes longer than the rank can wait.

        Args:
            user: whose history.
            tokens: the whole history, at least one token.
            time: that the rank has.
            while_waiting: entered while it waits.
        """
        existing = self._inventory.existing(user, tokens, time.left_s)
        decision = choose(existing, len(tokens), self._settings.relay.max_joiners)
        if isinstance(decision, UseResident):
            return FoundPrefix(Outcome.HBM_HIT, entry=decision.entry)
        if isinstance(decision, ComputeAll):
            return _miss(decision.reason)
        with while_waiting():
            match decision:
                case AdoptPrefill(producer):
                    return await self._adopt(producer, time)
                case JoinProducer(producer):
                    return await self._join(producer, time)
                case ReloadCopy(copy):
                    return await self._reload(copy, time)

    async def _adopt(self, producer: Producer, time: RankTime) -> FoundPrefix:
        """Take a running prefill over; a miss if the remainder is too much for this rank."""
        adoption = await self._producers.adopt(producer, time.patience_s)
        if adoption is None:
            if not producer.ended.done():
                return _miss(Reason.JOIN_TIMEOUT)
            return await self._join(producer, time)  # it ended in the meantime
        encoded = producer.encoded_tokens
        limit = self._settings.max_uncached_tokens
        is_too_much = limit is not None and time.num_tokens - encoded > limit
        if is_too_much or (self._settings.relay.degrade and not time.is_enough_from(encoded)):
            adoption.release()
            return _miss(Reason.JOIN_TIMEOUT)
        if not encoded:
            return FoundPrefix(Outcome.MISS_FULL, Reason.NOT_BEGUN, adoption=adoption)
        return FoundPrefix(Outcome.JOINED, Reason.COMPUTE, adoption=adoption)

    async def _join(self, producer: Producer, time: RankTime) -> FoundPrefix:
        """Wait for a producer, as long as time to do without the prefix remains."""
        producer.order.hasten(time.order_at)
        producer.joiners += 1
        try:
            done, _ = await asyncio.wait({producer.ended}, timeout=time.patience_s)
        finally:
            producer.joiners -= 1
        if not done:
            return _miss(Reason.JOIN_TIMEOUT)
        entry = self._pool.get(producer.key)
        if entry is not None:
            reason = Reason.RELOAD if producer.kind is ProducerKind.RELOAD else Reason.COMPUTE
            return FoundPrefix(Outcome.JOINED, reason, entry)
        return _miss(Reason.EXPIRED if producer.entry.is_published else Reason.PRODUCER_FAILED)

    async def _reload(self, copy: DramEntry, time: RankTime) -> FoundPrefix:
        """Start a reload, and wait for it."""
        deadline_at = self._clock() + self._settings.relay.t_life_s
        try:
            producer = self._producers.reload(
                copy, JobOrder(time.order_at), time.left_s, deadline_at, is_signalled=False
            )
        except ResourceError:
            return _miss(Reason.REJECTED_FOOTPRINT)
        found = await self._join(producer, time)
        if found.entry is not None:
            return FoundPrefix(Outcome.DRAM_HIT, entry=found.entry)
        return _miss(Reason.RELOAD_FAILED) if found.reason is Reason.PRODUCER_FAILED else found
