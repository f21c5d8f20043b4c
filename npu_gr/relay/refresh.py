"""Encodes a prefix again that a delta has touched, behind all other work of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Brownout
from npu_gr.core.served import Refreshed
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry, by_use, evict_last
from npu_gr.engine.kv_cache.tier import PageTier
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.queue import BEHIND_S, JobOrder
from npu_gr.relay.config import LiveSettings
from npu_gr.relay.encoder import P
from npu_gr.relay.lookup import E, Inventory, is_usable
from npu_gr.relay.prefill_manager import PrefillManager

# Tokens of a step: a rank waits for one at most, which takes about as long as the rank itself. A
# tile of attention, so that steps have the bits of a whole pass.
STEP_TOKENS = 64
# A prefix for which the device has no time is given up, since its tokens keep the spare rows of
# items from others (`handlers/spare_rows.py`, `WAIT_S`).
MOST_S = 8.0


class PrefixRefresh(Generic[P]):
    """Replaces touched prefixes of one relay by exact ones. Event loop only."""

    def __init__(
        self,
        settings: LiveSettings,
        tiers: Tiers,
        inventory: Inventory[P],
        prefills: PrefillManager[P],
        spill: Callable[[PrefixEntry], None],
        clock: Callable[[], float],
    ) -> None:
        """Store the parts.

        Args:
            settings: Live settings of the relay.
            tiers: HBM and DRAM.
            inventory: Prefixes that exist.
            prefills: Manager of the prefill jobs.
            spill: Copies a prefix to DRAM.
            clock: The event loop's clock, in seconds.
        """
        self._settings = settings
        self._tiers = tiers
        self._inventory = inventory
        self._prefills = prefills
        self._spill = spill
        self._clock = clock

    def users_by_use(self) -> list[UserKey]:
        """List the users with prefixes in HBM: those who wait for a rank, then the latest first."""
        return list(dict.fromkeys(entry.key.user for entry in by_use(self._tiers.pool)))

    def evict_last(self, users: Iterable[UserKey]) -> None:
        """Evict the prefixes of users after all others, those of the last user last."""
        entries: dict[UserKey, list[PrefixEntry]] = {}
        for entry in by_use(self._tiers.pool):
            entries.setdefault(entry.key.user, []).append(entry)
        for user in users:
            for entry in reversed(entries.get(user, [])):
                evict_last(self._tiers.pool, entry)

    async def refresh(self, user: UserKey, tokens: P, before: Sequence[P]) -> Refreshed:
        """Encode a user's prefix again, if a delta has touched it.

        Until then the touched one stays, if `relay.max_stale_s` lets ranks use it.

        Args:
            user: The user.
            tokens: The whole history as the weights now read it.
            before: The same history as weights before read it.
        """
        settings = self._settings
        is_off = settings.is_switched_off or not settings.relay.enabled
        if is_off or settings.brownout >= Brownout.NO_RELAY:
            return Refreshed.FAILED
        pool, dram = self._tiers
        key = self._inventory.key(user, tokens)
        exact = self._inventory.resident(user, tokens)

        def touched(tier: PageTier[E]) -> list[E]:
            entries = tier.find(user, key.model_version, key.layout_id)
            return [
                entry
                for entry in entries
                if not is_usable(entry, tokens) and any(is_usable(entry, then) for then in before)
            ]

        if dram is not None:
            for copy in touched(dram):
                dram.drop(copy)
        old = touched(pool)
        longest = max((entry.num_tokens for entry in old), default=0)
        is_exact = exact is not None and exact.num_tokens >= longest
        waits = any(entry.awaits_rank for entry in old)
        if is_exact or not settings.relay.max_stale_s:
            for entry in old:
                pool.drop(entry)  # nothing may use it
        if is_exact or self._inventory.is_being_written(key):  # a signal or a rank was first
            return Refreshed.EXACT
        if not old:
            return Refreshed.GONE
        # behind the prefills of signals
        order = JobOrder(float("inf"), self._clock() + BEHIND_S, step_tokens=STEP_TOKENS)
        try:
            job = self._prefills.refresh(key, tokens, order, self._clock() + MOST_S)
        except ResourceError:
            return Refreshed.NO_ROOM
        await job.ended
        made = pool.get(key)
        if made is None:
            return Refreshed.FAILED
        if not waits:
            with pool.lease(made, consume=True):
                pass  # so that it may be evicted
        for entry in old:
            pool.drop(entry)
        self._spill(made)
        return Refreshed.ENCODED
