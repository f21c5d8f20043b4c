"""The relay race: a signal puts a user's prefix KV into HBM, and the rank that follows leases it.

    signal -> PrefillAdmission  decides whether to encode the prefix
           -> PrefillManager    runs the prefill job in the background, one for each prefix

    rank   -> PrefixFinder      decides which prefix to use, and waits for it
           -> Lease             holds it while the rank runs
           -> Spills            copies the used prefix to DRAM

A prefix is identified by (user, model version, KV layout, fingerprint). `docs/relay.md` follows a
signal and a lease from beginning to end, and draws the states of a prefill job and of a page.

Source: RelayGR (arXiv:2601.01712), in-HBM relay-race inference and memory-aware expander.
Invariants, held by tests/relay:
  R1  a key has at most one prefill job
  R2  no failure of a pool, a tier or a job reaches the caller: the lease says miss_full or
      degraded, and why
  R3  every lease is released, however the block ends
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from types import MappingProxyType
from typing import Any, Generic

import msgspec

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Reason, Verdict
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry
from npu_gr.engine.kv_cache.prefix_store import PrefixStore
from npu_gr.engine.kv_cache.tier import DramEntry, DramStore, PrefixKey
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.page_jobs import CachedPrefix, PageCopy
from npu_gr.engine.queue import JobOrder
from npu_gr.relay.background import BackgroundTasks, Overwrites
from npu_gr.relay.config import Calibration, LiveSettings, RelayConfig, TriggerConfig
from npu_gr.relay.encoder import Encoder, P
from npu_gr.relay.lookup import FoundPrefix, Inventory, LastSignals, PrefixFinder, RankTime
from npu_gr.relay.pool_copies import PoolCalls, PoolCopies, StoreCalls
from npu_gr.relay.prefill_admission import PrefillAdmission
from npu_gr.relay.prefill_job import Adoption, PrefillKind
from npu_gr.relay.prefill_manager import PrefillManager, PrefixFiller
from npu_gr.relay.refresh import PrefixRefresh
from npu_gr.relay.trigger import RelayMeasurements

NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})  # all tenants are equal


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank gets its prefix.

    `cached` stays readable until the block of `Relay.lease` ends.
    """

    outcome: Outcome
    reason: Reason = Reason.NONE
    cached: CachedPrefix | None = None
    first_token: int = 0  # degraded: the pass skips the tokens before this one
    # Pages into which the pass writes its prefix KV; published if the block succeeds.
    keep: tuple[PageRun, ...] | None = None
    # Call it when the pass has failed: nothing is published, however the block ends.
    discard: Callable[[], None] = lambda: None


class Relay(Generic[P]):
    """Turns signals into prefixes and leases them to ranks, for one engine. Event loop only."""

    def __init__(
        self,
        config: RelayConfig,
        trigger: TriggerConfig,
        engine: Encoder[P],
        tiers: Tiers,
        model_version: str,
        clock: Callable[[], float] = time.monotonic,
        calibration: Calibration | None = None,
        tenant_weights: Mapping[str, float] = NO_WEIGHTS,
        store: PrefixStore | None = None,
        pool: PoolCalls | None = None,
    ) -> None:
        """Register for the erasures of the tiers. Nothing runs yet.

        Args:
            config: settings of the relay.
            trigger: settings of the trigger.
            engine: Engine that encodes and copies prefixes.
            tiers: HBM and DRAM; relays of several model versions may share them.
            model_version: Part of every prefix key.
            clock: Clock of the event loop and of the tiers, in seconds.
            calibration: Earlier measurements, used until there are new ones; also Q_m where the
                settings have none.
            tenant_weights: Weights for the tenants' shares; a tenant without one has weight 1.
            store: The pool behind the DRAM tier; None = there is none.
            pool: Calls to the pool, in the place of those to `store`, for a simulation.
        """
        self.tiers = tiers
        self._engine = engine
        self._clock = clock
        # Gauges read the live settings; a reload and the brown-out change them.
        self.settings = LiveSettings(config, trigger, tenant_weights)
        # Called with the work that failed: "prefill", "reload" or "spill".
        self.on_error: Callable[[str], None] = lambda _where: None
        # Called at the first use of a prefix, with the seconds since it was published.
        self.on_first_use: Callable[[float], None] = lambda _waited_s: None
        self.measured = RelayMeasurements(self.settings, tiers.pool, calibration, clock)
        self._learn_waits()
        tiers.weigh(tenant_weights)
        self._background = BackgroundTasks(lambda where: self.on_error(where))
        self._overwrites = Overwrites(engine, tiers)
        self._filler = PrefixFiller(engine, tiers, config.max_reloads)
        self.prefills = PrefillManager(self._filler, tiers.pool, self._background, clock)
        self.spills = Spills(self.settings, engine, tiers, self._background)
        self.store = store
        self.pool_copies: PoolCopies[P] | None = None
        if store is not None and tiers.dram is not None:
            pool = StoreCalls(store, tiers.dram, model_version)
        if pool is not None and tiers.dram is not None:
            self.pool_copies = PoolCopies(tiers.dram, pool, model_version, self._background, clock)
            self.spills.on_copied = self.pool_copies.put
            self.spills.is_pooled = True
        self._signals = LastSignals(self.settings)
        inventory = Inventory(
            self.settings,
            engine,
            tiers,
            self._filler,
            self.prefills.table,
            self._signals,
            model_version,
        )
        self._finder = PrefixFinder(self.settings, inventory, self.prefills, tiers.pool, clock)
        self._admission = PrefillAdmission(
            self.settings, engine, tiers.pool, inventory, self.prefills, self.measured, clock
        )
        self._admission.pool_copies = self.pool_copies
        # after a delta
        self.refreshing = PrefixRefresh(
            self.settings, tiers, inventory, self.prefills, self._spill, clock
        )

    # ---- settings and gauges

    def reconfigure(
        self,
        config: RelayConfig,
        trigger: TriggerConfig,
        tenant_weights: Mapping[str, float] = NO_WEIGHTS,
    ) -> None:
        """Apply other settings from now on, and use prefixes again if they were switched off.

        Running jobs and measurements stay.
        """
        self.settings.relay = config
        self.settings.trigger = trigger
        self.settings.is_switched_off = False
        self.settings.tenant_weights = tenant_weights
        self.tiers.weigh(tenant_weights)
        self._filler.reconfigure(config.max_reloads)
        self.measured.reconfigure()
        self.tiers.pool.waits.t_life_s = config.t_life_s
        self._learn_waits()

    def take_over(self) -> None:
        """Overwrite the pages of erased users from now on, in the place of another relay."""
        self._overwrites.take_over(self.tiers)

    @property
    def t_life_s(self) -> float:
        """Seconds that a published prefix waits for its rank, by the live settings."""
        return self.settings.relay.t_life_s

    @property
    def is_busy(self) -> bool:
        """Whether a job, a copy, a task or an overwrite has not ended."""
        return bool(
            len(self.prefills.table)
            or len(self.spills)
            or len(self._background)
            or len(self._overwrites)
        )

    def in_flight(self, work: str) -> int:
        """Count the prefixes on their way: `prefill` and `reload` into HBM, `spill` into DRAM."""
        return (
            len(self.spills)
            if work == "spill"
            else self.prefills.table.in_flight(PrefillKind(work))
        )

    # ---- signal

    def signal(self, user: UserKey, tokens: P, num_candidates: int | None = None) -> Verdict:
        """Decide whether to encode this history's prefix, and start it. Never waits, never fails.

        Args:
            user: User of the history.
            tokens: the whole history as the model reads it.
            num_candidates: Expected number of candidates of the rank; None =
                `trigger.num_candidates`.
        """
        if num_candidates is None:
            num_candidates = self.settings.trigger.num_candidates
        verdict = self._admission.preinfer(user, tokens, num_candidates)
        self._signals.remember(user, verdict, self._clock())
        return verdict

    # ---- lease

    def lease(
        self,
        user: UserKey,
        tokens: P,
        num_candidates: int,
        deadline_at: float,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> AbstractAsyncContextManager[Lease]:
        """Get a prefix KV of this history, or a reason why there is none, for one rank.

        The lease is valid while the block runs.

        Args:
            user: User of the history.
            tokens: the whole history as the model reads it.
            num_candidates: Number of candidates of the rank, to estimate its cost.
            deadline_at: instant of the clock by which the rank must be done.
            while_waiting: Factory of a context that is entered while the rank waits for a prefill
                job.
        """
        rank_time = RankTime(
            self.settings.relay, self._engine, self._clock, len(tokens), num_candidates, deadline_at
        )
        return _Leasing(self, user, tokens, rank_time, while_waiting)

    def _rank_ended(self, user: UserKey) -> None:
        waited_s = self._signals.rank_ended(user, self._clock())
        if waited_s is not None:
            self.measured.t_life_p99_s.observe(waited_s)
            self._learn_waits()

    def _learn_waits(self) -> None:
        """Set in the pool how long prefixes usually wait for their ranks."""
        self.tiers.pool.waits.usual_s = min(self.t_life_s, self.measured.t_life_p99_s.value)

    def _spill(self, entry: PrefixEntry) -> None:
        # behind every rank and prefill that is queued now
        self.spills.start(entry, self._clock() + self.t_life_s)

    # ---- erasure and stop

    async def erase(self, user: UserKey) -> None:
        """Erase a user from every tier.

        The prefixes cannot be found from now on. Returns when their unused pages are overwritten
        with zeros; pages that a running rank reads or writes are overwritten when it ends, and
        always before another user gets them.

        Raises:
            PoolFailed: the pool may still have the user; erase again.
        """
        self._signals.forget(user)
        tasks = {job.task for job in self.prefills.table.of(user) if job.task is not None}
        for task in tasks:
            task.cancel()  # each ends with the chunk that the device runs
        self.tiers.erase_user(user)
        self.spills.forget(user)
        in_pool = None
        if self.pool_copies is not None:
            in_pool = asyncio.ensure_future(self.pool_copies.erase(user))
        if tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # lets the callbacks of the tasks release the pages
        await self._overwrites.finished()
        if in_pool is not None:
            await in_pool

    def knows(self, user: UserKey) -> bool:
        """Return whether a tier, a prefill job or a remembered signal belongs to the user."""
        return (
            self.tiers.knows(user)
            or bool(self.prefills.table.of(user))
            or self._signals.knows(user)
        )

    async def settled(self) -> None:
        """Wait until nothing is being prefilled, reloaded, spilled or overwritten."""
        while len(self._background) or len(self._overwrites):
            await self._background.finished()
            await self._overwrites.settled()
            await asyncio.sleep(0)  # lets their callbacks run, which may start more

    async def stop(self) -> None:
        """Cancel the tasks that still run, and wait for them."""
        await self._background.stop()
        if self.pool_copies is not None:
            self.pool_copies.stop()


class _Leasing(AbstractAsyncContextManager[Lease], Generic[P]):
    """The context of `Relay.lease`: finds a prefix on entry, and releases it on exit."""

    __slots__ = ("_held", "_relay", "_time", "_tokens", "_user", "_while_waiting")

    def __init__(
        self,
        relay: Relay[P],
        user: UserKey,
        tokens: P,
        time: RankTime,
        while_waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._relay = relay
        self._user = user
        self._tokens = tokens
        self._time = time
        self._while_waiting = while_waiting

    async def __aenter__(self) -> Lease:
        try:
            self._held = self._granted(await self._find())
            return self._held.__enter__()
        except BaseException:
            self._relay._rank_ended(self._user)
            raise

    async def __aexit__(self, *raised: Any) -> None:
        try:
            self._held.__exit__(*raised)
        finally:
            self._relay._rank_ended(self._user)

    async def _find(self) -> FoundPrefix:
        time = self._time
        is_enabled = time.config.enabled and not self._relay.settings.is_switched_off
        if is_enabled and time.num_tokens:
            return await self._relay._finder.find(
                self._user, self._tokens, time, self._while_waiting
            )
        return FoundPrefix(Outcome.MISS_FULL, Reason.NOT_AT_RISK if is_enabled else Reason.DISABLED)

    def _granted(self, found: FoundPrefix) -> AbstractContextManager[Lease]:
        """Turn the result of the lookup into a lease.

        The rank reads a resident prefix, completes an adopted one, or else computes everything, or
        the newest tokens that fit before its deadline.
        """
        relay = self._relay
        if found.entry is not None:
            return _Reading(relay, found, found.entry)
        if found.adoption is not None:
            relay.on_first_use(0.0)
            return self._writing(found, found.adoption)
        first = self._time.first_token
        reason = found.reason
        limit = relay.settings.max_uncached_tokens
        if limit is not None and len(self._tokens) - first > limit:
            first = len(self._tokens) - limit
            reason = Reason.BROWNOUT
        if first:
            return nullcontext(Lease(outcome=Outcome.DEGRADED, reason=reason, first_token=first))
        adoption = relay._admission.keep(self._user, self._tokens)
        if adoption is None:
            return nullcontext(Lease(outcome=found.outcome, reason=reason))
        return self._writing(found, adoption)

    @contextmanager
    def _writing(self, found: FoundPrefix, adoption: Adoption) -> Iterator[Lease]:
        """Let the rank's own pass fill an entry.

        If the block succeeds, publish it and copy it to DRAM.
        """
        pool = self._relay.tiers.pool
        entry = adoption.job.entry
        runs = tuple(entry.runs)
        encoded = adoption.job.encoded_tokens
        try:
            yield Lease(
                outcome=found.outcome,
                reason=found.reason,
                cached=CachedPrefix(runs, encoded) if encoded else None,
                keep=runs,
                discard=adoption.release,
            )
            if adoption.is_held and pool.publish(entry):
                with pool.lease(entry, consume=True):
                    pass  # marks it as ranked, so that the entry may be evicted
                self._relay._spill(entry)
        finally:
            adoption.release()


class _Reading(AbstractContextManager[Lease]):
    """The lease of a resident prefix. On exit the prefix is copied to DRAM."""

    __slots__ = ("_entry", "_found", "_held", "_relay")

    def __init__(self, relay: Relay[Any], found: FoundPrefix, entry: PrefixEntry) -> None:
        self._relay = relay
        self._found = found
        self._entry = entry

    def __enter__(self) -> Lease:
        relay, entry = self._relay, self._entry
        pool = relay.tiers.pool
        if not entry.consumed:
            relay.on_first_use(relay._clock() - (entry.expires_at - pool.waits.t_life_s))
        self._held = pool.lease(entry, consume=True)
        self._held.__enter__()
        cached = CachedPrefix(tuple(entry.runs), entry.num_tokens)
        return Lease(outcome=self._found.outcome, reason=self._found.reason, cached=cached)

    def __exit__(self, *_: object) -> None:
        try:
            # before the lease ends, so that its pages cannot be evicted before the copy leases them
            self._relay._spill(self._entry)
        finally:
            self._held.__exit__(None, None, None)


class Spills(Generic[P]):
    """Copies used prefixes from HBM to DRAM, at most one copy for each key. Event loop only."""

    def __init__(
        self, settings: LiveSettings, engine: Encoder[P], tiers: Tiers, background: BackgroundTasks
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._tiers = tiers
        self._background = background
        self._copies: dict[PrefixKey, DramEntry] = {}
        self.is_pooled = False  # `on_copied` puts copies into the pool
        # Called with each complete copy.
        self.on_copied: Callable[[DramEntry], None] = lambda _copy: None

    def __len__(self) -> int:
        """Count the copies that have not ended."""
        return len(self._copies)

    def start(self, entry: PrefixEntry, order_at: float) -> None:
        """Copy a used prefix to DRAM.

        Does nothing if the prefix is no longer resident, is in DRAM or on its way there, or if DRAM
        is not in use or full. The HBM pages stay readable until the pool needs them.

        Args:
            entry: The prefix in HBM.
            order_at: Place of the copy in the device queue.
        """
        pool, dram = self._tiers
        key = entry.key
        if (
            dram is None
            or key in self._copies
            or dram.get(key) is not None
            or pool.get(key) is not entry
        ):
            return
        if not self._settings.uses_dram:
            return
        try:
            copy = dram.reserve(key, entry.num_tokens)
        except ResourceError:
            return
        self._copies[key] = copy
        held = ExitStack()
        held.enter_context(pool.lease(entry, consume=False))  # now, since the task begins later

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            dram.abandon(copy)  # does nothing to a committed copy
            if self._copies.get(key) is copy:
                del self._copies[key]

        task = self._background.start("spill", partial(self._copy, dram, copy, entry, order_at))
        task.add_done_callback(ended)

    async def _copy(
        self, dram: DramStore, copy: DramEntry, entry: PrefixEntry, order_at: float
    ) -> None:
        pool = self._tiers.pool
        pages = PageCopy(pool.arena, entry.runs, dram.arena, copy.runs, entry.num_tokens)
        await self._engine.copy(pages, float("inf"), JobOrder(order_at), preemptible=True)
        dram.commit(copy)
        self.on_copied(copy)

    async def hand_over(self, model_version: str, timeout_s: float) -> None:
        """Copy what only HBM holds, the latest first, right before the relay stops.

        Does nothing unless `on_copied` puts the copies into a pool.

        Args:
            model_version: Part of the keys of the prefixes.
            timeout_s: Most seconds that it takes; what is not in the pool by then is lost.
        """
        if not self.is_pooled:
            return
        pool = self._tiers.pool
        for user in reversed(pool.users()):
            for entry in pool.find(user, model_version, pool.arena.layout.layout_id)[:1]:
                self.start(entry, 0.0)

        async def settled() -> None:
            while len(self._background):
                await self._background.finished()
                await asyncio.sleep(0)  # lets the callbacks of the tasks run

        with suppress(TimeoutError):
            await asyncio.wait_for(settled(), timeout_s)

    def forget(self, user: UserKey) -> None:
        """Allow new copies of an erased user while old ones still run; those commit nothing."""
        self._copies = {key: copy for key, copy in self._copies.items() if key.user != user}
