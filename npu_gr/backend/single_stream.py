"""What a device does that has one queue of work: everything in order, nothing beside it. Others override it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


class InOrder:
    """The part of `Backend` that is no arithmetic."""

    device = torch.device("cpu")
    pins_host_memory = False

    def __init__(self) -> None:
        self.ops: Mapping[str, str] = {}
        self.on_fallback: Callable[[str], None] = lambda _op: None
        self._said: set[str] = set()

    def fell_back(self, op: str, why: str) -> None:
        """A call of this op does not run as `ops` says: counted, and said once."""
        self.on_fallback(op)
        if op not in self._said:
            self._said.add(op)
            log.warning("%s: %s; torch ops run instead, said once", op, why)

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """See `Backend.upload`."""
        host = torch.tensor(array)  # a copy: the array may be a view of a read-only body
        if not self.pins_host_memory:
            return host.to(self.device)
        # torch keeps page-locked blocks and hands one out again only when the copy from it is done
        return host.pin_memory().to(self.device, non_blocking=True)

    def stream(self) -> AbstractContextManager[None]:
        """See `Backend.stream`."""
        return nullcontext()

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Backend.copy`."""
        work()
        self.synchronize()
        return lambda: None

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """See `Backend.beam_fork_`. Two passes without a second slab.

        Rows whose parent stands behind them first, then the others. A row that is overwritten in the first pass is
        never read afterwards, *because parents do not decrease*.
        """
        row = torch.arange(len(parent), device=parent.device)
        for moves in (parent > row, parent < row):
            to = torch.nonzero(moves).squeeze(1)
            for plane in (keys, values):
                plane[:, to, :num_slots] = plane[:, parent[to], :num_slots]

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """See `Backend.row_wise`."""
        return work(*rows)

    def synchronize(self) -> None:
        """The CPU is never behind."""
