"""Unshared KV: the few tokens that beams have added to their prompt, one slot a round. Allocated once, reused.

Beside it the memory of a round's logits, which a fresh tensor would have to fault in each time.

Source: the separated KV cache of xGR (arXiv:2512.11529); `xgr.md` 2.2 and 2.4.
Invariant: slot s of row i holds round s of beam i (after `move`), or of beam ancestry[s, i] (after `ancestry`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npu_gr.backend.single_stream import SingleStream

Slab = tuple[Tensor, Tensor]
Fork = Callable[[Tensor, Tensor, Tensor, int], None]  # as `Backend.beam_fork_`

_IN_TWO_PASSES: Fork = SingleStream().beam_fork_


class BeamArena:
    """Keys and values of up to `max_beams` beams. H = KV heads, D = their width."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_beams: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        fork: Fork = _IN_TWO_PASSES,
    ) -> None:
        """Allocate.

        Args:
            num_slots: rounds whose KV is read again: levels of the catalogue - 1.
            fork: the backend's.
        """
        self.max_beams, self.num_slots, self._fork = max_beams, num_slots, fork
        shape = (num_layers, max_beams, num_slots, num_heads, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._logits = torch.empty(0, dtype=dtype, device=device)

    def part(self, first: int, count: int) -> BeamArena:
        """The beams of one of several requests that share the memory; a view."""
        assert 0 <= first <= first + count <= self.max_beams
        view = object.__new__(BeamArena)
        view.max_beams, view.num_slots, view._fork = count, self.num_slots, self._fork
        view._logits = self._logits[:0]  # of its own
        view._keys, view._values = (plane[:, first : first + count] for plane in (self._keys, self._values))
        return view

    @property
    def num_bytes(self) -> int:
        """Of both planes."""
        return 2 * self._keys.nbytes

    def slabs(self, layer: int) -> Slab:
        """K and v [max_beams, slots, H, D] of one layer; views."""
        return self._keys[layer], self._values[layer]

    def logits(self, num_rows: int, num_columns: int) -> Tensor:
        """Room for a round's logits [rows, columns], not written: the same memory each time; warm-up makes it grow."""
        count = num_rows * num_columns
        if len(self._logits) < count:
            self._logits = self._logits.new_empty(count)
        return self._logits[:count].view(num_rows, num_columns)

    def move(self, parent: Tensor, num_slots: int) -> None:
        """Fork in place: the first slots of row i become those of row parent[i]; see `Backend.beam_fork_`."""
        self._fork(self._keys, self._values, parent, num_slots)


def fork_ancestry(ancestry: Tensor, parent: Tensor) -> Tensor:
    """Fork by index: nothing moves, the table says which row holds each slot.

    Args:
        ancestry: int64 [slots, rows before] of the rounds so far.
        parent: int64 [rows].

    Returns:
        int64 [slots + 1, rows]: the new beams' table; their next token goes into the row of its own.
    """
    own = torch.arange(len(parent), device=parent.device)
    return torch.cat([ancestry[:, parent], own[None]])
