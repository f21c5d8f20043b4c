"""Decides whether to produce a prefix, and starts it: after a signal, or in a rank's pass that encodes it anyway.

Pre-infers and reloads at work are shared by the tenants (`core.shares`). Where all of
`trigger.max_inflight` are at work, a tenant with fewer than its share may still start one: the
youngest prefill of a tenant with more than its share gives way. The device takes the prefills of
several tenants in turn, each as if the tenant had its share of the device for itself; those of one
tenant run in the order in which they came.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996), as in admission.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Brownout, Verdict
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.engine.queue import JobOrder
from npu_gr.relay.config import LiveSettings
from npu_gr.relay.encoder import Encoder, P
from npu_gr.relay.lookup import Inventory
from npu_gr.relay.prefill_manager import Adoption, PrefillJob, PrefillManager, PrefillTable
from npu_gr.relay.trigger import AtShare, Forecast, Headroom, RelayMeasurements, decide


class TenantSlots(NamedTuple):
    """The producers at work, as one tenant finds them."""

    used: int  # that need not give way to this tenant
    is_at_share: bool  # it has its share of them, and others want the rest
    gives_way: PrefillJob | None  # ends if this tenant starts one more
    own: list[PrefillJob]  # of this tenant
    ratio: float  # its share, as a part of 1

    @classmethod
    def now(
        cls, pool: PrefixPool, producers: PrefillTable, max_inflight: int, tenant: str
    ) -> TenantSlots:
        """Look at the producers.

        Args:
            pool: knows which tenants want prefixes.
            producers: of the relay.
            max_inflight: producers at work at once.
            tenant: who would start one more.
        """
        account = pool.shares.asking(tenant)
        ratios = pool.shares.ratios()
        own = producers.at_work_of(account)
        used = producers.in_flight()
        if used < max_inflight or len(ratios) == 1:
            return cls(used, False, None, own, ratios[account])
        slots = {
            each: max(1, int(max_inflight * ratios.get(each, 0.0))) for each in pool.shares.accounts
        }
        if len(own) >= slots[account]:
            return cls(used, True, None, own, ratios[account])
        gives_way = producers.youngest_over(slots.items())
        return cls(used - (gives_way is not None), False, gives_way, own, ratios[account])

    def begins_at(self, now_at: float, takes_s: float) -> float:
        """Return the place of one more in the queue: when it would begin on this tenant's share of the device.

        Args:
            now_at: the clock.
            takes_s: device seconds of one, about.
        """
        behind_s = len(self.own) * takes_s / self.ratio if self.ratio < 1.0 else 0.0
        return max(now_at + behind_s, *(each.order.arrived_at or 0.0 for each in self.own), 0.0)


class Production(Generic[P]):
    """Starts producers within the limits of the trigger and the room in HBM. Event loop only."""

    def __init__(
        self,
        settings: LiveSettings,
        engine: Encoder[P],
        pool: PrefixPool,
        inventory: Inventory[P],
        producers: PrefillManager[P],
        measured: RelayMeasurements,
        clock: Callable[[], float],
    ) -> None:
        """Make it.

        Args:
            settings: of the relay and the trigger.
            engine: its costs and queue.
            pool: the room.
            inventory: what exists already.
            producers: to start.
            measured: the rate limit, and T_life.
            clock: the event loop's.
        """
        self._settings = settings
        self._engine = engine
        self._pool = pool
        self._inventory = inventory
        self._producers = producers
        self._measured = measured
        self._clock = clock

    @property
    def _produces(self) -> bool:
        return self._settings.relay.enabled and self._settings.brownout < Brownout.NO_RELAY

    def preinfer(self, user: UserKey, tokens: P, num_candidates: int) -> Verdict:
        """Decide what a signal leads to, and start it. Never waits, never fails.

        Args:
            user: whose history.
            tokens: the whole history.
            num_candidates: that the rank will bring.
        """
        if not self._produces:
            return Verdict.SKIP_DISABLED
        key = self._inventory.key(user, tokens)
        if (resident := self._pool.get(key)) is not None:
            self._pool.renew(resident)
            return Verdict.ALREADY_RESIDENT
        if self._inventory.is_being_written(key):
            return Verdict.ALREADY_RUNNING
        now_at = self._clock()
        trigger = self._settings.trigger
        base = self._inventory.resident(user, tokens)
        cached = base.num_tokens if base else 0
        copy = self._inventory.copy(user, tokens)
        if copy is not None and copy.num_tokens <= cached:
            copy = None
        if base is not None and copy is None and len(tokens) - cached < trigger.min_prefix_tokens:
            self._pool.renew(base)
            return Verdict.ALREADY_RESIDENT  # the rank computes the few new tokens itself
        forecast = self._forecast(len(tokens), cached, num_candidates)
        slots = TenantSlots.now(
            self._pool, self._producers.table, trigger.max_inflight, user.tenant
        )
        headroom = self._headroom(tokens, user, slots)
        verdict = decide(
            len(tokens), forecast, headroom, trigger, self._measured.rates, user.tenant
        )
        if verdict is not Verdict.PREINFER:
            return verdict
        # when the device has nothing better to do, until its rank waits
        order = JobOrder(float("inf"), slots.begins_at(now_at, forecast.full_s))
        t_life_s = self._settings.relay.t_life_s
        try:
            if copy is not None and self._inventory.reload_pays(copy, t_life_s):
                if self._inventory.is_being_written(copy.key):
                    return Verdict.ALREADY_RUNNING
                self._producers.reload(copy, order, t_life_s, now_at + t_life_s, is_signalled=True)
                started = Verdict.RELOAD
            else:
                started = self._producers.compute(
                    key, tokens, order, base, now_at + self._useful_s(len(tokens))
                )
        except ResourceError:
            return Verdict.SKIP_FOOTPRINT
        if slots.gives_way is not None:
            slots.gives_way.give_way()
        return started

    def keep(self, user: UserKey, tokens: P) -> Adoption | None:
        """Reserve an entry for the prefix that a full inference encodes anyway.

        Returns:
            None if it is not wanted, exists already, has a producer, or there is no room.
        """
        config = self._settings.relay
        is_wanted = config.keep_full and len(tokens) >= self._settings.trigger.min_prefix_tokens
        if not (is_wanted and self._produces):
            return None
        key = self._inventory.key(user, tokens)
        if self._inventory.is_being_written(key) or self._inventory.is_resident(key):
            return None
        try:
            return self._producers.keep(key, tokens, self._clock() + self._useful_s(len(tokens)))
        except ResourceError:
            return None

    def _useful_s(self, num_tokens: int) -> float:
        """Seconds after which the rank of a prefill has come and gone.

        A prefill that waits longer is dropped.
        """
        useful_s = 2 * (self._measured.t_life_p99_s.value + self._engine.cost.full_s(num_tokens, 0))
        return min(self._settings.relay.t_life_s, useful_s)

    def _forecast(self, num_tokens: int, cached_tokens: int, num_candidates: int) -> Forecast:
        pass_s = self._engine.cost.pass_s(num_tokens - cached_tokens, cached_tokens, num_candidates)
        return Forecast(self._engine.queue_s, pass_s, self._engine.residual_s)

    def _headroom(self, tokens: P, user: UserKey, slots: TenantSlots) -> Headroom:
        needed_bytes = self._pool.arena.layout.bytes(len(tokens))
        if needed_bytes:
            self._measured.kv_p99_bytes.observe(needed_bytes)
        room = self._pool.room(user.tenant, len(tokens))
        rates = self._measured.rates
        return Headroom(
            inflight=slots.used,
            available_bytes=room.num_pages * self._pool.arena.layout.page_bytes,
            needed_bytes=needed_bytes,
            at_share=AtShare(
                slots.is_at_share, room.is_at_share, rates is not None and rates.is_shared()
            ),
        )
