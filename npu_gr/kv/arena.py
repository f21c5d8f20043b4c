"""The memory of one tier: every page allocated and touched at start, read in place.

Keys and values are separate planes, `[layer, page, token, head, dim]`, so a run of consecutive pages of a layer is
one contiguous `[tokens, heads, dim]` slab: attention reads it without a gather, and a tier copy is a few long ones.
Where the layout says `tiles`, a page is `[tile, head, dims x 64 tokens]` instead, and a run is one `Tiles`.
Only the device thread calls these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from npu_gr.backend.tiles import TILE_TOKENS, Tiles, pack
from npu_gr.kv.layout import KVLayout, Run

Slab = tuple[Tensor, Tensor]
Kept = Sequence[Slab | Tiles] | None  # all tokens of a layer
Pack = Callable[[Tiles, int, Tensor, Tensor], None]  # as `tiles.pack`


class KVArena:
    """`num_pages` pages of one layout on one device."""

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, pinned: bool = False, pack: Pack = pack
    ) -> None:
        """`pack`: writes rows into tiles, for a layout of tiles: the backend's."""
        self.layout, self.num_pages, self._pack = layout, num_pages, pack
        group = TILE_TOKENS if layout.arrangement == "tiles" else 1
        shape = (layout.num_layers, num_pages, layout.page_tokens // group, layout.num_heads)

        def plane(width: int) -> Tensor:
            # zero_ after empty touches every page now, so that no request pays for the first fault
            empty = torch.empty(*shape, width * group, dtype=layout.torch_dtype, device=device, pin_memory=pinned)
            return empty.zero_()

        self._keys, self._values = (plane(width) for width in layout.widths)
        self._pinned = pinned

    def _slab(self, layer: int, run: Run) -> Slab:
        pages = slice(run.first_page, run.first_page + run.num_pages)
        return self._keys[layer, pages].flatten(0, 1), self._values[layer, pages].flatten(0, 1)

    def slabs(self, layer: int, runs: Sequence[Run], num_tokens: int) -> Sequence[Slab | Tiles]:
        """Each run in token order as the layout has it, exactly `num_tokens` in all; no copy."""
        if self.layout.arrangement == "natural":
            return self.views(layer, runs, num_tokens)
        found = []
        for run in runs:
            held = min(num_tokens, run.num_pages * self.layout.page_tokens)
            if held > 0:
                found.append(self._tiles(layer, run, held))
            num_tokens -= held
        return found

    def _tiles(self, layer: int, run: Run, num_tokens: int) -> Tiles:
        k, v = self._slab(layer, run)
        used = -(-num_tokens // TILE_TOKENS)
        return Tiles(k[:used], v[:used], num_tokens, self.layout.qk_dim, self.layout.v_dim)

    def views(self, layer: int, runs: Sequence[Run], num_tokens: int) -> list[Slab]:
        """As `slabs`, of a natural layout: (k [m, H, Dq], v [m, H, Dv])."""
        assert self.layout.arrangement == "natural"
        slabs = []
        for run in runs:
            if num_tokens <= 0:
                break
            k, v = self._slab(layer, run)
            slabs.append((k[:num_tokens], v[:num_tokens]))
            num_tokens -= len(k)
        return slabs

    def write(self, layer: int, runs: Sequence[Run], start_token: int, k: Tensor, v: Tensor) -> None:
        """Put rows k [n, H, Dq], v [n, H, Dv] at tokens start_token..start_token+n, in the arena's dtype.

        In tiles, the rest of the last written tile is no longer there: write a prefix in token order.
        """
        if self.layout.arrangement == "tiles":
            self._write_tiles(layer, runs, start_token, k, v)
            return
        done = 0
        for slab_k, slab_v in self._slabs_from(layer, runs, start_token):
            part = slice(done, done + len(slab_k))
            rows = len(k[part])
            slab_k[:rows].copy_(k[part])
            slab_v[:rows].copy_(v[part])
            done += rows
            if done == len(k):
                return
        assert done == len(k), f"{len(k) - done} rows do not fit the pages"

    def sink(self, runs: Sequence[Run], start_token: int = 0) -> Callable[[int, Tensor, Tensor], Kept]:
        """For a model's forward pass: writes each layer's rows behind `start_token` tokens that are there already.

        It gives back all of the layer's tokens where attention should read them here rather than in the rows: if they
        lie in tiles and are the same numbers, since packing the rows a second time would cost as much again.
        """

        def keep(layer: int, k: Tensor, v: Tensor) -> Kept:
            self.write(layer, runs, start_token, k, v)
            if self.layout.arrangement == "natural" or self.layout.torch_dtype != k.dtype:
                return None
            return self.slabs(layer, runs, start_token + len(k))

        return keep

    def _write_tiles(self, layer: int, runs: Sequence[Run], start_token: int, k: Tensor, v: Tensor) -> None:
        for run in runs:
            room = run.num_pages * self.layout.page_tokens
            here = max(0, min(room - start_token, len(k)))
            if here:
                self._pack(self._tiles(layer, run, room), start_token, k[:here], v[:here])
            k, v, start_token = k[here:], v[here:], max(0, start_token - room)
        assert not len(k), f"{len(k)} rows do not fit the pages"

    def _slabs_from(self, layer: int, runs: Sequence[Run], start_token: int) -> Iterator[Slab]:
        for run in runs:
            k, v = self._slab(layer, run)
            if start_token < len(k):
                yield k[start_token:], v[start_token:]
            start_token = max(0, start_token - len(k))

    def zero(self, runs: Sequence[Run]) -> None:
        """Overwrite pages."""
        for first, count in runs:
            self._keys[:, first : first + count].zero_()
            self._values[:, first : first + count].zero_()

    def copy_tokens_from(
        self, source: KVArena, source_runs: Sequence[Run], target_runs: Sequence[Run], num_tokens: int
    ) -> None:
        """Copy a prefix from another tier of the same layout, whole pages, bit for bit.

        Asynchronous where either side is page-locked: synchronise before the bytes are used.
        """
        assert source.layout == self.layout
        non_blocking = self._pinned or source._pinned
        pages = self.layout.pages(num_tokens)
        for source_page, target_page, count in _common_runs(source_runs, target_runs, pages):
            from_, to = slice(source_page, source_page + count), slice(target_page, target_page + count)
            pairs = ((self._keys, source._keys), (self._values, source._values))
            for target_plane, source_plane in pairs:
                if not non_blocking:
                    target_plane[:, to].copy_(source_plane[:, from_])
                    continue
                # layer by layer both sides are contiguous; torch copies anything else through pageable memory
                for into, out_of in zip(target_plane, source_plane, strict=True):
                    into[to].copy_(out_of[from_], non_blocking=True)


def _common_runs(a: Sequence[Run], b: Sequence[Run], num_pages: int) -> Iterator[tuple[int, int, int]]:
    """(page of a, page of b, count): both sequences walked together, `num_pages` in all."""
    left = [list(run) for run in reversed(a)]
    right = [list(run) for run in reversed(b)]
    while num_pages:
        count = min(left[-1][1], right[-1][1], num_pages)
        yield left[-1][0], right[-1][0], count
        num_pages -= count
        for side in (left, right):
            side[-1][0] += count
            side[-1][1] -= count
            if not side[-1][1]:
                side.pop()
