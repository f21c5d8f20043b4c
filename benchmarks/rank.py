"""`python -m benchmarks rank`: a rank with a cached prefix, against full inference.

The floor is the ratio of the two passes' floating-point operations. It counts the operations that
the code does: half of the square for causal attention, and only keys and values for history rows of
the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import click
import torch
from torch import Tensor

from benchmarks.frame import BACKEND, SEED, THREADS, Line, option, timed, timed_for, timed_in_turn
from npu_gr.backend.base import Backend
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Past, Segment

OPTIONS = (
    BACKEND,
    option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"])),
    THREADS,
    SEED,
    timed_for(3.0),
)
LENGTHS = (256, 1024, 4096)
CANDIDATES = (100, 500)
WITHIN = 0.85  # target: share of the flop ratio
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}  # relative to the logits' std deviation


def config(num_layers: int = 8, dim: int = 256) -> HSTUConfig:
    """Return the shape of all ranker benchmarks: 4 heads, of 64 at the default `dim`."""
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


def layout(shape: HSTUConfig, backend: Backend, dtype: torch.dtype = torch.float32) -> KVLayout:
    """Return the layout of a ranker's prefixes in an instance."""
    return KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        page_tokens=64,
        dtype=str(dtype).removeprefix("torch."),
        arrangement=backend.arrangement(dtype, 64),
        window_tokens=shape.attention_window_tokens,
        first_tokens=shape.attention_first_tokens,
    )


class CachedRank:
    """A request with a cached history, as a cold request and as a hit."""

    def __init__(
        self,
        model: HSTU,
        backend: Backend,
        num_tokens: int,
        num_candidates: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Draw a request and encode its history.

        Args:
            model, backend: Model and its backend.
            num_tokens: Tokens of the history.
            num_candidates: Number of candidates.
            dtype: Dtype of the model.
        """
        self._model = model
        self._backend = backend
        laid = layout(model.config, backend, dtype)
        arena = KVArena(laid, laid.pages(num_tokens), backend.device, pack=backend.pack_kv)
        nothing = torch.empty(0, dtype=torch.int64, device=backend.device)
        items = torch.randint(model.config.num_items, (num_tokens,), device=backend.device)
        times = torch.cumsum(torch.randint(100_000, (num_tokens,)), 0).to(backend.device)
        runs = (PageRun(0, laid.pages(num_tokens)),)
        self.cold = Segment(
            items=items,
            actions=torch.zeros_like(items),
            times=times,
            candidates=torch.randint(
                model.config.num_items, (num_candidates,), device=backend.device
            ),
            candidate_time=int(times[-1]) + 60,
        )
        self.run(replace(self.cold, candidates=nothing, sink=arena.sink(runs)))
        past = Past(times, lambda layer: arena.slabs(layer, runs, num_tokens))
        self.hit = replace(self.cold, items=nothing, actions=nothing, times=nothing, past=past)

    def run(self, segment: Segment) -> Tensor:
        """Compute the scores of a segment, and wait for them."""
        scores: Tensor = self._model(self._backend, [segment])[0]
        self._backend.synchronize()
        return scores


def flops(shape: HSTUConfig, num_history: int, num_candidates: int, cached: bool) -> float:
    """Count the floating-point operations of one pass.

    Args:
        shape: Configuration of the model.
        num_history: Tokens of the history.
        num_candidates: Number of candidates.
        cached: The history's keys and values are cached.
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


def lines(backend: BackendName, dtype: str, seed: int, seconds: float) -> Iterator[Line]:
    """Yield a line for each length of history and number of candidates.

    Raises:
        AssertionError: The cached scores are wrong; nothing was timed.
    """
    device = choose(backend)
    kind: torch.dtype = getattr(torch, dtype)
    torch.manual_seed(seed)
    shape = config()
    model = HSTU(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("position_bias", "time_bias")):
                parameter.normal_(std=0.1)
    model.cast(kind).to(device.device).eval().items.freeze()
    for n in LENGTHS:
        for c in CANDIDATES:
            rank = CachedRank(model, device, n, c, kind)
            want, got = rank.run(rank.cold), rank.run(rank.hit)
            drift = float((want - got).abs().max() / want.std())
            assert drift <= TOLERANCE[kind], f"n={n} c={c}: cached scores drift by {drift:.1e}"
            full, cached = timed_in_turn(
                [lambda r=rank: r.run(r.cold), lambda r=rank: r.run(r.hit)],  # type: ignore[misc]
                seconds,
            )
            floor = flops(shape, n, c, False) / flops(shape, n, c, True)
            case = f"L={n} M={c} layers={shape.num_layers} d={shape.dim} {dtype}"
            yield timed(
                "rank", case, cached, "full inference, same ops", full, WITHIN * floor, floor=floor
            )
