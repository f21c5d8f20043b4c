"""`npu-gr calibrate`: what the trigger's bounds need to know of this device, this checkpoint and this traffic.

    cost, copy    the passes and copies of an instance's own warm-up
    kv_p99        the P99 of a query log's histories; without one, the longest that the model takes
    T_life        the P99 from a signal to the end of its rank, in the log; without one, `relay.t_life_s`
    Q_m           pre-infers of kv_p99 tokens a second, as many at once as there are streams, nothing else running

Source: the symbols of RelayGR's trigger, `relaygr.md` 2.3.
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
from npu_gr.core.request import UserKey
from npu_gr.engine.job import JobOrder
from npu_gr.engine.scheduler import Scheduler
from npu_gr.jobs.rank import Ranking
from npu_gr.kv.keys import PrefixKey
from npu_gr.metrics.registry import Metrics
from npu_gr.relay.calibration import Calibration
from npu_gr.replay.log import Record
from npu_gr.service.build import describe, open_ranking, seeded_tokens
from npu_gr.service.config import Config

LEAST = 20  # ranks of a log: a quantile of fewer says nothing


class Traffic(NamedTuple):
    """What a query log says; None = it does not."""

    kv_p99_tokens: int | None
    t_life_s: float | None


def traffic(records: Iterable[Record]) -> Traffic:
    """Lengths of the histories that come whole, and times from a user's signal to the end of the rank after it.

    Raises:
        DataError: too few ranks.
    """
    lengths, lives_s, num_ranks = list[int](), list[float](), 0
    signals_s = dict[tuple[str, str], float]()
    for record in records:
        user = (record.tenant, record.user_id)
        if record.kind == "signal":
            signals_s[user] = record.ts
        elif record.kind == "rank":
            num_ranks += 1
            if record.history is not None and record.base is None:
                lengths.append(len(record.history))
            answered_s = (record.answer.latency_ms or 0.0) * 1e-3 if record.answer else 0.0
            if record.delay_ms is not None:  # its signal is sent on arrival, see `replay/plan.py`
                lives_s.append(record.delay_ms * 1e-3 + answered_s)
            elif user in signals_s:
                lives_s.append(record.ts - signals_s.pop(user) + answered_s)
    if num_ranks < LEAST:
        raise DataError(f"calibrate: the log has {num_ranks} ranks, the least is {LEAST}")
    return Traffic(
        max(1, int(np.quantile(lengths, 0.99, method="higher"))) if len(lengths) >= LEAST else None,
        max(1e-3, float(np.quantile(lives_s, 0.99))) if len(lives_s) >= LEAST else None,
    )


async def calibrate(config: Config, known: Traffic, seconds: float) -> Calibration:
    """Measure, on an idle machine.

    Args:
        config: of an instance that ranks.
        known: of the log, if there is one.
        seconds: for Q_m.

    Raises:
        ConfigError: it does not rank, or a prefix of so many tokens does not fit its pages.
    """
    if config.checkpoint is None:
        raise ConfigError("checkpoint: the configuration names none, and it is ranks that are calibrated")
    backend = choose(config.backend, config.native)
    scheduler = Scheduler(config.scheduler, backend.stream)
    scheduler.start()
    try:
        ranking = (
            await open_ranking(config, backend, scheduler, Metrics(CollectorRegistry(), config.slo.objectives()))
        )()
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
        raise ConfigError(f"kv.hbm_bytes: {streams} prefixes of {num_tokens} tokens do not fit: {error}") from error
    done, far, ends_at = 0, float("inf"), 0.0

    async def one_after_the_other(number: int) -> None:
        nonlocal done
        while done < streams or time.monotonic() < ends_at:
            await ranking.engine.prefill(tokens, entries[number].runs, far, JobOrder(far))
            done += 1

    await ranking.engine.prefill(tokens, entries[0].runs, far, JobOrder(far))  # not counted: first touch of the pages
    began_at = time.monotonic()
    ends_at = began_at + seconds
    await asyncio.gather(*map(one_after_the_other, range(streams)))
    took_s = time.monotonic() - began_at
    for entry in entries:
        pool.abandon(entry)
    return done / took_s
