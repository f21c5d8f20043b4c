"""The description of a batch, and a layer's bias, for the kernels `ops/ascendc/kernels/hstu_*.h`.

Times are int32 seconds since a request's first token, computed on the host: only differences
matter. Blocks of times have their minimum and maximum, by which a kernel knows the possible buckets
of a tile without reading the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.backend.calls import BiasTables

# as in ops/ascendc/hstu_blocks.h
ROW_BLOCK = 32
KEY_BLOCK = 256
NEAR_END = 288

MAX_SPAN_S = 2**31 - 3  # longest span of a request's times: difference + 1 fits int32

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class Entry(NamedTuple):
    """One request; its tokens are 0 .. keys - 1, cached ones first, candidates last."""

    rows: int  # number of queries: the last new rows
    keys: int  # number of tokens
    cached: int  # number of cached tokens
    targets: int  # number of candidates
    first_page: int  # index of its first page in the list of all pages
    first_row: int  # index of its first new row among all new rows
    first_query: int  # index of its first query among all queries
    keeps: int  # 1: its new history rows are written to its pages


def bounds(times: I32, block: int) -> I32:
    """Compute the minimum and maximum of each block of times, int32 [len / block, 2]."""
    blocks = times.reshape(-1, block)
    return np.stack([blocks.min(1), blocks.max(1)], axis=1)


def relative(times: I64, query_time: int, num_targets: int) -> I32 | None:
    """Return a request's key times, history then candidates; None = the span exceeds int32."""
    both = np.concatenate([times, np.full(num_targets, query_time, np.int64)])
    if not len(both):
        return np.zeros(0, np.int32)
    first = both.min()
    return None if int(both.max()) - int(first) > MAX_SPAN_S else (both - first).astype(np.int32)


class BatchTimes(NamedTuple):
    """The times of a batch, one row a request; padded by repeating the last time."""

    rows: I32  # [requests, row slots]
    keys: I32  # [requests, key slots]
    bounds: I32  # [requests, row slots / 32 + key slots / 256, 2]


def batch_times(
    entries: Sequence[Entry], times: Sequence[I32], row_slots: int, key_slots: int
) -> BatchTimes:
    """Arrange the times of a batch for the kernels.

    Args:
        entries: The requests.
        times: Times of each request's keys.
        row_slots, key_slots: Padded number of rows and keys of each request.
    """
    rows = np.stack(
        [_padded(t[e.keys - e.rows :], row_slots) for e, t in zip(entries, times, strict=True)]
    )
    keys = np.stack([_padded(t, key_slots) for t in times])
    row_bounds = bounds(rows.reshape(-1), ROW_BLOCK).reshape(len(entries), -1, 2)
    key_bounds = bounds(keys.reshape(-1), KEY_BLOCK).reshape(len(entries), -1, 2)
    return BatchTimes(rows, keys, np.concatenate([row_bounds, key_bounds], axis=1))


def _padded(times: I32, slots: int) -> I32:
    padded = np.zeros(slots, np.int32)
    padded[: len(times)] = times
    if len(times):
        padded[len(times) :] = times[-1]
    return padded


class LayerTables(NamedTuple):
    """A layer's relative bias as hstu_scores reads it: negated, fp32."""

    times: Tensor  # [H, 2, 64]: bias of each time bucket; the same plus the last position's
    near: Tensor  # [H, 8, P + 576]: by falling distance, ends repeated, row s shifted by 7 - s


def layer_tables(bias: BiasTables) -> LayerTables:
    """Negate and arrange a layer's tables, with torch ops on their device, once a layer."""
    position = -bias.position.float()
    time = -bias.time.float()
    falling = torch.cat(
        [
            position[:, -1:].expand(-1, NEAR_END),
            position.flip(1),
            position[:, :1].expand(-1, NEAR_END + 7),
        ],
        dim=1,
    )
    near = torch.stack(
        [falling[:, shift : falling.shape[1] - 7 + shift] for shift in reversed(range(8))], dim=1
    )
    return LayerTables(
        torch.stack([time, time + position[:, -1:]], dim=1).contiguous(), near.contiguous()
    )
