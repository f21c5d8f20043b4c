"""A ranker with its tiers under open-loop traffic, for `benchmarks relay` and `benchmarks cascade`.

Engine, scheduler, relay and tiers are real and run in this process. A request sends its signal when
it arrives. Its rank is due `LEAD` idle full inferences later (the time of retrieval and
pre-processing), and its latency counts from then.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.rank import config as model_config
from npu_gr.backend.base import Backend
from npu_gr.core.arrays import F32
from npu_gr.core.errors import NpuGrError
from npu_gr.core.history import Events, UserKey
from npu_gr.core.request import Outcome, Verdict
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.engine.kv_cache.tier import DramEntry, DramStore, PrefixKey
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.history_tokenizer import ItemVocabulary, Tokens, tokenize
from npu_gr.model.hstu import HSTU
from npu_gr.relay.config import RelayConfig, TriggerConfig
from npu_gr.relay.relay import Relay

LEAD = 2.0  # time from signal to rank, in idle full inferences
HBM_PREFIXES = 16  # capacity of the pool
RETURNING = 24  # number of users whose prefixes are in DRAM
DRAM_BYTES = 2 << 30  # size of the DRAM tier, within the limits below
DRAM_PREFIXES = (64, 512)  # least and most prefixes of the DRAM tier
MARGIN = 0.3  # share of the objective that the trigger reserves for all but queue and device
NEW_TOKENS = 16  # events of a returning user since the prefix was encoded
T_LIFE_S = 10.0
SAMPLES = 11  # samples of each part alone
TOLERANCE = 1e-4  # cached against cold scores, relative to the logits' standard deviation
ALWAYS = TriggerConfig(policy="always", min_prefix_tokens=1)


class Arm(NamedTuple):
    """One way to serve the same traffic."""

    name: str
    signals: bool = True
    dram: bool = False
    keep: float = 1.0  # share of the history that is read: its newest part
    trigger: TriggerConfig = ALWAYS


class Shape(NamedTuple):
    """The size of the requests and of the model."""

    num_tokens: int
    num_candidates: int
    num_layers: int
    dim: int = 256
    window: int = 0  # attention_window_tokens; 0 = full attention
    first: int = 0  # attention_first_tokens


class Idle(NamedTuple):
    """Seconds of each part on an idle machine."""

    full_s: float  # a full inference
    prefill_s: float  # a prefill
    load_s: float  # a reload from DRAM
    rank_s: float  # a rank with a cached prefix


class RigVisit(NamedTuple):
    """One user's signal and rank."""

    arrives_at: float  # arrival of the signal, in seconds since the start of the run
    user: UserKey
    events: Events
    is_ranked: bool = True  # False: there is no rank


# (rig, requests a second, count, seed)
Traffic = Callable[["Rig", float, int, int], list[RigVisit]]


class ArmOutcomes(NamedTuple):
    """The outcomes of the requests of one run."""

    latency_s: F32  # [ranks] from the due time; inf = failed, nan = the run was stopped before
    shares: dict[Outcome, float]  # shares of the ranks
    reloaded: float  # share of signals whose prefix came from DRAM
    wasted: float  # prefills that no rank used, as a share of the signals

    def holds(self, goal_s: float) -> bool | None:
        """Return whether 99 of 100 took at most `goal_s`; None = the run was stopped before."""
        if (self.latency_s > goal_s).sum() > allowed_late(len(self.latency_s)):
            return False
        return None if np.isnan(self.latency_s).any() else True

    def describe(self) -> str:
        """Describe the outcomes for a line."""
        shares = ", ".join(
            f"{name.value} {share:.0%}" for name, share in self.shares.items() if share >= 0.005
        )
        return (
            f"{shares or 'nothing answered'}; reloaded {self.reloaded:.0%}, wasted "
            f"{self.wasted:.0%}"
        )


def allowed_late(count: int) -> int:
    """Return how many of `count` requests may be late if 99 of 100 must meet the goal."""
    return count // 100


class Rig:
    """A ranker, and users with random histories, of one shape."""

    def __init__(self, shape: Shape, backend: Backend, seed: int) -> None:
        self.shape = shape
        self.backend = backend
        torch.manual_seed(seed)
        config = msgspec.structs.replace(
            model_config(shape.num_layers, shape.dim),
            max_history_tokens=shape.num_tokens,
            attention_window_tokens=shape.window,
            attention_first_tokens=shape.first,
        )
        self.model = HSTU(config).to(backend.device).eval()
        self.model.items.freeze()
        self.layout = KVLayout(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            qk_dim=config.qk_dim,
            v_dim=config.v_dim,
            arrangement=backend.arrangement(torch.float32, 64),
            window_tokens=shape.window,
            first_tokens=shape.first,
        )
        self.vocabulary = ItemVocabulary(np.arange(config.num_items, dtype=np.int64))
        pages = self.layout.pages(shape.num_tokens)
        least, most = DRAM_PREFIXES
        self.dram_prefixes = min(most, max(least, DRAM_BYTES // (pages * self.layout.page_bytes)))
        self.hbm = KVArena(self.layout, pages * HBM_PREFIXES, backend.device, pack=backend.pack_kv)
        self.dram = KVArena(
            self.layout, pages * self.dram_prefixes, torch.device("cpu"), backend.pins_host_memory
        )
        random = np.random.default_rng(seed)
        self.candidates = random.integers(0, config.num_items, shape.num_candidates)
        self.returning = self.user(random)  # the history of every returning user
        self.idle = Idle(0.0, 0.0, 0.0, 0.0)

    def user(self, random: np.random.Generator, share: float = 1.0) -> Events:
        """Draw a history, with a share of the shape's length."""
        n = int(self.shape.num_tokens * share)
        times = 1_600_000_000 + np.cumsum(random.integers(1, 100_000, n))
        return Events.make(random.integers(0, 10_000, n), np.zeros(n), times)

    def tokens(self, events: Events) -> Tokens:
        """Tokenize a history."""
        return tokenize(
            events,
            self.vocabulary,
            1,
            max_tokens=len(events),
            cut_step_tokens=1,
            reject_unknown=True,
        )

    @asynccontextmanager
    async def serving(self, arm: Arm, objective_s: float) -> AsyncIterator[ServedArm]:
        """Serve the model with fresh tiers and a relay, until the end of the block."""
        scheduler = Scheduler(SchedulerConfig(max_queue=100_000))
        engine = RankEngine(self.model, self.backend, scheduler, self.hbm)
        pool = PrefixPool(
            self.hbm, self.hbm.num_pages * self.layout.page_bytes, T_LIFE_S, time.monotonic
        )
        dram = DramStore(self.dram, ttl_s=1e6, ttl_jitter_ratio=0.0, seed=0, clock=time.monotonic)
        config = RelayConfig(enabled=arm.signals, degrade=False, max_reloads=2, t_life_s=T_LIFE_S)
        trigger = msgspec.structs.replace(
            arm.trigger, rank_budget_s=objective_s, margin_s=MARGIN * objective_s
        )
        relay = Relay(config, trigger, engine, Tiers(pool, dram if arm.dram else None), "v")
        scheduler.start()
        try:
            lengths = sorted({64, self.shape.num_tokens // 4, self.shape.num_tokens})
            await engine.warm_up(self.tokens(self.returning), lengths, [self.shape.num_candidates])
            first = (PageRun(0, self.layout.pages(self.shape.num_tokens)),)
            await engine.measure_copy(self.dram, first, first, self.shape.num_tokens)
            engine.objective_s = objective_s
            served = ServedArm(self, arm, engine, relay, pool, dram)
            with ExitStack() as held:
                if arm.dram:
                    held.enter_context(dram.lease(await served.encode_returning()))
                yield served
        finally:
            await relay.stop()
            await scheduler.stop()


class ServedArm:
    """A running arm: sends requests to its relay and engine, and counts their outcomes."""

    def __init__(
        self,
        rig: Rig,
        arm: Arm,
        engine: RankEngine,
        relay: Relay[Tokens],
        pool: PrefixPool,
        dram: DramStore,
    ) -> None:
        self.rig = rig
        self.arm = arm
        self.engine = engine
        self.relay = relay
        self.pool = pool
        self.dram = dram
        self._wasted = 0  # prefixes evicted unused in this run
        self._outcomes = Counter[Outcome]()
        self._verdicts = Counter[Verdict]()
        self._encoded: DramEntry | None = None  # the prefix of all returning users
        pool.on_evict = self._evicted

    def _evicted(self, entry: PrefixEntry) -> None:
        self._wasted += not entry.consumed

    async def encode_returning(self) -> DramEntry:
        """Compute the prefix that `returns` copies. The caller must lease it."""
        tokens = self.rig.tokens(self.rig.returning[:-NEW_TOKENS])
        user = UserKey("", "back, the first of them")
        # a full inference caches its prefix, which is then spilled
        await self.rank(user, tokens, time.monotonic() + 600)
        await self.relay.settled()
        self.pool.erase_user(user)
        await self.relay.settled()
        [self._encoded] = self.dram.find(user, "v", self.rig.layout.layout_id)
        return self._encoded

    def returns(self, user: UserKey) -> None:
        """Put the prefix into DRAM, as if the user had been served before."""
        source = self._encoded
        assert source is not None
        entry = self.dram.reserve(
            PrefixKey(user, "v", source.key.layout_id, source.key.fingerprint), source.num_tokens
        )
        self.dram.arena.copy_tokens_from(
            self.dram.arena, source.runs, entry.runs, source.num_tokens
        )
        self.dram.commit(entry)

    async def rank(self, user: UserKey, tokens: Tokens, deadline_at: float) -> F32:
        """Score the rig's candidates.

        Args:
            user: User whose prefix is leased.
            tokens: Tokens of the complete history.
            deadline_at: Instant of `time.monotonic()`.

        Returns:
            [c, tasks] logits.
        """
        arrived_at = time.monotonic()
        async with self.relay.lease(user, tokens, len(self.rig.candidates), deadline_at) as lease:
            work = RankPass(
                tokens, 0, self.rig.candidates, SHOWN_AT, cached=lease.cached, keep=lease.keep
            )
            logits = (await self.engine.rank(work, deadline_at, arrived_at)).logits
        self._outcomes[lease.outcome] += 1
        return logits

    async def run(
        self,
        visits: Sequence[RigVisit],
        patience_s: float,
        goal_s: float = float("inf"),
        lead_s: float | None = None,
    ) -> ArmOutcomes:
        """Serve the visits. Users whose names begin with `back` were served before.

        Args:
            visits: Visits in time order.
            patience_s: Deadline of a rank, from its due instant.
            goal_s: Goal of the latency; the run is stopped when 99 of 100 cannot meet it.
            lead_s: Seconds from a signal to its rank; None = `LEAD`.
        """
        back = (
            {visit.user for visit in visits if visit.user.user.startswith("back")}
            if self.arm.dram
            else set[UserKey]()
        )
        for user in back:
            self.returns(user)
        histories = [
            self.rig.tokens(v.events[len(v.events) - int(len(v.events) * self.arm.keep) :])
            for v in visits
        ]
        self._outcomes.clear()
        self._verdicts.clear()
        self._wasted = 0
        ranked = sum(visit.is_ranked for visit in visits)
        latency_s = np.full(len(visits), np.nan, np.float32)
        lead_s = LEAD * self.rig.idle.full_s if lead_s is None else lead_s
        began_at = time.monotonic()

        async def one(number: int, visit: RigVisit) -> None:
            tokens = histories[number]
            arrives_at = began_at + visit.arrives_at
            await asyncio.sleep(arrives_at - time.monotonic())
            if self.arm.signals:
                self._verdicts[self.relay.signal(visit.user, tokens, len(self.rig.candidates))] += 1
            due_at = arrives_at + lead_s
            await asyncio.sleep(due_at - time.monotonic())
            if visit.is_ranked:
                try:
                    await self.rank(visit.user, tokens, due_at + patience_s)
                    latency_s[number] = time.monotonic() - due_at
                except NpuGrError:
                    latency_s[number] = np.inf
                if (latency_s > goal_s).sum() > allowed_late(ranked):
                    for task in tasks:
                        task.cancel()

        tasks = [asyncio.ensure_future(one(*pair)) for pair in enumerate(visits)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        shares = {outcome: count / ranked for outcome, count in self._outcomes.most_common()}
        await self.relay.settled()
        for user in {visit.user for visit in visits}:
            left = self.pool.find(user, "v", self.rig.layout.layout_id)
            self._wasted += sum(not entry.consumed for entry in left)
            self.pool.erase_user(user)
            self.dram.erase_user(user)
        await self.relay.settled()
        reloaded = self._verdicts[Verdict.RELOAD] / len(visits)
        wasted = self._wasted / len(visits)
        return ArmOutcomes(latency_s[[v.is_ranked for v in visits]], shares, reloaded, wasted)


async def measure_idle(rig: Rig) -> Idle:
    """Measure the median of each part on an idle machine.

    Raises:
        AssertionError: Cached scores differ from those of a full inference.
    """
    async with rig.serving(Arm("idle"), 1.0) as served:
        tokens = rig.tokens(rig.returning)
        samples = []
        full_s = 0.0
        for number in range(1 + SAMPLES):
            user = UserKey("idle", str(number))
            await asyncio.sleep(2 * full_s)
            began_at = time.perf_counter()
            cold = (
                await served.engine.rank(RankPass(tokens, 0, rig.candidates, SHOWN_AT), _FAR)
            ).logits
            full_s = time.perf_counter() - began_at
            await asyncio.sleep(full_s)
            began_at = time.perf_counter()
            served.relay.signal(user, tokens)
            await served.relay.settled()
            prefill_s = time.perf_counter() - began_at
            await asyncio.sleep(full_s)
            began_at = time.perf_counter()
            hit = await served.rank(user, tokens, time.monotonic() + 60)
            rank_s = time.perf_counter() - began_at
            drift = float(np.abs(hit - cold).max() / cold.std())
            assert drift <= TOLERANCE, (
                f"cached scores drift by {drift:.1e} of their standard deviation"
            )
            await served.relay.settled()
            samples.append((full_s, prefill_s, rank_s))
        full_s, prefill_s, rank_s = np.median(np.array(samples[1:]), axis=0).tolist()
        load_s = rig.layout.bytes(rig.shape.num_tokens) / served.engine.copy_bytes_per_s
        return Idle(full_s, prefill_s, load_s, rank_s)


SHOWN_AT = 1_900_000_000
_FAR = float("inf")
