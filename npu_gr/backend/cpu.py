"""The CPU: the native kernels of `ops/cpu` where they are built and fit, else plain torch ops."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor

from npu_gr.backend.base import Choices, Continuations, Over
from npu_gr.backend.native import Native, NativeError, load
from npu_gr.backend.native_topk import NativeTopk
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.errors import ConfigError

log = logging.getLogger(__name__)

NativeMode = Literal["auto", "require", "off"]


class CPUBackend(TorchOps):
    """`backend: cpu`."""

    name = "cpu"
    pins_host_memory = False

    def __init__(self, mode: NativeMode = "auto", isa: str = "") -> None:
        """Load the kernels.

        Args:
            mode: auto: use them if they are there, and say so; require: they must be there; off: torch ops alone.
            isa: a lower instruction set than the CPU's best, for tests and measurements.

        Raises:
            ConfigError: they are required and cannot be used.
        """
        self.device = torch.device("cpu")
        self.native: Native | None = None
        self.kernels = "torch"
        try:
            self.native = None if mode == "off" else load(isa)
        except NativeError as error:
            if mode == "require" or isa:
                raise ConfigError(f"native: the CPU kernels are required, but {error}") from error
            log.warning("the CPU kernels are missing, torch ops run instead, several times slower: %s", error)
        if self.native:
            self.kernels = self.native.isa
            self._topk = NativeTopk(self.native)

    def beam_topk(
        self,
        logits: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        over: Over = "row",
        codes: slice | None = None,
        scale: float = 1.0,
    ) -> Choices:
        """See `Backend.beam_topk`."""
        if self.native and self._topk.takes(logits, acc, follow):
            return self._topk.beam_topk(logits, acc, follow, width, over, codes, scale)
        return super().beam_topk(logits, acc, follow, width, over, codes, scale)

    def gathered_topk(
        self, hidden: Tensor, weight: Tensor, acc: Tensor, follow: Continuations, width: int, scale: float = 1.0
    ) -> Choices:
        """See `Backend.gathered_topk`."""
        if self.native and self._topk.takes(hidden, acc, follow):
            return self._topk.gathered_topk(hidden, weight, acc, follow, width, scale)
        return super().gathered_topk(hidden, weight, acc, follow, width, scale)

    def synchronize(self) -> None:
        """The CPU is never behind."""
