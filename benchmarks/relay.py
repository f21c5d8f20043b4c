"""`python -m benchmarks relay`: sustained rate and longest history with and without a relay.

Requests are sent open loop by `benchmarks/relay_rig.py`; every arm gets the same users at the same
instants. The objective is a multiple of the idle latency of a full inference, so that the figures
are comparable across devices.

    full              no signals; the complete history is encoded at rank time
    truncated         only the newest quarter of the history: the fallback
    relay             signals; the prefix waits in HBM
    relay, dram r     DRAM behind HBM; a share r of the requests has a prefix in DRAM
    relay, dram trace users arrive and return as in a real trace (`--trace`, Mooncake's format)

A rate is sustained if 99 of 100 requests meet the objective; a run is stopped when they cannot.
Rates are on a grid, and an arm's figure is the highest rate that it sustains. If full inference
fails even at the lowest rate, that rate is used for it, and the ratio is a lower bound.

    longest history   the longest history at which 99 of 100 requests meet the shape's objective, at
                      half the rate that full inference sustains at the widest objective
    trigger off       prefill every signal, instead of those at risk; in a mix of few long and
                      many short histories, where half of the signals lead to no rank
    simulated         the widest objective on a virtual clock, with the trace's returns and memory
                      for a tenth of its users: full attention, and constant-size prefixes

Source of the arms: RelayGR (arXiv:2601.01712), whose figures are up to 3.6x throughput and 1.5x
longer histories on Ascend NPUs.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import click
import msgspec
import numpy as np

from benchmarks import relay_simulated
from benchmarks.frame import (
    BACKEND,
    COUNT,
    FILE,
    SEED,
    THREADS,
    Line,
    Numbers,
    compared,
    only,
    option,
)
from benchmarks.relay_rig import (
    LEAD,
    RETURNING,
    Arm,
    ArmOutcomes,
    Rig,
    RigVisit,
    ServedArm,
    Shape,
    Traffic,
    measure_idle,
)
from npu_gr.backend.base import Backend
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.core.history import UserKey
from npu_gr.relay.config import TriggerConfig

PARTS = ("arms", "longest", "trigger")
SIMULATED = "simulated"  # of a trace, on a virtual clock
OPTIONS = (
    BACKEND,
    THREADS,
    SEED,
    option("--lengths", default="1024,2048", type=Numbers(), help="Tokens of a history."),
    option("--candidates", default="100", type=Numbers(), help="Candidates of a rank."),
    option("--layers", default=3, type=click.IntRange(2)),
    option("--dim", default=256, help="Width of the model; a multiple of 64."),
    option("--window", default=0, type=click.IntRange(0), help="attention_window_tokens; 0 = all."),
    option("--first", default=0, type=click.IntRange(0), help="attention_first_tokens."),
    option("--count", default=200, type=COUNT, help="Requests of each run."),
    option(
        "--lowest",
        default=0.1,
        type=click.FloatRange(min=0, min_open=True),
        help="Lowest rate, as a share of the capacity of full inference.",
    ),
    option("--trace", type=FILE, help="Mooncake trace for the arm 'relay, dram trace'."),
    only((*PARTS, SIMULATED)),
)
MULTIPLES = (1.2, 1.5, 3.0)  # objectives, in idle full inferences
STEP = 1.25  # ratio of the rates of the grid
STEPS = 32  # number of rates; the last is a thousand times the lowest
START = 0.5  # first rate of an arm, relative to the capacity of full inference
PATIENCE = 12.0  # a rank's deadline, in idle full inferences
REUSE = (0.5, 0.75, 1.0)  # shares of requests with a prefix in DRAM
# lengths of history to try, relative to the shape's
SHARES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
HALF = 0.5  # their rate, relative to full inference's at the widest objective
MIX_RATES = (0.3, 0.6, 1.1)  # rates of the mix, relative to the capacity of full inference
MIXED = 400  # requests of a run of the mix
SHORT = 0.25  # length of the mix's short histories, relative to the shape's
LONG_SHARE = 0.2  # share of long histories in the mix
GONE = 0.5  # share of the mix's signals without a rank

FULL = Arm("full", signals=False)
RELAY = Arm("relay")
DRAM = Arm("relay, dram", dram=True)
AT_RISK = Arm("trigger", trigger=TriggerConfig())
EVERYTHING = Arm(
    "trigger off",
    trigger=TriggerConfig(policy="always", min_prefix_tokens=1, max_inflight=1_000_000),
)


def drawn(reuse: float, rig: Rig, rate_per_s: float, count: int, seed: int) -> list[RigVisit]:
    """Draw Poisson arrivals of returning and new users.

    Args:
        reuse: Share of requests from returning users, 0 to 1.
        rig: Source of the histories.
        rate_per_s: Rate of the arrivals.
        count: Number of requests.
        seed: Random seed.
    """
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1.0 / rate_per_s, count))
    coins = random.random(count)
    returning = random.integers(RETURNING, size=count)
    visits = []
    for number in range(count):
        # drawn even if it is not used, so that every arm sees the same histories
        events = rig.user(random)
        user = UserKey("", f"new {seed}-{number}")
        if coins[number] < reuse:
            user = UserKey("", f"back {returning[number]}")
            events = rig.returning
        visits.append(RigVisit(float(arrivals[number]), user, events))
    return visits


def of_trace(
    sessions: Sequence[int], rig: Rig, rate_per_s: float, count: int, seed: int
) -> list[RigVisit]:
    """Draw Poisson arrivals of a random section of a trace's sessions, in order.

    The last sessions before the section, half as many as DRAM holds, have a prefix there.

    Args:
        sessions: Session of each request of the trace.
        rig: Source of the histories.
        rate_per_s: Rate of the arrivals.
        count: Number of requests.
        seed: Random seed.
    """
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1.0 / rate_per_s, count))
    start = int(random.integers(len(sessions) // 4, len(sessions) - count))
    recent = list(dict.fromkeys(reversed(sessions[:start])))[: rig.dram_prefixes // 2]
    visits = []
    for session, arrives_at in zip(sessions[start : start + count], arrivals.tolist(), strict=True):
        is_back = session in recent
        events = (
            rig.returning if is_back else rig.user(np.random.default_rng([seed, session + 2**32]))
        )
        visits.append(
            RigVisit(arrives_at, UserKey("", f"{'back' if is_back else 'new'} {session}"), events)
        )
    return visits


def mixed(rig: Rig, rate_per_s: float, count: int, seed: int) -> list[RigVisit]:
    """Draw Poisson arrivals of few long histories and many short ones; half have no rank.

    Args:
        rig: Source of the histories.
        rate_per_s: Rate of the arrivals.
        count: Number of requests.
        seed: Random seed.
    """
    random = np.random.default_rng(seed)
    visits = []
    for number, arrives_at in enumerate(
        np.cumsum(random.exponential(1.0 / rate_per_s, count)).tolist()
    ):
        is_long = random.random() < LONG_SHARE
        is_ranked = random.random() >= GONE
        events = rig.user(random, 1.0 if is_long else SHORT)
        visits.append(RigVisit(arrives_at, UserKey("", f"new {seed}-{number}"), events, is_ranked))
    return visits


class RateSearch:
    """Finds the highest rate that one arm sustains, and stores the outcomes of each run."""

    def __init__(
        self, served: ServedArm, traffic: Traffic, count: int, lowest: float, seed: int
    ) -> None:
        self._served = served
        self._traffic = traffic
        self._count = count
        self._seed = seed
        self._lowest_per_s = lowest / served.rig.idle.full_s
        self.found: dict[int, ArmOutcomes] = {}

    def rate_per_s(self, step: int) -> float:
        """Return the rate of a step of the grid, in requests a second."""
        return self._lowest_per_s * STEP**step

    async def holds(self, step: int, goal_s: float) -> bool:
        """Return whether the step's rate is sustained.

        A run that was stopped for another goal may have to be repeated.
        """
        if step in self.found and (known := self.found[step].holds(goal_s)) is not None:
            return known
        rig = self._served.rig
        visits = self._traffic(rig, self.rate_per_s(step), self._count, self._seed)
        found = self.found[step] = await self._served.run(
            visits, PATIENCE * rig.idle.full_s, goal_s
        )
        return bool(found.holds(goal_s))

    async def sustained(self, goal_s: float, start: int) -> int:
        """Find the highest step at which 99 of 100 requests meet the goal; -1 = none."""

        async def holds(step: int) -> bool:
            return await self.holds(step, goal_s)

        return await last(holds, start, STEPS)


async def last(holds: Callable[[int], Awaitable[bool]], start: int, stop: int) -> int:
    """Find the largest number in 0..stop-1 that holds; -1 = none. No number is tried twice.

    Args:
        holds: Monotonic predicate: if it holds for a number, it holds for all smaller ones.
        start: First number to try; the search widens from there.
        stop: One more than the largest number.
    """
    low = -1  # the largest number known to hold
    high = stop  # the smallest number known not to hold
    step = min(max(start, 0), stop - 1)
    stride = 1
    while high - low > 1:
        if await holds(step):
            low = step
        else:
            high = step
        if low >= 0 and high < stop:
            step = (low + high) // 2
        else:  # one end is not known yet
            step = min(low + stride, stop - 1) if low >= 0 else max(high - stride, 0)
        stride *= 2
    return low


def lines(
    backend: BackendName,
    lengths: Sequence[int],
    candidates: Sequence[int],
    layers: int,
    dim: int,
    window: int,
    first: int,
    count: int,
    lowest: float,
    seed: int,
    trace: Path | None,
    parts: Collection[str] = PARTS,
) -> Iterator[Line]:
    """Yield, for each shape, the parts alone, then each arm against full inference.

    Args:
        backend: Name of the backend.
        lengths, candidates, layers, dim, window, first: Sizes of the shapes.
        count: Requests of each run.
        lowest: Lowest rate, relative to the capacity of full inference.
        seed: Random seed of weights and traffic.
        trace: Mooncake trace; None = without its arm.
        parts: Subset of `PARTS`.
    """
    device = choose(backend)
    sessions = [] if trace is None else read_sessions(trace)
    if SIMULATED in parts and sessions:
        yield from relay_simulated.lines(sessions)
    if not set(parts) & set(PARTS):
        return
    for num_tokens, num_candidates in product(lengths, candidates):
        shape = Shape(num_tokens, num_candidates, layers, dim, window, first)
        yield from ShapeBench(shape, device, count, lowest, seed).lines(sessions, parts)


class _TraceLine(msgspec.Struct, frozen=True):
    # ids of its blocks of 512 tokens; equal ids mean equal content up to the end of the block
    hash_ids: list[int]


def read_sessions(path: Path) -> list[int]:
    """Read the session of each request of a Mooncake trace.

    A session is the id of the second block, because the first is the system prompt.
    """
    lines = msgspec.json.Decoder(_TraceLine).decode_lines(path.read_bytes())
    return [
        one.hash_ids[1] if len(one.hash_ids) > 1 else -1 - place for place, one in enumerate(lines)
    ]


class ShapeBench:
    """The benchmark of one shape."""

    def __init__(
        self, shape: Shape, backend: Backend, count: int, lowest: float, seed: int
    ) -> None:
        self._backend = backend
        self._count = count
        self._lowest = lowest
        self._seed = seed
        self._rig = self._rig_of(shape)
        self._full_s = self._rig.idle.full_s
        self._case = f"L={shape.num_tokens} M={shape.num_candidates}"
        if shape.window:
            self._case += f" K1={shape.window} K2={shape.first}"

    def _rig_of(self, shape: Shape) -> Rig:
        rig = Rig(shape, self._backend, self._seed)
        rig.idle = asyncio.run(measure_idle(rig))
        return rig

    def lines(self, sessions: Sequence[int], parts: Collection[str]) -> Iterator[Line]:
        """Yield the parts alone and full inference, then `parts`.

        Args:
            sessions: Session of each request of a trace; empty = without its arm.
            parts: Subset of `PARTS`.
        """
        idle = self._rig.idle
        for name, part_s in (
            ("prefill", idle.prefill_s),
            ("load", idle.load_s),
            ("rank, cached", idle.rank_s),
        ):
            yield self._line(
                f"{name} alone",
                part_s * 1e3,
                "ms",
                "full",
                idle.full_s * 1e3,
                idle.full_s / part_s,
                None,
            )
        base = {}
        for multiple, rate, found in self._sustained(FULL, partial(drawn, 0.0)):
            base[multiple] = rate
            yield self._against(f"slo {multiple}x, full ({found.describe()})", rate, rate, None)
        if "arms" in parts:
            yield from self._arms(sessions, base)
        if "longest" in parts:
            rate = HALF * (base[MULTIPLES[-1]] or self._lowest / self._full_s)
            yield from (self._longest(multiple, rate) for multiple in MULTIPLES)
        if "trigger" in parts:
            yield from asyncio.run(self._trigger())

    def _arms(self, sessions: Sequence[int], base: Mapping[float, float]) -> Iterator[Line]:
        arms: list[tuple[Arm, Traffic]] = [
            (Arm("truncated to a quarter", signals=False, keep=0.25), partial(drawn, 0.0)),
            (RELAY, partial(drawn, 0.0)),
            *(
                (DRAM._replace(name=f"relay, dram {reuse:.0%}"), partial(drawn, reuse))
                for reuse in REUSE
            ),
        ]
        if sessions:
            arms.append((DRAM._replace(name="relay, dram trace"), partial(of_trace, sessions)))
        best = dict.fromkeys(MULTIPLES, 0.0)
        for arm, traffic in arms:
            for multiple, rate, found in self._sustained(arm, traffic):
                target = 1.0 if arm.signals else None
                yield self._against(
                    f"slo {multiple}x, {arm.name} ({found.describe()})",
                    rate,
                    base[multiple],
                    target,
                )
                if arm.signals and "100%" not in arm.name:
                    best[multiple] = max(best[multiple], rate)
        for multiple, rate in best.items():
            yield self._against(
                f"slo {multiple}x, best with at most 75 % reuse", rate, base[multiple], 3.6
            )

    def _sustained(self, arm: Arm, traffic: Traffic) -> Iterator[tuple[float, float, ArmOutcomes]]:
        """Yield (multiple, sustained rate, outcomes at this rate).

        Rate 0: not even the lowest is sustained, whose outcomes are returned.
        """

        async def search() -> list[tuple[float, float, ArmOutcomes]]:
            step = round(math.log(START / self._lowest, STEP))
            rows = []
            async with self._rig.serving(arm, MULTIPLES[0] * self._full_s) as served:
                search = RateSearch(served, traffic, self._count, self._lowest, self._seed)
                for multiple in MULTIPLES:
                    low = await search.sustained(multiple * self._full_s, step)
                    rows.append(
                        (
                            multiple,
                            search.rate_per_s(low) if low >= 0 else 0.0,
                            search.found[max(low, 0)],
                        )
                    )
                    step = max(low, step)
            return rows

        yield from asyncio.run(search())

    def _longest(self, multiple: float, rate_per_s: float) -> Line:
        """Find the longest history that meets the shape's objective at this rate."""
        goal_s = multiple * self._full_s
        lead_s = LEAD * self._full_s

        async def holds(arm: Arm, reuse: float, num_tokens: int) -> bool:
            gc.collect()  # frees gigabytes of the previous rig
            rig = Rig(self._rig.shape._replace(num_tokens=num_tokens), self._backend, self._seed)
            async with rig.serving(arm, goal_s) as served:
                visits = drawn(reuse, rig, rate_per_s, self._count, self._seed)
                found = await served.run(visits, PATIENCE * self._full_s, goal_s, lead_s)
            return bool(found.holds(goal_s))

        def longest(arm: Arm, reuse: float) -> int:
            tokens = [int(self._rig.shape.num_tokens * share) for share in SHARES]

            async def search() -> int:
                return await last(
                    lambda number: holds(arm, reuse, tokens[number]), SHARES.index(1.0), len(SHARES)
                )

            found = asyncio.run(search())
            return tokens[found] if found >= 0 else 0

        ours = longest(DRAM, 0.75)
        base = longest(FULL, 0.0)
        name = "full"
        if not base:  # not even the shortest history meets it
            base = int(self._rig.shape.num_tokens * SHARES[0])
            name = "full (less)"
        case = f"slo {multiple}x at {rate_per_s:.2f}/s, longest history with the relay, dram 75%"
        return self._line(case, ours, "tokens", name, base, ours / base, 2.0)

    async def _trigger(self) -> list[Line]:
        """Compare the ranks within the tightest objective with and without the trigger."""
        goal_s = MULTIPLES[0] * self._full_s
        found: dict[str, list[ArmOutcomes]] = {}
        for arm in (AT_RISK, EVERYTHING):
            async with self._rig.serving(arm, goal_s) as served:
                visits = [
                    mixed(self._rig, rate / self._full_s, MIXED, self._seed) for rate in MIX_RATES
                ]
                found[arm.name] = [
                    await served.run(each, PATIENCE * self._full_s) for each in visits
                ]
        rows = []
        for rate, one, other in zip(
            MIX_RATES, found[AT_RISK.name], found[EVERYTHING.name], strict=True
        ):
            ours, base = (100 * float((each.latency_s <= goal_s).mean()) for each in (one, other))
            case = f"slo {MULTIPLES[0]}x, mix at {rate / self._full_s:.1f}/s"
            case = f"{case}, trigger ({one.describe()}) against off ({other.describe()})"
            rows.append(
                self._line(
                    case, ours, "% within SLO", EVERYTHING.name, base, ours / max(base, 1e-9), 1.0
                )
            )
        return rows

    def _against(
        self, case: str, rate: float, base: float, target: float | None, name: str = "full"
    ) -> Line:
        if not base:  # it fails even at the lowest rate of the grid
            base = self._lowest / self._full_s
            name = f"{name} (less)"
        return self._line(case, rate, "req/s", name, base, rate / base, target)

    def _line(
        self,
        case: str,
        ours: float,
        unit: str,
        baseline: str,
        value: float,
        ratio: float,
        target: float | None,
    ) -> Line:
        return compared("relay", f"{self._case} {case}", ours, unit, baseline, value, ratio, target)
