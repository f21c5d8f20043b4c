"""Chooses the implementations of a generator's ops at its start, by the trial of `ways.py`.

Attention, selection and fork of the widest beams are computed after the longest prompt by every way
that the backend has. The CPU and NPU builds have one way each, so nothing is measured there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.calls import BeamCall, Continuations, TopkCall
from npu_gr.engine.page_jobs import warmup_order
from npu_gr.engine.scheduler import Scheduler
from npu_gr.engine.ways import DRIFT, PLAIN, Checked, Tried, fastest, try_way

log = logging.getLogger(__name__)

# Computes an op, and returns what every way must reproduce: fp32 on the host, by name.
Run = Callable[[Backend], dict[str, Tensor]]
T = TypeVar("T")
MOST_CODES = 8192  # of a selection that is tried; more need memory, not other kernels


class BeamShape(NamedTuple):
    """The sizes of a generator's widest search."""

    beams: int
    query_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    levels: int  # codes of a semantic ID, >= 1
    prompt_tokens: int
    codes: int  # of the largest level
    dtype: torch.dtype


async def choose_beam_ways(
    backend: Backend, scheduler: Scheduler, shape: BeamShape
) -> tuple[Backend, dict[str, tuple[Tried, ...]]]:
    """Return the backend with the fastest right way of each op, and what was tried.

    Args:
        backend: Backend with the ways.
        scheduler: Queue of the device, started; the runs queue as live ones do.
        shape: Sizes of the runs.

    Raises:
        DeviceError: plain torch ops fail.
    """
    tried: dict[str, tuple[Tried, ...]] = {}
    for op, ways in backend.beam_ways().items():
        run = await _call(scheduler, partial(RUNS[op], shape, backend.device))
        want = await _call(scheduler, partial(run, backend.running(PLAIN, op)))
        limit = DRIFT[shape.dtype]
        tried[op] = tuple(
            [await _try(scheduler, backend.running(way, op), way, run, want, limit) for way in ways]
        )
        best = fastest(tried[op])
        backend = backend.running(best.name, op)
        log.info("%s by %s: %s", op, best.name, "; ".join(map(_summary, tried[op])))
    return backend, tried


async def _call(scheduler: Scheduler, function: Callable[[], T]) -> T:
    return (await scheduler.call(function, float("inf"), warmup_order())).value


async def _try(
    scheduler: Scheduler,
    backend: Backend,
    way: str,
    run: Run,
    want: dict[str, Tensor],
    limit: float,
) -> Tried:
    async def check() -> Checked:
        got = await _call(scheduler, partial(run, backend))
        drifts = {name: _drift(got[name], right) for name, right in want.items()}
        name = max(drifts, key=lambda each: drifts[each])
        if drifts[name] <= limit:
            return Checked(drifts[name])
        return Checked(
            drifts[name],
            f"{name} differ from those of plain torch ops by {drifts[name]:.1e} of their standard "
            f"deviation, the limit is {limit:.0e}",
        )

    async def timed() -> float:
        return (await scheduler.call(partial(run, backend), float("inf"), warmup_order())).device_s

    return await try_way(way, check, [timed])


def _drift(got: Tensor, want: Tensor) -> float:
    """Return the largest difference in standard deviations; infinite if a number is none."""
    if got.shape != want.shape:
        return float("inf")
    largest = float((got - want).abs().max())
    spread = max(float(want.std(correction=0)), 1e-6)
    return float("inf") if math.isnan(largest) else largest / spread


def _summary(way: Tried) -> str:
    if way.rejected:
        return f"{way.name} rejected: {way.rejected}"
    return f"{way.name} {way.total_ms:.2f} ms"


def _random(shape: BeamShape, device: torch.device, *sizes: Sequence[int]) -> list[Tensor]:
    made = torch.Generator().manual_seed(23)
    return [torch.randn(*size, generator=made).to(device, shape.dtype) for size in sizes]


def _attention(shape: BeamShape, device: torch.device) -> Run:
    kept = shape.prompt_tokens, shape.kv_heads, shape.head_dim
    own = shape.beams, shape.levels, shape.kv_heads, shape.head_dim
    rows = shape.beams, shape.query_heads, shape.head_dim
    k, v, own_k, own_v, q = _random(shape, device, kept, kept, own, own, rows)
    scale = shape.head_dim**-0.5
    call = BeamCall(q, [(k, v)], (own_k, own_v), shape.levels, None, scale)
    return lambda backend: {"rows": backend.beam_attention(call).float().cpu()}


def _topk(shape: BeamShape, device: torch.device) -> Run:
    rows, codes = shape.beams, min(shape.codes, MOST_CODES)
    (logits,) = _random(shape, device, (rows, codes))
    first = torch.arange(rows, device=device) * codes
    degree = torch.full_like(first, codes)
    code = torch.arange(codes, device=device, dtype=torch.int32).repeat(rows)
    allowed = torch.arange(rows * codes, device=device) % 3 > 0
    acc = torch.zeros(rows, device=device)
    log_probs = logits.float().log_softmax(1).flatten()

    def run(backend: Backend) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for what, edges in (("all", None), ("allowed", allowed)):
            follow = Continuations(first, degree, code, edges)
            score, parent, edge = backend.beam_topk(TopkCall(logits, acc, follow, rows))
            found[f"scores of {what} codes"] = score.float().cpu()
            # equal scores may come in another order: what was chosen must have these scores
            found[f"chosen of {what} codes"] = log_probs[edge].cpu()
            found[f"parents of {what} codes"] = (edge // codes - parent).float().cpu()
        return found

    return run


def _fork(shape: BeamShape, device: torch.device) -> Run:
    plane = shape.layers, shape.beams, shape.levels, shape.kv_heads, shape.head_dim
    keys, values = _random(shape, device, plane, plane)
    made = torch.Generator().manual_seed(29)
    parent = torch.randint(0, shape.beams, (shape.beams,), generator=made).sort().values.to(device)

    def run(backend: Backend) -> dict[str, Tensor]:
        forked = keys.clone(), values.clone()
        backend.beam_fork_(*forked, parent, shape.levels)
        return {"keys": forked[0].float().cpu(), "values": forked[1].float().cpu()}

    return run


RUNS: dict[str, Callable[[BeamShape, torch.device], Run]] = {
    "softmax_attention": _attention,
    "beam_topk": _topk,
    "beam_fork": _fork,
}
