"""The parity self-test: cold == HBM hit == DRAM hit on this very device, before the first request is taken."""

from __future__ import annotations

import numpy as np

from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.errors import DeviceError
from npu_gr.core.request import I64
from npu_gr.engine.rank_engine import Cached, Engine, Pass
from npu_gr.engine.scheduler import Urgency
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import Run

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.1}  # of the logits' standard deviation
_FAR = float("inf")


async def parity(
    engine: Engine,
    runs: tuple[Run, ...],
    dram: KVArena | None,
    dram_runs: tuple[Run, ...],
    tokens: Tokens,
    candidates: I64,
) -> float:
    """Largest difference of cached from cold scores, as a share of their standard deviation.

    Args:
        engine: to be tested; its jobs come after those that have a deadline.
        runs: pages of its arena for `tokens`, of nobody else; zeroed at the end.
        dram: the other tier; None = there is none.
        dram_runs: as `runs`, of `dram`.
        tokens: a history.
        candidates: [c] item rows.

    Raises:
        DeviceError: the difference is over the tolerance of the dtype that keys and values are kept in.
    """
    layout = engine.arena.layout
    cut = len(tokens) * 3 // 4
    shown_at = int(tokens.events.timestamps[-1])
    head = tokens[:cut]
    cold = await engine.rank(Pass(tokens, 0, candidates, shown_at), _FAR)
    await engine.prefill(head, runs, _FAR, Urgency(_FAR))
    hit = Pass(tokens, 0, candidates, shown_at, cached=Cached(runs, cut))
    results = {"HBM": await engine.rank(hit, _FAR)}
    if dram is not None:
        await engine.copy(engine.arena, runs, dram, dram_runs, cut, _FAR)
        await engine.zero(engine.arena, runs)
        await engine.copy(dram, dram_runs, engine.arena, runs, cut, _FAR)
        results["DRAM"] = await engine.rank(hit, _FAR)
        await engine.zero(dram, dram_runs)
    await engine.zero(engine.arena, runs)
    spread = max(float(cold.logits.std()), 1e-6)
    worst = 0.0
    for tier, result in results.items():
        drift = float(np.abs(result.logits - cold.logits).max()) / spread
        worst = max(worst, drift)
        if not drift <= TOLERANCE[layout.dtype]:
            raise DeviceError(
                f"self-test: scores from {tier} differ from cold ones by {drift:.1e} of their standard deviation, "
                f"the limit for {layout.dtype} is {TOLERANCE[layout.dtype]:.0e}"
            )
    return worst
