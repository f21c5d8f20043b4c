"""Words of the configuration that choose a backend, and whether it uses our own kernels."""

from __future__ import annotations

from typing import Literal

BackendName = Literal["cpu", "cuda", "npu", "reference"]
ASCEND: BackendName = "npu"  # whose operators are built by hand
NativeMode = Literal["auto", "require", "off"]
# what runs a ranker's attention: measured at warm-up, or one of `Backend.hstu_ways`
AttentionMode = Literal["auto", "ascend_c", "mxrec", "triton", "torch"]
