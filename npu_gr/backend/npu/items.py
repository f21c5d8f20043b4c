"""The best items of a catalogue by a product and `masked_topk`: two launches a block, and no wait for the device.

Pairs that must not be found are bits: all set, but for the words that have such a pair. The host
makes those words and uploads them; the device writes them into a block's bits, one word a (query,
32 items).

Model (ops/ascendc's counts on the emulator, published vendor figures): 1 M scores, k = 100: 12 us,
of which 5 are the merge of the cores' lists, against 58 us of the vendor's topk, which knows
neither bits nor an order of equal scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.best_items import Best, Hidden

BLOCK_SCORES = 1 << 24  # fp32 scores of a block: 64 MiB, a third of the L2 cache
MIN_BLOCK_ITEMS = 4096
_ALL = -1  # a word of bits, all set
_WORD = 32

Upload = Callable[[np.ndarray[Any, np.dtype[Any]]], Tensor]


class _Words(NamedTuple):
    """Words of a block's bits that are not all set."""

    place: Tensor  # int64 [n], query x words of a row + word
    bits: Tensor  # int32 [n]


def best_items(
    queries: Tensor, items: Tensor, k: int, hidden: Hidden | None, upload: Upload
) -> Best:
    """Compute `Backend.best_items`.

    Args:
        queries: float32 [B, d].
        items: float32 [I, d], I >= 1.
        k: 1 to the operator's limit.
        hidden: on the host.
        upload: copies an array to the device; the host does not wait for the copy.
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
    if len(parts) > 1:  # a lower place among the parts is a lower item: equal scores stay in order
        merged = torch.cat([part[0] for part in parts], dim=1)
        value, place = torch.ops.npu_gr.masked_topk(merged, _bits(merged, None), k, None)
        index = torch.cat([part[1] for part in parts], dim=1).gather(1, place.clamp(min=0).long())
        index = index.masked_fill(value == -torch.inf, -1)
    return Best(value, index.long())


def block_items(num_queries: int, num_items: int) -> int:
    """Return how many items a block has: of whole words, and few enough that its scores stay in the cache."""
    size = max(MIN_BLOCK_ITEMS, BLOCK_SCORES // num_queries // _WORD * _WORD)
    return min(size, num_items)


def hidden_words(
    hidden: Hidden, start: int, num_items: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make the words of a block's bits that are not all set.

    Args:
        hidden: on the host.
        start: first item of the block.
        num_items: of the block.

    Returns:
        Places int64 [n], ascending and distinct (query x words of a row + word); words int32 [n],
        lowest item first.
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
    """Return uint8 [B, ceil(n / 8)]: bit 1 = may be found, lowest first."""
    rows, columns = scores.shape
    bits = torch.full((rows, -(-columns // _WORD)), _ALL, dtype=torch.int32, device=scores.device)
    if words is not None:
        bits.view(-1).index_put_((words.place,), words.bits)
    return bits.view(torch.uint8)[:, : -(-columns // 8)].contiguous()
