"""Pages of prefix KV: their layout, the same in every tier, and an allocator of page numbers.

A row is the key and value of one token in every layer. `PrefixLayout` says which rows of a user a
prefix holds, and in which of its pages they lie. Pool, DRAM tier, relay, simulator and self-check
ask it, and know nothing else about the form of a model's prefix. The pages of an entry have
*places* 0, 1, 2, ...; a place holds one page of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from npu_gr.backend.base import Arrangement
from npu_gr.backend.tiles import TILE_TOKENS, padded, scale_bytes
from npu_gr.core.errors import PoolExhausted


class PageRun(NamedTuple):
    """Consecutive pages [first_page, first_page + num_pages)."""

    first_page: int
    num_pages: int


class Places(NamedTuple):
    """Where the tokens that a pass reads and writes lie, in token order."""

    pages: tuple[int, ...]  # places
    gap_at: int = 0  # number of tokens before the gap
    gap: int = 0  # number of tokens that no page holds: those that no later row reads


class PrefixLayout(Protocol):
    """The form of a prefix. Every method is arithmetic on numbers of tokens."""

    @property
    def name(self) -> str:
        """Part of the layout's identifier; "" = the whole history."""
        ...

    def rows(self, num_tokens: int) -> tuple[range, ...]:
        """Return the positions whose rows later rows may read, after `num_tokens` tokens."""
        ...

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages that hold a prefix of `num_tokens` tokens."""
        ...

    def step_end(self, start: int, stop: int) -> int:
        """Return how far one pass may encode [start, stop), start < stop.

        Up to there it overwrites nothing that it reads, so the prefix of `start` tokens stays
        whole; a longer delta changes it, and is encoded in several passes.
        """
        ...

    def places(self, start: int, stop: int, begins_at: int = 0) -> Places | None:
        """Return the places of a pass that reads a prefix of `start` tokens and encodes to `stop`.

        Requires stop <= step_end(start, stop), unless the new rows are not written to pages.
        Behind the first tokens, those before `begins_at` are not read. None = all places, in order.
        """
        ...

    @property
    def first_end(self) -> int:
        """Number of tokens in the pages that are never overwritten."""
        ...

    def first_needed(self, num_tokens: int) -> int:
        """Return where to begin a prefix of `num_tokens` tokens, after its first `first_end`.

        No row that is read later depends on the tokens between them. 0 = at the beginning.
        """
        ...

    @property
    def most_tokens(self) -> int:
        """Most tokens that a pass has to encode, in whole pages; 0 = as many as there are."""
        ...


@dataclass(frozen=True, slots=True)
class WholeHistory:
    """Full attention: every row reads every row before it, so all rows are kept."""

    page_tokens: int

    @property
    def name(self) -> str:
        return ""

    def rows(self, num_tokens: int) -> tuple[range, ...]:
        return (range(num_tokens),)

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def step_end(self, start: int, stop: int) -> int:
        return stop

    def places(self, start: int, stop: int, begins_at: int = 0) -> Places | None:
        return None

    @property
    def first_end(self) -> int:
        return 0

    def first_needed(self, num_tokens: int) -> int:
        return 0

    @property
    def most_tokens(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class PageRing:
    """Semi-local attention: the row at position t reads positions [0, K2) and (t - K1, t].

    The pages of the first K2 tokens stay; the others are a ring that the newest tokens overwrite.
    With K1 = 4, K2 = 1 and pages of two tokens, after 11 tokens, of which position 11 reads x:

        place       0     1     2     3
        tokens    x 1   8x 9x 10x .  6  7
    """

    page_tokens: int
    window_tokens: int  # K1
    first_tokens: int  # K2
    num_layers: int

    @property
    def name(self) -> str:
        return f"/ring {self.first_tokens}+{self.window_tokens}"

    @property
    def _first_pages(self) -> int:
        return -(-self.first_tokens // self.page_tokens)

    @property
    def _ring_pages(self) -> int:
        """Pages that hold the window wherever it begins, and at least one token more."""
        return -(-self.window_tokens // self.page_tokens) + 1

    def rows(self, num_tokens: int) -> tuple[range, ...]:
        newest = max(0, num_tokens - self.window_tokens + 1)
        if newest <= self.first_tokens:
            return (range(num_tokens),)
        return range(self.first_tokens), range(newest, num_tokens)

    def num_pages(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self.page_tokens), self._first_pages + self._ring_pages)

    def step_end(self, start: int, stop: int) -> int:
        return min(stop, (self._oldest_page(start) + self._ring_pages) * self.page_tokens)

    @property
    def first_end(self) -> int:
        return self._first_pages * self.page_tokens

    @property
    def _reach(self) -> int:
        """Tokens before a row on which it depends: each layer reads K1 - 1 further back."""
        return self.num_layers * (self.window_tokens - 1)

    def first_needed(self, num_tokens: int) -> int:
        page = (num_tokens - self._reach) // self.page_tokens
        return page * self.page_tokens if page > self._first_pages else 0

    @property
    def most_tokens(self) -> int:
        return self.first_end + self._reach + self.page_tokens

    def places(self, start: int, stop: int, begins_at: int = 0) -> Places | None:
        oldest = max(self._oldest_page(start), begins_at // self.page_tokens)
        end = -(-stop // self.page_tokens)
        pages = (*range(min(self._first_pages, end)), *range(oldest, end))
        gap = (oldest - self._first_pages) * self.page_tokens
        return Places(
            tuple(map(self._place, pages)), self._first_pages * self.page_tokens if gap else 0, gap
        )

    def _oldest_page(self, start: int) -> int:
        """Return the page of the ring with the oldest row that position `start` reads."""
        newest = (start - self.window_tokens + 1) // self.page_tokens
        return max(self._first_pages, newest)

    def _place(self, page: int) -> int:
        behind = page - self._first_pages
        return page if behind < 0 else self._first_pages + behind % self._ring_pages


class HeldTokens(NamedTuple):
    """The tokens of a prefix that a pass reads, and the pages in which it finds them."""

    runs: tuple[PageRun, ...]  # in token order, with room for the new tokens
    num_cached: int  # tokens that the pages hold already, those in the gap left out
    gap_at: int = 0  # see `Places`
    gap: int = 0


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
    # semi-local attention (`PageRing`): K1 and K2; 0 = every row reads the whole history
    window_tokens: int = 0
    first_tokens: int = 0
    # the rows that a prefix holds, and their places in its pages
    prefix: PrefixLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        form = (
            PageRing(self.page_tokens, self.window_tokens, self.first_tokens, self.num_layers)
            if self.window_tokens
            else WholeHistory(self.page_tokens)
        )
        object.__setattr__(self, "prefix", form)
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
        """Widths of a stored key and value, for each head, in numbers of the dtype.

        Tiles pad them; of int8 they include the scale.
        """
        qk_dim, v_dim = (
            padded(self.qk_dim, self.v_dim)
            if self.arrangement == "tiles"
            else (self.qk_dim, self.v_dim)
        )
        scale = scale_bytes(self.torch_dtype)
        return qk_dim + scale, v_dim + scale

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
        return f"{shape}/{self.page_tokens}/{self.dtype}/{self.arrangement}{self.prefix.name}"

    def pages(self, num_tokens: int) -> int:
        """Return the number of pages that hold a prefix of `num_tokens` tokens."""
        return self.prefix.num_pages(num_tokens)

    def bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pages that hold a prefix of `num_tokens` tokens."""
        return self.pages(num_tokens) * self.page_bytes

    def held(
        self, runs: tuple[PageRun, ...], start: int, stop: int, begins_at: int = 0
    ) -> HeldTokens:
        """Arrange the pages of a prefix for a pass that reads `start` tokens and encodes to `stop`.

        Args:
            runs: Pages of the prefix, by place.
            start, stop, begins_at: See `PrefixLayout.places`.
        """
        places = self.prefix.places(start, stop, begins_at)
        if places is None:
            return HeldTokens(runs, start)
        pages = [page for run in runs for page in range(run.first_page, sum(run))]
        used = [PageRun(pages[place], 1) for place in places.pages]
        return HeldTokens(_merged(used), start - places.gap, places.gap_at, places.gap)


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
