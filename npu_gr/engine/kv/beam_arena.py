"""Unshared KV: the few tokens that each beam has added to its prompt, one slot a round. Allocated once and reused.

It also holds the memory of a round's logits: a new tensor would cost page faults in every round.

Source: the separated KV cache of xGR (arXiv:2512.11529).
Invariant: slot s of row i holds round s of beam i (after `move`), or of beam ancestry[s, i] (with `fork_ancestry`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npu_gr.backend.single_stream import SingleStream

Slab = tuple[Tensor, Tensor]
Fork = Callable[[Tensor, Tensor, Tensor, int], None]  # the signature of `Backend.beam_fork_`

_IN_TWO_PASSES: Fork = SingleStream().beam_fork_


class BeamArena:
    """Keys and values of up to `max_beams` beams. H = KV heads, D = width of a head."""

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
            num_layers: of the decoder.
            num_heads: KV heads.
            head_dim: width of a head.
            max_beams: of all requests of a pass.
            num_slots: rounds whose KV is read again: the levels of the catalogue, less one.
            dtype: of keys, values and logits.
            device: whose memory.
            fork: `beam_fork_` of the backend.
        """
        self.max_beams = max_beams
        self.num_slots = num_slots
        self._fork = fork
        shape = (num_layers, max_beams, num_slots, num_heads, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._logits = torch.empty(0, dtype=dtype, device=device)

    def part(self, first: int, count: int) -> BeamArena:
        """Return a view of `count` beams: each of several requests that share the memory gets its own."""
        assert 0 <= first <= first + count <= self.max_beams
        view = object.__new__(BeamArena)
        view.max_beams = count
        view.num_slots = self.num_slots
        view._fork = self._fork
        view._logits = self._logits[:0]  # none: a view allocates its own if it needs them
        view._keys, view._values = (plane[:, first : first + count] for plane in (self._keys, self._values))
        return view

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values."""
        return 2 * self._keys.nbytes

    def slabs(self, layer: int) -> Slab:
        """Return views of the keys and values of one layer, [max_beams, slots, H, D] each."""
        return self._keys[layer], self._values[layer]

    def logits(self, num_rows: int, num_columns: int) -> Tensor:
        """Return uninitialised memory for a round's logits [rows, columns].

        It is the same memory each time; the warm-up makes it grow to its largest size.
        """
        count = num_rows * num_columns
        if len(self._logits) < count:
            self._logits = self._logits.new_empty(count)
        return self._logits[:count].view(num_rows, num_columns)

    def move(self, parent: Tensor, num_slots: int) -> None:
        """Fork in place: the first `num_slots` slots of row i become those of row parent[i] (`Backend.beam_fork_`)."""
        self._fork(self._keys, self._values, parent, num_slots)


def fork_ancestry(ancestry: Tensor, parent: Tensor) -> Tensor:
    """Fork by index: no KV moves, a table says which row holds each slot of a beam.

    Args:
        ancestry: int64 [slots, rows before]: the table of the rounds so far.
        parent: int64 [rows]: the beam that each new beam grew from.

    Returns:
        int64 [slots + 1, rows]: the table of the new beams. A new beam's own token goes into its own row.
    """
    own = torch.arange(len(parent), device=parent.device)
    return torch.cat([ancestry[:, parent], own[None]])
