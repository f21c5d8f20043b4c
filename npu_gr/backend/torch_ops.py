"""The ops from plain torch, chunked: no N x N tensor, no copy of cached keys, work only where the mask allows.

Shared by every device; a device that has something better overrides the op. Sums over key chunks
accumulate in fp32 (fp64 for fp64 inputs), so the order of chunks costs no accuracy in bf16.

`SingleStream` is the device under them, the host: everything in order. `streams.py` has devices
with queues.
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

from npu_gr.backend.base import Arrangement, HstuPass, accumulator, bias_bucket
from npu_gr.backend.best_items import Best, Hidden, edges_of, select, top_k
from npu_gr.backend.calls import (
    BeamCall,
    BiasTables,
    BlendSums,
    BlendTables,
    Choices,
    Continuations,
    FusedForwardCall,
    HstuCall,
    HstuFindCall,
    HstuFound,
    HstuPassCall,
    HstuShape,
    TopkCall,
)
from npu_gr.backend.tiles import Slab, Tiles, natural, pack

log = logging.getLogger(__name__)


class SingleStream:
    """Implement `DeviceQueues` for the host."""

    device = torch.device("cpu")
    pins_host_memory = False
    gathers_head = True

    def __init__(self) -> None:
        self.ops: Mapping[str, str] = {}
        self.on_fallback: Callable[[str], None] = lambda _op: None
        self._said: set[str] = set()

    def fell_back(self, op: str, why: str) -> None:
        """Count a call of `op` that does not run as `ops` says; log the reason the first time."""
        self.on_fallback(op)
        if op not in self._said:
            self._said.add(op)
            log.warning("%s: %s; torch ops run instead, said once", op, why)

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """Share the array's memory where torch can, that is unless it is read-only: a copy takes ten times as long."""
        return torch.from_numpy(array) if array.flags.carray else torch.tensor(array)

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        return [own.float().numpy() for own in tensors]

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        self.synchronize()
        return lambda: None

    def synchronize(self) -> None:
        """Return at once: on the CPU nothing is queued."""


class PlainOps(SingleStream):
    """Implement the ops that need no kernel, or have none."""

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

        The first pass writes the rows whose parent stands behind them, the second pass the others.
        No row that the first pass has overwritten is read afterwards, *because parents do not
        decrease*.
        """
        row = torch.arange(len(parent), device=parent.device)
        for moves in (parent > row, parent < row):
            to = torch.nonzero(moves).squeeze(1)
            for plane in (keys, values):
                plane[:, to, :num_slots] = plane[:, parent[to], :num_slots]

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        """Have one way, which is chosen with the kernels: pages are laid out for it."""
        return (self.ops.get("hstu_attention", "torch"),) if shape.has_plain_times else ("torch",)

    def running(self, way: str) -> Self:
        """Name the way: which kernel a call runs follows from the call."""
        if self.ops.get("hstu_attention", "torch") == way:
            return self
        made = copy.copy(self)
        made.ops = {**self.ops, "hstu_attention": way}
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

    def hstu_pass(self, call: HstuPassCall) -> HstuPass | None:
        """Have no kernels for whole layers."""
        return None

    def fused_forward(self, call: FusedForwardCall) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """Have no kernels for whole passes."""
        return None

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        """Have no kernel for it."""
        return None

    def blend_sums(self, tables: BlendTables) -> BlendSums | None:
        """Have no kernel for it."""
        return None


# query rows a chunk; with COLUMNS x heads a chunk of logits stays in the last-level cache
ROWS = 256
COLUMNS = 2048
GATHERED_EDGES = 1 << 14  # dots at once, where the head is read at valid edges alone
CANDIDATE_ROWS = 512  # M-FALCON micro-batch; also the largest that the Ascend op was tested with


def column_chunks(slabs: Sequence[Slab]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first token, k [H, Dq, m], v [H, m, Dv]) of every chunk of at most COLUMNS keys.

    Chunks begin at multiples of COLUMNS whatever the slabs are, so that cached and full inference
    round the same partial sums; in bf16 they would differ otherwise. A chunk inside one slab is a
    view; one that spans several is a copy.
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
        bias: the layer's tables.
        first_row, first_column: positions of the block's corner.
        rows_at, columns_at: int64 [rows] and [columns], unix seconds.
        edges: of the time buckets, as of `HstuCall`.

    Returns:
        [H, rows, columns] in the tables' dtype.
    """
    buckets = bias.position.shape[1]
    delta = rows_at[:, None] - columns_at[None, :]
    block = bias.time.index_select(1, bias_bucket(edges, delta).flatten()).view(-1, *delta.shape)
    if first_row - (first_column + len(columns_at) - 1) >= buckets - 1:
        # far from the diagonal: one number a head
        return block.add_(bias.position[:, -1, None, None])
    row = torch.arange(first_row, first_row + len(rows_at), device=delta.device)
    column = torch.arange(first_column, first_column + len(columns_at), device=delta.device)
    distance = (row[:, None] - column[None, :]).clamp_(0, buckets - 1)
    return block.add_(bias.position.index_select(1, distance.flatten()).view(-1, *delta.shape))


class AttentionStage(NamedTuple):
    """Softmax attention over some of the keys, not yet normalised.

    All in the accumulator's dtype, base e.

    Source: staged attention of xGR, arXiv:2512.11529. A stage without keys is left out, so no
    maximum is -inf.
    """

    peak: Tensor  # [Hkv, g * rows, 1] largest score
    total: Tensor  # [Hkv, g * rows, 1] sum of exp(score - peak)
    output: Tensor  # [Hkv, g * rows, D] sum of exp(score - peak) * value

    def merge(self, other: AttentionStage) -> AttentionStage:
        """The stage over both sets of keys."""
        peak = torch.maximum(self.peak, other.peak)
        a = (self.peak - peak).exp_()
        b = (other.peak - peak).exp_()
        return AttentionStage(
            peak, a * self.total + b * other.total, a * self.output + b * other.output
        )


def weigh(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (peak, total, weights exp(score - peak)) of scores [..., m], m >= 1, which are overwritten."""
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    return peak, weights.sum(-1, keepdim=True), weights


def fold_rows(q: Tensor, num_kv_heads: int) -> Tensor:
    """Fold q [rows, Hq, D] to [Hkv, g * rows, D]: rows and heads that read one KV head stand side by side."""
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
    """K and v [Hkv, rows, slots, D] of each row's own tokens, in the accumulator's dtype."""
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
    """[Hkv, g * rows, slots] of folded queries against each row's own keys [Hkv, rows, slots, D].

    A product and a sum rather than a GEMM: rows x heads matrices of one to three keys are too small
    for one.
    """
    grouped = queries.unflatten(1, (-1, keys.shape[1]))
    return torch.stack([(grouped * k[:, None]).sum(-1) for k in keys.unbind(2)], dim=-1).flatten(
        1, 2
    )


def own_output(weights: Tensor, values: Tensor) -> Tensor:
    """[Hkv, g * rows, D] of weights [Hkv, g * rows, slots] on each row's own values [Hkv, rows, slots, D]."""
    grouped = weights.unflatten(1, (-1, values.shape[1]))
    parts = [
        w[..., None] * v[:, None] for w, v in zip(grouped.unbind(-1), values.unbind(2), strict=True)
    ]
    return torch.stack(parts).sum(0).flatten(1, 2)


class Products:
    """Products of queries and weights with cached keys and values, the result in the accumulator's dtype.

    Where the device multiplies half numbers with sums and results in fp32, the KV is read as it is
    stored; elsewhere a copy of it is widened first.
    """

    def __init__(self, device: torch.device) -> None:
        self._reads_half = _gives_fp32(device)

    def scores(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """[Hkv, g * rows, D], not scaled yet, and [Hkv, D, keys] -> scaled [Hkv, g * rows, keys]."""
        wide = accumulator(keys.dtype)
        if self._reads_half and keys.dtype != wide:
            return torch.bmm(queries, keys, out_dtype=wide).mul_(scale)
        return torch.bmm(queries.to(wide) * scale, keys.to(wide))

    def output(self, weights: Tensor, values: Tensor) -> Tensor:
        """[Hkv, g * rows, keys] in the accumulator's dtype, and [Hkv, keys, D] -> [Hkv, g * rows, D]."""
        wide = weights.dtype
        if self._reads_half and values.dtype != wide:
            return torch.bmm(weights.to(values.dtype), values, out_dtype=wide)
        return torch.bmm(weights, values.to(wide))


def _gives_fp32(device: torch.device) -> bool:
    """Tell whether torch has products of bf16 with a result in fp32 on the device.

    Its table of kernels knows; a call that fails could have failed for any reason.
    """
    if "dtype" not in torch.ops.aten.bmm.overloads():  # an older torch
        return False
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::bmm.dtype", key))


def staged_attention(call: BeamCall, products: Products) -> Tensor:
    """Compute `Backend.beam_attention`: the shared stage is one GEMM a KV head and key chunk, g * rows x D x keys."""
    queries = fold_rows(call.q, call.unshared[0].shape[2])
    done: AttentionStage | None = None
    for _, keys, values in column_chunks(call.shared):
        peak, total, weights = weigh(products.scores(queries, keys, call.scale))
        stage = AttentionStage(peak, total, products.output(weights, values))
        done = stage if done is None else done.merge(stage)
    return merged_with_own(call, done)


def merged_with_own(call: BeamCall, done: AttentionStage | None) -> Tensor:
    """Merge the stage over the prefix (None = there is no prefix) with each row's own tokens: [r, Hq, D] as q."""
    q = call.q
    if call.num_slots:
        k, v = own_tokens(call)
        peak, total, weights = weigh(own_scores(fold_queries(q, k.shape[0], call.scale), k))
        own = AttentionStage(peak, total, own_output(weights, v))
        done = own if done is None else done.merge(own)
    assert done is not None
    return unfold_rows(done.output / done.total, len(q)).to(q.dtype)


def joint_attention(call: BeamCall, products: Products) -> Tensor:
    """Compute it in one stage, from the scores of all keys side by side.

    The shared keys are never copied per row.
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
    """Implement `Backend`'s ops by torch, on any torch device."""

    @cached_property
    def products(self) -> Products:
        """How keys and values are multiplied on the device."""
        return Products(self.device)

    def hstu_causal(self, call: HstuCall) -> Tensor:
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
        q = call.q
        bias = call.bias
        m = len(call.times)
        buckets = bias.position.shape[1]
        beside = bias.time[:, 0]
        if call.own_time is not None:
            beside = bias.time[:, bias_bucket(call.edges, call.query_time - call.own_time)]
        own = (q * call.k).sum(2) * call.alpha + bias.position[:, 0] + beside
        out = (silu(own)[:, :, None] * call.v).transpose(0, 1).to(accumulator(q.dtype))
        # one row of bias serves every candidate: they share position and time
        distance = (m - torch.arange(m, device=q.device)).clamp_(0, buckets - 1)
        row = (
            bias.position[:, distance]
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
        """Give each chunk of query rows only the keys that it may see, so that a mask is ROWS x keys."""
        heads = k.shape[1]
        # it sees everything: the slabs are read where they are, and not joined
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
        """Compute the products in chunks; a code that no edge reads stays at -inf."""
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
