"""Traffic drawn from a model of the users. A user costs nothing until drawn, so 100 million are no more than one.

    visit    a user by Zipf popularity, at Poisson instants
    return   the user of the request that is nearest to so long ago, log-normal mixture, and has no return yet;
             where that was before the run began, the request is a visit

Both together are one Poisson stream of `qps` requests. A user's history length is a function of the user's number.

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

from npu_gr.core.request import I64
from npu_gr.simulate.config import Lognormal, UsersConfig

F64 = npt.NDArray[np.float64]

BLOCK = 4096  # requests drawn at once
_PROBES = 64  # requests looked at around the wanted instant


class Ask(NamedTuple):
    """One request of the traffic."""

    at_s: float
    kind: str  # signal | rank
    user: str
    num_tokens: int  # of the whole history
    num_candidates: int


class Zipf:
    """Numbers 1..n with probability proportional to 1 / number^s."""

    def __init__(self, s: float, n: int) -> None:
        self._s, self._n = s, n
        self._low, self._high = self._area(np.array(1.5)) - 1.0, self._area(np.array(n + 0.5))

    def draw(self, count: int, random: np.random.Generator) -> I64:
        """[count] of them."""
        found: list[I64] = []
        left = count
        while left > 0:
            u = self._high + random.random(left) * (self._low - self._high)
            x = self._inverse(u)
            k = np.clip(np.rint(x), 1, self._n)
            kept = k[u >= self._area(k + 0.5) - k**-self._s].astype(np.int64)
            found.append(kept)
            left -= len(kept)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _area(self, x: F64) -> F64:
        """Of 1/t^s from 1 to x."""
        log = np.log(x)
        power = (1.0 - self._s) * log
        safe = np.where(np.abs(power) > 1e-9, power, 1.0)
        return log * np.where(np.abs(power) > 1e-9, np.expm1(safe) / safe, 1.0 + power / 2)

    def _inverse(self, area: F64) -> F64:
        t = np.maximum(area * (1.0 - self._s), -1.0 + 1e-15)
        safe = np.where(np.abs(t) > 1e-9, t, 1.0)
        return np.asarray(np.exp(area * np.where(np.abs(t) > 1e-9, np.log1p(safe) / safe, 1.0 - t / 2)))


def normal_of(users: I64, salt: int) -> F64:
    """[n] standard normal numbers, always the same of a user."""
    uniforms = []
    for word in (2 * salt + 1, 2 * salt + 2):
        bits = users.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * word) & (2**64 - 1))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):  # splitmix64
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        uniforms.append(((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53)
    return np.asarray(np.sqrt(-2.0 * np.log(uniforms[0])) * np.cos(2.0 * np.pi * uniforms[1]))


def mixture(parts: list[Lognormal], count: int, random: np.random.Generator) -> F64:
    """[count] draws."""
    weights = np.array([part.weight for part in parts])
    chosen = random.choice(len(parts), count, p=weights / weights.sum())
    medians, sigmas = np.array([part.median for part in parts]), np.array([part.sigma for part in parts])
    return np.asarray(medians[chosen] * np.exp(sigmas[chosen] * random.standard_normal(count)))


class _Past:
    """The requests so far: when, whose, and whether their user has returned."""

    def __init__(self) -> None:
        self._times, self._users, self._returned = array("d"), array("q"), bytearray()

    def add(self, at_s: float, user: int) -> None:
        self._times.append(at_s)
        self._users.append(user)
        self._returned.append(0)

    def returning(self, at_s: float) -> int | None:
        """The user of the request nearest to that instant who has not come since."""
        if at_s < 0.0:
            return None
        middle = bisect_left(self._times, at_s)
        for step in range(_PROBES):
            place = middle + (step // 2 if step % 2 else -1 - step // 2)
            if 0 <= place < len(self._times) and not self._returned[place]:
                self._returned[place] = 1
                return self._users[place]
        return None


class Visit(NamedTuple):
    """One request of the model, at the instant of its signal."""

    at_s: float
    user: int
    num_tokens: int
    lead_s: float
    is_dropped: bool  # the rank never comes
    is_return: bool


def visits(config: UsersConfig, qps: float, duration_s: float, seed: int) -> Iterator[Visit]:
    """In the order of time."""
    random = np.random.default_rng(seed)
    zipf, past, begun_s = Zipf(config.zipf, config.num_users), _Past(), 0.0
    seen: dict[int, int] = {}  # requests so far
    while True:
        times = begun_s + np.cumsum(random.exponential(1.0 / qps, BLOCK))
        begun_s = float(times[-1])
        users = zipf.draw(BLOCK, random)
        gaps_s = np.full(BLOCK, np.inf)
        if config.return_ratio:
            gaps_s = np.where(
                random.random(BLOCK) < config.return_ratio, mixture(config.return_s, BLOCK, random), gaps_s
            )
        leads_s = config.lead_s * np.exp(config.lead_sigma * random.standard_normal(BLOCK))
        dropped = random.random(BLOCK) < config.dropout_ratio
        rows = zip(times.tolist(), users.tolist(), gaps_s.tolist(), leads_s.tolist(), dropped.tolist(), strict=True)
        drawn: list[tuple[float, int, float, bool, bool]] = []
        for at_s, fresh, gap_s, lead_s, is_dropped in rows:
            again = past.returning(at_s - gap_s) if gap_s <= at_s else None
            user = fresh if again is None else again
            past.add(at_s, user)
            drawn.append((at_s, user, lead_s, is_dropped, again is not None))
        lengths = _lengths(config.history_tokens, np.array([row[1] for row in drawn]))
        for (at_s, user, lead_s, is_dropped, is_return), length in zip(drawn, lengths, strict=True):
            if at_s >= duration_s:
                return
            before = seen.get(user, 0)
            seen[user] = before + 1
            yield Visit(at_s, user, length + before * config.growth_tokens, lead_s, is_dropped, is_return)


def _lengths(config: Lognormal, users: I64) -> list[int]:
    lengths = config.median * np.exp(config.sigma * normal_of(users, 0))
    found: list[int] = np.maximum(lengths, 1.0).astype(np.int64).tolist()
    return found


def asks(found: Iterable[Visit], num_candidates: int) -> Iterator[Ask]:
    """A signal and, a lead later, its rank; in the order of time."""
    ranks: list[Ask] = []
    for visit in found:
        while ranks and ranks[0].at_s <= visit.at_s:
            yield heapq.heappop(ranks)
        name = f"u{visit.user}"
        yield Ask(visit.at_s, "signal", name, visit.num_tokens, num_candidates)
        if not visit.is_dropped:
            heapq.heappush(ranks, Ask(visit.at_s + visit.lead_s, "rank", name, visit.num_tokens, num_candidates))
    while ranks:
        yield heapq.heappop(ranks)
