"""The best items of a catalogue on an NPU: a product and `masked_topk`, two launches a block.

The host never waits for the device. Excluded pairs are cleared bits of a mask, one 32-bit word for
each query and 32 items. The host computes only the words with an excluded pair, and uploads them;
the device writes them into a mask whose bits are all set.

Estimate (from ops/ascendc's counts on the CPU emulator and the vendor's published figures): 1 M
scores and k = 100 take 12 us, 5 of them to merge the cores' lists; the vendor's topk, which has
neither a mask nor an order of ties, takes 58 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.best_items import Best, Hidden

BLOCK_SCORES = 1 << 24  # fp32 scores per block: 64 MiB, a third of the L2 cache
MIN_BLOCK_ITEMS = 4096
_ALL = -1  # a word of bits, all set
_WORD = 32

Upload = Callable[[np.ndarray[Any, np.dtype[Any]]], Tensor]


class _Words(NamedTuple):
    """The mask words of a block that have an excluded pair."""

    place: Tensor  # int64 [n], query * words per row + word
    bits: Tensor  # int32 [n]


def best_items(
    queries: Tensor, items: Tensor, k: int, hidden: Hidden | None, upload: Upload
) -> Best:
    """Compute `Backend.best_items`.

    Args:
        queries: float32 [B, d].
        items: float32 [I, d], I >= 1.
        k: Number of items, 1 to the operator's limit.
        hidden: Pairs to exclude, on the host.
        upload: Copies an array to the device; the host does not wait for the copy.
    """
    size = block_items(len(queries), len(items))
    parts = []
    for start in range(0, len(items), size):
        block = items[start : start + size]
        scores = torch.mm(queries, block.T)
        words = None if hidden is None else _upload_words(hidden, start, len(block), upload)
        value, index = torch.ops.npu_gr.masked_topk(scores, _bits(scores, words), k, None)
        parts.append((value, index + start if start else index))
    value, index = parts[0]
    if len(parts) > 1:  # parts are in the order of items, so ties stay in order
        merged = torch.cat([part[0] for part in parts], dim=1)
        value, place = torch.ops.npu_gr.masked_topk(merged, _bits(merged, None), k, None)
        index = torch.cat([part[1] for part in parts], dim=1).gather(1, place.clamp(min=0).long())
        index = index.masked_fill(value == -torch.inf, -1)
    return Best(value, index.long())


def block_items(num_queries: int, num_items: int) -> int:
    """Return the items per block: a multiple of 32, with scores that fit the cache."""
    size = max(MIN_BLOCK_ITEMS, BLOCK_SCORES // num_queries // _WORD * _WORD)
    return min(size, num_items)


def hidden_words(
    hidden: Hidden, start: int, num_items: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Compute the mask words of a block that have an excluded pair.

    Args:
        hidden: Pairs to exclude, on the host.
        start: First item of the block.
        num_items: Number of items of the block.

    Returns:
        Places int64 [n], ascending and distinct (query * words per row + word); words int32 [n],
        whose lowest bit is the lowest item.
    """
    queries, items = (part.numpy() for part in hidden)
    low, high = np.searchsorted(items, (start, start + num_items))
    at = items[low:high] - start
    word = queries[low:high] * -(-num_items // _WORD) + at // _WORD
    order = np.argsort(word, kind="stable")
    place, first = np.unique(word[order], return_index=True)
    bit = np.left_shift(np.uint32(1), (at[order] % _WORD).astype(np.uint32))
    off = np.bitwise_or.reduceat(bit, first) if len(place) else bit
    return place, (~off).view(np.int32)


def _upload_words(hidden: Hidden, start: int, num_items: int, upload: Upload) -> _Words | None:
    place, bits = hidden_words(hidden, start, num_items)
    return _Words(upload(place), upload(bits)) if len(place) else None


def _bits(scores: Tensor, words: _Words | None) -> Tensor:
    """Make the mask, uint8 [B, ceil(n / 8)], lowest bit first; 1 = not excluded."""
    rows, columns = scores.shape
    bits = torch.full((rows, -(-columns // _WORD)), _ALL, dtype=torch.int32, device=scores.device)
    if words is not None:
        bits.view(-1).index_put_((words.place,), words.bits)
    return bits.view(torch.uint8)[:, : -(-columns // 8)].contiguous()
