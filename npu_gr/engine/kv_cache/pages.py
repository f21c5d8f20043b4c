"""Pages of prefix KV: their layout, the same in every tier, and an allocator of page numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from npu_gr.backend.base import Arrangement
from npu_gr.backend.tiles import TILE_TOKENS, padded
from npu_gr.core.errors import PoolExhausted


class PageRun(NamedTuple):
    """Consecutive pages [first_page, first_page + num_pages)."""

    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of a page, which holds the keys and values of `page_tokens` tokens in every layer."""

    num_layers: int
    num_heads: int
    qk_dim: int  # per head
    v_dim: int  # per head
    page_tokens: int = 64
    dtype: str = "float32"
    # order of the numbers within a page: token by token, or in tiles (`backend/tiles.py`)
    arrangement: Arrangement = "natural"

    def __post_init__(self) -> None:
        if self.arrangement == "tiles" and self.page_tokens % TILE_TOKENS:
            raise ValueError(
                f"page_tokens: {self.page_tokens} is no multiple of {TILE_TOKENS}, the tokens of a "
                "tile"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the stored keys and values."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of a stored key and value, for each head; tiles pad them."""
        return (
            padded(self.qk_dim, self.v_dim)
            if self.arrangement == "tiles"
            else (self.qk_dim, self.v_dim)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, all layers."""
        return self.num_layers * self.num_heads * sum(self.widths) * self.torch_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.page_tokens * self.token_bytes

    @property
    def layout_id(self) -> str:
        """Identifier of the layout; part of every prefix key, so layouts are never mixed."""
        shape = f"{self.num_layers}x{self.num_heads}x{self.qk_dim}+{self.v_dim}"
        return f"{shape}/{self.page_tokens}/{self.dtype}/{self.arrangement}"

    def pages(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pages that hold `num_tokens` tokens."""
        return self.pages(num_tokens) * self.page_bytes


class PageAllocator:
    """A binary buddy allocator of the pages 0..num_pages-1, without rounding up.

    A classic buddy allocator rounds a request up to a power of two. This one covers n pages by
    power-of-two blocks, largest first, so a request succeeds whenever n pages are free. Freed
    blocks merge with their buddies, so entries stay in few long runs. Costs grow with
    log(num_pages), not with the number of users.

    Invariants:
      B1  every page is in exactly one free block or one allocated run
      B2  a free block of order k starts at a multiple of 2**k, and its buddy is not free too
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages
        # For each order k, the first pages of the free blocks of 2**k pages, as an ordered set.
        self._free: list[dict[int, None]] = [{} for _ in range(num_pages.bit_length())]
        for first, order in _blocks(PageRun(0, num_pages)):
            self._free[order][first] = None
        self.steps = 0  # blocks split or merged so far, for tests

    def allocate(self, num_pages: int) -> tuple[PageRun, ...]:
        """Take `num_pages` pages, in runs in token order.

        Raises:
            PoolExhausted: fewer are free; none was taken.
        """
        if num_pages > self.num_free:
            raise PoolExhausted(
                f"need {num_pages} pages, {self.num_free} of {self.num_pages} are free"
            )
        self.num_free -= num_pages
        runs: list[PageRun] = []
        while num_pages:
            order = num_pages.bit_length() - 1
            first, got = self._take(order)
            runs.append(PageRun(first, 1 << got))
            num_pages -= 1 << got
        return _merged(runs)

    def _take(self, order: int) -> tuple[int, int]:
        """Take a free block of `order`, or else the largest: return (first page, order).

        A larger block is split first.
        """
        larger = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if larger is None:
            order = next(k for k in range(order - 1, -1, -1) if self._free[k])
            first, _ = self._free[order].popitem()
            return first, order
        first, _ = self._free[larger].popitem()
        while larger > order:
            larger -= 1
            self.steps += 1
            self._free[larger][first + (1 << larger)] = None
        return first, order

    def free(self, runs: Sequence[PageRun]) -> None:
        """Free pages; a run may be any part of an allocation."""
        for run in runs:
            self.num_free += run.num_pages
            for first, order in _blocks(run):
                self._join(first, order)

    def _join(self, first: int, order: int) -> None:
        while order + 1 < len(self._free) and (buddy := first ^ (1 << order)) in self._free[order]:
            del self._free[order][buddy]
            first = min(first, buddy)
            order += 1
            self.steps += 1
        assert first not in self._free[order], f"page {first} is free already"
        self._free[order][first] = None


def _blocks(run: PageRun) -> list[tuple[int, int]]:
    """Split a run into aligned power-of-two blocks: (first page, order) of each."""
    first, left = run
    blocks = []
    while left:
        order = left.bit_length() - 1
        if first:
            order = min(order, (first & -first).bit_length() - 1)
        blocks.append((first, order))
        first += 1 << order
        left -= 1 << order
    return blocks


def _merged(runs: Sequence[PageRun]) -> tuple[PageRun, ...]:
    merged: list[PageRun] = []
    for run in runs:
        if merged and merged[-1].first_page + merged[-1].num_pages == run.first_page:
            merged[-1] = PageRun(merged[-1].first_page, merged[-1].num_pages + run.num_pages)
        else:
            merged.append(run)
    return tuple(merged)
