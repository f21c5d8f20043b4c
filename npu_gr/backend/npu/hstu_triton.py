"""Loads the Triton kernel of HSTU for an NPU (`attention: triton`) and checks its results."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import ConfigError

MODULE = "npu_gr.backend.triton.hstu_ascend"
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # relative to the largest result


def load(device: torch.device) -> Any:
    """Make the kernel's `Attention`.

    Raises:
        ConfigError: triton-ascend cannot be imported, or the kernel's results differ from the
            definition.
    """
    try:
        attention = importlib.import_module(MODULE).NpuAttention()
    except ImportError as error:
        raise ConfigError(
            f"attention: triton needs triton-ascend, which brings triton: {error}"
        ) from error
    if wrong := _disagreement(attention, device):
        raise ConfigError(f"attention: the Triton kernel computes something else: {wrong}")
    return attention


def _disagreement(attention: Any, device: torch.device) -> str:
    """Return how the kernel differs from the definition on a few rows; "" = it does not."""
    generator = torch.Generator().manual_seed(0)
    plain = TorchOps()
    for dtype, tolerance in TOLERANCES.items():
        q, k, v = (torch.randn(40, 2, 16, generator=generator).to(device, dtype) for _ in range(3))
        past_k, past_v = (
            torch.randn(170, 2, 16, generator=generator).to(device, dtype) for _ in range(2)
        )
        tables = [torch.randn(2, 64, generator=generator).to(device, dtype) for _ in range(2)]
        times = (torch.arange(210) * 3600).to(device)
        past = [(past_k, past_v)]
        call = HstuCall(q, k, v, past, times, BiasTables(*tables), 0.25)
        shown = call._replace(times=times[:170], query_time=10**6)
        for name, got, want in (
            ("history rows", attention.causal(call, past), plain.hstu_causal(call)),
            ("candidates", attention.targets(shown, past), plain.hstu_targets(shown)),
        ):
            worst = float((got.float() - want.float()).abs().max() / want.float().abs().max())
            if not worst <= tolerance:
                return f"{name} in {dtype} differ by {worst:.1e}"
    return ""
