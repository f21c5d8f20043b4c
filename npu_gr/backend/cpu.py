"""The CPU: plain torch ops."""

from __future__ import annotations

import torch

from npu_gr.backend.torch_ops import TorchOps


class CPUBackend(TorchOps):
    """`backend: cpu`."""

    name = "cpu"
    pins_host_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        """The CPU is never behind."""
