"""Traffic drawn from a model of the users.

Users take no memory until they are drawn, so there may be 100 million.

Requests arrive as one Poisson stream of `qps` a second. Each is one of two:

    visit    a user drawn by Zipf popularity
    return   draw a gap from a log-normal mixture; the user is that of the request closest to that
             instant which has no return yet. If the instant is before the run, it is a visit.

The length of a user's history is a function of the user's number.

Source: rejection-inversion of the bounded Zipf distribution (Hoermann and Derflinger 1996).
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.simulate.config import Lognormal, UsersConfig

F64 = npt.NDArray[np.float64]

BLOCK = 4096  # requests drawn at once
_PROBES = 64  # requests examined around an instant


class TrafficRequest(NamedTuple):
    """One request of the traffic."""

    due_at: float  # seconds since the run began
    kind: str  # SIGNAL.name | RANK.name
    user: str
    num_tokens: int  # length of the user's complete history
    num_candidates: int
    tenant: str = ""


class Zipf:
    """Draws numbers from 1 to n with probability proportional to 1 / number^s."""

    def __init__(self, s: float, n: int) -> None:
        self._s = s
        self._n = n
        self._low = self._area(np.array(1.5)) - 1.0
        self._high = self._area(np.array(n + 0.5))

    def draw(self, count: int, random: np.random.Generator) -> I64:
        """Draw [count] numbers."""
        accepted: list[I64] = []
        left = count
        while left > 0:
            u = self._high + random.random(left) * (self._low - self._high)
            x = self._inverse(u)
            k = np.clip(np.rint(x), 1, self._n)
            good = k[u >= self._area(k + 0.5) - k**-self._s].astype(np.int64)
            accepted.append(good)
            left -= len(good)
        return np.concatenate(accepted) if accepted else np.empty(0, np.int64)

    def _area(self, x: F64) -> F64:
        """Compute the integral of 1/t^s from 1 to x."""
        log = np.log(x)
        power = (1.0 - self._s) * log
        safe = np.where(np.abs(power) > 1e-9, power, 1.0)
        return log * np.where(np.abs(power) > 1e-9, np.expm1(safe) / safe, 1.0 + power / 2)

    def _inverse(self, area: F64) -> F64:
        t = np.maximum(area * (1.0 - self._s), -1.0 + 1e-15)
        safe = np.where(np.abs(t) > 1e-9, t, 1.0)
        return np.asarray(
            np.exp(area * np.where(np.abs(t) > 1e-9, np.log1p(safe) / safe, 1.0 - t / 2))
        )


def normal_of(users: I64, salt: int) -> F64:
    """Compute [n] standard normal numbers that depend only on user and salt."""
    uniforms = []
    for word in (2 * salt + 1, 2 * salt + 2):
        bits = users.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * word) & (2**64 - 1))
        # splitmix64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        uniforms.append(((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53)
    return np.asarray(np.sqrt(-2.0 * np.log(uniforms[0])) * np.cos(2.0 * np.pi * uniforms[1]))


def mixture(parts: list[Lognormal], count: int, random: np.random.Generator) -> F64:
    """Draw from a log-normal mixture.

    Args:
        parts: Components with their weights.
        count: Number of draws.
        random: Source of the draws.

    Returns:
        [count] draws.
    """
    weights = np.array([part.weight for part in parts])
    chosen = random.choice(len(parts), count, p=weights / weights.sum())
    medians = np.array([part.median for part in parts])
    sigmas = np.array([part.sigma for part in parts])
    return np.asarray(medians[chosen] * np.exp(sigmas[chosen] * random.standard_normal(count)))


class _Past:
    """The requests so far: arrival, user, and whether the user has returned."""

    def __init__(self) -> None:
        self._arrived_at = array("d")
        self._users = array("q")
        self._returned = bytearray()

    def add(self, arrived_at: float, user: int) -> None:
        self._arrived_at.append(arrived_at)
        self._users.append(user)
        self._returned.append(0)

    def returning(self, instant: float) -> int | None:
        """Take the user of the request closest to an instant that has no return yet."""
        if instant < 0.0:
            return None
        middle = bisect_left(self._arrived_at, instant)
        for step in range(_PROBES):
            place = middle + (step // 2 if step % 2 else -1 - step // 2)
            if 0 <= place < len(self._arrived_at) and not self._returned[place]:
                self._returned[place] = 1
                return self._users[place]
        return None


class UserVisit(NamedTuple):
    """One request of the model, at the arrival of its signal."""

    arrived_at: float  # seconds since the run began
    user: int
    num_tokens: int  # length of the user's complete history
    lead_s: float  # from the signal to the rank
    is_dropped: bool  # there is no rank
    is_return: bool


def visits(config: UsersConfig, qps: float, duration_s: float, seed: int) -> Iterator[UserVisit]:
    """Draw the visits of a run, in time order.

    Args:
        config: Model of the users.
        qps: Mean visits a second.
        duration_s: Duration of the run.
        seed: Random seed; equal seeds give equal visits.
    """
    random = np.random.default_rng(seed)
    zipf = Zipf(config.zipf, config.num_users)
    past = _Past()
    block_at = 0.0
    num_before: dict[int, int] = {}  # user -> requests so far
    while True:
        arrivals = block_at + np.cumsum(random.exponential(1.0 / qps, BLOCK))
        block_at = float(arrivals[-1])
        users = zipf.draw(BLOCK, random)
        gaps_s = np.full(BLOCK, np.inf)
        if config.return_ratio:
            gaps_s = np.where(
                random.random(BLOCK) < config.return_ratio,
                mixture(config.return_s, BLOCK, random),
                gaps_s,
            )
        leads_s = config.lead_s * np.exp(config.lead_sigma * random.standard_normal(BLOCK))
        dropped = random.random(BLOCK) < config.dropout_ratio
        rows = zip(
            arrivals.tolist(),
            users.tolist(),
            gaps_s.tolist(),
            leads_s.tolist(),
            dropped.tolist(),
            strict=True,
        )
        drawn: list[tuple[float, int, float, bool, bool]] = []
        for arrived_at, fresh, gap_s, lead_s, is_dropped in rows:
            again = past.returning(arrived_at - gap_s) if gap_s <= arrived_at else None
            user = fresh if again is None else again
            past.add(arrived_at, user)
            drawn.append((arrived_at, user, lead_s, is_dropped, again is not None))
        lengths = _lengths(config.history_tokens, np.array([row[1] for row in drawn]))
        for (arrived_at, user, lead_s, is_dropped, is_return), length in zip(
            drawn, lengths, strict=True
        ):
            if arrived_at >= duration_s:
                return
            before = num_before.get(user, 0)
            num_before[user] = before + 1
            num_tokens = length + before * config.growth_tokens
            yield UserVisit(arrived_at, user, num_tokens, lead_s, is_dropped, is_return)


def _lengths(config: Lognormal, users: I64) -> list[int]:
    """Compute the length of each user's first history."""
    lengths = config.median * np.exp(config.sigma * normal_of(users, 0))
    tokens: list[int] = np.maximum(lengths, 1.0).astype(np.int64).tolist()
    return tokens


def signals_and_ranks(found: Iterable[UserVisit], num_candidates: int) -> Iterator[TrafficRequest]:
    """Turn each visit into a signal and, `lead_s` later, a rank; in time order."""
    ranks: list[TrafficRequest] = []  # a heap: the earliest first
    for visit in found:
        while ranks and ranks[0].due_at <= visit.arrived_at:
            yield heapq.heappop(ranks)
        name = f"u{visit.user}"
        yield TrafficRequest(visit.arrived_at, SIGNAL.name, name, visit.num_tokens, num_candidates)
        if not visit.is_dropped:
            rank_at = visit.arrived_at + visit.lead_s
            heapq.heappush(
                ranks, TrafficRequest(rank_at, RANK.name, name, visit.num_tokens, num_candidates)
            )
    while ranks:
        yield heapq.heappop(ranks)
