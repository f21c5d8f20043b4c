"""Semi-local attention (`AttentionWindow`) in plain torch: a block of rows gathers what it sees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from npu_gr.backend.base import accumulator, bias_bucket
from npu_gr.backend.calls import AttentionWindow, HstuCall
from npu_gr.backend.tiles import TILE_TOKENS, Slab, natural

ROWS = 4 * TILE_TOKENS  # query rows of a block


def causal_in_window(call: HstuCall, window: AttentionWindow) -> Tensor:
    """Compute `Backend.hstu_causal` of a call with a window: [n, H, Dv].

    A block begins at a multiple of ROWS positions and its keys at a multiple of a tile, so that
    cached and full inference sum the same parts.
    """
    keys, values = _joined([*natural(call.cached), (call.k, call.v)])
    num_rows, num_tokens = len(call.q), len(call.times)
    positions = window.positions(num_tokens, call.q.device)[:-1]
    buckets = call.bias.position.shape[1]
    past = num_tokens - num_rows
    asked = call.times[past:] if call.row_times is None else call.row_times
    out = call.q.new_zeros(num_rows, *call.v.shape[1:], dtype=accumulator(call.q.dtype))
    row = 0
    while row < num_rows:
        at = int(positions[past + row])
        end = min(num_rows, row + ROWS - at % ROWS)
        rows = positions[past + row : past + end]
        tile = max(0, (at // ROWS * ROWS - window.recent + 1) // TILE_TOKENS * TILE_TOKENS)
        is_read = (positions < window.first) | (positions >= tile)
        columns = is_read[: past + end].nonzero().squeeze(1)
        ago = (rows[:, None] - positions[columns]).clamp_(0, buckets - 1)
        since = asked[row:end, None] - call.times[columns]
        bias = call.bias.position[:, ago] + call.bias.time[:, bias_bucket(call.edges, since).long()]
        logits = torch.baddbmm(
            bias, call.q[row:end].transpose(0, 1), keys[columns].permute(1, 2, 0), alpha=call.alpha
        )
        weights = silu(logits).masked_fill(~window.sees(rows, positions[columns]), 0)
        out[row:end] = torch.bmm(weights, values[columns].transpose(0, 1)).transpose(0, 1)
        row = end
    return out.to(call.q.dtype)


def seen_by_candidates(call: HstuCall, window: AttentionWindow) -> tuple[HstuCall, Tensor]:
    """Reduce a call of `Backend.hstu_targets` to the tokens that its candidates see.

    Returns:
        The call without a window, and the distance of each of its tokens, int64 [m].
    """
    positions = window.positions(len(call.times), call.q.device)
    own, positions = positions[-1:], positions[:-1]
    columns = window.sees(own, positions)[0].nonzero().squeeze(1)
    slabs = natural(call.cached)
    seen: list[Slab] = []
    if slabs:
        keys, values = _joined(slabs)
        seen = [(keys[columns], values[columns])]
    reduced = call._replace(cached=seen, times=call.times[columns], window=None)
    return reduced, own - positions[columns]


def _joined(slabs: list[Slab]) -> Slab:
    return torch.cat([k for k, _ in slabs]), torch.cat([v for _, v in slabs])
