"""The peak rates of this CPU, measured in the same run as the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from npu_gr.backend.cpu.library import Native

_READ_FLOATS = 64 << 20  # 256 MiB: more than a last-level cache


@dataclass(frozen=True, slots=True)
class Roofs:
    """Peak rates of one core."""

    read_bytes_s: float  # sequential reads from memory
    f32_flops: float
    bf16_flops: float | None  # None = the CPU has no bf16 dot product


def cpu_s(run: Callable[[], object], repeats: int) -> float:
    """Return the best CPU time of this thread over `repeats` runs, to exclude disturbances."""
    best = float("inf")
    for _ in range(repeats):
        began_at = time.thread_time()
        run()
        best = min(best, time.thread_time() - began_at)
    return best


def measure(native: Native) -> Roofs:
    """Measure the roofs; takes about a second."""
    kernels = native.kernels
    repeats = 4000
    data = torch.zeros(_READ_FLOATS)
    read_s = cpu_s(lambda: kernels.probe_read(data.data_ptr(), len(data)), 5)
    f32_s = cpu_s(lambda: kernels.probe_fma_f32(repeats), 5)
    bf16 = None
    if native.has_bf16_dot:
        bf16 = (
            kernels.probe_flops_bf16 * repeats / cpu_s(lambda: kernels.probe_fma_bf16(repeats), 5)
        )
    return Roofs(data.nbytes / read_s, kernels.probe_flops_f32 * repeats / f32_s, bf16)
