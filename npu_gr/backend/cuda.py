"""The backend of NVIDIA devices: Triton kernels if triton is installed, else torch ops.

Not yet run by us.

Each thread has its own stream. The work between two attentions of a decode step is one graph for
each bucket of rows; the attentions read slabs at addresses that change, and are launched one by
one.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from npu_gr.backend.base import BEAM_OPS, HSTU
from npu_gr.backend.calls import BeamCall, Choices, HstuCall, HstuShape, TopkCall
from npu_gr.backend.streams import StreamedOps
from npu_gr.core.errors import ConfigError

log = logging.getLogger(__name__)

_KERNELS = "npu_gr.backend.triton"


class CUDABackend(StreamedOps):
    """Runs Triton kernels if triton is installed and they support the call, else torch ops."""

    name = "cuda"

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """Find the current device; tests pass a recording stub as `cuda`."""
        if not cuda.is_available():
            raise ConfigError(
                "backend 'cuda' is configured but cannot be loaded: torch sees no CUDA device"
            )
        device = torch.device("cuda", cuda.current_device()) if cuda is torch.cuda else cuda.device
        super().__init__(cuda, device, cuda.CUDAGraph)
        self._triton: Any = _triton_ops()
        self._hstu: Any = self._triton.hstu.Attention() if self._triton else None
        self.kernels = "triton" if self._triton else "torch"
        self.ops = dict.fromkeys((HSTU, *BEAM_OPS), self.kernels)
        self.ops |= {"graphs": "cuda_graph"}

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        is_read = shape.kept_dtype in (shape.dtype, torch.int8) and shape.has_plain_times
        takes = self._hstu and is_read and self._hstu.takes_numbers(shape.dtype)
        return ("triton", "torch") if takes else ("torch",)

    def beam_ways(self) -> Mapping[str, Sequence[str]]:
        return dict.fromkeys(BEAM_OPS, ("triton", "torch")) if self._triton else {}

    def hstu_causal(self, call: HstuCall) -> Tensor:
        if self._uses(HSTU):
            read = call.as_stored(is_causal=True)
            if read.is_plain and self._hstu.takes(read.q, read.cached):
                out: Tensor = self._hstu.causal(read, read.cached)
                return out
        return super().hstu_causal(call)

    def hstu_targets(self, call: HstuCall) -> Tensor:
        if self._uses(HSTU):
            read = call.as_stored(is_causal=False)
            if read.is_plain and self._hstu.takes(read.q, read.cached):
                out: Tensor = self._hstu.targets(read, read.cached)
                return out
        return super().hstu_targets(call)

    def beam_attention(self, call: BeamCall) -> Tensor:
        if self._uses("softmax_attention") and self._triton.beams.takes(call):
            out: Tensor = self._triton.beams.attend(call)
            return out
        return super().beam_attention(call)

    def beam_topk(self, call: TopkCall) -> Choices:
        if self._uses("beam_topk") and self._triton.topk.takes(call):
            made: Choices = self._triton.topk.beam_topk(call)
            return made
        return super().beam_topk(call)

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        if self._uses("beam_fork") and len(parent) <= self._triton.fork.MAX_BEAMS:
            for plane in (keys, values):
                self._triton.fork.fork(plane, parent, num_slots)
        else:
            super().beam_fork_(keys, values, parent, num_slots)

    def _uses(self, op: str) -> bool:
        return self.ops[op] == "triton"


def _triton_ops() -> ModuleType | None:
    """Import the kernels' package with all its modules; None if triton is not installed."""
    try:
        for part in ("beams", "fork", "hstu", "topk"):
            importlib.import_module(f"{_KERNELS}.{part}")
    except ImportError as error:
        log.warning("the Triton kernels cannot be imported, torch ops run instead: %s", error)
        return None
    return importlib.import_module(_KERNELS)
