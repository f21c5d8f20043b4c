"""An allocator of page numbers: a binary buddy that hands out any n free pages as few aligned blocks.

A classic buddy rounds a request up; this one covers n pages by power-of-two blocks, largest first, so a request
succeeds whenever n pages are free. Blocks coalesce with their buddies when they come back, which keeps entries in
few long runs however long the instance lives. Costs grow with log(num_pages), never with the number of users.

Invariants:
  B1  every page is in exactly one free block or one allocated run
  B2  a free block of order k starts at a multiple of 2**k, and its buddy is not free too
"""

from __future__ import annotations

from collections.abc import Sequence

from npu_gr.core.errors import PoolExhausted
from npu_gr.engine.kv.layout import PageRun


class PageAllocator:
    """The free ones of the pages 0..num_pages-1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages
        # per order k: first pages of the free blocks of 2**k pages, as ordered sets
        self._free: list[dict[int, None]] = [{} for _ in range(num_pages.bit_length())]
        for first, order in _blocks(PageRun(0, num_pages)):
            self._free[order][first] = None
        self.steps = 0  # blocks split or joined so far: the work done, for tests

    def allocate(self, num_pages: int) -> tuple[PageRun, ...]:
        """Take `num_pages` pages. The order of the runs is the order of the tokens.

        Raises:
            PoolExhausted: fewer are free; nothing was taken.
        """
        if num_pages > self.num_free:
            raise PoolExhausted(f"need {num_pages} pages, {self.num_free} of {self.num_pages} are free")
        self.num_free -= num_pages
        runs: list[PageRun] = []
        while num_pages:
            order = num_pages.bit_length() - 1
            first, got = self._take(order)
            runs.append(PageRun(first, 1 << got))
            num_pages -= 1 << got
        return _merged(runs)

    def _take(self, order: int) -> tuple[int, int]:
        """(first page, order) of a free block: of `order`, split from a larger one, or else the largest there is."""
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
        """Give pages back; a run may be any part of what was allocated."""
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

    def check(self) -> None:
        """Assert B2 and that the free blocks are disjoint and add up."""
        seen: set[int] = set()
        for order, blocks in enumerate(self._free):
            for first in blocks:
                assert first % (1 << order) == 0
                buddy = first ^ (1 << order)
                assert order + 1 >= len(self._free) or buddy not in blocks
                pages = set(range(first, first + (1 << order)))
                assert not pages & seen
                seen |= pages
        assert len(seen) == self.num_free
        assert all(0 <= page < self.num_pages for page in seen)


def _blocks(run: PageRun) -> list[tuple[int, int]]:
    """(first page, order) of the aligned power-of-two blocks that a run is made of."""
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
