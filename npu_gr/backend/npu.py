"""Ascend devices through torch_npu: plain torch ops. Not yet run on an NPU by us."""

from __future__ import annotations

import importlib

import torch

from npu_gr.backend.torch_ops import TorchOps
from npu_gr.errors import ConfigError


class NPUBackend(TorchOps):
    """`backend: npu`."""

    name = "npu"
    kernels = "torch"
    pins_host_memory = True

    def __init__(self) -> None:
        try:
            self._torch_npu = importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"backend 'npu' is configured but cannot be loaded: {error}; it needs CANN and "
                "pip install 'npu_gr[npu]'"
            ) from error
        if not self._torch_npu.npu.is_available():
            raise ConfigError("backend 'npu' is configured but cannot be loaded: torch_npu sees no NPU")
        self.device = torch.device("npu", self._torch_npu.npu.current_device())

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch_npu.npu.synchronize()
