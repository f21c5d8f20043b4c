"""How the prefix KV of one model lies in pages, in every tier alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from npu_gr.backend.base import Arrangement
from npu_gr.backend.tiles import TILE_TOKENS, padded


class Run(NamedTuple):
    """Consecutive pages."""

    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of a page: `page_tokens` tokens of keys and values of every layer."""

    num_layers: int
    num_heads: int
    qk_dim: int  # per head
    v_dim: int  # per head
    page_tokens: int = 64
    dtype: str = "float32"
    arrangement: Arrangement = "natural"  # of the tokens of a page

    def __post_init__(self) -> None:
        if self.arrangement == "tiles" and self.page_tokens % TILE_TOKENS:
            raise ValueError(f"page_tokens: {self.page_tokens} is no multiple of a tile's {TILE_TOKENS}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the stored keys and values."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def widths(self) -> tuple[int, int]:
        """Stored numbers of a token's key and value per head; tiles pad them."""
        return padded(self.qk_dim, self.v_dim) if self.arrangement == "tiles" else (self.qk_dim, self.v_dim)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        return self.num_layers * self.num_heads * sum(self.widths) * self.torch_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """One page, all layers."""
        return self.page_tokens * self.token_bytes

    @property
    def layout_id(self) -> str:
        """Part of every cache key: entries of different layouts never meet."""
        shape = f"{self.num_layers}x{self.num_heads}x{self.qk_dim}+{self.v_dim}"
        return f"{shape}/{self.page_tokens}/{self.dtype}/{self.arrangement}"

    def pages(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_tokens)

    def bytes(self, num_tokens: int) -> int:
        """Bytes of the pages that hold this many tokens."""
        return self.pages(num_tokens) * self.page_bytes
