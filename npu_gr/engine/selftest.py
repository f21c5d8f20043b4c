"""The parity self-test: cold scores == HBM hit == DRAM hit, on this very device, before the first request is served."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DeviceError
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.layout import PageRun
from npu_gr.engine.page_jobs import CachedPrefix, proof_order
from npu_gr.engine.rank_engine import FindPass, RankEngine, RankPass

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.1}  # of the logits' standard deviation
_FAR = float("inf")


async def parity(
    engine: RankEngine,
    runs: tuple[PageRun, ...],
    dram: KVArena | None,
    dram_runs: tuple[PageRun, ...],
    tokens: Tokens,
    candidates: I64,
) -> float:
    """Rank one history cold, from HBM and from DRAM, and compare the scores; and its vector, where the model retrieves.

    Args:
        engine: the engine to test. Its ranks wait as live ones do; `engine.objective_s` is set.
        runs: pages of its arena for `tokens` that nobody else uses; they are zero at the end.
        dram: the arena of the DRAM tier; None = there is no such tier.
        dram_runs: pages of `dram` for `tokens` that nobody else uses; they are zero at the end.
        tokens: a history. Three quarters of it are cached, the rest is computed.
        candidates: [c] item rows.

    Returns:
        the largest difference of a cached score from the cold one, in standard deviations of the cold scores.

    Raises:
        DeviceError: the difference is over the tolerance of the dtype in which keys and values are kept.
    """
    layout = engine.arena.layout
    cut = max(len(tokens) * 3 // 4, tokens.num_user)
    shown_at = int(tokens.events.timestamps[-1])
    head = tokens[:cut]
    cold = await _asked(engine, RankPass(tokens, 0, candidates, shown_at))
    await engine.prefill(head, runs, _FAR, proof_order())
    hit = RankPass(tokens, 0, candidates, shown_at, cached=CachedPrefix(runs, cut))
    results = {"HBM": await _asked(engine, hit)}
    if dram is not None:
        await engine.copy(engine.arena, runs, dram, dram_runs, cut, _FAR, proof_order())
        await engine.zero(engine.arena, runs)
        await engine.copy(dram, dram_runs, engine.arena, runs, cut, _FAR, proof_order())
        results["DRAM"] = await _asked(engine, hit)
        await engine.zero(dram, dram_runs)
    await engine.zero(engine.arena, runs)
    worst = 0.0
    for tier, result in results.items():
        drift = max(_drift(*pair) for pair in zip(result, cold, strict=True))
        worst = max(worst, drift)
        if not drift <= TOLERANCE[layout.dtype]:
            raise DeviceError(
                f"self-test: scores from {tier} differ from cold ones by {drift:.1e} of their standard deviation, "
                f"the limit for {layout.dtype} is {TOLERANCE[layout.dtype]:.0e}"
            )
    return worst


async def _asked(engine: RankEngine, work: RankPass) -> list[F32]:
    """Compute the logits; and the user vector, where the model retrieves."""
    answers = [(await engine.rank(work, _FAR)).logits]
    if engine.model.config.retrieval:
        nothing: I64 = np.empty(0, np.int64)
        find = FindPass(replace(work, candidates=nothing), 0, nothing)
        answers.append((await engine.find(find, _FAR)).vector)
    return answers


def _drift(got: F32, want: F32) -> float:
    return float(np.abs(got - want).max()) / max(float(want.std()), 1e-6)
