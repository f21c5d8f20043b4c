"""Gets a rank the best prefix of its history: decides what to use of what exists, and waits for it if need be.

    the prefix is                       the rank                                     outcome
    resident in HBM                     leases it                  UseResident       hbm_hit
    being prefilled, nobody waits       encodes the rest itself    AdoptPrefill      joined | miss_full not_begun
    on its way into HBM otherwise       waits, if time remains     JoinProducer      joined | miss_full join_timeout
    in DRAM, and a copy is faster       reloads it and waits       ReloadCopy        dram_hit | miss_full reload_*
    nowhere                             computes everything        ComputeAll        miss_full | degraded

Of several prefixes in one place the longest usable one counts. A prefix is usable if it is the
beginning of the history: same user, model version and layout, and the same fingerprint of that many
tokens.

    Inventory     what exists                RankTime   what the rank has time for
    choose        what to use of it (pure)   LastSignals   why there is nothing
    PrefixFinder  gets it

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
from npu_gr.relay.prefill_manager import (
    Adoption,
    PrefillJob,
    PrefillKind,
    PrefillManager,
    PrefillTable,
    PrefixFiller,
)
from npu_gr.relay.trigger import reload_pays

E = TypeVar("E", bound=TierEntry)


class UseResident(msgspec.Struct, frozen=True):
    """Lease a resident prefix."""

    entry: PrefixEntry


class AdoptPrefill(msgspec.Struct, frozen=True):
    """Stop a prefill of the whole history, and encode the rest in the rank's own pass."""

    producer: PrefillJob


class JoinProducer(msgspec.Struct, frozen=True):
    """Wait for a producer."""

    producer: PrefillJob


class ReloadCopy(msgspec.Struct, frozen=True):
    """Start a reload, and wait for it."""

    copy: DramEntry


class ComputeAll(msgspec.Struct, frozen=True):
    """Use nothing, for this reason."""

    reason: Reason


Decision = UseResident | AdoptPrefill | JoinProducer | ReloadCopy | ComputeAll


class Existing(NamedTuple):
    """The longest usable prefix of a history in each place, looked up in this order until one is found."""

    resident: PrefixEntry | None = None
    producer: PrefillJob | None = None
    copy: DramEntry | None = None  # in DRAM
    copy_pays: bool = False  # reloading it is faster than computing it, and in time
    why_missing: Reason = Reason.NO_SIGNAL  # if none is found


def is_usable(entry: TierEntry, tokens: Prefix) -> bool:
    """Return whether an entry holds the beginning of a history, given that user, version and layout agree."""
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


def longest_producer(producers: Iterable[PrefillJob], tokens: Prefix) -> PrefillJob | None:
    """Return the producer of the longest usable prefix.

    A producer whose user was erased will publish nothing.
    """
    usable = (
        each for each in producers if not each.entry.is_erased and is_usable(each.entry, tokens)
    )
    return max(usable, key=lambda each: each.entry.num_tokens, default=None)


def choose(existing: Existing, num_tokens: int, max_joiners: int) -> Decision:
    """Decide what a rank uses.

    Args:
        existing: the prefixes of its history.
        num_tokens: length of the history.
        max_joiners: the most ranks that may wait for one producer.
    """
    if existing.resident is not None:
        return UseResident(existing.resident)
    producer = existing.producer
    if producer is not None:
        if producer.joiners >= max_joiners:
            return ComputeAll(Reason.REJECTED_LOAD)
        if producer.is_adoptable and producer.entry.num_tokens == num_tokens:
            return AdoptPrefill(producer)
        return JoinProducer(producer)
    if existing.copy is None:
        return ComputeAll(existing.why_missing)
    return ReloadCopy(existing.copy) if existing.copy_pays else ComputeAll(Reason.RELOAD_SLOWER)


class RankTime(msgspec.Struct, frozen=True):
    """One rank of a history of `num_tokens` tokens, to be done by `deadline_at`.

    `margin_s` of the settings is kept back everywhere, for what follows the device.
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
        """Seconds to wait for a producer: as long as a full inference can still follow.

        If there is no time for one anyway, the rank waits until its deadline.
        """
        left_s = self.deadline_at - self.clock()
        # Kept back: the pass that does without the prefix, what follows it, and waking up late.
        without_s = (
            self.engine.cost.full_s(self.num_tokens, self.num_candidates) + 2 * self.config.margin_s
        )
        return max(left_s - (without_s if left_s > without_s else self.config.margin_s), 0.0)

    @property
    def order_at(self) -> float:
        """The rank's place in the queue, and that of the work it waits for: its objective, not its deadline."""
        return min(self.deadline_at, self.clock() + self.engine.objective_s)

    @property
    def first_token(self) -> int:
        """0, or where the newest tokens begin that a full inference can still score in time."""
        if not self.config.degrade or not self.num_tokens:
            return 0
        safe = self.engine.cost.safe_tokens(self.num_tokens, self.num_candidates, self.device_s)
        return self.num_tokens - safe

    def is_enough_from(self, encoded_tokens: int) -> bool:
        """Return whether the rank can encode the rest of the history, behind `encoded_tokens`, in time."""
        rest = self.num_tokens - encoded_tokens
        return self.engine.cost.pass_s(rest, encoded_tokens, self.num_candidates) <= self.device_s


# Why a signal produced nothing. A verdict that is not here produced something, or found it there.
_REJECTIONS = {
    Verdict.SKIP_NOT_AT_RISK: Reason.NOT_AT_RISK,
    Verdict.SKIP_FOOTPRINT: Reason.REJECTED_FOOTPRINT,
    Verdict.SKIP_LOAD: Reason.REJECTED_LOAD,
    Verdict.SKIP_RATE: Reason.REJECTED_RATE,
    Verdict.SKIP_SHARE: Reason.REJECTED_SHARE,
    Verdict.SKIP_DISABLED: Reason.DISABLED,
}


class _Signal(NamedTuple):
    rejection: Reason  # NONE = it led to a prefix
    came_at: float
    is_pending: bool  # no rank has ended since


class LastSignals:
    """Explains a miss, and times a prefix from its signal to the end of its rank.

    It has the last signal of up to `max_remembered` users; the user whose signal is oldest is
    forgotten first.
    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._last: OrderedDict[UserKey, _Signal] = OrderedDict()

    def remember(self, user: UserKey, verdict: Verdict, now_at: float) -> None:
        """Keep a signal and what came of it."""
        self._last[user] = _Signal(_REJECTIONS.get(verdict, Reason.NONE), now_at, is_pending=True)
        self._last.move_to_end(user)
        if len(self._last) > self._settings.relay.max_remembered:
            self._last.popitem(last=False)

    def rank_ended(self, user: UserKey, now_at: float) -> float | None:
        """Return the seconds since the user's signal, for the first rank after it; None for any other rank."""
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
    """Looks prefixes up. It changes nothing, except that DRAM copies whose TTL is over are dropped."""

    def __init__(
        self,
        settings: LiveSettings,
        engine: Encoder[P],
        tiers: Tiers,
        filler: PrefixFiller[P],
        producers: PrefillTable,
        signals: LastSignals,
        model_version: str,
    ) -> None:
        """Look things up in `tiers`, `producers` and `signals`.

        Args:
            settings: whether DRAM is used.
            engine: its cost model.
            tiers: where prefixes lie; other versions may share them.
            filler: predicts a reload.
            producers: prefixes on their way into HBM.
            signals: explain a miss.
            model_version: part of every key.
        """
        self._settings = settings
        self._engine = engine
        self._tiers = tiers
        self._filler = filler
        self._producers = producers
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
        """Return whether a prefix has a producer, in this relay or in another one over the same tiers."""
        return key in self._producers or self._tiers.pool.is_reserved(key)

    def resident(self, user: UserKey, tokens: P) -> PrefixEntry | None:
        """Return the longest usable prefix in HBM."""
        return longest(self._tiers.pool.find(user, self._version, self._layout_id), tokens)

    def copy(self, user: UserKey, tokens: P) -> DramEntry | None:
        """Return the longest usable prefix in DRAM, unless the brown-out keeps DRAM out."""
        dram = self._tiers.dram
        if dram is None or not self._settings.uses_dram:
            return None
        return longest(dram.find(user, self._version, self._layout_id), tokens)

    def existing(self, user: UserKey, tokens: P, budget_s: float) -> Existing:
        """Look a history up: in HBM, among the producers, in DRAM, until one place has a usable prefix.

        Args:
            user: whose history.
            tokens: the whole history.
            budget_s: seconds that a reload may take.
        """
        resident = self.resident(user, tokens)
        if resident is not None:
            return Existing(resident=resident)
        producer = longest_producer(self._producers.of(user), tokens)
        if producer is not None:
            return Existing(producer=producer)
        copy = self.copy(user, tokens)
        if copy is None:
            return Existing(why_missing=self._why_missing(user))
        pays = not self._tiers.pool.is_reserved(copy.key) and self.reload_pays(copy, budget_s)
        return Existing(copy=copy, copy_pays=pays)

    def reload_pays(self, copy: DramEntry, budget_s: float) -> bool:
        """Return whether a reload is faster than computing the prefix again, and within the budget."""
        num_reloading = self._producers.in_flight(PrefillKind.RELOAD)
        copy_s = self._filler.reload_s(copy.num_tokens, num_reloading)
        return reload_pays(copy_s, self._engine.cost.full_s(copy.num_tokens, 0), budget_s)

    def _why_missing(self, user: UserKey) -> Reason:
        if self._tiers.pool.find(user, self._version, self._layout_id):
            return Reason.FINGERPRINT_MISMATCH
        return self._signals.why_missing(user)


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
        producers: PrefillManager[P],
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
        self,
        user: UserKey,
        tokens: P,
        time: RankTime,
        while_waiting: Callable[[], AbstractContextManager[None]],
    ) -> FoundPrefix:
        """Get the best prefix of a history.

        Never fails, and never takes longer than the rank can wait.

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

    async def _adopt(self, producer: PrefillJob, time: RankTime) -> FoundPrefix:
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

    async def _join(self, producer: PrefillJob, time: RankTime) -> FoundPrefix:
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
            reason = Reason.RELOAD if producer.kind is PrefillKind.RELOAD else Reason.COMPUTE
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
