"""The memory of keys and values: pages of one tier (`KVArena`), and tokens of beams (`BeamArena`).

Every page is allocated and touched at start, and read in place. Keys and values are separate
planes, `[layer, page, token, head, dim]`. So consecutive pages of a layer are one contiguous
`[tokens, heads, dim]` slab: attention reads it without a gather, and a copy between tiers is a few
long copies. If the arrangement is `tiles`, a page is `[tile, head, dims x 64 tokens]` instead, and
a run of pages is one `Tiles`.

Only device threads call these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from npu_gr.backend.calls import PagedKV
from npu_gr.backend.tiles import TILE_TOKENS, Tiles, pack, quantise
from npu_gr.backend.torch_ops import PlainOps
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun

Slab = tuple[Tensor, Tensor]
# All tokens of a layer; None = attention reads the rows that the pass has computed.
LayerKV = Sequence[Slab | Tiles] | None
Pack = Callable[[Tiles, int, Tensor, Tensor], None]  # the signature of `tiles.pack`
PINNED_CHUNK_BYTES = 1 << 26  # a power of two, as torch's pinned allocator rounds up to one


class KVArena:
    """`num_pages` pages of one layout on one device."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        pinned: bool = False,
        pack: Pack = pack,
    ) -> None:
        """Allocate the pages.

        Args:
            layout: Shape of a page.
            num_pages: Number of pages.
            device: Device that holds the memory.
            pinned: True = page-locked host memory, which a device copies asynchronously.
            pack: Backend function that writes rows into tiles; used if the layout has tiles.
        """
        self.layout = layout
        self.num_pages = num_pages
        self._pack = pack
        self._is_int8 = layout.torch_dtype == torch.int8
        group = TILE_TOKENS if layout.arrangement == "tiles" else 1
        rows = layout.page_tokens // group
        page_bytes = (
            layout.num_layers
            * rows
            * layout.num_heads
            * max(layout.widths)
            * group
            * layout.torch_dtype.itemsize
        )
        self._chunk_pages = (
            max(1, PINNED_CHUNK_BYTES // page_bytes) if pinned else max(1, num_pages)
        )

        def plane(width: int) -> list[Tensor]:
            # zero_ after empty touches every page now, so that no request pays for a page fault
            made = partial(torch.empty, dtype=layout.torch_dtype, device=device, pin_memory=pinned)
            starts = range(0, max(1, num_pages), self._chunk_pages)
            pages = [min(self._chunk_pages, num_pages - start) for start in starts]
            shape = (rows, layout.num_heads, width * group)
            return [made(layout.num_layers, count, *shape).zero_() for count in pages]

        # Chunks of pages, [layer, page, ...] each.
        self._keys, self._values = (plane(width) for width in layout.widths)
        self._pinned = pinned

    def _slab(self, layer: int, run: PageRun) -> Slab:
        assert not self._pinned, "a run of page-locked memory may lie in several chunks"
        pages = slice(run.first_page, run.first_page + run.num_pages)
        return self._keys[0][layer, pages].flatten(0, 1), self._values[0][layer, pages].flatten(
            0, 1
        )

    def _pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Cut pages where a chunk ends: yield (chunk, first page in it, count)."""
        while count:
            chunk, page = divmod(first, self._chunk_pages)
            here = min(count, self._chunk_pages - page)
            yield chunk, page, here
            first += here
            count -= here

    def slabs(self, layer: int, runs: Sequence[PageRun], num_tokens: int) -> Sequence[Slab | Tiles]:
        """Return views of the first `num_tokens` tokens of a layer: slabs, or tiles.

        Slabs of int8 are rows as they are stored, see `tiles.quantise`.

        Args:
            layer: index of the layer.
            runs: pages in token order.
            num_tokens: Number of tokens to read.
        """
        if self.layout.arrangement == "natural":
            return self.views(layer, runs, num_tokens)
        found = []
        for run in runs:
            held = min(num_tokens, run.num_pages * self.layout.page_tokens)
            if held > 0:
                found.append(self._tiles(layer, run, held))
            num_tokens -= held
        return found

    def _tiles(self, layer: int, run: PageRun, num_tokens: int) -> Tiles:
        k, v = self._slab(layer, run)
        used = -(-num_tokens // TILE_TOKENS)
        return Tiles(k[:used], v[:used], num_tokens, self.layout.qk_dim, self.layout.v_dim)

    def views(self, layer: int, runs: Sequence[PageRun], num_tokens: int) -> list[Slab]:
        """Return views of the first `num_tokens` tokens of a layer of a natural layout.

        Args:
            layer: index of the layer.
            runs: pages in token order.
            num_tokens: Number of tokens to read.

        Returns:
            One (k [m, H, Dq], v [m, H, Dv]) for each run; their m add up to `num_tokens`.
        """
        assert self.layout.arrangement == "natural"
        slabs = []
        for run in runs:
            if num_tokens <= 0:
                break
            k, v = self._slab(layer, run)
            slabs.append((k[:num_tokens], v[:num_tokens]))
            num_tokens -= len(k)
        return slabs

    def paged(self, runs: Sequence[PageRun]) -> PagedKV:
        """Describe pages, in token order, to kernels that address them by number."""
        assert not self._pinned, "a device reads pages of its own memory"
        return PagedKV(runs, self._keys[0], self._values[0], self.layout.arrangement == "tiles")

    def write(
        self, layer: int, runs: Sequence[PageRun], start_token: int, k: Tensor, v: Tensor
    ) -> None:
        """Write rows of a layer at the tokens [start_token, start_token + n), in the arena's dtype.

        In a layout of tiles this destroys the rest of the last tile it writes: write a prefix in
        token order.

        Args:
            layer: index of the layer.
            runs: Pages in token order, enough for start_token + n tokens.
            start_token: Token of the first row.
            k: [n, H, Dq]
            v: [n, H, Dv]
        """
        if self.layout.arrangement == "tiles":
            self._write_tiles(layer, runs, start_token, k, v)
            return
        if self._is_int8:
            k, v = quantise(k), quantise(v)
        done = 0
        for run in runs:
            run_k, run_v = self._slab(layer, run)
            slab_k, slab_v = run_k[start_token:], run_v[start_token:]
            start_token = max(0, start_token - len(run_k))
            if not len(slab_k):
                continue
            part = slice(done, done + len(slab_k))
            rows = len(k[part])
            slab_k[:rows].copy_(k[part])
            slab_v[:rows].copy_(v[part])
            done += rows
            if done == len(k):
                return
        assert done == len(k), f"{len(k) - done} rows do not fit the pages"

    def sink(
        self, runs: Sequence[PageRun], start_token: int = 0
    ) -> Callable[[int, Tensor, Tensor], LayerKV]:
        """Make the function with which a forward pass writes each layer's rows to the pages.

        If the pages are in tiles and of the dtype of the rows, or in int8, the function returns all
        tokens of the layer, which attention then reads in place of the rows: so the rows are packed
        once.

        Args:
            runs: pages in token order.
            start_token: Number of tokens that the pages hold already.
        """

        def keep(layer: int, k: Tensor, v: Tensor) -> LayerKV:
            self.write(layer, runs, start_token, k, v)
            is_read = self._is_int8 or self.layout.torch_dtype == k.dtype
            if self.layout.arrangement == "natural" or not is_read:
                return None
            return self.slabs(layer, runs, start_token + len(k))

        return keep

    def _write_tiles(
        self, layer: int, runs: Sequence[PageRun], start_token: int, k: Tensor, v: Tensor
    ) -> None:
        for run in runs:
            room = run.num_pages * self.layout.page_tokens
            here = max(0, min(room - start_token, len(k)))
            if here:
                self._pack(self._tiles(layer, run, room), start_token, k[:here], v[:here])
            k = k[here:]
            v = v[here:]
            start_token = max(0, start_token - room)
        assert not len(k), f"{len(k)} rows do not fit the pages"

    def zero(self, runs: Sequence[PageRun]) -> None:
        """Overwrite pages with zeros."""
        self.fill(runs, 0.0)

    def fill(self, runs: Sequence[PageRun], number: float) -> None:
        """Overwrite pages with a number, 0 or NaN."""
        for part in self._parts(runs):
            # in int8 the scales are NaN if every byte is 0xff
            part.fill_(-bool(number) if self._is_int8 else number)

    def copies(self, runs: Sequence[PageRun]) -> list[Tensor]:
        """Copy pages to the host: keys, then values of each run, [layer, page, ...] each."""
        return [
            part.cpu() if part.device.type != "cpu" else part.clone() for part in self._parts(runs)
        ]

    def _parts(self, runs: Sequence[PageRun]) -> Iterator[Tensor]:
        for run in runs:
            for chunk, first, count in self._pieces(*run):
                yield self._keys[chunk][:, first : first + count]
                yield self._values[chunk][:, first : first + count]

    def copy_tokens_from(
        self,
        source: KVArena,
        source_runs: Sequence[PageRun],
        target_runs: Sequence[PageRun],
        num_tokens: int,
    ) -> None:
        """Copy a prefix from another tier of the same layout, in whole pages, bit for bit.

        The copy is asynchronous if either side is page-locked: synchronise before the bytes are
        used.

        Args:
            source: Arena of the other tier.
            source_runs: Pages of `source`, in token order.
            target_runs: Pages of this arena, in token order; at least as many.
            num_tokens: Length of the prefix.
        """
        assert source.layout == self.layout
        non_blocking = self._pinned or source._pinned
        pages = self.layout.pages(num_tokens)
        source_pieces = [piece for run in source_runs for piece in source._pieces(*run)]
        target_pieces = [piece for run in target_runs for piece in self._pieces(*run)]
        for from_, into, count in _common_pieces(source_pieces, target_pieces, pages):
            for target_plane, source_plane in (
                (self._keys, source._keys),
                (self._values, source._values),
            ):
                out_of = source_plane[from_.chunk][:, from_.page : from_.page + count]
                to = target_plane[into.chunk][:, into.page : into.page + count]
                if not non_blocking:
                    to.copy_(out_of)
                    continue
                # One layer is contiguous on both sides; torch would copy anything else through
                # pageable memory.
                for target_layer, source_layer in zip(to, out_of, strict=True):
                    target_layer.copy_(source_layer, non_blocking=True)


class _Place(NamedTuple):
    chunk: int
    page: int  # index in the chunk


def _common_pieces(
    a: Sequence[tuple[int, int, int]], b: Sequence[tuple[int, int, int]], num_pages: int
) -> Iterator[tuple[_Place, _Place, int]]:
    """Walk two sequences of (chunk, page, count) together for `num_pages` pages.

    Yields (place in a, place in b, count).
    """
    left = [list(piece) for piece in reversed(a)]
    right = [list(piece) for piece in reversed(b)]
    while num_pages:
        count = min(left[-1][2], right[-1][2], num_pages)
        yield _Place(left[-1][0], left[-1][1]), _Place(right[-1][0], right[-1][1]), count
        num_pages -= count
        for side in (left, right):
            side[-1][1] += count
            side[-1][2] -= count
            if not side[-1][2]:
                side.pop()


Fork = Callable[[Tensor, Tensor, Tensor, int], None]  # the signature of `Backend.beam_fork_`

_IN_TWO_PASSES: Fork = PlainOps().beam_fork_


class BeamArena:
    """Unshared KV: the tokens that each beam has added to its prompt, one slot for each round.

    Allocated once and reused, together with the memory of a round's logits: a new tensor would cost
    page faults in every round. H = KV heads, D = width of a head.

    Source: the separated KV cache of xGR (arXiv:2512.11529). Invariant: slot s of row i holds round
    s of beam i (after `move`), or of beam ancestry[s, i] (with `fork_ancestry`).
    """

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
        """Allocate the memory.

        Args:
            num_layers: Number of layers of the decoder.
            num_heads: Number of KV heads.
            head_dim: Width of a head.
            max_beams: Most beams of all requests of a pass.
            num_slots: Rounds whose KV is read again: the levels of the catalogue, less one.
            dtype: Dtype of keys, values and logits.
            device: Device that holds the memory.
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
        """Return a view of `count` beams, for one of several requests that share the memory."""
        assert 0 <= first <= first + count <= self.max_beams
        view = object.__new__(BeamArena)
        view.max_beams = count
        view.num_slots = self.num_slots
        view._fork = self._fork
        view._logits = self._logits[:0]  # none: a view allocates its own if it needs them
        view._keys, view._values = (
            plane[:, first : first + count] for plane in (self._keys, self._values)
        )
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

        Every call returns the same memory; the warm-up lets it grow to its largest size.
        """
        count = num_rows * num_columns
        if len(self._logits) < count:
            self._logits = self._logits.new_empty(count)
        return self._logits[:count].view(num_rows, num_columns)

    def move(self, parent: Tensor, num_slots: int) -> None:
        """Fork in place: row i gets the first `num_slots` slots of row parent[i]."""
        self._fork(self._keys, self._values, parent, num_slots)


def fork_ancestry(ancestry: Tensor, parent: Tensor) -> Tensor:
    """Fork by index: no KV moves, and a table names the row that holds each slot of a beam.

    Args:
        ancestry: int64 [slots, rows before], the table of the rounds so far.
        parent: int64 [rows], the beam from which each new beam grew.

    Returns:
        int64 [slots + 1, rows], the table of the new beams. The token that a beam adds goes into
        its own row.
    """
    own = torch.arange(len(parent), device=parent.device)
    return torch.cat([ancestry[:, parent], own[None]])
