"""`npu-gr calibrate`: measure the constants of the trigger for a device, checkpoint and traffic.

    cost, copy    from the passes and copies of the warm-up
    kv_p99        P99 of the history lengths in a query log; else the model's longest history
    T_life        P99 from a signal to the end of its rank in the log; else `relay.t_life_s`
    Q_m           prefills of kv_p99 tokens per second, one per stream, on an idle device

Source of the symbols: the trigger of RelayGR (arXiv:2601.01712).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry

from npu_gr.backend.choose import choose
from npu_gr.core.errors import ConfigError, DataError, PoolExhausted
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.engine.kv_cache.tier import PrefixKey
from npu_gr.engine.queue import JobOrder
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.ranking import Ranking
from npu_gr.metrics.registry import Metrics
from npu_gr.relay.config import Calibration
from npu_gr.replay.log import QueryRecord
from npu_gr.service.build import describe, open_ranking
from npu_gr.service.config import Config
from npu_gr.service.warmup import seeded_tokens

MIN_RANKS = 20  # in a log; a P99 of fewer is meaningless


class LogTraffic(NamedTuple):
    """Quantiles of a query log. None: too few ranks have the value."""

    kv_p99_tokens: int | None
    t_life_s: float | None


def traffic(records: Iterable[QueryRecord]) -> LogTraffic:
    """Compute the P99 of history lengths, and of the times from a signal to the end of its rank.

    Args:
        records: Records in time order.

    Raises:
        DataError: fewer than `MIN_RANKS` ranks.
    """
    lengths: list[int] = []
    lives_s: list[float] = []
    num_ranks = 0
    signalled_at: dict[UserKey, float] = {}  # newest signal of each user without a rank yet
    for record in records:
        user = UserKey(record.tenant, record.user_id)
        if record.kind == SIGNAL.name:
            signalled_at[user] = record.ts
        elif record.kind == RANK.name:
            num_ranks += 1
            if record.history is not None and record.base is None:
                lengths.append(len(record.history))
            took_s = (record.answer.latency_ms or 0.0) * 1e-3 if record.answer else 0.0
            # replay sends its signal on arrival, see `npu_gr/replay/plan.py`
            if record.delay_ms is not None:
                lives_s.append(record.delay_ms * 1e-3 + took_s)
            elif user in signalled_at:
                lives_s.append(record.ts - signalled_at.pop(user) + took_s)
    if num_ranks < MIN_RANKS:
        raise DataError(f"calibrate: the log has {num_ranks} ranks, the least is {MIN_RANKS}")
    return LogTraffic(
        max(1, int(np.quantile(lengths, 0.99, method="higher")))
        if len(lengths) >= MIN_RANKS
        else None,
        max(1e-3, float(np.quantile(lives_s, 0.99))) if len(lives_s) >= MIN_RANKS else None,
    )


async def calibrate(config: Config, known: LogTraffic, seconds: float) -> Calibration:
    """Measure an instance's costs; the machine should be idle.

    Args:
        config: Configuration of an instance that ranks.
        known: Quantiles of a query log.
        seconds: Duration of the measurement of Q_m.

    Raises:
        ConfigError: the instance does not rank, or prefixes of the P99 length do not fit its pages.
    """
    if config.checkpoint is None:
        raise ConfigError(
            "checkpoint: not set, but calibration measures ranks; set it to a ranker's checkpoint"
        )
    backend = choose(
        config.backend, config.native, config.hstu_library, config.attention, config.device
    )
    scheduler = Scheduler(config.scheduler, backend.stream)
    scheduler.start()
    try:
        ranking = (
            await open_ranking(
                config, backend, scheduler, Metrics(CollectorRegistry(), config.slo.objectives())
            )
        ).activate()
        try:
            longest = config.service.max_history_tokens or ranking.model.max_history_tokens
            tokens = min(known.kv_p99_tokens or longest, longest)
            return Calibration(
                version=ranking.version,
                device=describe(backend),
                cost=ranking.engine.cost,
                copy_bytes_per_s=ranking.engine.copy_bytes_per_s,
                kv_token_bytes=ranking.engine.arena.layout.token_bytes,
                kv_p99_tokens=tokens,
                t_life_s=known.t_life_s or config.relay.t_life_s,
                q_m_per_s=await _prefills_per_s(ranking, tokens, config.scheduler.streams, seconds),
            )
        finally:
            await ranking.stop()
    finally:
        await scheduler.stop()


async def _prefills_per_s(ranking: Ranking, num_tokens: int, streams: int, seconds: float) -> float:
    pool, _ = ranking.relay.tiers
    tokens = seeded_tokens(ranking.vocabulary, ranking.engine.model.config, num_tokens)
    keys = [
        PrefixKey(UserKey("", str(n)), ranking.version, pool.arena.layout.layout_id, "calibrate")
        for n in range(streams)
    ]
    try:
        entries = [pool.reserve(key, num_tokens) for key in keys]
    except PoolExhausted as error:
        raise ConfigError(
            f"kv_cache.hbm_bytes: {streams} prefixes of {num_tokens} tokens do not fit: {error}"
        ) from error
    far = float("inf")
    done = 0
    ends_at = 0.0

    async def run_prefills(number: int) -> None:
        nonlocal done
        while done < streams or time.monotonic() < ends_at:
            await ranking.engine.prefill(tokens, entries[number].runs, far, JobOrder(far))
            done += 1

    # not counted, since it touches the pages for the first time
    await ranking.engine.prefill(tokens, entries[0].runs, far, JobOrder(far))
    began_at = time.monotonic()
    ends_at = began_at + seconds
    await asyncio.gather(*map(run_prefills, range(streams)))
    took_s = time.monotonic() - began_at
    for entry in entries:
        pool.abandon(entry)
    return done / took_s
