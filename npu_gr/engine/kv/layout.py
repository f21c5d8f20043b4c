"""The page layout of one model's prefix KV. It is the same in every tier, so a copy is whole pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from npu_gr.backend.base import Arrangement
from npu_gr.backend.tiles import TILE_TOKENS, padded


class PageRun(NamedTuple):
    """Consecutive pages [first_page, first_page + num_pages)."""

    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of a page: the keys and values of `page_tokens` tokens, of every layer."""

    num_layers: int
    num_heads: int
    qk_dim: int  # per head
    v_dim: int  # per head
    page_tokens: int = 64
    dtype: str = "float32"
    arrangement: Arrangement = "natural"  # of the tokens within a page: row by row, or in tiles (`backend/tiles.py`)

    def __post_init__(self) -> None:
        if self.arrangement == "tiles" and self.page_tokens % TILE_TOKENS:
            raise ValueError(f"page_tokens: {self.page_tokens} is no multiple of a tile's {TILE_TOKENS}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the stored keys and values."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers stored for a token's key and value, per head. Tiles pad them."""
        return padded(self.qk_dim, self.v_dim) if self.arrangement == "tiles" else (self.qk_dim, self.v_dim)

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
        """Identifies the layout. It is part of every prefix key, so entries of different layouts never meet."""
        shape = f"{self.num_layers}x{self.num_heads}x{self.qk_dim}+{self.v_dim}"
        return f"{shape}/{self.page_tokens}/{self.dtype}/{self.arrangement}"

    def pages(self, num_tokens: int) -> int:
        """Return how many pages hold this many tokens."""
        return -(-num_tokens // self.page_tokens)

    def bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pages that hold this many tokens."""
        return self.pages(num_tokens) * self.page_bytes
