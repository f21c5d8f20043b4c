"""Choose what runs a ranker's attention: at the warm-up, by measuring what can run it here, once for its whole life.

A prefix is exact because its hit is computed as its cold pass is, so a ranker keeps one way. Each candidate encodes one
history into pages, and ranks over it, cold and from the pages; scores that are not those of plain torch ops refuse it,
and so does what small requests show of its reading and writing (`attention_check.py`).
The CPU has one way, which its build decides: nothing is measured there, and no answer depends on a clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.calls import HstuShape
from npu_gr.backend.names import AttentionMode
from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError, DeviceError
from npu_gr.core.served import AttentionWay
from npu_gr.engine.attention_check import Observed, cases, observe, refusal
from npu_gr.engine.kv.layout import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix, proof_order
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.model.hstu import HSTU

log = logging.getLogger(__name__)

PLAIN = "torch"  # the way that the others are compared with; `npu-gr doctor` compares it with the definition
DRIFT = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}  # of the deviation
SAMPLES = 3  # of each pass; the fastest counts
MEASURE_S = 2.0  # no further sample of a way after so long
WORTH = 0.95  # a way further down the order must take less than this of the best time
NEW_TOKENS = 64  # that a timed rank computes behind the cached ones
_FAR = float("inf")
_NOTHING: I64 = np.empty(0, np.int64)


def shape_of(model: HSTU, layout: KVLayout) -> HstuShape:
    """Say of a ranker what decides who can run its attention."""
    config = model.config
    return HstuShape(
        config.num_heads,
        config.qk_dim,
        config.v_dim,
        model.dtype,
        getattr(torch, layout.dtype),
        layout.page_tokens,
        config.v_dim if config.norm == "group" else config.num_heads * config.v_dim,
        config.residual == "concat",
        config.relative_bias != "none",
        config.has_plain_layers,
        config.has_plain_times,
    )


class Trial(NamedTuple):
    """What every way computes."""

    tokens: Tokens  # a history
    cached: int  # tokens of it in pages, the last `chunk` of them encoded in the timed pass
    chunk: int
    candidates: I64  # [c] item rows
    runs: tuple[PageRun, ...]  # pages of the engine's arena for the history that nobody else uses; zero at the end
    other: Tokens  # another user's history

    @property
    def query_time(self) -> int:
        """Unix seconds of its requests."""
        return int(self.tokens.events.timestamps.max(initial=0))  # a token of the user alone has no event


def possible(engine: RankEngine, backend: Backend, wanted: AttentionMode) -> Sequence[str]:
    """Name the ways of the backend that may run the engine's ranker, in its order.

    Args:
        engine: of the ranker.
        backend: has the ways.
        wanted: the configuration's `attention`; "auto" = any.

    Raises:
        ConfigError: the wanted way cannot run this ranker here.
    """
    ways = backend.hstu_ways(shape_of(engine.model, engine.arena.layout))
    if wanted != "auto" and wanted not in ways:
        raise ConfigError(f"attention: {wanted} cannot run this ranker here; what can: {', '.join(ways)}")
    return ways if wanted == "auto" else (wanted,)


async def choose_way(
    engine: RankEngine, backend: Backend, ways: Sequence[str], trial: Trial
) -> tuple[AttentionWay, ...]:
    """Set the engine's backend to the fastest way that computes what it should.

    Args:
        engine: of the ranker. Its jobs wait as live ones do; it serves nobody yet.
        backend: has the ways.
        ways: of `possible`. Of equals the first one is chosen.
        trial: what is computed.

    Returns:
        what was tried, in order.

    Raises:
        ConfigError: a single way computes something else.
        DeviceError: plain torch ops fail.
    """
    tried = list[AttentionWay]()
    try:
        engine.backend = backend.running(PLAIN)
        checked = await _Checked.of(engine, trial)
        for way in ways:
            engine.backend = backend.running(way)
            tried.append(await _try(engine, way, trial, checked))
    finally:
        await engine.zero(engine.arena, trial.runs)
    best = fastest(tried)
    if best.refused:
        raise ConfigError(f"attention: {best.name} is of no use here: {best.refused}")
    engine.backend = backend.running(best.name)
    log.info("attention by %s: %s", best.name, "; ".join(map(told, tried)))
    return tuple(tried)


def fastest(tried: Sequence[AttentionWay]) -> AttentionWay:
    """Return the fastest; a later one only where it is faster by more than measurements differ."""
    best = tried[0]
    for way in tried[1:]:
        if way.total_ms < best.total_ms * WORTH:
            best = way
    return best


def told(way: AttentionWay) -> str:
    """Say how a way did."""
    if way.prefill_ms is None or way.rank_ms is None:
        return f"{way.name} refused: {way.refused}"
    return f"{way.name} {way.prefill_ms:.2f} ms a chunk and {way.rank_ms:.2f} ms a rank"


class _Checked(NamedTuple):
    """What every way should compute: what plain torch ops do."""

    logits: list[F32]
    small: list[Observed]  # of small requests, `attention_check.py`

    @classmethod
    async def of(cls, engine: RankEngine, trial: Trial) -> _Checked:
        """Ask the engine's backend."""
        logits = await _logits(engine, trial)
        users = trial.tokens, trial.other
        small = cases(users, trial.candidates, trial.runs, engine.arena.layout.page_tokens, trial.query_time)
        return cls(logits, [await observe(engine, case, trial.runs) for case in small])

    def drift(self, logits: Sequence[F32]) -> float:
        """Return the greatest difference from the logits, in their deviations; a NaN stays one."""
        return float(np.max([_drift(*pair) for pair in zip(logits, self.logits, strict=True)]))


async def _refusal(engine: RankEngine, trial: Trial, checked: _Checked, drift: float) -> str:
    """Say why the engine's way is not to be used; "" = it may be."""
    limit = DRIFT[engine.model.dtype]
    if not drift <= limit:
        return f"scores differ from plain torch ops' by {drift:.1e} of their deviation, the limit is {limit:.0e}"
    spread = float(checked.logits[0].std())
    for want in checked.small:
        if why := refusal(await observe(engine, want.case, trial.runs), want, spread, limit):
            return why
    return ""


async def _try(engine: RankEngine, way: str, trial: Trial, checked: _Checked) -> AttentionWay:
    try:
        drift = checked.drift(await _logits(engine, trial))
        if why := await _refusal(engine, trial, checked, drift):
            return AttentionWay(name=way, drift=drift, refused=why)
        prefill, rank = _passes(trial)
        prefill_ms = await _fastest_ms(engine, prefill)
        rank_ms = await _fastest_ms(engine, rank)
    except DeviceError as error:
        if way == PLAIN:
            raise
        return AttentionWay(name=way, refused=str(error))
    return AttentionWay(name=way, prefill_ms=prefill_ms, rank_ms=rank_ms, drift=drift)


def _passes(trial: Trial) -> tuple[RankPass, RankPass]:
    """The two that are timed: the last chunk of a prefill, and a rank behind it."""
    start = trial.cached - trial.chunk
    known = CachedPrefix(trial.runs, start) if start else None
    prefill = RankPass(trial.tokens[: trial.cached], 0, _NOTHING, 0, cached=known, keep=trial.runs)
    return prefill, _rank(trial, CachedPrefix(trial.runs, trial.cached))


def _rank(trial: Trial, cached: CachedPrefix | None) -> RankPass:
    return RankPass(trial.tokens, 0, trial.candidates, trial.query_time, cached=cached)


async def _logits(engine: RankEngine, trial: Trial) -> list[F32]:
    """Rank cold, and over pages that this way has written."""
    cold = await engine.rank(_rank(trial, None), _FAR)
    await engine.prefill(trial.tokens[: trial.cached], trial.runs, _FAR, proof_order())
    hit = await engine.rank(_rank(trial, CachedPrefix(trial.runs, trial.cached)), _FAR)
    return [cold.logits, hit.logits]


async def _fastest_ms(engine: RankEngine, work: RankPass) -> float:
    began_at = time.monotonic()
    fastest_s = _FAR
    for _ in range(SAMPLES):
        fastest_s = min(fastest_s, await engine.timed(partial(engine.forward, [work])))
        if time.monotonic() - began_at > MEASURE_S / 2:
            break
    return fastest_s * 1e3


def _drift(got: F32, want: F32) -> float:
    return float(np.abs(got - want).max()) / max(float(want.std()), 1e-6)
