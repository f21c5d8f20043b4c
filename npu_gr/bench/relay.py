"""`npu-gr bench relay`: how much traffic meets the objective, and how long a history does, with and without a relay.

Open loop, one process, real engine, relay and tiers; every arm gets the same users at the same instants. A request
signals when it arrives, ranks `lead` later (retrieval and pre-processing), and counts from the instant its rank was
due. The objective is a multiple of the idle latency of a full inference, so its figures carry over to other devices.

    full            no signals, the whole history at rank time
    truncated       the newest quarter of it: what is served where nothing else fits
    relay           signals; the prefix waits in HBM
    relay, r        the same with DRAM behind it, and a share r of the requests from users whose prefix lies there

A rate is sustained if 99 of 100 requests meet the objective. Rates go up by a constant factor until the arm fails;
between the last sustained and the first failed one the figure is interpolated. Where full inference fails at the
lowest rate already, that rate stands for it, and the ratio is a lower bound. Histories are random, seeded.

Source of the arms: RelayGR (arXiv:2601.01712), whose figures are up to 3.6x throughput and 1.5x longer histories on
Ascend NPUs; `relaygr.md` 4.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.choose import BackendName, choose
from npu_gr.bench.line import Line
from npu_gr.bench.rank import config as model_config
from npu_gr.catalog.items import ItemVocabulary
from npu_gr.catalog.tokens import Tokens, tokenize
from npu_gr.engine.engine import Engine, Pass
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.errors import NpuGrError
from npu_gr.kv.arena import KVArena
from npu_gr.kv.dram_store import DramStore
from npu_gr.kv.layout import KVLayout, Run
from npu_gr.kv.prefix_pool import PrefixPool
from npu_gr.model.hstu import HSTU
from npu_gr.relay.relay import Relay, RelayConfig
from npu_gr.relay.trigger import TriggerConfig
from npu_gr.request import F32, Events, Outcome, UserKey

MULTIPLES = (1.2, 1.5, 3.0)  # the objective, of the idle full inference
LEAD = 2.0  # of the idle full inference: from signal to rank
STEP = 1.35  # from one rate to the next
LOWEST = 0.05  # of what full inference could do at most
GIVE_UP = 1.25  # an arm that misses the widest objective by so much at P99 is not asked for more
RETURNING = 24  # users whose prefixes lie in DRAM
NEW_TOKENS = 16  # behaviours since the prefix was encoded: of a user who comes back
TOLERANCE = 1e-4


class Arm(NamedTuple):
    """One way to serve."""

    name: str
    signals: bool = True
    reuse: float = 0.0
    keep: float = 1.0  # of the history
    always: bool = True  # pre-infer whatever fits, or only what is at risk


ARMS = (
    Arm("full", signals=False),
    Arm("truncated", signals=False, keep=0.25),
    Arm("relay"),
    Arm("relay, dram 50 %", reuse=0.5),
    Arm("relay, dram 75 %", reuse=0.75),
    Arm("relay, dram 100 %", reuse=1.0),
)


class Shape(NamedTuple):
    """What is served."""

    num_tokens: int
    num_candidates: int
    num_layers: int


class Idle(NamedTuple):
    """Seconds of each part alone."""

    full_s: float
    prefill_s: float
    load_s: float
    rank_s: float


class Outcomes(NamedTuple):
    """Of one run at one rate."""

    latency_s: F32  # [n] from the due instant
    hits: float  # share of ranks with a prefix
    wasted: float  # share of pre-infers that no rank used


class Rig:
    """A ranker with its tiers, and the users of one shape."""

    def __init__(self, shape: Shape, backend: Backend, seed: int) -> None:
        self.shape, self.backend = shape, backend
        torch.manual_seed(seed)
        config = model_config(shape.num_layers)
        self.model = HSTU(config).to(backend.device).eval()
        self.model.freeze_items()
        self.layout = KVLayout(
            num_layers=config.num_layers, num_heads=config.num_heads, qk_dim=config.qk_dim, v_dim=config.v_dim
        )
        self.vocabulary = ItemVocabulary(np.arange(config.num_items, dtype=np.int64))
        pages = self.layout.pages(shape.num_tokens)
        self.hbm = KVArena(self.layout, pages * 16, backend.device)
        self.dram = KVArena(self.layout, pages * (RETURNING + 8), torch.device("cpu"), backend.pins_host_memory)
        random = np.random.default_rng(seed)
        self.candidates = random.integers(0, config.num_items, shape.num_candidates)
        self.returning = [self.user(random) for _ in range(RETURNING)]
        self.idle = Idle(0.0, 0.0, 0.0, 0.0)

    def user(self, random: np.random.Generator) -> Events:
        """A history of the shape's length."""
        n = self.shape.num_tokens
        times = 1_600_000_000 + np.cumsum(random.integers(1, 100_000, n))
        return Events.make(random.integers(0, 10_000, n), np.zeros(n), times)

    def tokens(self, events: Events) -> Tokens:
        """As the model reads it."""
        return tokenize(events, self.vocabulary, 1, max_tokens=len(events), cut_step_tokens=1, refuse_unknown=True)

    @asynccontextmanager
    async def serving(self, arm: Arm, objective_s: float) -> AsyncIterator[Served]:
        """Fresh tiers and a relay over the model; the returning users' prefixes in DRAM."""
        scheduler = Scheduler(SchedulerConfig(max_queue=100_000))
        engine = Engine(self.model, self.backend, scheduler, self.hbm)
        pool = PrefixPool(self.hbm, self.hbm.num_pages * self.layout.page_bytes, 10.0, time.monotonic)
        dram = DramStore(self.dram, ttl_s=1e6, ttl_jitter_ratio=0.0, seed=0, clock=time.monotonic)
        config = RelayConfig(enabled=arm.signals, degrade=False, max_reloads=2)
        trigger = TriggerConfig(
            policy="always" if arm.always else "at_risk", rank_budget_s=objective_s, min_prefix_tokens=64
        )
        relay = Relay(config, trigger, engine, pool, dram if arm.reuse else None, "v")
        scheduler.start()
        try:
            lengths = sorted({64, self.shape.num_tokens // 4, self.shape.num_tokens})
            await engine.warm_up(self.tokens(self.returning[0]), lengths, [self.shape.num_candidates])
            first = (Run(0, self.layout.pages(self.shape.num_tokens)),)
            await engine.measure_copy(self.dram, first, first, self.shape.num_tokens)
            engine.objective_s = objective_s
            served = Served(self, arm, engine, relay, pool)
            if arm.reuse:
                for number in range(RETURNING):
                    await served.fill(number)
            yield served
        finally:
            await relay.stop()
            await scheduler.stop()


class Served:
    """One arm at work."""

    def __init__(self, rig: Rig, arm: Arm, engine: Engine, relay: Relay[Tokens], pool: PrefixPool) -> None:
        self.rig, self.arm, self.engine, self.relay, self.pool = rig, arm, engine, relay, pool
        self._wasted = self._hits = 0
        pool.on_evict = self._evicted

    def _evicted(self, entry: object) -> None:
        self._wasted += not getattr(entry, "consumed", True)

    async def fill(self, number: int) -> None:
        """Encode a returning user's prefix and let it spill."""
        user = UserKey("back", str(number))
        self.relay.signal(user, self._prefix(number))
        await self.rank(user, self._prefix(number), time.monotonic() + 600)
        await self.relay.settled()
        self.pool.erase_user(user)  # from HBM alone
        await self.relay.settled()

    def _prefix(self, number: int) -> Tokens:
        return self.rig.tokens(self.rig.returning[number][:-NEW_TOKENS])

    async def rank(self, user: UserKey, tokens: Tokens, due_s: float) -> F32:
        """Score the candidates."""
        async with self.relay.lease(user, tokens, len(self.rig.candidates), due_s) as lease:
            self._hits += lease.outcome in (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)
            work = Pass(tokens, 0, self.rig.candidates, _SHOWN_AT, cached=lease.cached, keep=lease.keep)
            return (await self.engine.rank(work, due_s)).logits

    async def run(self, rate_per_s: float, count: int, seed: int, patience_s: float) -> Outcomes:
        """Poisson arrivals; the same users at the same instants, whatever the arm."""
        random = np.random.default_rng(seed)
        gaps, coins = random.exponential(1.0 / rate_per_s, count), random.random(count)
        requests = []
        for number in range(count):
            events = self.rig.user(random)  # drawn whether it is used or not: every arm sees the same ones
            if coins[number] < self.arm.reuse:
                back = int(random.integers(RETURNING))
                events, user = self.rig.returning[back], UserKey("back", str(back))
            else:
                user = UserKey("new", f"{seed}-{number}")
            kept = events[len(events) - int(len(events) * self.arm.keep) :]
            requests.append((user, self.rig.tokens(kept)))
        self._hits = self._wasted = 0
        latency_s, lead_s = np.full(count, np.inf, np.float32), LEAD * self.rig.idle.full_s
        began_s = time.monotonic()

        async def one(number: int, at_s: float) -> None:
            user, tokens = requests[number]
            await asyncio.sleep(at_s - time.monotonic())
            if self.arm.signals:
                self.relay.signal(user, tokens, len(self.rig.candidates))
            due_s = at_s + lead_s
            await asyncio.sleep(due_s - time.monotonic())
            await self.rank(user, tokens, due_s + patience_s)
            latency_s[number] = time.monotonic() - due_s

        arrivals = began_s + np.cumsum(gaps)
        results = await asyncio.gather(*(one(n, float(at)) for n, at in enumerate(arrivals)), return_exceptions=True)
        unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, NpuGrError)]
        if unexpected:
            raise unexpected[0]
        for user, _ in requests:
            self.pool.erase_user(user)
        return Outcomes(latency_s, self._hits / count, self._wasted / count)


async def measure_idle(rig: Rig) -> Idle:
    """Each part alone, median of five; the cached scores are checked against the cold ones."""
    async with rig.serving(Arm("idle", reuse=1.0), 1.0) as served:
        tokens, samples = rig.tokens(rig.returning[0]), []
        for number in range(6):
            user = UserKey("idle", str(number))
            began_s = time.perf_counter()
            cold = (await served.engine.rank(Pass(tokens, 0, rig.candidates, _SHOWN_AT), _FAR)).logits
            full_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            served.relay.signal(user, tokens)
            await served.relay.settled()
            prefill_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            hit = await served.rank(user, tokens, time.monotonic() + 60)
            rank_s = time.perf_counter() - began_s
            drift = float(np.abs(hit - cold).max() / cold.std())
            assert drift <= TOLERANCE, f"cached scores drift by {drift:.1e} of their standard deviation"
            await served.relay.settled()
            samples.append((full_s, prefill_s, rank_s))
        full_s, prefill_s, rank_s = np.median(np.array(samples[1:]), axis=0).tolist()
        load_s = rig.layout.bytes(rig.shape.num_tokens) / served.engine.copy_bytes_per_s
        return Idle(full_s, prefill_s, load_s, rank_s)


async def sweep(rig: Rig, arm: Arm, count: int, seed: int) -> tuple[list[tuple[float, float]], Outcomes]:
    """(requests a second, P99 of their latency) at rising rates until the arm fails, and the last outcomes."""
    full_s, points = rig.idle.full_s, list[tuple[float, float]]()
    async with rig.serving(arm, MULTIPLES[1] * full_s) as served:
        while True:
            rate = LOWEST / full_s * STEP ** len(points)
            outcomes = await served.run(rate, count, seed, patience_s=20 * MULTIPLES[-1] * full_s)
            p99_s = float(np.quantile(outcomes.latency_s, 0.99, method="higher"))
            points.append((rate, p99_s))
            if p99_s > GIVE_UP * MULTIPLES[-1] * full_s:
                return points, outcomes


def sustained(points: Sequence[tuple[float, float]], goal_s: float) -> float:
    """The rate at which P99 crosses the goal, interpolated between two measured ones; 0 where the lowest fails."""
    low_rate, low_s = 0.0, 0.0
    for rate, p99_s in points:
        if p99_s > goal_s:
            share = (goal_s - low_s) / max(min(p99_s, 1e3) - low_s, 1e-9)
            return low_rate * (rate / low_rate) ** share if low_rate else 0.0
        low_rate, low_s = rate, p99_s
    return low_rate


def lines(
    backend_name: BackendName,
    lengths: Sequence[int],
    candidates: Sequence[int],
    num_layers: int,
    count: int,
    seed: int,
) -> Iterator[Line]:
    """The idle parts of each shape, then each arm's sustained rate beside that of full inference."""
    backend = choose(backend_name)
    for num_tokens in lengths:
        for num_candidates in candidates:
            yield from _shape(Rig(Shape(num_tokens, num_candidates, num_layers), backend, seed), count, seed)


def _shape(rig: Rig, count: int, seed: int) -> Iterator[Line]:
    shape = rig.shape
    case = f"L={shape.num_tokens} M={shape.num_candidates} layers={shape.num_layers}"
    idle = rig.idle = asyncio.run(measure_idle(rig))
    for name, part_s in (("pre-infer", idle.prefill_s), ("load", idle.load_s), ("rank, cached", idle.rank_s)):
        ratio = idle.full_s / part_s
        yield _line(f"{case} {name}", part_s * 1e3, "ms", "full inference", idle.full_s * 1e3, ratio, None)
    base, best = dict[float, float](), dict[float, float]()
    for arm in ARMS:
        points, outcomes = asyncio.run(sweep(rig, arm, count, seed))
        for multiple in MULTIPLES:
            rate = sustained(points, multiple * idle.full_s)
            # where full inference fails at the lowest rate already, that rate is more than it sustains
            base.setdefault(multiple, rate or points[0][0])
            ratio = rate / base[multiple]
            target = 1.0 if arm.signals else None
            what = f"{case} slo={multiple}x {arm.name} (hits {outcomes.hits:.0%}, wasted {outcomes.wasted:.0%})"
            yield _line(what, rate, "req/s", "full inference", base[multiple], ratio, target)
            if arm.signals and arm.reuse <= 0.75:
                best[multiple] = max(best.get(multiple, 0.0), ratio)
    for multiple, ratio in best.items():
        what = f"{case} slo={multiple}x best with at most 75 % reuse"
        yield _line(what, ratio * base[multiple], "req/s", "full inference", base[multiple], ratio, 3.6)


def _line(case: str, ours: float, unit: str, baseline: str, value: float, ratio: float, target: float | None) -> Line:
    return Line(
        bench="relay",
        case=case,
        ours=ours,
        unit=unit,
        baseline=baseline,
        baseline_value=value,
        ratio=ratio,
        target=target,
        ok=None if target is None else ratio >= target,
    )


_SHOWN_AT = 1_900_000_000
_FAR = float("inf")
