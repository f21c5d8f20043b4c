"""Base of the CUDA and Ascend backends: a stream per thread, a stream for copies, and graphs.

A copy runs after everything that its thread queued before; only the user of the bytes waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.backend.graphs import Graphs
from npu_gr.backend.torch_ops import TorchOps


class StreamedOps(TorchOps):
    """Runs torch ops on the streams of a device."""

    pins_host_memory = True
    has_windows = False  # the kernels of devices know full attention alone

    def __init__(self, runtime: Any, device: torch.device, graph: Callable[[], Any] | None) -> None:
        """Make the stream for copies.

        Args:
            runtime: torch.cuda or torch.npu.
            device: The device.
            graph: Constructor of an empty graph; None = the runtime has no graphs.
        """
        super().__init__()
        self._runtime = runtime
        self.device = device
        self._copies = runtime.Stream()
        calls = self.fell_back, self.ran, self.padded
        self._graphs = Graphs(runtime, graph, *calls) if graph else None

    def ran(self, outcome: str) -> None:
        """Count a call that may have used a graph."""
        self.on_graph(outcome)

    def padded(self, what: str, used: int, size: int) -> None:
        """Count the size of a call that is padded to that of a graph."""
        self.on_padding(what, used, size)

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        # torch caches page-locked blocks, and reuses one only when the copy from it is done
        return torch.tensor(array).pin_memory().to(self.device, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        host = torch.cat([own.flatten() for own in tensors]).to("cpu", torch.float32)
        parts = host.split([own.numel() for own in tensors])
        return [part.view(own.shape).numpy() for part, own in zip(parts, tensors, strict=True)]

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._runtime.set_device(self.device)
        own = self._runtime.Stream()
        own.wait_event(self._now())  # wait for the writes of weights and pools
        with self._runtime.stream(own):
            yield

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        self._copies.wait_event(self._now())
        after = self._runtime.Event()
        with self._runtime.stream(self._copies):
            work()
        after.record(self._copies)

        def wait() -> None:
            self._runtime.set_device(self.device)  # for the waiting thread
            after.synchronize()

        return wait

    def _now(self) -> Any:
        """Record an event behind the work that this thread has queued so far."""
        event = self._runtime.Event()
        event.record(self._runtime.current_stream())
        return event

    def synchronize(self) -> None:
        self._runtime.current_stream().synchronize()

    def release_memory(self) -> None:
        self._runtime.empty_cache()

    def free_bytes(self) -> int | None:
        runtime, device = self._runtime, self.device
        kept = runtime.memory_reserved(device) - runtime.memory_allocated(device)
        return int(runtime.mem_get_info(device)[0] + kept)

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        return self._graphs.row_wise(owner, what, work, rows) if self._graphs else work(*rows)
