"""Time buckets of checkpoints trained elsewhere, as the whole seconds at which each bucket begins.

Public code computes a bucket in fp32 (log or sqrt of seconds, divided, floored). Vectorised logarithms differ in the
last place from device to device, and so would a bucket whose edge a time difference just meets. Seconds are whole
numbers: the edges are found once, here, and comparing with them is exact on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_gr.model.config import TimeBuckets

NEVER_S = 1 << 40  # 35,000 years


def bucket_by_formula(times: TimeBuckets, seconds: Tensor) -> Tensor:
    """Compute the bucket of int64 seconds >= 0 as public code does, in fp32: the definition."""
    scaled = seconds.clamp(min=1).float() / times.unit_s
    if times.function == "log":
        scaled = scaled.log()
    elif times.function == "sqrt":
        scaled = scaled.sqrt()
    return (scaled / times.divisor).floor().clamp(0, times.count - 1).long()


def edges_of(times: TimeBuckets) -> Tensor:
    """Find the least second of every bucket but the first, int64 [count - 1]; `NEVER_S` where there is none.

    By bisection: the formula does not decrease.
    """
    wanted = torch.arange(1, times.count, device="cpu")  # also where a model is made without memory
    low = torch.zeros_like(wanted)  # every earlier second is in a lower bucket
    high = torch.full_like(wanted, NEVER_S)
    while bool((high > low).any()):
        middle = (low + high) // 2
        reached = bucket_by_formula(times, middle) >= wanted
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle + 1)
        low = torch.minimum(low, high)
    return high
