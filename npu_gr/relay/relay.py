"""The relay race: a signal encodes a user's prefix, the rank that follows leases it. One state machine.

A prefix is known by (user, model version, KV layout, fingerprint). Per key at most one producer (a compute or a
reload) runs; everybody else who needs it joins that producer's task. Producers belong to the relay, not to the
request that started them, so a request that goes away takes nothing with it.

    in HBM                    -> lease                                     hbm_hit
    being produced            -> wait for it, but keep time to do without  joined   | miss_full join_timeout ...
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
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from npu_gr.engine.cost import CostModel
from npu_gr.engine.engine import Cached
from npu_gr.engine.quantile import RunningQuantile
from npu_gr.engine.scheduler import Done, Urgency
from npu_gr.errors import DeadlineExceeded, NpuGrError, Overloaded, ResourceError
from npu_gr.kv.arena import KVArena
from npu_gr.kv.dram_store import DramEntry, DramStore
from npu_gr.kv.keys import PrefixKey
from npu_gr.kv.layout import Run
from npu_gr.kv.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.relay.calibration import Calibration
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
from npu_gr.request import I64, Brownout, Outcome, Reason, UserKey, Verdict

log = logging.getLogger(__name__)


class Prefix(Protocol):
    """A history as one model reads it: how many tokens, and which."""

    @property
    def timestamps(self) -> I64:
        """[n] unix seconds, kept beside the KV."""
        ...

    def __len__(self) -> int:
        """Tokens."""
        ...

    def fingerprint(self, num_tokens: int) -> str:
        """Of the first `num_tokens`: equal prefixes and no others have equal ones."""
        ...


P = TypeVar("P", bound=Prefix)
P_in = TypeVar("P_in", bound=Prefix, contravariant=True)


class Encoder(Protocol[P_in]):
    """The engine whose prefixes are relayed."""

    @property
    def cost(self) -> CostModel:
        """What a pass takes."""
        ...

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth between the tiers."""
        ...

    @property
    def queue_s(self) -> float:
        """How long a request that comes now would wait for the device."""
        ...

    @property
    def objective_s(self) -> float:
        """How long after it came a request should be done."""
        ...

    @property
    def residual_s(self) -> float:
        """What `cost` has been short by lately, a high quantile."""
        ...

    async def prefill(
        self, tokens: P_in, keep: tuple[Run, ...], deadline_s: float, urgency: Urgency, first_token: int = 0
    ) -> None:
        """Encode the prefix into the pages, which hold its first `first_token` tokens already."""
        ...

    async def copy(
        self,
        source: KVArena,
        source_runs: Sequence[Run],
        target: KVArena,
        target_runs: Sequence[Run],
        num_tokens: int,
        deadline_s: float,
        order_s: float | Urgency | None = None,
        *,
        is_sheddable: bool = False,
    ) -> None:
        """Copy a prefix between tiers."""
        ...

    def zero(self, arena: KVArena, runs: Sequence[Run]) -> asyncio.Future[Done[None]]:
        """Overwrite pages before any job that waits."""
        ...


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


@dataclass(slots=True, eq=False)
class _Producer:
    task: asyncio.Task[None]
    num_tokens: int
    is_reload: bool
    urgency: Urgency
    joiners: int = 0


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
        self._producers: dict[PrefixKey, _Producer] = {}
        self._by_user: dict[UserKey, set[PrefixKey]] = {}  # keys being produced
        self._spilling: set[PrefixKey] = set()
        self._overwriting: set[asyncio.Future[Done[None]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: OrderedDict[UserKey, _Signal] = OrderedDict()
        self._reloads = asyncio.Semaphore(config.max_reloads)
        self.brownout = Brownout.NONE
        # from a signal to the end of its rank, and what a prefix takes
        t_life_s, kv_bytes = config.t_life_s, pool.arena.layout.page_bytes
        if calibration is not None:
            t_life_s, kv_bytes = calibration.t_life_s, pool.arena.layout.bytes(calibration.kv_p99_tokens)
        self.t_life_p99_s = RunningQuantile(0.99, t_life_s, is_measured=calibration is not None)
        self.kv_p99_bytes = RunningQuantile(0.99, kv_bytes, is_measured=calibration is not None)
        self._calibration = calibration
        self._bucket = self._new_bucket()
        self.on_error: Callable[[str], None] = lambda _where: None
        self.on_first_use: Callable[[float], None] = lambda _waited_s: None
        pool.on_erased = partial(self._overwrite, pool.arena)
        if dram is not None:
            dram.on_erased = partial(self._overwrite, dram.arena)

    def become(self, config: RelayConfig, trigger: TriggerConfig) -> None:
        """Other settings from now on; what is being produced, and what was measured, stays."""
        if config.max_reloads != self._config.max_reloads:
            self._reloads = asyncio.Semaphore(config.max_reloads)  # reloads of now give their turns back to the old one
        self._config, self._trigger = config, trigger
        self._bucket = self._new_bucket()
        self._pool.t_life_s = config.t_life_s

    @property
    def t_life_s(self) -> float:
        """How long a produced prefix waits for its rank."""
        return self._config.t_life_s

    def in_flight(self, work: str) -> int:
        """Prefixes on their way: `prefill` and `reload` into HBM, `spill` into DRAM."""
        if work == "spill":
            return len(self._spilling)
        return sum(producer.is_reload == (work == "reload") for producer in self._producers.values())

    async def settled(self) -> None:
        """Nothing is being produced, spilled or overwritten any more."""
        while self._tasks or self._overwriting:
            await asyncio.gather(*self._tasks, *self._overwriting, return_exceptions=True)
            await asyncio.sleep(0)  # their callbacks

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
        if key in self._producers or self._pool.is_reserved(key):
            return Verdict.ALREADY_RUNNING
        now_s = self._clock()
        base, spilled = self._resident(user, tokens), self._spilled(user, tokens)
        cached = base.num_tokens if base else 0
        if spilled is not None and spilled.num_tokens <= cached:
            spilled = None
        if base is not None and spilled is None and len(tokens) - cached < self._trigger.min_prefix_tokens:
            return Verdict.ALREADY_RESIDENT  # what is new, the rank computes along the way
        forecast, headroom = self._forecast(len(tokens), cached, num_candidates), self._headroom(tokens)
        verdict = decide(len(tokens), forecast, headroom, self._trigger, self._limit(), now_s)
        if verdict is not Verdict.PREINFER:
            return verdict
        urgency = Urgency(float("inf"), now_s)  # when the device has nothing better to do, until its rank is here
        try:
            if spilled is not None and self._reload_pays(spilled, self._config.t_life_s):
                if spilled.key in self._producers or self._pool.is_reserved(spilled.key):
                    return Verdict.ALREADY_RUNNING
                self._start_reload(spilled.key, spilled, urgency, self._config.t_life_s)
                return Verdict.RELOAD
            return self._start_compute(key, tokens, urgency, base)
        except ResourceError:
            return Verdict.SKIP_FOOTPRINT

    def _forecast(self, num_tokens: int, cached_tokens: int, num_candidates: int) -> Forecast:
        engine = self._engine
        pass_s = engine.cost.pass_s(num_tokens - cached_tokens, cached_tokens, num_candidates)
        return Forecast(engine.queue_s, pass_s, engine.residual_s)

    def _headroom(self, tokens: P) -> Headroom:
        needed_bytes = self._pool.arena.layout.bytes(len(tokens))
        if needed_bytes:
            self.kv_p99_bytes.observe(needed_bytes)
        return Headroom(
            inflight=len(self._producers),
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
    async def lease(self, user: UserKey, tokens: P, num_candidates: int, due_s: float) -> AsyncIterator[Lease]:
        """The best way to this history's prefix KV, held while the block runs.

        Args:
            user: whose.
            tokens: the whole history as the model reads it.
            num_candidates: for the estimate of what still fits.
            due_s: instant of the clock by which the rank must be done.
        """
        outcome, reason, entry = (
            Outcome.MISS_FULL,
            Reason.NOT_AT_RISK if self._config.enabled else Reason.DISABLED,
            None,
        )
        if self._config.enabled and len(tokens):
            outcome, reason, entry = await self._find(user, tokens, num_candidates, due_s)
        with ExitStack() as held:
            held.callback(self._ranked, user)
            if entry is not None:
                if not entry.consumed:
                    self.on_first_use(self._clock() - (entry.expires_at_s - self._pool.t_life_s))
                held.enter_context(self._pool.lease(entry, consume=True))
                held.callback(self._spill, entry)
                cached = Cached(tuple(entry.runs), entry.num_tokens)
                yield Lease(outcome=outcome, reason=reason, cached=cached)
                return
            first = self._first_token(len(tokens), num_candidates, due_s)
            if self.brownout >= Brownout.TRUNCATE and len(tokens) - first > self._config.brownout_tokens:
                first, reason = len(tokens) - self._config.brownout_tokens, Reason.BROWNOUT
            if first:
                yield Lease(outcome=Outcome.DEGRADED, reason=reason, first_token=first)
                return
            room = self._reserve_for_keeping(user, tokens)
            if room is None:
                yield Lease(outcome=outcome, reason=reason)
                return
            held.callback(self._abandon_unless_published, room)
            discard = partial(self._pool.abandon, room)
            yield Lease(outcome=outcome, reason=reason, keep=tuple(room.runs), discard=discard)
            self._publish_kept(room, tokens)

    async def _find(
        self, user: UserKey, tokens: P, num_candidates: int, due_s: float
    ) -> tuple[Outcome, Reason, PrefixEntry | None]:
        """The longest usable prefix: resident, else in flight, else in DRAM."""
        resident = self._resident(user, tokens)
        if resident is not None:
            return Outcome.HBM_HIT, Reason.NONE, resident
        # kept back when joining: the pass that does without, what follows it, and waking up late
        spare_s = self._engine.cost.full_s(len(tokens), num_candidates) + 2 * self._config.margin_s
        running = self._running(user, tokens)
        if running is not None:
            key, producer = running
            if producer.joiners >= self._config.max_joiners:
                return Outcome.MISS_FULL, Reason.REJECTED_LOAD, None
            why = await self._join(producer, due_s, spare_s)
            entry = self._pool.get(key)
            if why is None and entry is not None:
                return Outcome.JOINED, Reason.RELOAD if producer.is_reload else Reason.COMPUTE, entry
            return Outcome.MISS_FULL, why or Reason.EXPIRED, None
        spilled = self._spilled(user, tokens)
        if spilled is None:
            return Outcome.MISS_FULL, self._why_missing(user), None
        left_s = due_s - self._clock() - self._config.margin_s
        if self._pool.is_reserved(spilled.key) or not self._reload_pays(spilled, left_s):
            return Outcome.MISS_FULL, Reason.RELOAD_SLOWER, None
        try:
            producer = self._start_reload(spilled.key, spilled, Urgency(self._wanted_by_s(due_s)), left_s)
        except ResourceError:
            return Outcome.MISS_FULL, Reason.REJECTED_FOOTPRINT, None
        why = await self._join(producer, due_s, spare_s)
        entry = self._pool.get(spilled.key)
        if why is None and entry is not None:
            return Outcome.DRAM_HIT, Reason.NONE, entry
        return (
            Outcome.MISS_FULL,
            Reason.RELOAD_FAILED if why is Reason.PRODUCER_FAILED else why or Reason.EXPIRED,
            None,
        )

    async def _join(self, producer: _Producer, due_s: float, spare_s: float) -> Reason | None:
        """Wait for a producer as long as time to do without it remains. None = it has published."""
        producer.urgency.hasten(self._wanted_by_s(due_s))
        left_s = due_s - self._clock()
        wait_s = left_s - spare_s if left_s > spare_s else left_s - self._config.margin_s
        producer.joiners += 1
        try:
            done, _ = await asyncio.wait({producer.task}, timeout=max(wait_s, 0.0))
        finally:
            producer.joiners -= 1
        if not done:
            return Reason.JOIN_TIMEOUT
        return Reason.PRODUCER_FAILED if producer.task.cancelled() or producer.task.exception() else None

    def _wanted_by_s(self, due_s: float) -> float:
        """A rank's place in the queue, also for what it waits for: its objective, not its deadline."""
        return min(due_s, self._clock() + self._engine.objective_s)

    def _first_token(self, num_tokens: int, num_candidates: int, due_s: float) -> int:
        """0, or where the newest tokens begin that a full inference can still score in time."""
        if not self._config.degrade or not num_tokens:
            return 0
        budget_s = due_s - self._clock() - self._config.margin_s - self._engine.queue_s
        return num_tokens - self._engine.cost.safe_tokens(num_tokens, num_candidates, budget_s)

    # ---- what exists

    def _key(self, user: UserKey, tokens: P, num_tokens: int) -> PrefixKey:
        return PrefixKey(user, self._version, self._layout_id, tokens.fingerprint(num_tokens))

    def _matches(self, key: PrefixKey, num_tokens: int, tokens: P) -> bool:
        return 0 < num_tokens <= len(tokens) and tokens.fingerprint(num_tokens) == key.fingerprint

    def _resident(self, user: UserKey, tokens: P) -> PrefixEntry | None:
        entries = self._pool.find(user, self._version, self._layout_id)
        usable = [e for e in entries if self._matches(e.key, e.num_tokens, tokens)]
        return max(usable, key=lambda e: e.num_tokens, default=None)

    def _running(self, user: UserKey, tokens: P) -> tuple[PrefixKey, _Producer] | None:
        found = [(key, self._producers[key]) for key in self._by_user.get(user, ())]
        usable = [(key, p) for key, p in found if self._matches(key, p.num_tokens, tokens)]
        return max(usable, key=lambda pair: pair[1].num_tokens, default=None)

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

    # ---- producers

    def _produce(
        self, entry: PrefixEntry, work: Coroutine[Any, Any, None], urgency: Urgency, held: ExitStack, *, is_reload: bool
    ) -> _Producer:
        """Start the work that publishes `entry`; however it ends, it leaves nothing reserved and nothing held."""
        key, task = entry.key, self._own(work)
        producer = self._producers[key] = _Producer(task, entry.num_tokens, is_reload, urgency)
        self._by_user.setdefault(key.user, set()).add(key)

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            self._pool.abandon(entry)
            del self._producers[key]
            keys = self._by_user[key.user]
            keys.discard(key)
            if not keys:
                del self._by_user[key.user]

        task.add_done_callback(ended)
        return producer

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # what was shed or came too late is counted, and under overload there is one a request
            level = logging.DEBUG if isinstance(error, DeadlineExceeded | Overloaded) else logging.WARNING
            log.log(level, "a relay task failed: %s: %s", type(error).__name__, error)

    def _start_compute(self, key: PrefixKey, tokens: P, urgency: Urgency, base: PrefixEntry | None) -> Verdict:
        """Encode a prefix; on from `base`, a resident one of its own beginning, if there is room beside it."""
        held = ExitStack()
        if base is not None:
            held.enter_context(self._pool.lease(base, consume=False))
        try:
            entry = self._pool.reserve(key, len(tokens))
        except ResourceError:
            held.close()
            if base is None:
                raise
            base, entry = None, self._pool.reserve(key, len(tokens))
        self._produce(entry, self._compute(entry, tokens, urgency, base), urgency, held, is_reload=False)
        return Verdict.PREINFER if base is None else Verdict.EXTEND

    async def _compute(self, entry: PrefixEntry, tokens: P, urgency: Urgency, base: PrefixEntry | None) -> None:
        # worthless once the rank it is for has given up
        # worthless once its rank has come and gone: what then still waits for the device is dropped
        needed_s = 2 * (self.t_life_p99_s.value + self._engine.cost.full_s(len(tokens), 0))
        deadline_s = self._clock() + min(self._config.t_life_s, needed_s)
        runs, first = tuple(entry.runs), 0
        with self._counted("prefill"):
            if base is not None:
                arena, first = self._pool.arena, base.num_tokens
                await self._engine.copy(arena, base.runs, arena, runs, first, deadline_s, urgency)
            await self._engine.prefill(tokens, runs, deadline_s, urgency, first)
        if self._pool.publish(entry, tokens.timestamps) and base is not None:
            self._pool.drop(base)  # whoever reads it goes on; nobody else needs it

    def _start_reload(self, key: PrefixKey, spilled: DramEntry, urgency: Urgency, patience_s: float) -> _Producer:
        entry = self._pool.reserve(key, spilled.num_tokens)
        work = self._reload(entry, spilled, urgency, patience_s)
        return self._produce(entry, work, urgency, ExitStack(), is_reload=True)

    async def _reload(self, entry: PrefixEntry, spilled: DramEntry, urgency: Urgency, patience_s: float) -> None:
        """Copy a prefix back, when it is its turn; not at all if that is too late for who asked first."""
        assert self._dram is not None
        deadline_s, turns = self._clock() + self._config.t_life_s, self._reloads
        with self._counted("reload"), self._dram.lease(spilled):
            try:
                await asyncio.wait_for(turns.acquire(), patience_s)
            except TimeoutError as error:
                raise DeadlineExceeded("no turn to reload came in time") from error
            try:
                self._dram.verify(spilled)
                await self._engine.copy(
                    self._dram.arena,
                    spilled.runs,
                    self._pool.arena,
                    entry.runs,
                    spilled.num_tokens,
                    deadline_s,
                    urgency,
                )
                self._dram.verify(spilled)
            finally:
                turns.release()
        assert spilled.timestamps is not None, "complete copies alone are found"
        self._pool.publish(entry, spilled.timestamps)

    @contextmanager
    def _counted(self, where: str) -> Iterator[None]:
        try:
            yield
        except NpuGrError:
            self.on_error(where)
            raise

    def _reload_pays(self, spilled: DramEntry, budget_s: float) -> bool:
        copy_s = self._pool.arena.layout.bytes(spilled.num_tokens) / self._engine.copy_bytes_per_s
        ahead = sum(producer.is_reload for producer in self._producers.values()) // self._config.max_reloads
        return reload_pays(copy_s * (1 + ahead), self._engine.cost.full_s(spilled.num_tokens, 0), budget_s)

    # ---- keeping what was computed or used

    def _reserve_for_keeping(self, user: UserKey, tokens: P) -> PrefixEntry | None:
        key = self._key(user, tokens, len(tokens))
        wanted = self._config.keep_full and len(tokens) >= self._trigger.min_prefix_tokens
        wanted &= self.brownout < Brownout.NO_RELAY
        if not self._config.enabled or not wanted or self._pool.get(key) is not None or self._pool.is_reserved(key):
            return None
        try:
            return self._pool.reserve(key, len(tokens))
        except ResourceError:
            return None

    def _publish_kept(self, entry: PrefixEntry, tokens: P) -> None:
        if not self._pool.publish(entry, tokens.timestamps):
            return
        with self._pool.lease(entry, consume=True):  # its rank has just been served
            pass
        self._spill(entry)

    def _abandon_unless_published(self, entry: PrefixEntry) -> None:
        if not entry.is_published:
            self._pool.abandon(entry)

    def _spill(self, entry: PrefixEntry) -> None:
        """Copy a used prefix to DRAM in the background; its HBM pages stay readable until somebody needs them."""
        dram, key = self._dram, entry.key
        if (
            dram is None
            or self.brownout >= Brownout.NO_DRAM
            or key in self._spilling
            or dram.get(key) is not None
            or self._pool.get(key) is not entry
        ):
            return
        try:
            room = dram.reserve(key, entry.num_tokens)
        except ResourceError:
            return
        self._spilling.add(key)
        held = ExitStack()  # from now on: the entry must not be evicted before its copy is queued
        held.enter_context(self._pool.lease(entry, consume=False))

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            dram.abandon(room)
            self._spilling.discard(key)

        self._own(self._spill_to(dram, room, entry)).add_done_callback(ended)

    async def _spill_to(self, dram: DramStore, room: DramEntry, entry: PrefixEntry) -> None:
        order_s = self._clock() + self._config.t_life_s  # behind every rank and pre-infer of now
        with self._counted("spill"):
            await self._engine.copy(
                self._pool.arena,
                entry.runs,
                dram.arena,
                room.runs,
                entry.num_tokens,
                float("inf"),
                order_s,
                is_sheddable=True,
            )
        assert entry.timestamps is not None, "it was published"
        dram.commit(room, entry.timestamps)

    # ---- the end

    async def erase(self, user: UserKey) -> None:
        """Forget the user in every tier: unfindable at once, the pages overwritten before anybody else gets them.

        Pages that a rank of this moment reads or writes are overwritten when it ends.
        """
        producing = {self._producers[key].task for key in self._by_user.get(user, ())}
        for task in producing:
            task.cancel()
        self._pool.erase_user(user)
        if self._dram is not None:
            self._dram.erase_user(user)
        self._last.pop(user, None)
        if producing:  # they end with the chunk that the device is at
            await asyncio.wait(producing)
            await asyncio.sleep(0)  # and give their pages back when that has been noticed
        if self._overwriting:
            done, _ = await asyncio.wait(self._overwriting)  # which, unlike gather, cancels nothing
            for future in done:
                future.result()

    def _overwrite(self, arena: KVArena, runs: tuple[Run, ...], free: Callable[[], None]) -> None:
        future = self._engine.zero(arena, runs)
        self._overwriting.add(future)

        def ended(future: asyncio.Future[Done[None]]) -> None:
            self._overwriting.discard(future)
            free()
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("pages of an erased user were not overwritten: %s", error)

        future.add_done_callback(ended)

    async def stop(self) -> None:
        """Cancel what still runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
