"""What the HSTU kernels of ops/ascendc are told of a batch and of a layer; `ops/ascendc/kernels/hstu_*.h` says how.

Times are int32 seconds from a request's first token on, made on the host: they decide nothing but
differences. Blocks of times come with their least and greatest, so that a kernel knows before it
looks which buckets a tile can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.backend.calls import BiasTables

# of ops/ascendc/hstu_blocks.h
ROW_BLOCK = 32
KEY_BLOCK = 256
NEAR_END = 288

MAX_SPAN_S = 2**31 - 3  # of a request's times: a difference and one more fit int32

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class Entry(NamedTuple):
    """One request: its tokens are 0 .. keys - 1, the cached ones first, its candidates last."""

    rows: int  # queries: the last of its new rows
    keys: int
    cached: int
    targets: int  # candidates
    first_page: int  # of its pages in the list of all
    first_row: int  # of its new rows among all new rows
    first_query: int  # of its queries among all queries
    keeps: int  # 1: its new history rows go to its pages


def bounds(times: I32, block: int) -> I32:
    """Return the least and greatest of each block of times, int32 [len / block, 2]."""
    blocks = times.reshape(-1, block)
    return np.stack([blocks.min(1), blocks.max(1)], axis=1)


def relative(times: I64, query_time: int, num_targets: int) -> I32 | None:
    """Return a request's key times, its candidates' behind its history's; None = they span too long for int32."""
    whole = np.concatenate([times, np.full(num_targets, query_time, np.int64)])
    if not len(whole):
        return np.zeros(0, np.int32)
    first = whole.min()
    return None if int(whole.max()) - int(first) > MAX_SPAN_S else (whole - first).astype(np.int32)


class BatchTimes(NamedTuple):
    """The times of a batch, one row a request; behind its last row or key the last is repeated."""

    rows: I32  # [requests, row slots]
    keys: I32  # [requests, key slots]
    bounds: I32  # [requests, row slots / 32 + key slots / 256, 2]


def batch_times(
    entries: Sequence[Entry], times: Sequence[I32], row_slots: int, key_slots: int
) -> BatchTimes:
    """Lay the times of a batch out for the kernels.

    Args:
        entries: the requests.
        times: of each request's keys.
        row_slots, key_slots: rows and keys that each request has room for.
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

    times: Tensor  # [H, 2, 64]: of each time bucket alone, and with the last position
    near: Tensor  # [H, 8, P + 576]: by distance falling, ends repeated, row s shifted by 7 - s


def layer_tables(bias: BiasTables) -> LayerTables:
    """Negate and lay out a layer's tables; torch ops on their device, once a layer."""
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
