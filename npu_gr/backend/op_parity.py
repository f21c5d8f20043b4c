"""Compare every op of a backend with its slow definition, on a few hundred rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Hidden
from npu_gr.backend.calls import BeamCall, BiasTables, Continuations, HstuCall, TopkCall
from npu_gr.backend.checks import Finding, FindingState
from npu_gr.backend.reference import ReferenceBackend

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}  # of the result's largest number


def compare(backend: Backend) -> list[Finding]:
    """Run every op of a backend and of the reference in fp32 and bf16; one finding an op."""
    findings = []
    for name, run in OPS.items():
        impl = backend.ops.get(name, "torch")
        worst = max(_difference(run, backend, dtype) / TOLERANCE[dtype] for dtype in TOLERANCE)
        state = FindingState.OK if worst <= 1.0 else FindingState.BROKEN
        remedy = (
            ""
            if state is FindingState.OK
            else "do not serve with it: report this line, and set `native: off` meanwhile"
        )
        findings.append(Finding(f"{backend.name}: {name}", state, f"{impl}; {worst:.1%} of the tolerance", remedy))
    return findings


Op = Callable[[Backend, torch.dtype], Tensor]


def _difference(run: Op, backend: Backend, dtype: torch.dtype) -> float:
    got = run(backend, dtype).to("cpu", torch.float64)
    want = run(ReferenceBackend(), dtype).to(torch.float64)
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


def _made(backend: Backend, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).to(backend.device) for shape in shapes]


def _times(backend: Backend, num: int) -> Tensor:
    return (torch.arange(num) * 3600).to(backend.device)


def _hstu(backend: Backend, dtype: torch.dtype) -> Tensor:
    q, k, past_k = _made(backend, dtype, (40, 2, 16), (40, 2, 16), (170, 2, 16))
    bias = BiasTables(*_made(backend, dtype, (2, 64), (2, 64)))
    past = [(past_k, past_k.flip(0))]
    times = _times(backend, 210)
    causal = backend.hstu_causal(HstuCall(q, k, q.flip(0), past, times, bias, 0.25))
    targets = backend.hstu_targets(HstuCall(q, k, q.flip(0), past, times[:170], bias, 0.25, query_time=10**6))
    return torch.cat([causal, targets])


def _attention(backend: Backend, dtype: torch.dtype) -> Tensor:
    q, k, past, own = _made(backend, dtype, (40, 4, 16), (40, 2, 16), (170, 2, 16), (40, 3, 2, 16))
    causal = backend.causal_attention(q, k, k.flip(0), [(past, past)], 0.25)
    call = BeamCall(q, [(past, past)], (own, own), 2, None, 0.25)
    beams = backend.beam_attention(call)
    plain = backend.beam_attention_plain(call)
    return torch.cat([causal, beams, plain])


def _topk(backend: Backend, dtype: torch.dtype) -> Tensor:
    (logits,) = _made(backend, dtype, (16, 64))
    lo = torch.arange(16).to(backend.device) * 8
    code = torch.arange(128, dtype=torch.int32).to(backend.device) % 64
    follow = Continuations(lo, torch.full_like(lo, 8), code)
    chosen = backend.beam_topk(TopkCall(logits, torch.zeros(16, device=backend.device), follow, 32))
    return torch.stack([chosen.score, chosen.parent, chosen.edge])


def _fork(backend: Backend, dtype: torch.dtype) -> Tensor:
    keys, values = _made(backend, dtype, (2, 16, 3, 2, 8), (2, 16, 3, 2, 8))
    parent = (torch.arange(16) // 3).to(backend.device)
    backend.beam_fork_(keys, values, parent, 2)
    return torch.stack([keys, values])


def _items(backend: Backend, dtype: torch.dtype) -> Tensor:
    queries, items = (x.float() for x in _made(backend, dtype, (3, 16), (500, 16)))
    pairs = Hidden(torch.arange(40) % 3, torch.arange(40) * 7)  # on the host
    found = backend.best_items(queries, items, 20, pairs)
    return torch.stack([found.scores, found.items])


OPS: dict[str, Op] = {
    "hstu_attention": _hstu,
    "softmax_attention": _attention,
    "beam_topk": _topk,
    "beam_fork": _fork,
    "best_items": _items,
}
