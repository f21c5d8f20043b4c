"""Values of the configuration that choose a backend and the use of our own kernels."""

from __future__ import annotations

from typing import Literal

BackendName = Literal["cpu", "cuda", "npu", "reference"]
ASCEND: BackendName = "npu"  # its native operators are not built by pip
NativeMode = Literal["auto", "require", "off"]
# implementation of a ranker's attention: measured at warm-up, or one of `Backend.hstu_ways`
AttentionMode = Literal["auto", "ascend_c", "mxrec", "triton", "torch"]
