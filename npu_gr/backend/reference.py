"""The slow, obvious definition of every op: a dense [H, queries, keys] matrix and its mask.

All other implementations are tested against it. It runs on the CPU in the dtype of its inputs,
including fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from npu_gr.backend.base import accumulator, bias_bucket
from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.calls import (
    AttentionWindow,
    BeamCall,
    BiasTables,
    Choices,
    Continuations,
    HstuCall,
    TopkCall,
)
from npu_gr.backend.tiles import Slab, natural
from npu_gr.backend.torch_ops import PlainOps


def allowed(row: int, column: int, num_history: int) -> bool:
    """Return whether a row sees a column of [history | candidates]: E7 and E8 of docs/exactness.md.

    A history row sees the history up to itself; a candidate sees the whole history and itself.
    """
    if row < num_history:
        return column <= row
    return column < num_history or column == row


def is_within(window: AttentionWindow | None, row: int, column: int) -> bool:
    """Return whether the window of the row at one position holds another position."""
    return window is None or column < window.first or row - column < window.recent


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    times: Tensor,
    num_history: int,
    bias: BiasTables,
    alpha: float,
    query_times: Tensor | None = None,
    edges: Tensor | None = None,
    window: AttentionWindow | None = None,
) -> Tensor:
    """Compute the attention of a whole sequence [history | candidates].

    Args:
        q, k, v: [N, H, D] of all rows.
        positions, times: int64 [N] of all keys.
        num_history: Number of rows before the first candidate.
        bias: Tables of the relative bias.
        alpha: Factor on q k^T.
        query_times: int64 [N] times of the queries; None = `times`.
        edges: int64 [buckets - 1], see `HstuCall.edges`.
        window: See `HstuCall.window`.

    Returns:
        [N, H, Dv], without the attention scale.
    """
    n = len(q)
    place = positions.tolist()
    seen = [
        [allowed(i, j, num_history) and is_within(window, place[i], place[j]) for j in range(n)]
        for i in range(n)
    ]
    mask = torch.tensor(seen, dtype=torch.bool).view(n, n)
    distance = (positions[:, None] - positions[None, :]).clamp(0, bias.position.shape[1] - 1)
    asked = times if query_times is None else query_times
    bucket = bias_bucket(edges, asked[:, None] - times[None, :]).long()
    logits = (
        torch.einsum("ihd,jhd->hij", q, k) * alpha
        + bias.position[:, distance]
        + bias.time[:, bucket]
    )
    weights = torch.where(mask, silu(logits), torch.zeros((), dtype=q.dtype))
    return torch.einsum("hij,jhd->ihd", weights, v)


def _positions(call: HstuCall, num_tokens: int) -> Tensor:
    """Return the positions of a call's tokens, and of the one after them: [n + 1]."""
    if call.window is None:
        return torch.arange(num_tokens + 1)
    return call.window.positions(num_tokens, call.times.device)


def joined(slabs: Sequence[Slab], k: Tensor, v: Tensor) -> Slab:
    """Concatenate all keys and values in token order, the rows k and v last."""
    return torch.cat([*(s[0] for s in slabs), k]), torch.cat([*(s[1] for s in slabs), v])


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from one query row q [Hq, D] to its keys and values [m, Hkv, D], m >= 1: [Hq, D]."""
    group = q.shape[0] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1)
    values = v.repeat_interleave(group, dim=1)
    weights = (torch.einsum("hd,mhd->hm", q, keys) * scale).softmax(dim=1)
    return torch.einsum("hm,mhd->hd", weights, values)


class ReferenceBackend(PlainOps):
    """Computes every op by its definition, with quadratic memory: for tests and the self-test."""

    name = "reference"
    kernels = "torch"

    def hstu_causal(self, call: HstuCall) -> Tensor:
        call = call.as_read(is_causal=True)
        keys, values = joined(natural(call.cached), call.k, call.v)
        num_past = len(keys) - len(call.q)
        # cached rows have no queries: use zeros
        queries = torch.cat([call.q.new_zeros(num_past, *call.q.shape[1:]), call.q])
        positions = _positions(call, len(keys))[:-1]
        asked = call.times.clone()
        if call.row_times is not None:
            asked[num_past:] = call.row_times
        out = dense_attention(
            queries,
            keys,
            values,
            positions,
            call.times,
            len(keys),
            call.bias,
            call.alpha,
            asked,
            call.edges,
            call.window,
        )
        return out[num_past:]

    def hstu_targets(self, call: HstuCall) -> Tensor:
        call = call.as_read(is_causal=False)
        keys, values = joined(natural(call.cached), call.k, call.v)
        m = len(keys) - len(call.k)
        queries = torch.cat([call.q.new_zeros(m, *call.q.shape[1:]), call.q])
        places = _positions(call, m)
        positions = torch.cat([places[:-1], places[-1].expand(len(call.q))])
        asked = torch.cat([call.times, torch.full((len(call.q),), call.query_time)])
        times = asked.clone()
        if call.own_time is not None:
            times[m:] = call.own_time
        return dense_attention(
            *(queries, keys, values, positions, times, m, call.bias, call.alpha, asked, call.edges),
            call.window,
        )[m:]

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], scale: float
    ) -> Tensor:
        keys, values = joined(past, k, v)
        first = len(keys) - len(q)
        rows = [
            softmax_attention(row, keys[: first + i + 1], values[: first + i + 1], scale)
            for i, row in enumerate(q)
        ]
        return torch.stack(rows)

    def beam_attention(self, call: BeamCall) -> Tensor:
        """Attend to the concatenation of prefix and own tokens, row by row."""
        out = []
        for row, query in enumerate(call.q):
            holders = [
                row if call.ancestry is None else int(call.ancestry[slot, row])
                for slot in range(call.num_slots)
            ]
            own_k, own_v = (
                torch.stack([plane[holder, slot] for slot, holder in enumerate(holders)])
                if holders
                else plane[0, :0]
                for plane in call.unshared
            )
            out.append(softmax_attention(query, *joined(call.shared, own_k, own_v), call.scale))
        return torch.stack(out)

    def beam_topk(self, call: TopkCall) -> Choices:
        """Sort every edge of every beam."""
        follow = call.follow
        codes = call.codes or slice(None)
        wide = call.logits.to(accumulator(call.logits.dtype)) * call.scale
        found = []
        for row, (lo, degree) in enumerate(
            zip(follow.lo.tolist(), follow.degree.tolist(), strict=True)
        ):
            edges = [
                e for e in range(lo, lo + degree) if follow.allowed is None or follow.allowed[e]
            ]
            values = wide[row, codes][follow.code[edges].long()]
            norm = (wide[row] if call.over == "row" else values).logsumexp(0)
            if bool(norm.isnan()) or bool(norm == float("inf")):
                raise FloatingPointError("a logit is not a number")
            scores = (values - norm + call.acc[row]).tolist()
            found += [(-s, row, e) for s, e in zip(scores, edges, strict=True) if s > float("-inf")]
        best = sorted(found)[: call.width]
        return Choices(
            torch.tensor([-score for score, _, _ in best], dtype=wide.dtype),
            torch.tensor([row for _, row, _ in best], dtype=torch.int64),
            torch.tensor([edge for _, _, edge in best], dtype=torch.int64),
        )

    def gathered_topk(
        self,
        hidden: Tensor,
        weight: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        scale: float = 1.0,
    ) -> Choices:
        """Compute the whole product."""
        wide = accumulator(hidden.dtype)
        logits = hidden.to(wide) @ weight.to(wide).T
        return self.beam_topk(TopkCall(logits, acc, follow, width, "valid", scale=scale))

    def best_items(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        """Sort all scores by score, then by row; excluded pairs are -inf."""
        scores = queries @ items.T
        if hidden is not None:
            scores[hidden.queries, hidden.items] = -torch.inf
        best, order = scores.sort(dim=1, descending=True, stable=True)
        order = order.masked_fill(best == -torch.inf, -1)
        short = max(0, k - len(items))
        pad = torch.nn.functional.pad
        return Best(
            pad(best[:, :k], (0, short), value=-torch.inf), pad(order[:, :k], (0, short), value=-1)
        )

    def item_products(self, query: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """Multiply the rows with the query."""
        return (items[rows] * query).sum(-1)
