"""The ops from plain torch, chunked: no N x N tensor, no copy of cached keys, work only where the mask allows.

Shared by every device; a device that has something better overrides the op. Sums over key chunks accumulate in
fp32 (fp64 for fp64 inputs), so the order of chunks costs no accuracy in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from npu_gr.backend.base import BiasTables, Slab, time_bucket

ROWS = 256  # query rows a chunk; with COLUMNS x heads a chunk of logits stays in the last-level cache
COLUMNS = 2048
CANDIDATE_ROWS = 512  # M-FALCON micro-batch; also the largest that the Ascend op was tested with


def column_chunks(slabs: Sequence[Slab]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(index of the first token, k [H, Dq, m], v [H, m, Dv]) for every chunk of at most COLUMNS keys.

    Chunks begin at multiples of COLUMNS whatever the slabs are, so that cached and full inference round the same
    partial sums (in bf16 that is what keeps them together). A chunk inside one slab is a view; only one that spans
    several is gathered.
    """
    first, parts, room = 0, list[Slab](), COLUMNS
    for k, v in slabs:
        at = 0
        while at < len(k):
            part = slice(at, min(at + room, len(k)))
            parts.append((k[part], v[part]))
            room -= part.stop - at
            at = part.stop
            if not room:
                yield first, *_joined(parts)
                first, parts, room = first + COLUMNS, [], COLUMNS
    if parts:
        yield first, *_joined(parts)


def _joined(parts: list[Slab]) -> Slab:
    k, v = parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
    return k.permute(1, 2, 0), v.transpose(0, 1)


def block_bias(bias: BiasTables, first_row: int, first_column: int, rows_at: Tensor, columns_at: Tensor) -> Tensor:
    """[H, rows, columns] bias of a block of history rows, given its corner's positions and all its times."""
    buckets = bias.position.shape[1]
    delta = rows_at[:, None] - columns_at[None, :]
    block = bias.time.index_select(1, time_bucket(delta).flatten()).view(-1, *delta.shape)
    if first_row - (first_column + len(columns_at) - 1) >= buckets - 1:
        return block.add_(bias.position[:, -1, None, None])  # far from the diagonal: one number a head
    row = torch.arange(first_row, first_row + len(rows_at), device=delta.device)
    column = torch.arange(first_column, first_column + len(columns_at), device=delta.device)
    distance = (row[:, None] - column[None, :]).clamp_(0, buckets - 1)
    return block.add_(bias.position.index_select(1, distance.flatten()).view(-1, *delta.shape))


class TorchOps:
    """`Backend`'s ops on any torch device."""

    def hstu_causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Sequence[Slab],
        times: Tensor,
        bias: BiasTables,
        alpha: float,
    ) -> Tensor:
        """See `Backend.hstu_causal`."""
        n, heads, width = len(q), q.shape[1], v.shape[2]
        num_past = len(times) - n
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(heads, n, width, dtype=accumulator, device=q.device)
        for r0 in range(0, n, ROWS):
            r1 = min(r0 + ROWS, n)
            rows = slice(num_past + r0, num_past + r1)
            queries = q[r0:r1].transpose(0, 1)
            for c0, keys, values in column_chunks([*past, (k[:r1], v[:r1])]):
                columns = slice(c0, c0 + keys.shape[2])
                block = block_bias(bias, rows.start, c0, times[rows], times[columns])
                logits = torch.baddbmm(block, queries, keys, alpha=alpha)
                weights = silu(logits, inplace=True)
                if columns.stop > rows.start + 1:  # the block touches the diagonal
                    weights.tril_(rows.start - c0)
                out[:, r0:r1] += torch.bmm(weights, values)
        return out.transpose(0, 1).to(q.dtype)

    def hstu_targets(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        history: Sequence[Slab],
        times: Tensor,
        query_time: int,
        bias: BiasTables,
        alpha: float,
    ) -> Tensor:
        """See `Backend.hstu_targets`."""
        m, buckets = len(times), bias.position.shape[1]
        own = (q * k).sum(2) * alpha + bias.position[:, 0] + bias.time[:, 0]
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = (silu(own)[:, :, None] * v).transpose(0, 1).to(accumulator)
        # one row of bias serves every candidate: they share position and time
        distance = (m - torch.arange(m, device=q.device)).clamp_(0, buckets - 1)
        row = bias.position[:, distance] + bias.time[:, time_bucket(query_time - times).long()]
        for keys_from, keys, values in column_chunks(history):
            part = row[:, None, keys_from : keys_from + keys.shape[2]]
            for r0 in range(0, len(q), CANDIDATE_ROWS):
                queries = q[r0 : r0 + CANDIDATE_ROWS].transpose(0, 1)
                logits = torch.baddbmm(part, queries, keys, alpha=alpha)
                out[:, r0 : r0 + CANDIDATE_ROWS] += torch.bmm(silu(logits, inplace=True), values)
        return out.transpose(0, 1).to(q.dtype)
