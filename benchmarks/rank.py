"""`python -m benchmarks rank`: score candidates on a cached prefix, and by a full inference of the same request.

The floor is the ratio of the two passes' floating-point operations. It counts the operations that the code does: causal
attention as half its square, and of the last layer's history rows only their keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.line import Line, percentiles, timed_in_turn
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.pages import KVLayout, PageRun
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.segment import Past, Segment

LENGTHS = (256, 1024, 4096)
CANDIDATES = (100, 500)
WITHIN = 0.85  # the cached path must reach this share of the flop ratio
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}  # of the logits' standard deviation


def config(num_layers: int = 8, dim: int = 256) -> HSTUConfig:
    """The shape of all benches of a ranker: 4 heads, of 64 at the default `dim`."""
    return HSTUConfig(
        num_items=10_000,
        actions=("click",),
        tasks=("click",),
        dim=dim,
        num_layers=num_layers,
        num_heads=4,
        qk_dim=dim // 4,
        v_dim=dim // 4,
        scaling_seqlen=4096,
        max_history_tokens=8192,
    )


def flops(shape: HSTUConfig, num_history: int, num_candidates: int, cached: bool) -> float:
    """Floating-point operations of one pass.

    Args:
        shape: of the model.
        num_history: tokens.
        num_candidates: one token each.
        cached: the history's keys and values are read, not computed.
    """
    uv = shape.num_heads * shape.v_dim
    qk = shape.num_heads * shape.qk_dim
    row = 2 * shape.dim * (2 * uv + 2 * qk) + 2 * uv * shape.dim  # U, V, Q, K and the output
    pair = 2 * (qk + uv)  # one query, one key
    n = num_history
    c = num_candidates
    candidates = shape.num_layers * (c * row + c * (n + 1) * pair)
    if cached:
        return candidates
    last = n * 2 * shape.dim * (uv + qk)
    return candidates + (shape.num_layers - 1) * (n * row + n * (n + 1) / 2 * pair) + last


def lines(backend_name: BackendName, dtype: torch.dtype, seed: int, budget_s: float) -> Iterator[Line]:
    """One line for each length of history and number of candidates.

    Args:
        backend_name: as in a configuration.
        dtype: of the model.
        seed: of weights and inputs.
        budget_s: to time each case for.

    Raises:
        AssertionError: the cached scores are wrong; nothing was timed.
    """
    backend = choose(backend_name)
    torch.manual_seed(seed)
    shape = config()
    model = HSTU(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("position_bias", "time_bias")):
                parameter.normal_(std=0.1)
    model.cast(dtype).to(backend.device).eval().freeze_items()
    layout = KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        page_tokens=64,
        dtype=str(dtype).removeprefix("torch."),
        arrangement=backend.arrangement(dtype, 64),
    )
    arena = KVArena(layout, layout.pages(max(LENGTHS)), backend.device, pack=backend.pack_kv)
    nothing = torch.empty(0, dtype=torch.int64, device=backend.device)
    for n in LENGTHS:
        items = torch.randint(shape.num_items, (n,), device=backend.device)
        times = torch.cumsum(torch.randint(100_000, (n,)), 0).to(backend.device)
        runs = (PageRun(0, layout.pages(n)),)
        actions = torch.zeros_like(items)
        history = Segment(items=items, actions=actions, times=times, candidates=nothing, sink=arena.sink(runs))
        model(backend, [history])
        past = Past(times, lambda layer, runs=runs, n=n: arena.slabs(layer, runs, n))  # type: ignore[misc]
        for c in CANDIDATES:
            candidates = torch.randint(shape.num_items, (c,), device=backend.device)
            shown_at = int(times[-1]) + 60
            cold = Segment(items=items, actions=actions, times=times, candidates=candidates, candidate_time=shown_at)
            hit = replace(cold, items=nothing, actions=nothing, times=nothing, past=past)

            def run(segment: Segment) -> Tensor:
                scores: Tensor = model(backend, [segment])[0]
                backend.synchronize()
                return scores

            want = run(cold)
            got = run(hit)
            drift = float((want - got).abs().max() / want.std())
            assert drift <= TOLERANCE[dtype], f"n={n} c={c}: cached scores drift by {drift:.1e}"
            full, cached = timed_in_turn([lambda s=cold: run(s), lambda s=hit: run(s)], budget_s)  # type: ignore[misc]
            full_ms = percentiles(full)[0] * 1e3
            ours_ms, p10, p90 = (value * 1e3 for value in percentiles(cached))
            floor = flops(shape, n, c, False) / flops(shape, n, c, True)
            ratio = full_ms / ours_ms
            yield Line(
                bench="rank",
                case=f"L={n} M={c} layers={shape.num_layers} d={shape.dim} {layout.dtype}",
                ours=ours_ms,
                unit="ms",
                baseline="full inference, same ops",
                baseline_value=full_ms,
                ratio=ratio,
                target=WITHIN * floor,
                ok=ratio >= WITHIN * floor,
                floor=floor,
                of_floor=ratio / floor,
                p10=p10,
                p90=p90,
            )
