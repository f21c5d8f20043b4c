"""Fits the models of a simulation: users to a query log, the device to a replay on an instance.

Users. A request within `RETURN_WITHIN_S` after another request of the same user is a return. The
fit computes the share of returns, and the mixture of their gaps (expectation-maximisation on the
logarithms). The other requests are visits, whose exponent is the maximum-likelihood exponent of a
bounded Zipf distribution over the users in the log. A short log of many users therefore gives a low
exponent.

Device. `engine.cost` fits the coefficients to ranks with and without cached KV, without outliers.
The residuals are the noise of passes. The rest of a rank's latency is attributed to the host,
whether the service or the client spent it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npu_gr.core.errors import DataError
from npu_gr.core.kinds import EVENTS, RANK, SIGNAL
from npu_gr.core.request import Outcome
from npu_gr.engine.cost import fit_passes
from npu_gr.replay.log import QueryRecord, count
from npu_gr.replay.plan import ReplayOptions, plan
from npu_gr.replay.player import play
from npu_gr.replay.requests import Sample
from npu_gr.simulate.config import DeviceProfile, Lateness, Lognormal, UsersConfig
from npu_gr.simulate.users import TrafficRequest

F64 = npt.NDArray[np.float64]

RETURN_WITHIN_S = 3600.0
VALUES = 200  # most values by which a measured distribution is stored
_TRIMS = 3  # fits of the device, each without the outliers of the previous fit
_LEAST_RANKS = 50  # least ranks for a device profile
_ROUNDS = 60  # rounds of expectation-maximisation
_LEAST_SIGMA = 0.05
_CLASSES = 8  # most classes of passes by length
_OUTLIER = 1.5  # a pass is an outlier if measured / predicted is above this times the median


# ---- users


def fit_users(records: Iterable[QueryRecord], num_users: int | None = None) -> UsersConfig:
    """Fit the model of users to a query log.

    Args:
        records: Query log in time order, with at least two ranks.
        num_users: Size of the population; None = the users of the log.

    Raises:
        DataError: There are fewer than two ranks.
    """
    last_at: dict[str, float] = {}  # user -> instant of the newest rank
    tokens: dict[str, int] = {}  # user -> length of the newest history
    visits = Counter[str]()
    gaps_s = list[float]()
    growth = list[int]()
    candidates = list[int]()
    num_ranks = 0
    for record in records:
        user = f"{record.tenant}\0{record.user_id}"
        if record.kind != RANK.name:
            continue
        num_ranks += 1
        candidates.append(count(record.candidates))
        gap_s = record.ts - last_at.get(user, -np.inf)
        if 0 < gap_s <= RETURN_WITHIN_S:
            gaps_s.append(gap_s)
        else:
            visits[user] += 1
        last_at[user] = record.ts
        if record.history is not None:
            if user in tokens:
                growth.append(max(len(record.history) - tokens[user], 0))
            tokens[user] = len(record.history)
    if num_ranks < 2:
        raise DataError(f"a model of the users needs at least two ranks, the log has {num_ranks}")
    lengths = np.log(np.maximum(list(tokens.values()) or [1], 1))
    return UsersConfig(
        num_users=num_users or len(last_at),
        zipf=round(zipf_exponent(sorted(visits.values(), reverse=True)), 3),
        return_ratio=min(len(gaps_s) / num_ranks, 0.99),
        return_s=fit_mixture(np.log(gaps_s)) if gaps_s else [],
        history_tokens=Lognormal(
            median=float(np.exp(np.median(lengths))), sigma=float(lengths.std())
        ),
        growth_tokens=round(float(np.mean(growth))) if growth else 0,
        candidates=round(float(np.median(candidates))),
    )


def zipf_exponent(counts: Sequence[int]) -> float:
    """Find the maximum-likelihood exponent, in 0..3, of a bounded Zipf distribution.

    Args:
        counts: Visits of each user, the most frequent user first.
    """
    if len(counts) < 2:
        return 0.0
    logs = np.log(np.arange(1, len(counts) + 1))
    weights = np.array(counts, np.float64)
    low = 0.0
    high = 3.0
    # the likelihood has one maximum; its slope is expected minus observed log rank
    for _ in range(60):
        middle = (low + high) / 2
        chance = np.exp(-middle * logs)
        slope = (chance @ logs) / chance.sum() - (weights @ logs) / weights.sum()
        low, high = (middle, high) if slope > 0 else (low, middle)
    return (low + high) / 2


def fit_mixture(logs: F64, num_parts: int = 2) -> list[Lognormal]:
    """Fit a log-normal mixture by expectation-maximisation; few or equal values: one component."""
    if len(logs) < 20 or float(logs.std()) < _LEAST_SIGMA:
        return [Lognormal(median=float(np.exp(logs.mean())), sigma=float(logs.std()))]
    means = np.quantile(logs, (np.arange(num_parts) + 0.5) / num_parts)
    sigmas = np.full(num_parts, logs.std())
    weights = np.full(num_parts, 1.0 / num_parts)
    for _ in range(_ROUNDS):
        z = (logs[:, None] - means) / sigmas
        density = weights / sigmas * np.exp(-0.5 * z * z) + 1e-300
        share = density / density.sum(1, keepdims=True)
        total = np.maximum(share.sum(0), 1e-9)
        weights = total / len(logs)
        means = (share * logs[:, None]).sum(0) / total
        sigmas = np.maximum(
            np.sqrt((share * (logs[:, None] - means) ** 2).sum(0) / total), _LEAST_SIGMA
        )
    parts = zip(weights.tolist(), np.exp(means).tolist(), sigmas.tolist(), strict=True)
    return [Lognormal(weight=max(w, 1e-6), median=m, sigma=s) for w, m, s in parts]


def requests_of(records: Iterable[QueryRecord], options: ReplayOptions) -> Iterable[TrafficRequest]:
    """Yield the signals and ranks of a query log, as a replay with these options sends them.

    A record without a history gets its user's last known length plus the events appended since.
    """
    tokens: defaultdict[str, int] = defaultdict(int)
    for action in plan(records, options):
        record = action.record
        user = f"{record.tenant}\0{record.user_id}"
        if record.kind == EVENTS.name:
            tokens[user] += len(record.events or ())
        if record.kind not in (SIGNAL.name, RANK.name):
            continue
        if record.history is not None:
            tokens[user] = (
                len(record.history) if record.base is None else tokens[user] + len(record.history)
            )
        num_candidates = record.num_candidates or count(record.candidates)
        yield TrafficRequest(action.due_at, record.kind, user, tokens[user], num_candidates)


# ---- device


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRank:
    """One answered rank of a replay."""

    new_tokens: int
    cached_tokens: int
    num_candidates: int
    device_s: float
    waited_s: float  # waiting for the prefix and the device
    total_s: float  # latency at the client
    outcome: str
    due_at: float = 0.0  # seconds since the replay began


async def measure(
    records: Iterable[QueryRecord], options: ReplayOptions
) -> tuple[list[MeasuredRank], list[float]]:
    """Replay a log against a running instance.

    Returns:
        The answered ranks, and the seconds that each signal took at the client.
    """
    ranks = list[MeasuredRank]()
    signals_s = list[float]()

    def answered(sample: Sample) -> None:
        if sample.error or sample.due_at < options.warmup_s:
            return
        if sample.record.kind == SIGNAL.name:
            signals_s.append(sample.latency_s)
        if sample.record.kind != RANK.name or sample.answer is None:
            return
        stages = sample.answer["stages_s"]
        cached = sample.answer["prefix_tokens"]
        ranks.append(
            MeasuredRank(
                new_tokens=sample.answer["history"]["num_tokens"] - cached,
                cached_tokens=cached,
                num_candidates=count(sample.record.candidates),
                device_s=stages["device"],
                waited_s=stages["queue"] + stages["lease"],
                total_s=sample.latency_s,
                outcome=sample.answer["outcome"],
                due_at=sample.due_at,
            )
        )

    await play(plan(records, options), options, answered)
    await asyncio.sleep(0)
    return ranks, signals_s


def fit_device(
    ranks: Sequence[MeasuredRank],
    signals_s: Sequence[float],
    *,
    kv_token_bytes: int,
    copy_bytes_per_s: float,
    max_history_tokens: int,
) -> DeviceProfile:
    """Fit the profile of the measured instance.

    Args:
        ranks: Ranks at low load, with several lengths and numbers of candidates, hits and misses.
        signals_s: Seconds of each signal at the client.
        kv_token_bytes: Bytes of one token's keys and values, all layers.
        copy_bytes_per_s: Bandwidth from DRAM to HBM, which the service logs at start.
        max_history_tokens: Longest history of the model.

    Raises:
        DataError: There are fewer than 50 ranks.
    """
    # a degraded rank of an older version computed less than its response states
    ranks = [rank for rank in ranks if rank.outcome != Outcome.DEGRADED]
    if len(ranks) < _LEAST_RANKS:
        raise DataError(
            f"a device profile needs at least {_LEAST_RANKS} answered ranks, got {len(ranks)}"
        )
    samples = [
        (r.new_tokens, r.cached_tokens, r.num_candidates, max(r.device_s, 1e-7)) for r in ranks
    ]
    cost = fit_passes(samples)
    for _ in range(_TRIMS):
        ratios = np.array([seconds / max(cost.pass_s(*shape), 1e-9) for *shape, seconds in samples])
        within = ratios <= _OUTLIER * np.median(ratios)
        cost = fit_passes(
            sample for sample, is_within in zip(samples, within, strict=True) if is_within
        )
    late_s = np.array([seconds - cost.pass_s(*shape) for *shape, seconds in samples])
    host = np.array([max(r.total_s - r.waited_s - r.device_s, 0.0) for r in ranks])
    return DeviceProfile(
        a0_s=cost.a0,
        a1_s=cost.a1,
        a2_s=cost.a2,
        b0_s=cost.b0,
        b1_s=cost.b1,
        late=_lateness(np.array([max(cost.pass_s(*shape), 1e-9) for *shape, _ in samples]), late_s),
        rank_host_s=_values(host),
        signal_host_s=float(np.median(signals_s)) if signals_s else float(np.median(host)),
        copy_bytes_per_s=copy_bytes_per_s,
        kv_token_bytes=kv_token_bytes,
        max_history_tokens=max_history_tokens,
    )


def _lateness(expected_s: F64, late_s: F64) -> list[Lateness]:
    """Compute the relative noise of passes by class of length, the shortest first."""
    order = np.argsort(expected_s, kind="stable")
    parts = np.array_split(order, max(1, min(_CLASSES, len(order) // _LEAST_RANKS)))
    return [
        Lateness(
            up_to_s=float(expected_s[part[-1]]), ratios=_values(late_s[part] / expected_s[part])
        )
        for part in parts
    ]


def _values(samples: F64) -> list[float]:
    """Compress samples into means of equal shares, which preserves the mean."""
    parts = np.array_split(np.sort(samples), min(VALUES, len(samples)))
    return [round(float(part.mean()), 7) for part in parts]
