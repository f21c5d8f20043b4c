"""The CPU: the native kernels of `ops/cpu` where they are built and fit, else plain torch ops."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from npu_gr.backend.native import Native, NativeError, load
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

    def synchronize(self) -> None:
        """The CPU is never behind."""
