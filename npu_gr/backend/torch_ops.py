"""The ops in plain torch, chunked: no N x N tensor, no copy of cached keys, no masked-out work.

Every backend inherits them and overrides the ops for which it has kernels. Sums over key chunks
accumulate in fp32 (fp64 for fp64 inputs), so that bf16 loses no accuracy.

`SingleStream` is the host, which runs everything in order; `streams.py` has devices with queues.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from npu_gr.backend.base import HSTU, Arrangement, HstuPass, accumulator, bias_bucket
from npu_gr.backend.best_items import Best, Hidden, edges_of, select, top_k
from npu_gr.backend.calls import (
    BeamCall,
    BiasTables,
    BlendSums,
    BlendTables,
    Choices,
    Continuations,
    FusedForwardCall,
    GraphShape,
    HstuCall,
    HstuFindCall,
    HstuFound,
    HstuPassCall,
    HstuShape,
    TopkCall,
)
from npu_gr.backend.tiles import Slab, Tiles, natural, pack
from npu_gr.backend.window_ops import causal_in_window, seen_by_candidates

log = logging.getLogger(__name__)


class SingleStream:
    """Implements `DeviceQueues` for the host."""

    device = torch.device("cpu")
    pins_host_memory = False
    gathers_head = True
    has_windows = True
    has_int8 = True

    def __init__(self) -> None:
        self.ops: Mapping[str, str] = {}
        self.on_fallback: Callable[[str], None] = lambda _op: None
        self.on_graph: Callable[[str], None] = lambda _outcome: None
        self.on_padding: Callable[[str, int, int], None] = lambda _what, _used, _size: None
        self._said: set[str] = set()

    def fell_back(self, op: str, why: str) -> None:
        """Count a call of `op` that falls back to torch ops; log the reason the first time."""
        self.on_fallback(op)
        if op not in self._said:
            self._said.add(op)
            log.warning("%s: %s; torch ops run instead (logged once)", op, why)

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """Share the array's memory, unless it is read-only: a copy takes ten times as long."""
        return torch.from_numpy(array) if array.flags.carray else torch.tensor(array)

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        return [own.float().numpy() for own in tensors]

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        self.synchronize()
        return lambda: None

    def release_memory(self) -> None:
        pass

    def free_bytes(self) -> int | None:
        return None

    def synchronize(self) -> None:
        """Return immediately: on the CPU nothing is queued."""


class PlainOps(SingleStream):
    """Implements the ops that need no kernel, or have none."""

    def arrangement(self, dtype: torch.dtype, page_tokens: int) -> Arrangement:
        return "natural"

    def pack_kv(self, into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
        pack(into, first_token, k, v)

    def affine(self, x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
        bias = None if layer.bias is None else layer.bias[first:last]
        y = linear(x.to(layer.weight.dtype), layer.weight[first:last], bias)
        return silu(y) if is_silu else y

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """Fork in two passes, without a second slab.

        The first pass writes the rows whose parent is behind them, the second pass the others. The
        second pass reads no row that the first has overwritten, *because parents do not decrease*.
        """
        row = torch.arange(len(parent), device=parent.device)
        for moves in (parent > row, parent < row):
            to = torch.nonzero(moves).squeeze(1)
            for plane in (keys, values):
                plane[:, to, :num_slots] = plane[:, parent[to], :num_slots]

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        """List one implementation: the page layout already depends on the kernels."""
        return (self.ops.get("hstu_attention", "torch"),) if shape.has_plain_times else ("torch",)

    def beam_ways(self) -> Mapping[str, Sequence[str]]:
        """List none: a generator's ops have one implementation each."""
        return {}

    def running(self, way: str, op: str = HSTU) -> Self:
        """Rename only: each call itself decides on the kernel."""
        if self.ops.get(op, "torch") == way:
            return self
        made = copy.copy(self)
        made.ops = {**self.ops, op: way}
        return made

    def order_of(self, numbers: Tensor) -> Tensor:
        return torch.argsort(numbers, stable=True)

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        return work(*rows)

    def graph_shapes(
        self, max_requests: int, max_tokens: int, chunk_tokens: int
    ) -> Sequence[GraphShape]:
        return ()

    def hstu_pass(self, call: HstuPassCall) -> HstuPass | None:
        """Return None: there are no fused kernels."""
        return None

    def fused_forward(self, call: FusedForwardCall) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """Return None: there is no kernel."""
        return None

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        """Return None: there is no kernel."""
        return None

    def blend_sums(self, tables: BlendTables) -> BlendSums | None:
        """Return None: there is no kernel."""
        return None


# query rows a chunk; ROWS x COLUMNS x heads logits fit the last-level cache
ROWS = 256
COLUMNS = 2048
GATHERED_EDGES = 1 << 14  # products at once in `gathered_topk`
CANDIDATE_ROWS = 512  # M-FALCON micro-batch; also the largest tested with the Ascend op


def column_chunks(slabs: Sequence[Slab]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first token, k [H, Dq, m], v [H, m, Dv]) of every chunk of at most COLUMNS keys.

    Chunks begin at multiples of COLUMNS for any slabs, so that cached and full inference round the
    same partial sums; otherwise they would differ in bf16. A chunk inside one slab is a view, a
    chunk over several is a copy.
    """
    first = 0
    parts: list[Slab] = []
    room = COLUMNS
    for k, v in slabs:
        at = 0
        while at < len(k):
            part = slice(at, min(at + room, len(k)))
            parts.append((k[part], v[part]))
            room -= part.stop - at
            at = part.stop
            if not room:
                yield first, *_joined(parts)
                first += COLUMNS
                parts = []
                room = COLUMNS
    if parts:
        yield first, *_joined(parts)


def _joined(parts: list[Slab]) -> Slab:
    k, v = (
        parts[0]
        if len(parts) == 1
        else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
    )
    return k.permute(1, 2, 0), v.transpose(0, 1)


def block_bias(
    bias: BiasTables,
    first_row: int,
    first_column: int,
    rows_at: Tensor,
    columns_at: Tensor,
    edges: Tensor | None,
) -> Tensor:
    """Look up the bias of a block of history rows.

    Args:
        bias: Tables of the layer.
        first_row, first_column: Positions of the block's corner.
        rows_at, columns_at: int64 [rows] and [columns], unix seconds.
        edges: int64 [buckets - 1], see `HstuCall.edges`.

    Returns:
        [H, rows, columns] in the tables' dtype.
    """
    buckets = bias.position.shape[1]
    delta = rows_at[:, None] - columns_at[None, :]
    block = bias.time.index_select(1, bias_bucket(edges, delta).flatten()).view(-1, *delta.shape)
    if first_row - (first_column + len(columns_at) - 1) >= buckets - 1:
        # far from the diagonal the position bias is one number a head
        return block.add_(bias.position[:, -1, None, None])
    row = torch.arange(first_row, first_row + len(rows_at), device=delta.device)
    column = torch.arange(first_column, first_column + len(columns_at), device=delta.device)
    distance = (row[:, None] - column[None, :]).clamp_(0, buckets - 1)
    return block.add_(bias.position.index_select(1, distance.flatten()).view(-1, *delta.shape))


class AttentionStage(NamedTuple):
    """Softmax attention over some of the keys, not normalised, in the accumulator's dtype, base e.

    Source: staged attention of xGR, arXiv:2512.11529. There are no stages without keys, so `peak`
    is never -inf.
    """

    peak: Tensor  # [Hkv, g * rows, 1] largest score
    total: Tensor  # [Hkv, g * rows, 1] sum of exp(score - peak)
    output: Tensor  # [Hkv, g * rows, D] sum of exp(score - peak) * value

    def merge(self, other: AttentionStage) -> AttentionStage:
        """Return the stage over both sets of keys."""
        peak = torch.maximum(self.peak, other.peak)
        a = (self.peak - peak).exp_()
        b = (other.peak - peak).exp_()
        return AttentionStage(
            peak, a * self.total + b * other.total, a * self.output + b * other.output
        )


def weigh(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (peak, total, weights exp(score - peak)) of scores [..., m], m >= 1, in place."""
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    return peak, weights.sum(-1, keepdim=True), weights


def fold_rows(q: Tensor, num_kv_heads: int) -> Tensor:
    """Fold q [rows, Hq, D] to [Hkv, g * rows, D]: the rows and heads of a KV head are adjacent."""
    folded: Tensor = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    return folded


def fold_queries(q: Tensor, num_kv_heads: int, scale: float) -> Tensor:
    """Fold q * scale, in the accumulator's dtype."""
    return fold_rows(q.to(accumulator(q.dtype)) * scale, num_kv_heads)


def unfold_rows(folded: Tensor, num_rows: int) -> Tensor:
    """Undo `fold_rows`: [Hkv, g * rows, X] -> [rows, Hq, X]."""
    rows: Tensor = folded.unflatten(1, (-1, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)
    return rows


def own_tokens(call: BeamCall) -> Slab:
    """Gather k and v [Hkv, rows, slots, D] of each row's own tokens, in the accumulator's dtype."""
    planes = []
    for plane in call.unshared:
        if call.ancestry is None:
            held = plane[: len(call.q), : call.num_slots]
        else:
            held = plane[
                call.ancestry[: call.num_slots].T, torch.arange(call.num_slots, device=plane.device)
            ]
        planes.append(held.permute(2, 0, 1, 3).to(accumulator(plane.dtype)))
    return planes[0], planes[1]


def own_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Score folded queries against each row's own keys [Hkv, rows, slots, D].

    A product and a sum are faster than many GEMMs of one to three keys.

    Returns:
        [Hkv, g * rows, slots].
    """
    grouped = queries.unflatten(1, (-1, keys.shape[1]))
    return torch.stack([(grouped * k[:, None]).sum(-1) for k in keys.unbind(2)], dim=-1).flatten(
        1, 2
    )


def own_output(weights: Tensor, values: Tensor) -> Tensor:
    """Weigh own values: [Hkv, g * rows, slots], [Hkv, rows, slots, D] -> [Hkv, g * rows, D]."""
    grouped = weights.unflatten(1, (-1, values.shape[1]))
    parts = [
        w[..., None] * v[:, None] for w, v in zip(grouped.unbind(-1), values.unbind(2), strict=True)
    ]
    return torch.stack(parts).sum(0).flatten(1, 2)


class Products:
    """Products with cached keys and values, with results in the accumulator's dtype.

    If the device has half-precision products with fp32 results, the KV is read as it is stored;
    otherwise a widened copy is made first.
    """

    def __init__(self, device: torch.device) -> None:
        self._reads_half = _gives_fp32(device)

    def scores(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Compute scaled scores: [Hkv, g * rows, D], [Hkv, D, keys] -> [Hkv, g * rows, keys]."""
        wide = accumulator(keys.dtype)
        if self._reads_half and keys.dtype != wide:
            return torch.bmm(queries, keys, out_dtype=wide).mul_(scale)
        return torch.bmm(queries.to(wide) * scale, keys.to(wide))

    def output(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weigh values: [Hkv, g * rows, keys], [Hkv, keys, D] -> [Hkv, g * rows, D]."""
        wide = weights.dtype
        if self._reads_half and values.dtype != wide:
            return torch.bmm(weights.to(values.dtype), values, out_dtype=wide)
        return torch.bmm(weights, values.to(wide))


def _gives_fp32(device: torch.device) -> bool:
    """Return whether torch has bf16 products with fp32 results on the device.

    It asks the dispatcher, because a trial call could fail for other reasons.
    """
    if "dtype" not in torch.ops.aten.bmm.overloads():  # an older torch
        return False
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::bmm.dtype", key))


def staged_attention(call: BeamCall, products: Products) -> Tensor:
    """Compute `Backend.beam_attention` in stages: one GEMM for each KV head and chunk of keys."""
    queries = fold_rows(call.q, call.unshared[0].shape[2])
    done: AttentionStage | None = None
    for _, keys, values in column_chunks(call.shared):
        peak, total, weights = weigh(products.scores(queries, keys, call.scale))
        stage = AttentionStage(peak, total, products.output(weights, values))
        done = stage if done is None else done.merge(stage)
    return merged_with_own(call, done)


def merged_with_own(call: BeamCall, done: AttentionStage | None) -> Tensor:
    """Merge the prefix's stage (None = no prefix) with each row's own tokens: [r, Hq, D] as q."""
    q = call.q
    if call.num_slots:
        k, v = own_tokens(call)
        peak, total, weights = weigh(own_scores(fold_queries(q, k.shape[0], call.scale), k))
        own = AttentionStage(peak, total, own_output(weights, v))
        done = own if done is None else done.merge(own)
    assert done is not None
    return unfold_rows(done.output / done.total, len(q)).to(q.dtype)


def joint_attention(call: BeamCall, products: Products) -> Tensor:
    """Compute `Backend.beam_attention` in one stage, with one softmax over all keys.

    The shared keys are not copied per row.
    """
    q = call.q
    queries = fold_queries(q, call.unshared[0].shape[2], call.scale)
    k, v = own_tokens(call)
    if not call.shared:
        _, total, weights = weigh(own_scores(queries, k))
        return unfold_rows(own_output(weights, v) / total, len(q)).to(q.dtype)
    keys, values = _joined(list(call.shared))
    scores = products.scores(fold_rows(q, len(keys)), keys, call.scale)
    m = scores.shape[2]
    if call.num_slots:
        scores = torch.cat([scores, own_scores(queries, k)], dim=2)
    _, total, weights = weigh(scores)
    out = products.output(weights[..., :m], values)
    if call.num_slots:
        out += own_output(weights[..., m:], v)
    return unfold_rows(out / total, len(q)).to(q.dtype)


class TorchOps(PlainOps):
    """Implements `Backend`'s ops by torch, on any torch device."""

    @cached_property
    def products(self) -> Products:
        """The device's products with keys and values."""
        return Products(self.device)

    def hstu_causal(self, call: HstuCall) -> Tensor:
        call = call.as_read(is_causal=True)
        if call.window is not None:
            return causal_in_window(call, call.window)
        q = call.q
        k = call.k
        v = call.v
        times = call.times
        n, heads, _ = q.shape
        num_past = len(times) - n
        asked = times[num_past:] if call.row_times is None else call.row_times
        slabs = natural(call.cached)
        out = torch.zeros(heads, n, v.shape[2], dtype=accumulator(q.dtype), device=q.device)
        for r0 in range(0, n, ROWS):
            r1 = min(r0 + ROWS, n)
            rows = slice(num_past + r0, num_past + r1)
            queries = q[r0:r1].transpose(0, 1)
            for c0, keys, values in column_chunks([*slabs, (k[:r1], v[:r1])]):
                columns = slice(c0, c0 + keys.shape[2])
                block = block_bias(
                    call.bias, rows.start, c0, asked[r0:r1], times[columns], call.edges
                )
                logits = torch.baddbmm(block, queries, keys, alpha=call.alpha)
                weights = silu(logits, inplace=True)
                if columns.stop > rows.start + 1:  # the block touches the diagonal
                    weights.tril_(rows.start - c0)
                out[:, r0:r1] += torch.bmm(weights, values)
        return out.transpose(0, 1).to(q.dtype)

    def hstu_targets(self, call: HstuCall) -> Tensor:
        call = call.as_read(is_causal=False)
        if call.window is not None:
            call, ago = seen_by_candidates(call, call.window)
        else:
            ago = len(call.times) - torch.arange(len(call.times), device=call.q.device)
        q = call.q
        bias = call.bias
        buckets = bias.position.shape[1]
        own_time = bias.time[:, 0]
        if call.own_time is not None:
            own_time = bias.time[:, bias_bucket(call.edges, call.query_time - call.own_time)]
        own = (q * call.k).sum(2) * call.alpha + bias.position[:, 0] + own_time
        out = (silu(own)[:, :, None] * call.v).transpose(0, 1).to(accumulator(q.dtype))
        # all candidates have the same row of bias, because they share position and time
        row = (
            bias.position[:, ago.clamp_(0, buckets - 1)]
            + bias.time[:, bias_bucket(call.edges, call.query_time - call.times).long()]
        )
        for keys_from, keys, values in column_chunks(natural(call.cached)):
            part = row[:, None, keys_from : keys_from + keys.shape[2]]
            for r0 in range(0, len(q), CANDIDATE_ROWS):
                queries = q[r0 : r0 + CANDIDATE_ROWS].transpose(0, 1)
                logits = torch.baddbmm(part, queries, keys, alpha=call.alpha)
                out[:, r0 : r0 + CANDIDATE_ROWS] += torch.bmm(silu(logits, inplace=True), values)
        return out.transpose(0, 1).to(q.dtype)

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], scale: float
    ) -> Tensor:
        """Attend chunk by chunk, each to the keys that it sees: the largest mask is ROWS x keys."""
        heads = k.shape[1]
        # a single row sees all keys, so the slabs need not be concatenated
        if past and len(q) == 1:
            nothing = k.new_empty(1, 0, *k.shape[1:]), v.new_empty(1, 0, *v.shape[1:])
            return staged_attention(
                BeamCall(q, [*past, (k, v)], nothing, 0, None, scale), self.products
            )
        keys, values = _joined([*past, (k, v)])
        first = len(values[0]) - len(q)  # keys before the first query's own
        # [Hkv, g, ...]: the group's keys are a view of stride 0, one copy of KV for all its query
        # heads
        queries = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        group = queries.shape[1]
        k_all = keys.transpose(1, 2)[:, None].expand(-1, group, -1, -1)
        v_all = values[:, None].expand(-1, group, -1, -1)
        if not first:
            out = scaled_dot_product_attention(queries, k_all, v_all, is_causal=True, scale=scale)
            return out.permute(2, 0, 1, 3).flatten(1, 2)
        parts = []
        for r0 in range(0, len(q), ROWS):
            r1 = min(r0 + ROWS, len(q))
            end = first + r1
            seen = torch.ones(r1 - r0, end, dtype=torch.bool, device=q.device).tril_(first + r0)
            mask = seen if r1 - r0 > 1 else None
            chunk = queries[:, :, r0:r1], k_all[:, :, :end], v_all[:, :, :end]
            parts.append(scaled_dot_product_attention(*chunk, attn_mask=mask, scale=scale))
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).flatten(1, 2)

    def beam_attention(self, call: BeamCall) -> Tensor:
        return (
            staged_attention(call, self.products)
            if call.is_split
            else joint_attention(call, self.products)
        )

    def beam_topk(self, call: TopkCall) -> Choices:
        wide = call.logits.to(accumulator(call.logits.dtype))
        wide = wide if call.scale == 1.0 else wide * call.scale
        norm = wide.logsumexp(1) if call.over == "row" else None
        level = wide if call.codes is None else wide[:, call.codes]
        return select(level, norm, call.acc.to(wide.dtype), call.follow, call.width)

    def gathered_topk(
        self,
        hidden: Tensor,
        weight: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        scale: float = 1.0,
    ) -> Choices:
        """Compute the products in chunks; codes without an edge stay at -inf."""
        wide = accumulator(hidden.dtype)
        logits = torch.full(
            (len(hidden), len(weight)), float("-inf"), dtype=wide, device=hidden.device
        )
        row, edge = edges_of(follow, torch.arange(len(hidden), device=hidden.device))
        code = follow.code[edge].long()
        for at in range(0, len(row), GATHERED_EDGES):
            part = slice(at, at + GATHERED_EDGES)
            dots = (hidden[row[part]].to(wide) * weight[code[part]].to(wide)).sum(1)
            logits[row[part], code[part]] = dots * scale
        return select(logits, None, acc.to(wide), follow, width)

    def best_items(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        return top_k(queries, items, k, hidden)

    def item_products(self, query: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        return (items[rows] * query).sum(-1)
