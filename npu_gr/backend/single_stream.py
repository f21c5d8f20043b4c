"""A device with one queue of work: everything runs in order, nothing beside it. Devices with streams override it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.backend.base import HstuPass
from npu_gr.backend.calls import (
    HstuFindCall,
    HstuFound,
    HstuPassCall,
    HstuShape,
    HstuWholeCall,
    OrderSums,
    OrderTables,
)

log = logging.getLogger(__name__)


class SingleStream:
    """Implement the parts of `Backend` that are not arithmetic."""

    device = torch.device("cpu")
    pins_host_memory = False
    gathers_head = True

    def __init__(self) -> None:
        self.ops: Mapping[str, str] = {}
        self.on_fallback: Callable[[str], None] = lambda _op: None
        self._said: set[str] = set()

    def fell_back(self, op: str, why: str) -> None:
        """Count a call of `op` that does not run as `ops` says; log the reason the first time."""
        self.on_fallback(op)
        if op not in self._said:
            self._said.add(op)
            log.warning("%s: %s; torch ops run instead, said once", op, why)

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        host = torch.tensor(array)  # a copy: the array may be a view of a read-only body
        if not self.pins_host_memory:
            return host.to(self.device)
        # torch keeps page-locked blocks and hands one out again only when the copy from it is done
        return host.pin_memory().to(self.device, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        host = torch.cat([own.flatten() for own in tensors]).to("cpu", torch.float32)
        parts = host.split([own.numel() for own in tensors])
        return [part.view(own.shape).numpy() for part, own in zip(parts, tensors, strict=True)]

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        self.synchronize()
        return lambda: None

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """Fork in two passes, without a second slab.

        The first pass writes the rows whose parent stands behind them, the second pass the others. No row that the
        first pass has overwritten is read afterwards, *because parents do not decrease*.
        """
        row = torch.arange(len(parent), device=parent.device)
        for moves in (parent > row, parent < row):
            to = torch.nonzero(moves).squeeze(1)
            for plane in (keys, values):
                plane[:, to, :num_slots] = plane[:, parent[to], :num_slots]

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        """Have one way, which is chosen with the kernels: pages are laid out for it."""
        return (self.ops.get("hstu_attention", "torch"),) if shape.has_plain_times else ("torch",)

    def running(self, way: str) -> Self:
        """Name the way: which kernel a call runs follows from the call."""
        if self.ops.get("hstu_attention", "torch") == way:
            return self
        made = copy.copy(self)
        made.ops = {**self.ops, "hstu_attention": way}
        return made

    def order_of(self, numbers: Tensor) -> Tensor:
        return torch.argsort(numbers, stable=True)

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        return work(*rows)

    def hstu_pass(self, call: HstuPassCall) -> HstuPass | None:
        """Have no kernels for whole layers."""
        return None

    def hstu_whole(self, call: HstuWholeCall) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """Have no kernels for whole passes."""
        return None

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        """Have no kernel for it."""
        return None

    def order_sums(self, tables: OrderTables) -> OrderSums | None:
        """Have no kernel for it."""
        return None

    def synchronize(self) -> None:
        """Return at once: on the CPU nothing is queued."""
