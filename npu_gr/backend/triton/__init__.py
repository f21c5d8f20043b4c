"""Triton kernels of the hot ops.

Imported only if triton is installed; `TRITON_INTERPRET=1` runs them on a CPU.

Triton compiles a kernel at its first launch, and again for arguments of other types or alignment.
The hook here tells the heartbeat of the device thread, so that a request that waits for the
compiler does not make the instance unready.
"""

from __future__ import annotations

import triton
from triton.runtime.jit import JITFunction

from npu_gr.core.health import compiles


def _before_compile(**_: object) -> bool:
    compiles()
    return False  # do compile


if hasattr(triton, "knobs"):
    triton.knobs.runtime.jit_cache_hook = _before_compile
else:  # Triton-Ascend 3.2
    JITFunction.cache_hook = staticmethod(_before_compile)
