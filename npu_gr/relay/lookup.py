"""Prefix lookup: decides which prefix of its history a rank uses, and waits for it if need be.

    the prefix is                    the rank                  decision      outcome
    resident in HBM                  leases it                 UseResident   hbm_hit
    in HBM, of weights just before   leases it, stale                        hbm_hit
    being prefilled, no rank waits   encodes the rest itself   AdoptPrefill  joined | miss_full
    on its way into HBM otherwise    waits, if time remains    JoinPrefill   joined | miss_full
    in DRAM, and a copy is faster    reloads it and waits      ReloadCopy    dram_hit | miss_full
    nowhere                          computes everything       ComputeAll    miss_full | degraded

The longest usable prefix of a place is taken. A prefix is usable if it is the beginning of the
history: same user, model version and page layout, and the same fingerprint of that many tokens.

    Inventory      finds the prefixes that exist
    choose         decides which of them to use (pure)
    RankTime       says what the rank has time for
    LastSignals    explains why there is no prefix
    PrefixFinder   carries the decision out

See `docs/relay.md`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

import msgspec

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Reason, Verdict
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.engine.kv_cache.tier import DramEntry, PrefixKey, TierEntry
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.queue import JobOrder
from npu_gr.relay.config import LiveSettings, RelayConfig
from npu_gr.relay.encoder import DeviceEstimates, Encoder, P, Prefix
from npu_gr.relay.prefill_job import Adoption, PrefillJob, PrefillKind
from npu_gr.relay.prefill_manager import PrefillManager, PrefillTable, PrefixFiller
from npu_gr.relay.trigger import reload_pays

E = TypeVar("E", bound=TierEntry)


class UseResident(msgspec.Struct, frozen=True):
    """Lease a resident prefix."""

    entry: PrefixEntry


class AdoptPrefill(msgspec.Struct, frozen=True):
    """Stop a prefill of the whole history, and encode the rest in the rank's own pass."""

    job: PrefillJob


class JoinPrefill(msgspec.Struct, frozen=True):
    """Wait until a prefill job has published the prefix."""

    job: PrefillJob


class ReloadCopy(msgspec.Struct, frozen=True):
    """Start a reload, and wait for it."""

    copy: DramEntry


class ComputeAll(msgspec.Struct, frozen=True):
    """Use nothing, for this reason."""

    reason: Reason


Decision = UseResident | AdoptPrefill | JoinPrefill | ReloadCopy | ComputeAll


class Existing(NamedTuple):
    """The longest usable prefix of a history, in the first of these places that has one."""

    resident: PrefixEntry | None = None
    job: PrefillJob | None = None
    copy: DramEntry | None = None  # in DRAM
    copy_pays: bool = False  # a reload is faster than computing it, and ends before the deadline
    why_missing: Reason = Reason.NO_SIGNAL  # set if no place has one


def is_usable(entry: TierEntry, tokens: Prefix) -> bool:
    """Return whether an entry holds the beginning of a history.

    The entry must be of the same user, model version and page layout.
    """
    return (
        0 < entry.num_tokens <= len(tokens)
        and tokens.fingerprint(entry.num_tokens) == entry.key.fingerprint
    )


def longest(entries: Iterable[E], tokens: Prefix) -> E | None:
    """Return the longest usable entry."""
    found: E | None = None
    for entry in entries:
        if (found is None or entry.num_tokens > found.num_tokens) and is_usable(entry, tokens):
            found = entry
    return found


def longest_job(jobs: Iterable[PrefillJob], tokens: Prefix) -> PrefillJob | None:
    """Return the job with the longest usable prefix; a job of an erased user publishes nothing."""
    usable = (each for each in jobs if not each.entry.is_erased and is_usable(each.entry, tokens))
    return max(usable, key=lambda each: each.entry.num_tokens, default=None)


def choose(existing: Existing, num_tokens: int, max_joiners: int) -> Decision:
    """Decide what a rank uses.

    Args:
        existing: the prefixes of its history.
        num_tokens: length of the history.
        max_joiners: Most ranks that may wait for one job.
    """
    if existing.resident is not None:
        return UseResident(existing.resident)
    job = existing.job
    if job is not None:
        if job.joiners >= max_joiners:
            return ComputeAll(Reason.REJECTED_LOAD)
        if job.is_adoptable and job.entry.num_tokens == num_tokens:
            return AdoptPrefill(job)
        return JoinPrefill(job)
    if existing.copy is None:
        return ComputeAll(existing.why_missing)
    return ReloadCopy(existing.copy) if existing.copy_pays else ComputeAll(Reason.RELOAD_SLOWER)


class RankTime(msgspec.Struct, frozen=True):
    """What a rank of `num_tokens` history tokens has time for before its deadline.

    Every figure leaves `relay.margin_s` for the work that follows the device.
    """

    config: RelayConfig
    engine: DeviceEstimates
    clock: Callable[[], float]
    num_tokens: int
    num_candidates: int
    deadline_at: float

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, less the margin."""
        return self.deadline_at - self.clock() - self.config.margin_s

    @property
    def device_s(self) -> float:
        """Seconds that the device may take for the rank if it joins the queue now."""
        return self.left_s - self.engine.queue_s

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a prefill job, so that a full inference can still follow.

        If there is no time for a full inference even now, the rank waits until its deadline.
        """
        left_s = self.deadline_at - self.clock()
        # Reserved: a full inference, the work that follows it, and a late wake-up of the rank.
        without_s = (
            self.engine.cost.full_s(self.num_tokens, self.num_candidates) + 2 * self.config.margin_s
        )
        return max(left_s - (without_s if left_s > without_s else self.config.margin_s), 0.0)

    @property
    def order_at(self) -> float:
        """Place in the device queue of the rank and of the work that it waits for.

        It is the instant of the SLO objective, or the deadline if that is earlier.
        """
        return min(self.deadline_at, self.clock() + self.engine.objective_s)

    @property
    def first_token(self) -> int:
        """First token that a full inference reads: 0, or more if the rest must be truncated.

        The newest tokens are kept, as many as the device can encode before the deadline.
        """
        if not self.config.degrade or not self.num_tokens:
            return 0
        safe = self.engine.cost.safe_tokens(self.num_tokens, self.num_candidates, self.device_s)
        return self.num_tokens - safe

    def is_enough_from(self, encoded_tokens: int) -> bool:
        """Return whether there is time to encode the history after its first `encoded_tokens`."""
        rest = self.num_tokens - encoded_tokens
        return self.engine.cost.pass_s(rest, encoded_tokens, self.num_candidates) <= self.device_s


# Why a signal led to no prefix. All other verdicts started a job, or found the prefix.
_REJECTIONS = {
    Verdict.SKIP_NOT_AT_RISK: Reason.NOT_AT_RISK,
    Verdict.SKIP_FOOTPRINT: Reason.REJECTED_FOOTPRINT,
    Verdict.SKIP_LOAD: Reason.REJECTED_LOAD,
    Verdict.SKIP_RATE: Reason.REJECTED_RATE,
    Verdict.SKIP_SHARE: Reason.REJECTED_SHARE,
    Verdict.SKIP_DISABLED: Reason.DISABLED,
}


class _Signal(NamedTuple):
    rejection: Reason  # NONE = the signal led to a prefix
    came_at: float  # instant of the clock
    is_pending: bool  # no rank of the user has ended since


class LastSignals:
    """Remembers each user's last signal: to explain a miss, and to measure T_life.

    At most `relay.max_remembered` users are remembered; the oldest signal is dropped first.
    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._last: OrderedDict[UserKey, _Signal] = OrderedDict()

    def remember(self, user: UserKey, verdict: Verdict, now_at: float) -> None:
        """Store a user's latest signal and its verdict."""
        self._last[user] = _Signal(_REJECTIONS.get(verdict, Reason.NONE), now_at, is_pending=True)
        self._last.move_to_end(user)
        if len(self._last) > self._settings.relay.max_remembered:
            self._last.popitem(last=False)

    def rank_ended(self, user: UserKey, now_at: float) -> float | None:
        """Return the seconds since the user's last signal if this is the first rank after it."""
        signal = self._last.get(user)
        if signal is None or not signal.is_pending:
            return None
        self._last[user] = signal._replace(is_pending=False)
        return now_at - signal.came_at

    def why_missing(self, user: UserKey) -> Reason:
        """Explain why a user has no prefix in any tier."""
        signal = self._last.get(user)
        if signal is None:
            return Reason.NO_SIGNAL
        return signal.rejection or Reason.EXPIRED

    def knows(self, user: UserKey) -> bool:
        """Whether a signal of the user is remembered."""
        return user in self._last

    def forget(self, user: UserKey) -> None:
        """Forget a user's signal."""
        self._last.pop(user, None)


class Inventory(Generic[P]):
    """Finds existing prefixes. Changes nothing, but drops DRAM copies whose TTL has expired."""

    def __init__(
        self,
        settings: LiveSettings,
        engine: Encoder[P],
        tiers: Tiers,
        filler: PrefixFiller[P],
        jobs: PrefillTable,
        signals: LastSignals,
        model_version: str,
    ) -> None:
        """Search `tiers` and `jobs`.

        Args:
            settings: Live settings; the brown-out may switch DRAM off.
            engine: Engine whose cost model is compared with the cost of a reload.
            tiers: HBM and DRAM; relays of other model versions may share them.
            filler: Predicts the seconds of a reload.
            jobs: Prefixes on their way into HBM.
            signals: Last signals, which explain a miss.
            model_version: Part of every prefix key.
        """
        self._settings = settings
        self._engine = engine
        self._tiers = tiers
        self._filler = filler
        self._jobs = jobs
        self._signals = signals
        self._version = model_version
        self._layout_id = tiers.pool.arena.layout.layout_id

    def key(self, user: UserKey, tokens: P) -> PrefixKey:
        """Return the key of a whole history."""
        return PrefixKey(user, self._version, self._layout_id, tokens.fingerprint(len(tokens)))

    def is_resident(self, key: PrefixKey) -> bool:
        """Return whether a prefix can be leased."""
        return self._tiers.pool.get(key) is not None

    def is_being_written(self, key: PrefixKey) -> bool:
        """Return whether a prefix has a job, in this relay or another one over the same tiers."""
        return key in self._jobs or self._tiers.pool.is_reserved(key)

    def resident(self, user: UserKey, tokens: P) -> PrefixEntry | None:
        """Return the longest usable prefix in HBM."""
        return longest(self._tiers.pool.find(user, self._version, self._layout_id), tokens)

    def stale(self, user: UserKey, tokens: P, now_at: float) -> PrefixEntry | None:
        """Return the longest prefix in HBM that was exact within `relay.max_stale_s`."""
        if not (stale_s := self._settings.relay.max_stale_s):
            return None
        entries = self._tiers.pool.find(user, self._version, self._layout_id)
        found = (longest(entries, then) for then in tokens.earlier(now_at - stale_s))
        return max(filter(None, found), key=lambda entry: entry.num_tokens, default=None)

    def copy(self, user: UserKey, tokens: P) -> DramEntry | None:
        """Return the longest usable prefix in DRAM; None while the brown-out keeps DRAM unused."""
        dram = self._tiers.dram
        if dram is None or not self._settings.uses_dram:
            return None
        return longest(dram.find(user, self._version, self._layout_id), tokens)

    def existing(self, user: UserKey, tokens: P, budget_s: float) -> Existing:
        """Look for a usable prefix in HBM, then among the prefill jobs, then in DRAM.

        Args:
            user: User of the history.
            tokens: the whole history.
            budget_s: Most seconds that a reload may take.
        """
        resident = self.resident(user, tokens)
        if resident is not None:
            return Existing(resident=resident)
        job = longest_job(self._jobs.of(user), tokens)
        if job is not None:
            return Existing(job=job)
        copy = self.copy(user, tokens)
        if copy is None:
            return Existing(why_missing=self._why_missing(user))
        pays = not self._tiers.pool.is_reserved(copy.key) and self.reload_pays(copy, budget_s)
        return Existing(copy=copy, copy_pays=pays)

    def reload_pays(self, copy: DramEntry, budget_s: float) -> bool:
        """Return whether a reload is within the budget and not slower than a prefill."""
        num_reloading = self._jobs.in_flight(PrefillKind.RELOAD)
        copy_s = self._filler.reload_s(copy.num_tokens, num_reloading)
        return reload_pays(copy_s, self._engine.cost.full_s(copy.num_tokens, 0), budget_s)

    def _why_missing(self, user: UserKey) -> Reason:
        if self._tiers.pool.find(user, self._version, self._layout_id):
            return Reason.FINGERPRINT_MISMATCH
        return self._signals.why_missing(user)


class FoundPrefix(NamedTuple):
    """The prefix of a rank, if there is one, and where it came from."""

    outcome: Outcome
    reason: Reason = Reason.NONE
    entry: PrefixEntry | None = None  # resident; must be leased before the next await
    adoption: Adoption | None = None  # the rank encodes the rest, and must release this


def _miss(reason: Reason) -> FoundPrefix:
    return FoundPrefix(Outcome.MISS_FULL, reason)


class PrefixFinder(Generic[P]):
    """Gets a rank its prefix: leases, adopts, joins or reloads one. Event loop only."""

    def __init__(
        self,
        settings: LiveSettings,
        inventory: Inventory[P],
        prefills: PrefillManager[P],
        pool: PrefixPool,
        clock: Callable[[], float],
    ) -> None:
        """Search `inventory`, and join, adopt or start the jobs of `prefills`.

        Args:
            settings: Live settings of the relay.
            inventory: Prefixes that exist.
            prefills: Manager of the prefill jobs.
            pool: HBM tier in which the jobs publish.
            clock: The event loop's clock, in seconds.
        """
        self._settings = settings
        self._inventory = inventory
        self._prefills = prefills
        self._pool = pool
        self._clock = clock

    async def find(
        self,
        user: UserKey,
        tokens: P,
        time: RankTime,
        while_waiting: Callable[[], AbstractContextManager[None]],
    ) -> FoundPrefix:
        """Get the longest usable prefix of a history.

        Never fails, and never takes longer than the rank can wait.

        Args:
            user: User of the history.
            tokens: the whole history, at least one token.
            time: Time of the rank until its deadline.
            while_waiting: Factory of a context that is entered while the rank waits.
        """
        existing = self._inventory.existing(user, tokens, time.left_s)
        if existing.resident is None:
            stale = self._inventory.stale(user, tokens, self._clock())
            if stale is not None:
                return FoundPrefix(Outcome.HBM_HIT, Reason.STALE, stale)
        decision = choose(existing, len(tokens), self._settings.relay.max_joiners)
        if isinstance(decision, UseResident):
            return FoundPrefix(Outcome.HBM_HIT, entry=decision.entry)
        if isinstance(decision, ComputeAll):
            return _miss(decision.reason)
        with while_waiting():
            match decision:
                case AdoptPrefill(job):
                    return await self._adopt(job, time)
                case JoinPrefill(job):
                    return await self._join(job, time)
                case ReloadCopy(copy):
                    return await self._reload(copy, time)

    async def _adopt(self, job: PrefillJob, time: RankTime) -> FoundPrefix:
        """Take a running prefill over; a miss if this rank has no time for the rest."""
        adoption = await self._prefills.adopt(job, time.patience_s)
        if adoption is None:
            if not job.ended.done():
                return _miss(Reason.JOIN_TIMEOUT)
            return await self._join(job, time)  # it ended before the rank could adopt it
        encoded = job.encoded_tokens
        limit = self._settings.max_uncached_tokens
        is_too_much = limit is not None and time.num_tokens - encoded > limit
        if is_too_much or (self._settings.relay.degrade and not time.is_enough_from(encoded)):
            adoption.release()
            return _miss(Reason.JOIN_TIMEOUT)
        if not encoded:
            return FoundPrefix(Outcome.MISS_FULL, Reason.NOT_BEGUN, adoption=adoption)
        return FoundPrefix(Outcome.JOINED, Reason.COMPUTE, adoption=adoption)

    async def _join(self, job: PrefillJob, time: RankTime) -> FoundPrefix:
        """Wait for a job, as long as there is time for a full inference afterwards."""
        job.order.hasten(time.order_at)
        job.joiners += 1
        try:
            done, _ = await asyncio.wait({job.ended}, timeout=time.patience_s)
        finally:
            job.joiners -= 1
        if not done:
            return _miss(Reason.JOIN_TIMEOUT)
        entry = self._pool.get(job.key)
        if entry is not None:
            reason = Reason.RELOAD if job.kind is PrefillKind.RELOAD else Reason.COMPUTE
            return FoundPrefix(Outcome.JOINED, reason, entry)
        return _miss(Reason.EXPIRED if job.entry.is_published else Reason.PRODUCER_FAILED)

    async def _reload(self, copy: DramEntry, time: RankTime) -> FoundPrefix:
        """Start a reload, and wait for it."""
        deadline_at = self._clock() + self._settings.relay.t_life_s
        try:
            job = self._prefills.reload(
                copy, JobOrder(time.order_at), time.left_s, deadline_at, is_signalled=False
            )
        except ResourceError:
            return _miss(Reason.REJECTED_FOOTPRINT)
        found = await self._join(job, time)
        if found.entry is not None:
            return FoundPrefix(Outcome.DRAM_HIT, entry=found.entry)
        return _miss(Reason.RELOAD_FAILED) if found.reason is Reason.PRODUCER_FAILED else found
