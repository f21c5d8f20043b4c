"""A ranker with its tiers, driven open loop: what `bench relay` and `bench cascade` measure on.

One process, real engine, scheduler, relay and tiers. A request signals when it arrives, ranks `LEAD` idle full
inferences later (retrieval and pre-processing), and its latency counts from the instant its rank was due.
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

from npu_gr.backend.base import Backend
from npu_gr.bench.rank import config as model_config
from npu_gr.catalogue.items import ItemVocabulary
from npu_gr.catalogue.tokens import Tokens, tokenize
from npu_gr.core.errors import NpuGrError
from npu_gr.core.request import F32, Events, Outcome, UserKey, Verdict
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.kv.arena import KVArena
from npu_gr.kv.dram_store import DramEntry, DramStore
from npu_gr.kv.keys import PrefixKey
from npu_gr.kv.layout import KVLayout, PageRun
from npu_gr.kv.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.kv.tiers import Tiers
from npu_gr.model.hstu import HSTU
from npu_gr.relay.config import RelayConfig
from npu_gr.relay.relay import Relay
from npu_gr.relay.trigger import TriggerConfig

LEAD = 2.0  # of the idle full inference: from signal to rank
HBM_PREFIXES = 16  # that the pool holds
RETURNING = 24  # users whose prefixes lie in DRAM
DRAM_BYTES, DRAM_PREFIXES = 2 << 30, (64, 512)  # of the tier, and the prefixes that it holds at least and at most
MARGIN = 0.3  # of the objective: what the trigger leaves for everything but queue and device
NEW_TOKENS = 16  # behaviours since then
T_LIFE_S = 10.0
SAMPLES = 11  # of each part alone
TOLERANCE = 1e-4  # of the logits' standard deviation: cached against cold scores
ALWAYS = TriggerConfig(policy="always", min_prefix_tokens=1)


class Arm(NamedTuple):
    """One way to serve."""

    name: str
    signals: bool = True
    dram: bool = False
    keep: float = 1.0  # of the history: its newest part
    trigger: TriggerConfig = ALWAYS


class Shape(NamedTuple):
    """What is served."""

    num_tokens: int
    num_candidates: int
    num_layers: int
    dim: int = 256


class Idle(NamedTuple):
    """Seconds of each part alone."""

    full_s: float
    prefill_s: float
    load_s: float
    rank_s: float


class Visit(NamedTuple):
    """One request."""

    at_s: float  # when its signal comes, from the start
    user: UserKey
    events: Events
    is_ranked: bool = True  # or retrieval came to nothing


Traffic = Callable[["Rig", float, int, int], list[Visit]]  # rig, requests a second, how many, seed


class Outcomes(NamedTuple):
    """Of one run."""

    latency_s: F32  # [n ranked] from the due instant; inf = not answered, nan = the run was given up before
    shares: dict[Outcome, float]  # of the ranks
    reloaded: float  # of the signals: their prefix came from DRAM
    wasted: float  # pre-infers that no rank used, by signals

    def holds(self, goal_s: float) -> bool | None:
        """Whether 99 of 100 took at most so long; None = it was given up before that was known."""
        if (self.latency_s > goal_s).sum() > allowed_late(len(self.latency_s)):
            return False
        return None if np.isnan(self.latency_s).any() else True

    def describe(self) -> str:
        """In words, for a line."""
        shares = ", ".join(f"{name.value} {share:.0%}" for name, share in self.shares.items() if share >= 0.005)
        return f"{shares or 'nothing answered'}; reloaded {self.reloaded:.0%}, wasted {self.wasted:.0%}"


def allowed_late(count: int) -> int:
    """Of so many requests, where 99 of 100 are to be in time."""
    return count // 100


class Rig:
    """A ranker and the users of one shape; histories are random, seeded."""

    def __init__(self, shape: Shape, backend: Backend, seed: int) -> None:
        self.shape, self.backend = shape, backend
        torch.manual_seed(seed)
        config = msgspec.structs.replace(model_config(shape.num_layers, shape.dim), max_history_tokens=shape.num_tokens)
        self.model = HSTU(config).to(backend.device).eval()
        self.model.freeze_items()
        self.layout = KVLayout(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            qk_dim=config.qk_dim,
            v_dim=config.v_dim,
            arrangement=backend.arrangement(torch.float32, 64),
        )
        self.vocabulary = ItemVocabulary(np.arange(config.num_items, dtype=np.int64))
        pages = self.layout.pages(shape.num_tokens)
        least, most = DRAM_PREFIXES
        self.dram_prefixes = min(most, max(least, DRAM_BYTES // (pages * self.layout.page_bytes)))
        self.hbm = KVArena(self.layout, pages * HBM_PREFIXES, backend.device, pack=backend.pack_kv)
        self.dram = KVArena(self.layout, pages * self.dram_prefixes, torch.device("cpu"), backend.pins_host_memory)
        random = np.random.default_rng(seed)
        self.candidates = random.integers(0, config.num_items, shape.num_candidates)
        self.returning = self.user(random)  # the history of every user who comes back
        self.idle = Idle(0.0, 0.0, 0.0, 0.0)

    def user(self, random: np.random.Generator, share: float = 1.0) -> Events:
        """A history of a share of the shape's length."""
        n = int(self.shape.num_tokens * share)
        times = 1_600_000_000 + np.cumsum(random.integers(1, 100_000, n))
        return Events.make(random.integers(0, 10_000, n), np.zeros(n), times)

    def tokens(self, events: Events) -> Tokens:
        """As the model reads it."""
        return tokenize(events, self.vocabulary, 1, max_tokens=len(events), cut_step_tokens=1, refuse_unknown=True)

    @asynccontextmanager
    async def serving(self, arm: Arm, objective_s: float) -> AsyncIterator[Served]:
        """Fresh tiers and a relay over the model."""
        scheduler = Scheduler(SchedulerConfig(max_queue=100_000))
        engine = RankEngine(self.model, self.backend, scheduler, self.hbm)
        pool = PrefixPool(self.hbm, self.hbm.num_pages * self.layout.page_bytes, T_LIFE_S, time.monotonic)
        dram = DramStore(self.dram, ttl_s=1e6, ttl_jitter_ratio=0.0, seed=0, clock=time.monotonic)
        config = RelayConfig(enabled=arm.signals, degrade=False, max_reloads=2, t_life_s=T_LIFE_S)
        trigger = msgspec.structs.replace(arm.trigger, rank_budget_s=objective_s, margin_s=MARGIN * objective_s)
        relay = Relay(config, trigger, engine, Tiers(pool, dram if arm.dram else None), "v")
        scheduler.start()
        try:
            lengths = sorted({64, self.shape.num_tokens // 4, self.shape.num_tokens})
            await engine.warm_up(self.tokens(self.returning), lengths, [self.shape.num_candidates])
            first = (PageRun(0, self.layout.pages(self.shape.num_tokens)),)
            await engine.measure_copy(self.dram, first, first, self.shape.num_tokens)
            engine.objective_s = objective_s
            served = Served(self, arm, engine, relay, pool, dram)
            with ExitStack() as held:
                if arm.dram:
                    held.enter_context(dram.lease(await served.encode_returning()))
                yield served
        finally:
            await relay.stop()
            await scheduler.stop()


class Served:
    """One arm at work."""

    def __init__(
        self, rig: Rig, arm: Arm, engine: RankEngine, relay: Relay[Tokens], pool: PrefixPool, dram: DramStore
    ) -> None:
        self.rig, self.arm, self.engine, self.relay, self.pool, self.dram = rig, arm, engine, relay, pool, dram
        self._wasted, self._outcomes, self._verdicts = 0, Counter[Outcome](), Counter[Verdict]()
        self._encoded: DramEntry | None = None  # the prefix of who comes back
        pool.on_evict = self._evicted

    def _evicted(self, entry: PrefixEntry) -> None:
        self._wasted += not entry.consumed

    async def encode_returning(self) -> DramEntry:
        """Compute once what `returns` copies; the caller keeps it."""
        tokens = self.rig.tokens(self.rig.returning[:-NEW_TOKENS])
        user = UserKey("back", "the first of them")
        await self.rank(user, tokens, time.monotonic() + 600)  # full inference keeps its prefix, which then spills
        await self.relay.settled()
        self.pool.erase_user(user)
        await self.relay.settled()
        [self._encoded] = self.dram.find(user, "v", self.rig.layout.layout_id)
        return self._encoded

    def returns(self, user: UserKey) -> None:
        """As if the user had been here a while ago: the prefix lies in DRAM."""
        source = self._encoded
        assert source is not None
        assert source.timestamps is not None
        entry = self.dram.reserve(PrefixKey(user, "v", source.key.layout_id, source.key.fingerprint), source.num_tokens)
        self.dram.arena.copy_tokens_from(self.dram.arena, source.runs, entry.runs, source.num_tokens)
        self.dram.commit(entry, source.timestamps)

    async def rank(self, user: UserKey, tokens: Tokens, deadline_at: float) -> F32:
        """Score the candidates."""
        arrived_at = time.monotonic()
        async with self.relay.lease(user, tokens, len(self.rig.candidates), deadline_at) as lease:
            work = RankPass(tokens, 0, self.rig.candidates, SHOWN_AT, cached=lease.cached, keep=lease.keep)
            logits = (await self.engine.rank(work, deadline_at, arrived_at)).logits
        self._outcomes[lease.outcome] += 1
        return logits

    async def run(
        self,
        visits: Sequence[Visit],
        patience_s: float,
        goal_s: float = float("inf"),
        lead_s: float | None = None,
    ) -> Outcomes:
        """Serve them; who is of tenant `back` has been here before.

        Args:
            visits: who comes, and when.
            patience_s: how long a rank is waited for.
            goal_s: it is given up once it is known that 99 of 100 do not take so little.
            lead_s: from a signal to its rank; None = `LEAD`.
        """
        back = {visit.user for visit in visits if visit.user.tenant == "back"} if self.arm.dram else set[UserKey]()
        for user in back:
            self.returns(user)
        asked = [self.rig.tokens(v.events[len(v.events) - int(len(v.events) * self.arm.keep) :]) for v in visits]
        self._outcomes.clear()
        self._verdicts.clear()
        self._wasted = 0
        ranked = sum(visit.is_ranked for visit in visits)
        latency_s = np.full(len(visits), np.nan, np.float32)
        lead_s = LEAD * self.rig.idle.full_s if lead_s is None else lead_s
        began_at = time.monotonic()

        async def one(number: int, visit: Visit) -> None:
            at_s, tokens = began_at + visit.at_s, asked[number]
            await asyncio.sleep(at_s - time.monotonic())
            if self.arm.signals:
                self._verdicts[self.relay.signal(visit.user, tokens, len(self.rig.candidates))] += 1
            deadline_at = at_s + lead_s
            await asyncio.sleep(deadline_at - time.monotonic())
            if visit.is_ranked:
                try:
                    await self.rank(visit.user, tokens, deadline_at + patience_s)
                    latency_s[number] = time.monotonic() - deadline_at
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
        reloaded, wasted = self._verdicts[Verdict.RELOAD] / len(visits), self._wasted / len(visits)
        return Outcomes(latency_s[[v.is_ranked for v in visits]], shares, reloaded, wasted)


async def measure_idle(rig: Rig) -> Idle:
    """Each part alone, as a lone request finds the machine, by the median; cached scores are checked against cold."""
    async with rig.serving(Arm("idle"), 1.0) as served:
        tokens, samples, full_s = rig.tokens(rig.returning), [], 0.0
        for number in range(1 + SAMPLES):
            user = UserKey("idle", str(number))
            await asyncio.sleep(2 * full_s)
            began_at = time.perf_counter()
            cold = (await served.engine.rank(RankPass(tokens, 0, rig.candidates, SHOWN_AT), _FAR)).logits
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
            assert drift <= TOLERANCE, f"cached scores drift by {drift:.1e} of their standard deviation"
            await served.relay.settled()
            samples.append((full_s, prefill_s, rank_s))
        full_s, prefill_s, rank_s = np.median(np.array(samples[1:]), axis=0).tolist()
        load_s = rig.layout.bytes(rig.shape.num_tokens) / served.engine.copy_bytes_per_s
        return Idle(full_s, prefill_s, load_s, rank_s)


SHOWN_AT = 1_900_000_000
_FAR = float("inf")
