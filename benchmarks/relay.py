"""`python -m benchmarks relay`: the rate, and the length of history, that meet the objective with and without a relay.

Requests are sent open loop by `benchmarks/relay_rig.py`; every arm gets the same users at the same
instants. The objective is a multiple of the idle latency of a full inference, so the figures carry
over to other devices.

    full              no signals; the whole history is encoded at rank time
    truncated         only the newest quarter of the history: what is served if nothing else fits
    relay             signals; the prefix waits in HBM
    relay, dram r     DRAM behind HBM; a share r of the requests comes from users whose prefix lies in DRAM
    relay, dram trace users come and return as in a stretch of a real trace (`--trace`, Mooncake's format)

A rate is sustained if 99 of 100 requests meet the objective; a run ends once they cannot. Rates lie
on a grid, and an arm's figure is the highest rate that it sustains. If full inference fails at the
lowest rate already, that rate stands for it, and the ratio is a lower bound.

    longest history   the longest history at which 99 of 100 requests meet the shape's objective, at half the rate that
                      full inference sustains at the widest objective
    trigger off       pre-infer every signal, instead of those that the trigger finds at risk; in a mix of few long and
                      many short histories, where half of the signals lead to no rank

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
OPTIONS = (
    BACKEND,
    THREADS,
    SEED,
    option("--lengths", default="1024,2048", type=Numbers(), help="Tokens of a history."),
    option("--candidates", default="100", type=Numbers(), help="Of a rank."),
    option("--layers", default=3, type=click.IntRange(2)),
    option("--dim", default=256, help="Of the model; a multiple of 64."),
    option("--count", default=200, type=COUNT, help="Requests of each run."),
    option(
        "--lowest",
        default=0.1,
        type=click.FloatRange(min=0, min_open=True),
        help="The lowest rate, as a share of what full inference could do.",
    ),
    option("--trace", type=FILE, help="A Mooncake trace; one arm follows its returns."),
    only(PARTS),
)
MULTIPLES = (1.2, 1.5, 3.0)  # the objectives, of the idle full inference
STEP = 1.25  # from one rate of the grid to the next
STEPS = 32  # of the grid: the last is a thousand times the lowest
START = 0.5  # the first rate of an arm, of what full inference could do at most
PATIENCE = 12.0  # a rank's deadline, in idle full inferences
REUSE = (0.5, 0.75, 1.0)  # share of the requests whose prefix lies in DRAM
# lengths of history to try, of the shape's
SHARES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
HALF = 0.5  # the rate to try them at, of what full inference sustains at the widest objective
MIX_RATES = (0.3, 0.6, 1.1)  # of the mix, of what full inference of long histories could do
MIXED = 400  # requests of a run of the mix
SHORT = 0.25  # length of the mix's short histories, of the shape's
LONG_SHARE = 0.2  # of the mix's requests
GONE = 0.5  # share of the mix's signals that lead to no rank

FULL = Arm("full", signals=False)
RELAY = Arm("relay")
DRAM = Arm("relay, dram", dram=True)
AT_RISK = Arm("trigger", trigger=TriggerConfig())
EVERYTHING = Arm(
    "trigger off",
    trigger=TriggerConfig(policy="always", min_prefix_tokens=1, max_inflight=1_000_000),
)


def drawn(reuse: float, rig: Rig, rate_per_s: float, count: int, seed: int) -> list[RigVisit]:
    """Poisson arrivals of users who come back and of new users.

    Args:
        reuse: share of the requests from users who come back, 0 to 1.
        rig: draws the histories.
        rate_per_s: of arrivals.
        count: requests.
        seed: of arrivals, users and histories.
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
    """Poisson arrivals of a stretch of a trace's sessions, in its order.

    The last sessions before the stretch, half as many as DRAM holds, have a prefix there.

    Args:
        sessions: of each request of the trace.
        rig: draws the histories.
        rate_per_s: of arrivals.
        count: requests.
        seed: of the stretch and the arrivals.
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
    """Poisson arrivals of few long histories and many short ones; half of the ranks never come.

    Args:
        rig: draws the histories.
        rate_per_s: of arrivals.
        count: requests.
        seed: of everything.
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
    """Finds the highest rate that one arm sustains, and keeps the outcomes of each run."""

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
        """The rate of a step of the grid, requests a second."""
        return self._lowest_per_s * STEP**step

    async def holds(self, step: int, goal_s: float) -> bool:
        """Whether the step's rate is sustained.

        A run that ended early for another goal may have to be repeated.
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
        """The highest step at which 99 of 100 meet the goal; -1 = not even the lowest."""

        async def holds(step: int) -> bool:
            return await self.holds(step, goal_s)

        return await last(holds, start, STEPS)


async def last(holds: Callable[[int], Awaitable[bool]], start: int, stop: int) -> int:
    """The greatest number in 0..stop-1 that holds; -1 = none. Asks for no number twice.

    Args:
        holds: if it holds for a number, it holds for all below.
        start: the first number to ask for; the search widens from there.
        stop: one more than the greatest number.
    """
    low = -1  # the greatest that is known to hold
    high = stop  # the least that is known not to
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
    count: int,
    lowest: float,
    seed: int,
    trace: Path | None,
    parts: Collection[str] = PARTS,
) -> Iterator[Line]:
    """For each shape: the parts alone, then each arm's sustained rate beside that of full inference.

    Args:
        backend: as in a configuration.
        lengths, candidates, layers, dim: of the shapes to measure.
        count: requests of each run.
        lowest: the lowest rate, of what full inference could do.
        seed: of weights and traffic.
        trace: a Mooncake trace for the arm that follows one; None = no such arm.
        parts: of `PARTS`.
    """
    device = choose(backend)
    sessions = [] if trace is None else read_sessions(trace)
    for num_tokens, num_candidates in product(lengths, candidates):
        shape = Shape(num_tokens, num_candidates, layers, dim)
        yield from ShapeBench(shape, device, count, lowest, seed).lines(sessions, parts)


class _TraceLine(msgspec.Struct, frozen=True):
    # of its blocks of 512 tokens; an equal id means equal content from the start to there
    hash_ids: list[int]


def read_sessions(path: Path) -> list[int]:
    """The session of each request of a Mooncake trace: its second block, because the first is the system prompt."""
    lines = msgspec.json.Decoder(_TraceLine).decode_lines(path.read_bytes())
    return [
        one.hash_ids[1] if len(one.hash_ids) > 1 else -1 - place for place, one in enumerate(lines)
    ]


class ShapeBench:
    """The bench of one shape."""

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

    def _rig_of(self, shape: Shape) -> Rig:
        rig = Rig(shape, self._backend, self._seed)
        rig.idle = asyncio.run(measure_idle(rig))
        return rig

    def lines(self, sessions: Sequence[int], parts: Collection[str]) -> Iterator[Line]:
        """The parts alone and full inference, then what `parts` names.

        Args:
            sessions: of each request of a trace; empty = no arm follows one.
            parts: of `PARTS`.
        """
        idle = self._rig.idle
        for name, part_s in (
            ("pre-infer", idle.prefill_s),
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
        """For each multiple the sustained rate (0 = not even the lowest), and the outcomes at it, or at the lowest."""

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
        """The longest history that is served at this rate within the shape's objective, with the shape's lead."""
        goal_s = multiple * self._full_s
        lead_s = LEAD * self._full_s

        async def holds(arm: Arm, reuse: float, num_tokens: int) -> bool:
            gc.collect()  # frees the gigabytes of the rig before
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
        if not base:  # it does not even serve the shortest
            base = int(self._rig.shape.num_tokens * SHARES[0])
            name = "full (less)"
        case = f"slo {multiple}x at {rate_per_s:.2f}/s, longest history with the relay, dram 75%"
        return self._line(case, ours, "tokens", name, base, ours / base, 2.0)

    async def _trigger(self) -> list[Line]:
        """Ranks in time with the trigger, beside pre-inferring everything: equal rates, the tightest objective."""
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
                    case, ours, "% in time", EVERYTHING.name, base, ours / max(base, 1e-9), 1.0
                )
            )
        return rows

    def _against(
        self, case: str, rate: float, base: float, target: float | None, name: str = "full"
    ) -> Line:
        if not base:  # it fails at the lowest rate of the grid already
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
