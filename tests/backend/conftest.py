"""The native kernels, once for each instruction set of this CPU.

Triton's, on the GPU or interpreted.
"""

from __future__ import annotations

import os

import pytest
import torch

from npu_gr.backend.cpu.library import ISAS, Native, load, supported

if not torch.cuda.is_available():
    # read when triton is imported, and when a kernel is
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", params=ISAS)
def native(request: pytest.FixtureRequest) -> Native:
    if request.param not in supported():
        pytest.skip(f"{request.param}: not this CPU's, or no library was built")
    return load(request.param)


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Where the Triton kernels run."""
    triton = pytest.importorskip(
        "triton", reason="triton is not installed: pip install 'npu_gr[triton]'"
    )
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported before this folder could ask for its interpreter")
    return torch.device("cpu")
