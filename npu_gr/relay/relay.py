"""The relay race: a signal encodes a user's prefix, the rank that follows leases it. One state machine.

A prefix is known by (user, model version, KV layout, fingerprint). Here is decided what is produced, and who gets what;
`producers.py` does it.

    in HBM                    -> lease                                     hbm_hit
    being computed            -> go on from where it is                    joined   | miss_full not_begun ...
    being copied, or encoded  -> wait for it, but keep time to do without  joined   | miss_full join_timeout ...
      by another rank
    in DRAM and a copy pays   -> start a reload, wait for it               dram_hit | miss_full reload_*
    nowhere                   -> the pass computes everything              miss_full, or degraded to what fits

Source: RelayGR (arXiv:2601.01712), in-HBM relay-race inference and memory-aware expander; `relaygr.md` 2.5.
Invariants:
  R1  at most one producer per key
  R2  no failure of a pool, a tier or a producer reaches the caller: the lease says miss_full or degraded, and why
  R3  every lease is released, whatever ends the block
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Generic, NamedTuple

import msgspec

from npu_gr.core.errors import ResourceError
from npu_gr.core.request import Brownout, Outcome, Reason, UserKey, Verdict
from npu_gr.engine.quantile import RunningQuantile
from npu_gr.engine.rank_engine import Cached
from npu_gr.engine.scheduler import Urgency
from npu_gr.kv.dram_store import DramEntry, DramStore
from npu_gr.kv.keys import PrefixKey
from npu_gr.kv.layout import Run
from npu_gr.kv.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.relay.calibration import Calibration
from npu_gr.relay.encoder import Encoder, P
from npu_gr.relay.producers import Producer, Producers
from npu_gr.relay.trigger import (
    Forecast,
    Headroom,
    TokenBucket,
    TriggerConfig,
    admitted_rate,
    decide,
    live_limit,
    reload_pays,
)


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prefixes are produced, kept and used."""

    enabled: bool = True
    t_life_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0  # how long a prefix waits for its rank
    keep_full: bool = True  # a full inference publishes the prefix that it computed anyway, if there is room
    degrade: bool = True  # truncate a history whose full inference would miss the deadline
    margin_s: Annotated[float, msgspec.Meta(ge=0)] = 0.002  # kept back for what follows the device
    max_reloads: Annotated[int, msgspec.Meta(ge=1)] = 2  # copies from DRAM at once
    max_joiners: Annotated[int, msgspec.Meta(ge=1)] = 64  # ranks that wait for one producer; against bots
    brownout_tokens: Annotated[int, msgspec.Meta(ge=1)] = 512  # that a rank without prefix reads when truncating
    max_remembered: Annotated[int, msgspec.Meta(ge=1)] = 100_000  # users whose last signal is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """How one rank gets its prefix. `cached` stays readable until the block of `Relay.lease` ends."""

    outcome: Outcome
    reason: Reason = Reason.NONE
    cached: Cached | None = None
    first_token: int = 0  # degraded: older tokens are left out
    keep: tuple[Run, ...] | None = None  # the pass leaves its prefix KV here; published if the block succeeds
    discard: Callable[[], None] = lambda: None  # it did not: nothing is published, whatever the block does


class _Found(NamedTuple):
    """The prefix of a rank, if there is one."""

    outcome: Outcome
    reason: Reason = Reason.NONE
    entry: PrefixEntry | None = None  # resident
    taken: Producer | None = None  # in part


class _Signal(NamedTuple):
    """A user's last signal."""

    reason: Reason  # why it led to nothing; NONE if it did lead to something
    at_s: float
    is_pending: bool  # no rank has come since


_WHY_NOT = {
    Verdict.SKIP_NOT_AT_RISK: Reason.NOT_AT_RISK,
    Verdict.SKIP_FOOTPRINT: Reason.REJECTED_FOOTPRINT,
    Verdict.SKIP_LOAD: Reason.REJECTED_LOAD,
    Verdict.SKIP_RATE: Reason.REJECTED_RATE,
    Verdict.SKIP_DISABLED: Reason.DISABLED,
}


class Relay(Generic[P]):
    """Signals in, leases out, over one pool, an optional DRAM tier and one engine. Event loop only."""

    def __init__(
        self,
        config: RelayConfig,
        trigger: TriggerConfig,
        engine: Encoder[P],
        pool: PrefixPool,
        dram: DramStore | None,
        model_version: str,
        clock: Callable[[], float] = time.monotonic,
        calibration: Calibration | None = None,
    ) -> None:
        """Nothing runs yet.

        Args:
            config, trigger: settings.
            engine, pool, dram: what it works with.
            model_version: part of every key.
            clock: the event loop's, and the pool's and the store's.
            calibration: where measuring goes on from, and Q_m, if the settings do not say.
        """
        self._config, self._trigger, self._engine, self._clock = config, trigger, engine, clock
        self._pool, self._dram, self._version = pool, dram, model_version
        self._layout_id = pool.arena.layout.layout_id
        self.producers = Producers(engine, pool, dram, config.max_reloads, clock)
        self._last: OrderedDict[UserKey, _Signal] = OrderedDict()
        self.brownout = Brownout.NONE
        # from a signal to the end of its rank, and what a prefix takes
        t_life_s, kv_bytes = config.t_life_s, pool.arena.layout.page_bytes
        if calibration is not None:
            t_life_s, kv_bytes = calibration.t_life_s, pool.arena.layout.bytes(calibration.kv_p99_tokens)
        self.t_life_p99_s = RunningQuantile(0.99, t_life_s, is_measured=calibration is not None)
        self.kv_p99_bytes = RunningQuantile(0.99, kv_bytes, is_measured=calibration is not None)
        self._calibration = calibration
        self._bucket = self._new_bucket()
        self.on_first_use: Callable[[float], None] = lambda _waited_s: None

    def become(self, config: RelayConfig, trigger: TriggerConfig) -> None:
        """Other settings from now on; what is being produced, and what was measured, stays."""
        self.producers.become(config.max_reloads)
        self._config, self._trigger = config, trigger
        self._bucket = self._new_bucket()
        self._pool.t_life_s = config.t_life_s

    @property
    def t_life_s(self) -> float:
        """How long a produced prefix waits for its rank."""
        return self._config.t_life_s

    @property
    def tiers(self) -> tuple[PrefixPool, DramStore | None]:
        """Where the prefixes lie; a relay of another version over the same ones takes over their erasures."""
        return self._pool, self._dram

    @property
    def q_inst_per_s(self) -> float:
        """Pre-infers a second that are admitted, by what has been measured so far."""
        q_m = self._q_m_per_s
        l_max = live_limit(self._pool.budget_bytes, max(1, int(self.kv_p99_bytes.value)))
        return admitted_rate(l_max, self.t_life_p99_s.value, None if q_m is None else q_m * self._trigger.q_m_fraction)

    @property
    def _q_m_per_s(self) -> float | None:
        """Q_m: as configured, else as calibrated."""
        if self._trigger.q_m_per_s is None and self._calibration is not None:
            return self._calibration.q_m_per_s
        return self._trigger.q_m_per_s

    def _new_bucket(self) -> TokenBucket | None:
        return None if self._q_m_per_s is None else TokenBucket(self.q_inst_per_s, self._trigger.burst_s)

    # ---- signal

    def signal(self, user: UserKey, tokens: P, num_candidates: int | None = None) -> Verdict:
        """Decide on a pre-infer for this history and start it. Never waits, never fails.

        Args:
            user: whose.
            tokens: the whole history as the model reads it.
            num_candidates: that the rank will bring; None = the configuration's guess.
        """
        verdict = self._decide(user, tokens, self._trigger.num_candidates if num_candidates is None else num_candidates)
        self._remember(user, _Signal(_WHY_NOT.get(verdict, Reason.NONE), self._clock(), is_pending=True))
        return verdict

    def _decide(self, user: UserKey, tokens: P, num_candidates: int) -> Verdict:
        if not self._config.enabled or self.brownout >= Brownout.NO_RELAY:
            return Verdict.SKIP_DISABLED
        key = self._key(user, tokens, len(tokens))
        if self._pool.get(key) is not None:
            return Verdict.ALREADY_RESIDENT
        if key in self.producers or self._pool.is_reserved(key):
            return Verdict.ALREADY_RUNNING
        now_at = self._clock()
        base, spilled = self._resident(user, tokens), self._spilled(user, tokens)
        cached = base.num_tokens if base else 0
        if spilled is not None and spilled.num_tokens <= cached:
            spilled = None
        if base is not None and spilled is None and len(tokens) - cached < self._trigger.min_prefix_tokens:
            return Verdict.ALREADY_RESIDENT  # what is new, the rank computes along the way
        forecast, headroom = self._forecast(len(tokens), cached, num_candidates), self._headroom(tokens)
        verdict = decide(len(tokens), forecast, headroom, self._trigger, self._limit(), now_at)
        if verdict is not Verdict.PREINFER:
            return verdict
        urgency = Urgency(float("inf"), now_at)  # when the device has nothing better to do, until its rank is here
        try:
            if spilled is not None and self._reload_pays(spilled, self._config.t_life_s):
                if spilled.key in self.producers or self._pool.is_reserved(spilled.key):
                    return Verdict.ALREADY_RUNNING
                t_life_s = self._config.t_life_s
                self.producers.reload(spilled, urgency, t_life_s, now_at + t_life_s)
                return Verdict.RELOAD
            return self.producers.compute(key, tokens, urgency, base, now_at + self._needed_s(len(tokens)))
        except ResourceError:
            return Verdict.SKIP_FOOTPRINT

    def _needed_s(self, num_tokens: int) -> float:
        """After that, the rank that a pre-infer is for must have come and gone; if it still waits, it is dropped."""
        needed_s = 2 * (self.t_life_p99_s.value + self._engine.cost.full_s(num_tokens, 0))
        return min(self._config.t_life_s, needed_s)

    def _forecast(self, num_tokens: int, cached_tokens: int, num_candidates: int) -> Forecast:
        engine = self._engine
        pass_s = engine.cost.pass_s(num_tokens - cached_tokens, cached_tokens, num_candidates)
        return Forecast(engine.queue_s, pass_s, engine.residual_s)

    def _headroom(self, tokens: P) -> Headroom:
        needed_bytes = self._pool.arena.layout.bytes(len(tokens))
        if needed_bytes:
            self.kv_p99_bytes.observe(needed_bytes)
        return Headroom(
            inflight=len(self.producers),
            available_bytes=self._pool.free_bytes + self._pool.evictable_bytes,
            needed_bytes=needed_bytes,
        )

    def _limit(self) -> TokenBucket | None:
        if self._bucket is not None:
            self._bucket.rate_per_s = self.q_inst_per_s
            self._bucket.burst = max(1.0, self._bucket.rate_per_s * self._trigger.burst_s)
        return self._bucket

    # ---- lease

    @asynccontextmanager
    async def lease(self, user: UserKey, tokens: P, num_candidates: int, deadline_at: float) -> AsyncIterator[Lease]:
        """The best way to this history's prefix KV, held while the block runs.

        Args:
            user: whose.
            tokens: the whole history as the model reads it.
            num_candidates: for the estimate of what still fits.
            deadline_at: instant of the clock by which the rank must be done.
        """
        found: _Found = _Found(Outcome.MISS_FULL, Reason.NOT_AT_RISK if self._config.enabled else Reason.DISABLED)
        if self._config.enabled and len(tokens):
            found = await self._find(user, tokens, num_candidates, deadline_at)
        outcome, reason = found.outcome, found.reason
        with ExitStack() as held:
            held.callback(self._ranked, user)
            if (entry := found.entry) is not None:
                if not entry.consumed:
                    self.on_first_use(self._clock() - (entry.expires_at - self._pool.t_life_s))
                held.enter_context(self._pool.lease(entry, consume=True))
                held.callback(self._spill, entry)
                cached = Cached(tuple(entry.runs), entry.num_tokens)
                yield Lease(outcome=outcome, reason=reason, cached=cached)
                return
            taken = found.taken
            if taken is not None:
                self.on_first_use(0.0)
            else:
                first = self._first_token(len(tokens), num_candidates, deadline_at)
                if self.brownout >= Brownout.TRUNCATE and len(tokens) - first > self._config.brownout_tokens:
                    first, reason = len(tokens) - self._config.brownout_tokens, Reason.BROWNOUT
                if first:
                    yield Lease(outcome=Outcome.DEGRADED, reason=reason, first_token=first)
                    return
                taken = self._keep(user, tokens)
                if taken is None:
                    yield Lease(outcome=outcome, reason=reason)
                    return
            let_go = partial(self.producers.let_go, taken)
            held.callback(let_go)
            runs, encoded = tuple(taken.entry.runs), taken.encoded_tokens
            begun = Cached(runs, encoded) if encoded else None
            yield Lease(outcome=outcome, reason=reason, cached=begun, keep=runs, discard=let_go)
            if taken.is_taken:  # not discarded
                self._publish_kept(taken.entry, tokens)

    async def _find(self, user: UserKey, tokens: P, num_candidates: int, deadline_at: float) -> _Found:
        """The longest usable prefix: resident, else in flight, else in DRAM."""
        resident = self._resident(user, tokens)
        if resident is not None:
            return _Found(Outcome.HBM_HIT, entry=resident)
        # kept back when joining: the pass that does without, what follows it, and waking up late
        spare_s = self._engine.cost.full_s(len(tokens), num_candidates) + 2 * self._config.margin_s
        running = self._running(user, tokens)
        if running is not None:
            if running.joiners >= self._config.max_joiners:
                return _Found(Outcome.MISS_FULL, Reason.REJECTED_LOAD)
            if running.entry.num_tokens == len(tokens) and running.may_be_taken:
                if await self.producers.take_over(running, self._patience_s(deadline_at, spare_s)):
                    return self._taken(running, num_candidates, deadline_at)
                if not running.ended.done():
                    return _Found(Outcome.MISS_FULL, Reason.JOIN_TIMEOUT)
            return await self._join(running, deadline_at, spare_s)
        spilled = self._spilled(user, tokens)
        if spilled is None:
            return _Found(Outcome.MISS_FULL, self._why_missing(user))
        left_s = deadline_at - self._clock() - self._config.margin_s
        if self._pool.is_reserved(spilled.key) or not self._reload_pays(spilled, left_s):
            return _Found(Outcome.MISS_FULL, Reason.RELOAD_SLOWER)
        try:
            producer = self.producers.reload(
                spilled, Urgency(self._wanted_by_s(deadline_at)), left_s, self._clock() + self._config.t_life_s
            )
        except ResourceError:
            return _Found(Outcome.MISS_FULL, Reason.REJECTED_FOOTPRINT)
        found = await self._join(producer, deadline_at, spare_s)
        if found.entry is not None:
            return _Found(Outcome.DRAM_HIT, entry=found.entry)
        return found._replace(reason=Reason.RELOAD_FAILED) if found.reason is Reason.PRODUCER_FAILED else found

    def _taken(self, producer: Producer, num_candidates: int, deadline_at: float) -> _Found:
        """A pre-infer that was taken over where it was, unless what is left of it is too much for this rank."""
        encoded, rest = producer.encoded_tokens, producer.entry.num_tokens - producer.encoded_tokens
        is_late = self._engine.cost.pass_s(rest, encoded, num_candidates) > self._budget_s(deadline_at)
        is_given_up = self.brownout >= Brownout.TRUNCATE and rest > self._config.brownout_tokens
        if is_given_up or (is_late and self._config.degrade):
            self.producers.let_go(producer)
            return _Found(Outcome.MISS_FULL, Reason.JOIN_TIMEOUT)
        if not encoded:
            return _Found(Outcome.MISS_FULL, Reason.NOT_BEGUN, taken=producer)
        return _Found(Outcome.JOINED, Reason.COMPUTE, taken=producer)

    async def _join(self, producer: Producer, deadline_at: float, spare_s: float) -> _Found:
        """Wait for a producer as long as time to do without it remains."""
        producer.urgency.hasten(self._wanted_by_s(deadline_at))
        producer.joiners += 1
        try:
            done, _ = await asyncio.wait({producer.ended}, timeout=self._patience_s(deadline_at, spare_s))
        finally:
            producer.joiners -= 1
        if not done:
            return _Found(Outcome.MISS_FULL, Reason.JOIN_TIMEOUT)
        entry = self._pool.get(producer.entry.key)
        if entry is not None:
            return _Found(Outcome.JOINED, Reason.RELOAD if producer.is_reload else Reason.COMPUTE, entry)
        return _Found(Outcome.MISS_FULL, Reason.EXPIRED if producer.entry.is_published else Reason.PRODUCER_FAILED)

    def _patience_s(self, deadline_at: float, spare_s: float) -> float:
        """How long to wait so that there is time to do without, or if there is none, until the end."""
        left_s = deadline_at - self._clock()
        return max(left_s - spare_s if left_s > spare_s else left_s - self._config.margin_s, 0.0)

    def _wanted_by_s(self, deadline_at: float) -> float:
        """A rank's place in the queue, also for what it waits for: its objective, not its deadline."""
        return min(deadline_at, self._clock() + self._engine.objective_s)

    def _first_token(self, num_tokens: int, num_candidates: int, deadline_at: float) -> int:
        """0, or where the newest tokens begin that a full inference can still score in time."""
        if not self._config.degrade or not num_tokens:
            return 0
        return num_tokens - self._engine.cost.safe_tokens(num_tokens, num_candidates, self._budget_s(deadline_at))

    def _budget_s(self, deadline_at: float) -> float:
        """That the device may take for a rank which comes to it now."""
        return deadline_at - self._clock() - self._config.margin_s - self._engine.queue_s

    # ---- what exists

    def _key(self, user: UserKey, tokens: P, num_tokens: int) -> PrefixKey:
        return PrefixKey(user, self._version, self._layout_id, tokens.fingerprint(num_tokens))

    def _matches(self, key: PrefixKey, num_tokens: int, tokens: P) -> bool:
        return 0 < num_tokens <= len(tokens) and tokens.fingerprint(num_tokens) == key.fingerprint

    def _resident(self, user: UserKey, tokens: P) -> PrefixEntry | None:
        entries = self._pool.find(user, self._version, self._layout_id)
        usable = [e for e in entries if self._matches(e.key, e.num_tokens, tokens)]
        return max(usable, key=lambda e: e.num_tokens, default=None)

    def _running(self, user: UserKey, tokens: P) -> Producer | None:
        entries = ((p, p.entry) for p in self.producers.of(user))
        live = [(p, entry) for p, entry in entries if not entry.is_erased]  # the others will publish nothing
        usable = [p for p, entry in live if self._matches(entry.key, entry.num_tokens, tokens)]
        return max(usable, key=lambda p: p.entry.num_tokens, default=None)

    def _spilled(self, user: UserKey, tokens: P) -> DramEntry | None:
        if self._dram is None or self.brownout >= Brownout.NO_DRAM:
            return None
        entries = self._dram.find(user, self._version, self._layout_id)
        usable = [e for e in entries if self._matches(e.key, e.num_tokens, tokens)]
        return max(usable, key=lambda e: e.num_tokens, default=None)

    def _why_missing(self, user: UserKey) -> Reason:
        if self._pool.find(user, self._version, self._layout_id):
            return Reason.FINGERPRINT_MISMATCH
        if user not in self._last:
            return Reason.NO_SIGNAL
        return self._last[user].reason or Reason.EXPIRED

    def _remember(self, user: UserKey, signal: _Signal) -> None:
        self._last[user] = signal
        self._last.move_to_end(user)
        if len(self._last) > self._config.max_remembered:
            self._last.popitem(last=False)

    def _ranked(self, user: UserKey) -> None:
        signal = self._last.get(user)
        if signal is not None and signal.is_pending:
            self._last[user] = signal._replace(is_pending=False)
            self.t_life_p99_s.observe(self._clock() - signal.at_s)

    def _reload_pays(self, spilled: DramEntry, budget_s: float) -> bool:
        copy_s, full_s = self.producers.reload_s(spilled.num_tokens), self._engine.cost.full_s(spilled.num_tokens, 0)
        return reload_pays(copy_s, full_s, budget_s)

    # ---- keeping what was computed or used

    def _keep(self, user: UserKey, tokens: P) -> Producer | None:
        """Room for what a full inference encodes, if it is wanted and nobody else encodes it."""
        key = self._key(user, tokens, len(tokens))
        wanted = self._config.keep_full and len(tokens) >= self._trigger.min_prefix_tokens
        wanted &= self._config.enabled and self.brownout < Brownout.NO_RELAY
        if not wanted or key in self.producers or self._pool.is_reserved(key) or self._pool.get(key) is not None:
            return None
        try:
            return self.producers.keep(key, tokens, self._clock() + self._needed_s(len(tokens)))
        except ResourceError:
            return None

    def _publish_kept(self, entry: PrefixEntry, tokens: P) -> None:
        if not self._pool.publish(entry, tokens.timestamps):
            return
        with self._pool.lease(entry, consume=True):  # its rank has just been served
            pass
        self._spill(entry)

    def _spill(self, entry: PrefixEntry) -> None:
        if self.brownout < Brownout.NO_DRAM:
            behind_s = self._clock() + self._config.t_life_s  # every rank and pre-infer of now
            self.producers.spill(entry, behind_s)

    async def erase(self, user: UserKey) -> None:
        """Forget the user in every tier: unfindable at once, the pages overwritten before anybody else gets them.

        Pages that a rank of this moment reads or writes are overwritten when it ends.
        """
        self._last.pop(user, None)
        await self.producers.erase(user)

    async def settled(self) -> None:
        """Nothing is being produced, spilled or overwritten any more."""
        await self.producers.settled()

    async def stop(self) -> None:
        """Cancel what still runs and wait for it."""
        await self.producers.stop()
