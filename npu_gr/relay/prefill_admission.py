"""Admission of prefill jobs: decides whether a prefix is worth encoding, and starts its job.

A signal starts a prefill or a reload; a rank that encodes the whole prefix anyway may keep it.

Tenants share the `trigger.max_inflight` running jobs (`core.shares`). When all of them run, a
tenant with fewer than its share may still start one: the youngest prefill of a tenant over its
share is cancelled. The device serves the prefills of several tenants in turn, each tenant as if it
had its share of the device to itself; the prefills of one tenant run in order of arrival.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996), as in admission.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Brownout, Verdict
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.engine.queue import JobOrder
from npu_gr.relay.config import LiveSettings
from npu_gr.relay.encoder import Encoder, P
from npu_gr.relay.lookup import Inventory
from npu_gr.relay.pool_copies import PoolCopies
from npu_gr.relay.prefill_job import Adoption, PrefillJob
from npu_gr.relay.prefill_manager import PrefillManager, PrefillTable
from npu_gr.relay.trigger import AtShare, Forecast, Headroom, RelayMeasurements, decide


class TenantSlots(NamedTuple):
    """The running prefill jobs from the point of view of one tenant."""

    used: int  # running jobs, less the one that would give way to this tenant
    is_at_share: bool  # the tenant has its share, and other tenants want the rest
    gives_way: PrefillJob | None  # cancelled if this tenant starts one more
    own: list[PrefillJob]  # running jobs of this tenant, oldest first
    ratio: float  # the tenant's share, in (0, 1]

    @classmethod
    def now(
        cls, pool: PrefixPool, jobs: PrefillTable, max_inflight: int, tenant: str
    ) -> TenantSlots:
        """Count the running jobs for a tenant that wants to start one more.

        Args:
            pool: HBM tier, which knows the tenants that want prefixes.
            jobs: Jobs of the relay that have not ended.
            max_inflight: Most jobs that may run at a time.
            tenant: Name of the tenant.
        """
        account = pool.shares.asking(tenant)
        ratios = pool.shares.ratios()
        own = jobs.at_work_of(account)
        used = jobs.in_flight()
        if used < max_inflight or len(ratios) == 1:
            return cls(used, False, None, own, ratios[account])
        slots = {
            each: max(1, int(max_inflight * ratios.get(each, 0.0))) for each in pool.shares.accounts
        }
        if len(own) >= slots[account]:
            return cls(used, True, None, own, ratios[account])
        gives_way = jobs.youngest_over(slots.items())
        return cls(used - (gives_way is not None), False, gives_way, own, ratios[account])

    def begins_at(self, now_at: float, takes_s: float) -> float:
        """Return when a new job would begin if the tenant had its share of the device to itself.

        Args:
            now_at: instant of the clock.
            takes_s: Estimated device seconds of one job.
        """
        behind_s = len(self.own) * takes_s / self.ratio if self.ratio < 1.0 else 0.0
        return max(now_at + behind_s, *(each.order.arrived_at or 0.0 for each in self.own), 0.0)


class PrefillAdmission(Generic[P]):
    """Starts prefill jobs within the limits of the trigger and the room in HBM. Event loop only."""

    def __init__(
        self,
        settings: LiveSettings,
        engine: Encoder[P],
        pool: PrefixPool,
        inventory: Inventory[P],
        prefills: PrefillManager[P],
        measured: RelayMeasurements,
        clock: Callable[[], float],
    ) -> None:
        """Start nothing yet.

        Args:
            settings: Live settings of the relay and the trigger.
            engine: Engine whose cost model and queue the forecasts use.
            pool: HBM tier in which the prefixes need room.
            inventory: Prefixes that exist already.
            prefills: Manager that runs the jobs.
            measured: Rate limit and measured T_life.
            clock: The event loop's clock, in seconds.
        """
        self._settings = settings
        self._engine = engine
        self._pool = pool
        self._inventory = inventory
        self._prefills = prefills
        self._measured = measured
        self._clock = clock
        self.pool_copies: PoolCopies[P] | None = None  # None = there is no pool

    @property
    def _is_enabled(self) -> bool:
        settings = self._settings
        is_on = settings.relay.enabled and not settings.is_switched_off
        return is_on and settings.brownout < Brownout.NO_RELAY

    def preinfer(
        self, user: UserKey, tokens: P, num_candidates: int, *, may_fetch: bool = True
    ) -> Verdict:
        """Decide what a signal leads to, and start it. Never waits, never fails.

        Args:
            user: User of the history.
            tokens: the whole history.
            num_candidates: Expected number of candidates of the rank.
            may_fetch: Whether the pool may have the prefix.
        """
        if not self._is_enabled:
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
        slots = TenantSlots.now(self._pool, self._prefills.table, trigger.max_inflight, user.tenant)
        headroom = self._headroom(tokens, user, slots)
        verdict = decide(
            len(tokens), forecast, headroom, trigger, self._measured.rates, user.tenant
        )
        if verdict is not Verdict.PREINFER:
            return verdict
        nothing_here = may_fetch and base is None and copy is None
        if nothing_here and self._fetch(user, tokens, num_candidates):
            return Verdict.RELOAD
        # Preemptible: it runs when no request waits, until its own rank waits and hastens it.
        order = JobOrder(float("inf"), slots.begins_at(now_at, forecast.full_s))
        t_life_s = self._settings.relay.t_life_s
        try:
            if copy is not None and self._inventory.reload_pays(copy, t_life_s):
                if self._inventory.is_being_written(copy.key):
                    return Verdict.ALREADY_RUNNING
                self._prefills.reload(copy, order, t_life_s, now_at + t_life_s, is_signalled=True)
                started = Verdict.RELOAD
            else:
                started = self._prefills.compute(
                    key, tokens, order, base, now_at + self._useful_s(len(tokens))
                )
        except ResourceError:
            return Verdict.SKIP_FOOTPRINT
        if slots.gives_way is not None:
            slots.gives_way.give_way()
        return started

    def _fetch(self, user: UserKey, tokens: P, num_candidates: int) -> bool:
        """Start to fetch a prefix from the pool, and decide the signal again when that has ended.

        Returns:
            False if it is not tried.
        """
        copies = self.pool_copies
        if copies is None or not self._settings.uses_dram:
            return False
        if copies.is_fetching(user):
            return True
        again = partial(self.preinfer, user, tokens, num_candidates, may_fetch=False)
        return copies.fetch(user, tokens, self._engine.cost.full_s(len(tokens), 0), again)

    def keep(self, user: UserKey, tokens: P) -> Adoption | None:
        """Reserve an entry for the prefix that a full inference encodes anyway.

        Returns:
            None if the prefix is too short, exists already or has a job, if `relay.keep_full` is
            off, or if there is no room.
        """
        config = self._settings.relay
        is_wanted = config.keep_full and len(tokens) >= self._settings.trigger.min_prefix_tokens
        if not (is_wanted and self._is_enabled):
            return None
        key = self._inventory.key(user, tokens)
        if self._inventory.is_being_written(key) or self._inventory.is_resident(key):
            return None
        try:
            return self._prefills.keep(key, tokens, self._clock() + self._useful_s(len(tokens)))
        except ResourceError:
            return None

    def _useful_s(self, num_tokens: int) -> float:
        """Estimate the seconds until the rank of a prefill is over; a later prefill is useless."""
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
