"""The hot ops of a device against torch's ops on it: `python -m benchmarks kernels --device NAME`.

It measures the wall time of one op and a wait for the device. The floor is the bytes that an op
must read and write, at the bandwidth of a large copy in the same run. Results are checked before
anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame import Line, percentiles, timed, timed_in_turn
from npu_gr.backend.base import TIME_BUCKETS, Backend
from npu_gr.backend.calls import BeamCall, BiasTables, Choices, Continuations, HstuCall, TopkCall
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.backend.torch_ops import TorchOps

COPY_BYTES = 1 << 29
# selection
WIDTHS = (128, 512)
CODES = 8192
# ranker
LENGTHS = (1024, 4096)
CANDIDATES = 500
HEADS = 4
WIDTH = 64
# decoder
PROMPT = 1024
BEAMS = 256
QUERY_HEADS = 16
KV_HEADS = 8
HEAD_DIM = 128
TOLERANCE = 5e-2  # relative to the largest result, in bf16

# name, bytes, method of a backend, its call
DeviceCase = tuple[str, int, str, HstuCall | BeamCall | TopkCall]


def lines(name: BackendName, seed: int, seconds: float) -> Iterator[Line]:
    """Measure all cases.

    Args:
        name: Name of the backend.
        seed: Random seed of the inputs.
        seconds: Seconds of a case.

    Raises:
        AssertionError: A result is wrong; it was not timed.
        ConfigError: This machine lacks the device.
    """
    backend = choose(name)
    torch.manual_seed(seed)
    pair = [
        torch.zeros(COPY_BYTES // 2, dtype=torch.uint8, device=backend.device) for _ in range(2)
    ]
    (samples,) = timed_in_turn([_waited(backend, partial(pair[0].copy_, pair[1]))], seconds)
    bytes_s = COPY_BYTES / min(samples)
    pair.clear()
    for case, num_bytes, method, call in _cases(backend.device):
        runs = [partial(getattr(each, method), call) for each in (backend, TorchOps())]
        _check(runs[0](), runs[1](), case)
        ours, theirs = timed_in_turn([_waited(backend, run) for run in runs], seconds)
        floor_s = num_bytes / bytes_s
        case = f"{case}, {backend.kernels} on {backend.device.type}"
        of_floor = percentiles(ours)[0] / floor_s
        yield timed(
            "kernels", case, ours, "torch ops", theirs, floor=floor_s * 1e3, of_floor=of_floor
        )


def _waited(backend: Backend, op: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        op()
        backend.synchronize()

    return run


def _check(got: Any, want: Any, case: str) -> None:
    got, want = ((x.score if isinstance(x, Choices) else x).double() for x in (got, want))
    assert got.shape == want.shape, case
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max()), case


def _cases(device: torch.device) -> Iterator[DeviceCase]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    for width in WIDTHS:
        logits = random(width, CODES)
        acc = torch.randn(width, device=device)
        every = torch.arange(CODES, dtype=torch.int32, device=device).repeat(width)
        lo = torch.arange(width, device=device) * CODES
        follow = Continuations(lo, torch.full_like(lo, CODES), every)
        yield (
            f"beam_topk BW={width} V={CODES}",
            logits.nbytes,
            "beam_topk",
            TopkCall(logits, acc, follow, width),
        )
    for length in LENGTHS:
        q, k, v = random(3, length, HEADS, WIDTH)
        times = torch.arange(length, device=device) * 3600
        bias = BiasTables(random(HEADS, 256), random(HEADS, TIME_BUCKETS))
        yield (
            f"hstu_causal L={length}",
            4 * q.nbytes,
            "hstu_causal",
            HstuCall(q, k, v, [], times, bias, 0.125),
        )
        own = q[:CANDIDATES], k[:CANDIDATES], v[:CANDIDATES]
        call = HstuCall(*own, [(k, v)], times, bias, 0.125, query_time=length * 3600)
        yield (
            f"hstu_targets L={length} M={len(own[0])}",
            2 * k.nbytes + 4 * own[0].nbytes,
            "hstu_targets",
            call,
        )
    k, v = random(2, PROMPT, KV_HEADS, HEAD_DIM)
    own_k, own_v = random(2, BEAMS, 2, KV_HEADS, HEAD_DIM)
    q = random(BEAMS, QUERY_HEADS, HEAD_DIM)
    beams = BeamCall(q, [(k, v)], (own_k, own_v), 2, None, HEAD_DIM**-0.5)
    num_bytes = sum(x.nbytes for x in (k, v, own_k, own_v, q, q))
    yield f"beam_attention prompt={PROMPT} BW={BEAMS}", num_bytes, "beam_attention", beams
