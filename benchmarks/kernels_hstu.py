"""HSTU on the CPU kernels: attention against the FMA roof, a rank against a naive cached path.

Roofs are measured in the same run by the library's own probes, in the kernel's arithmetic.
Everything runs on one thread, in turn with its baseline, and is measured in the thread's CPU time
(other processes then cost cache misses but no waiting). The floor of attention is 4 flops for each
dimension of a pair of query and key, half of it if causal; that of a rank is `rank.flops`. Keys and
values are packed into pages once, before any attention; this is a line of its own, against a plain
copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks import rank
from benchmarks.frame import Line, timed, timed_in_turn
from npu_gr.backend import tiles
from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import Native
from npu_gr.core.errors import ConfigError
from npu_gr.model.hstu import HSTU

LENGTHS = (1024, 4096)
CANDIDATES = (100, 500)
HEADS = 4
WIDTH = 64
OF_PEAK = 0.7
OF_FLOOR = 1.5
TIMES_NAIVE = 4.0
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest result
DTYPES = (torch.float32, torch.bfloat16)


class NaiveCachedBackend(CPUBackend):
    """Ranks with cached keys in plain torch as public code does, with an N x N mask a layer.

    Candidates are appended to copies of the cached keys and values. It has no relative bias.
    """

    def __init__(self) -> None:
        super().__init__("off")

    def hstu_targets(self, call: HstuCall) -> Tensor:
        """Attend; `bias` must be zero."""
        slabs = tiles.natural(call.cached)
        keys, values = (
            torch.cat([*(s[i] for s in slabs), own]) for i, own in ((0, call.k), (1, call.v))
        )
        m = len(call.times)
        n = len(keys)
        ids = torch.arange(n).clamp_(max=m)
        mask = torch.eye(n, dtype=torch.bool) | (ids[:, None] - ids[None, :] > 0)
        weights = silu(torch.einsum("chd,nhd->hcn", call.q, keys) * call.alpha) * mask[m:]
        return torch.einsum("hcn,nhd->chd", weights, values)


def roof_flops(native: Native, dtype: torch.dtype, budget_s: float = 0.2) -> float:
    """Measure the flops a second of the best loop for a dtype: VDPBF16PS for bf16, if available."""
    uses_dot = dtype == torch.bfloat16 and native.has_bf16_dot
    probe = native.kernels.probe_fma_bf16 if uses_dot else native.kernels.probe_fma_f32
    flops = native.kernels.probe_flops_bf16 if uses_dot else native.kernels.probe_flops_f32
    repeats = 4000  # about a millisecond: shorter runs are sometimes measured too short
    ((*samples,),) = timed_in_turn([lambda: probe(repeats)], budget_s, clock=time.thread_time)
    return float(repeats * flops / min(samples))


def lines(isa: str, seed: int, budget_s: float) -> Iterator[Line]:
    """Measure all cases; a wrong result is an AssertionError, before it is timed."""
    backend = CPUBackend(isa=isa)
    if backend.native is None:
        raise ConfigError(
            "bench kernels: the CPU kernels are not built: install g++, then npu_gr again"
        )
    torch.manual_seed(seed)
    for dtype in DTYPES:
        for length in LENGTHS:
            yield from _attention(backend, backend.native, dtype, length, budget_s)
        for c in CANDIDATES:
            yield from _rank(backend, backend.native, dtype, max(LENGTHS), c, budget_s)


def _attention(
    backend: CPUBackend, native: Native, dtype: torch.dtype, length: int, budget_s: float
) -> Iterator[Line]:
    off = CPUBackend("off")
    mixed = torch.randn(length, 3 * HEADS * WIDTH).to(dtype)
    q, k, v = (x.unflatten(1, (HEADS, WIDTH)) for x in mixed.chunk(3, dim=1))
    times = torch.cumsum(torch.randint(1, 100_000, (length,)), 0)
    bias = BiasTables(torch.randn(HEADS, 256).to(dtype), torch.randn(HEADS, 64).to(dtype))
    into = tiles.empty(-(-length // tiles.TILE_TOKENS), HEADS, WIDTH, WIDTH, dtype)
    backend.pack_kv(into, 0, k, v)
    held = into._replace(num_tokens=length)
    at = int(times[-1]) + 60
    pair = 4 * HEADS * WIDTH  # flops of one query and one key, over all heads
    copied = torch.empty_like(k), torch.empty_like(v)
    ours, theirs = timed_in_turn(
        [
            lambda: backend.pack_kv(into, 0, k, v),
            lambda: [to.copy_(x) for to, x in zip(copied, (k, v), strict=True)],
        ],
        budget_s,
        clock=time.thread_time,
    )
    yield _line(
        f"pack_kv L={length} {_name(dtype)}",
        native,
        ours,
        min(theirs),
        "copying the rows",
        theirs,
        None,
    )
    plain = HstuCall(q, k, v, [], times, bias, 0.125)
    tiled = plain._replace(k=k[:0], v=v[:0], cached=[held])  # all tokens are in tiles already
    cases = [(f"prefill L={length}", pair * length * (length + 1) / 2, "hstu_causal", tiled, plain)]
    for c in CANDIDATES:
        rows = HstuCall(q[:c], k[:c], v[:c], [held], times, bias, 0.125, query_time=at)
        flops = float(pair * c * (length + 1))
        cases.append(
            (f"rank L={length} M={c}", flops, "hstu_targets", rows, rows._replace(cached=[(k, v)]))
        )
    for name, flops, op, ours_call, torch_call in cases:
        run_ours = partial(getattr(backend, op), ours_call)
        run_torch = partial(getattr(off, op), torch_call)
        want = run_torch()
        assert float((run_ours() - want).abs().max()) <= TOLERANCE[dtype] * float(
            want.abs().max()
        ), name
        roof = roof_flops(native, dtype)
        ours, theirs = timed_in_turn([run_ours, run_torch], budget_s, clock=time.thread_time)
        yield _line(
            f"{name} {_name(dtype)}", native, ours, flops / roof, "torch ops", theirs, 1 / OF_PEAK
        )


def _rank(
    backend: CPUBackend, native: Native, dtype: torch.dtype, length: int, c: int, budget_s: float
) -> Iterator[Line]:
    """Measure a rank; the model's bias tables are zero, because the naive path has no bias."""
    model = HSTU(rank.config()).cast(dtype).eval()
    model.items.freeze()
    both = []
    for each in (backend, NaiveCachedBackend()):
        torch.manual_seed(c)  # the same request for both
        both.append(rank.CachedRank(model, each, length, c, dtype))
    ours, theirs = (partial(one.run, one.hit) for one in both)
    want, got = theirs(), ours()
    drift = float((got - want).abs().max() / want.abs().max())
    assert drift <= TOLERANCE[dtype], f"rank L={length} M={c}: {drift:.1e}"
    shape = model.config
    floor_s = rank.flops(shape, length, c, True) / roof_flops(native, dtype)
    mine, other = timed_in_turn([ours, theirs], budget_s, clock=time.thread_time)
    case = f"request L={length} M={c} layers={shape.num_layers} d={shape.dim} {_name(dtype)}"
    yield _line(
        case, native, mine, floor_s, "naive cached path, N x N mask", other, OF_FLOOR, TIMES_NAIVE
    )


def _line(
    case: str,
    native: Native,
    ours: list[float],
    floor_s: float,
    baseline: str,
    theirs: list[float],
    times_floor: float | None,
    target: float | None = None,
) -> Line:
    """Make a line whose `ok` compares with both floor and baseline.

    It requires the best run within `times_floor` of the floor, and `target` times the baseline's
    speed; None = there is no target.
    """
    of_floor = floor_s / min(ours)
    case = f"hstu {case} {native.isa}"
    line = timed(
        "kernels", case, ours, baseline, theirs, target, floor=floor_s * 1e3, of_floor=of_floor
    )
    ok = (
        None if times_floor is None else of_floor >= 1 / times_floor and line.ratio >= (target or 0)
    )
    return replace(line, ok=ok)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
