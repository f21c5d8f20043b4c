"""NVIDIA devices: plain torch ops on the current device."""

from __future__ import annotations

import torch

from npu_gr.backend.torch_ops import TorchOps
from npu_gr.errors import ConfigError


class CUDABackend(TorchOps):
    """`backend: cuda`."""

    name = "cuda"
    kernels = "torch"
    pins_host_memory = True

    def __init__(self) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise ConfigError("backend 'cuda' is configured but cannot be loaded: torch sees no CUDA device")
        self.device = torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        torch.cuda.synchronize(self.device)
