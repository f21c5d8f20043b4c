"""A pretended torch_npu: a device `npu` whose memory is this machine's.

See tests/ops/pretended/toolkit.py.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch_npu import npu as npu

__version__ = "2.13.0"

_HERE = Path(__file__).parent
torch.ops.load_library(_HERE / "lib" / "libtorch_npu.so")
npu.library = ctypes.CDLL(str(_HERE / "lib" / "libtorch_npu.so"))
npu.library.pretended_begin()
torch.utils.backend_registration.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)

# where a test has put our library, in place of the package's own folder
if "PRETENDED_LIBRARIES" in os.environ:
    from npu_gr.backend.npu import ops

    ops.LIBRARIES = Path(os.environ["PRETENDED_LIBRARIES"])
