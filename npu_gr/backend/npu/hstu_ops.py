"""The HSTU operators `torch.ops.npu_gr.hstu_*`: schemas, and definitions in plain torch.

A layer is `hstu_rows`, a product, `hstu_scores`, a product, `hstu_finish`; `hstu_pass.py` runs
them. `meta`, int32 [B, 8], describes the batch: the fields of `hstu_batch.Entry`. Results are
written to arguments.

Sizes: B requests, H heads, D width of a head (Dq, Dv), R row slots, K key slots, Q queries in all,
P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCHEMAS = (
    "hstu_rows(Tensor mixed, Tensor meta, Tensor page_ids, Tensor(a!) k_plane, Tensor(b!) v_plane, "
    "Tensor(c!) q, Tensor(d!) k, Tensor(e!) v, Tensor(f!) u, float q_scale, bool silu_all) -> ()",
    "hstu_scores(Tensor(a!) scores, Tensor meta, Tensor bounds, Tensor row_times, Tensor "
    "key_times, Tensor tables, Tensor near, float alpha) -> ()",
    "hstu_finish(Tensor attention, Tensor u, Tensor norm, Tensor meta, Tensor(a!) out, float "
    "scale, float eps) -> ()",
)
NEAR_END = 288  # repetitions at each end of a table of positions


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def hstu_rows(
    mixed: Tensor,
    meta: Tensor,
    page_ids: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    q_scale: float,
    silu_all: bool,
) -> None:
    """Make the attention's inputs of a layer's projected rows and the cached pages.

    Args:
        mixed: fp32, fp16 or bf16 [N, U | V | Q | K], each part [H, D].
        meta: int32 [B, 8].
        page_ids: int32 [..], pages of all requests.
        k_plane, v_plane: [pages, tokens, H, D]; written: new history rows of requests with `keeps`.
        q: [B, H, R, Dq], written: queries times q_scale.
        k, v: [B, H, K, D], written: cached tokens, then new rows, then zeros.
        u: [Q, H * Dv], written: SiLU(U) of the queries.
        q_scale: Factor on the queries.
        silu_all: SiLU of all parts, not of U only.
    """
    heads, dq = q.shape[1], q.shape[3]
    dv = v.shape[3]
    page_tokens = k_plane.shape[1]
    wide = mixed.float().split([heads * dv, heads * dv, heads * dq, heads * dq], dim=1)
    u_all, v_all, q_all, k_all = (_silu(x) if i == 0 or silu_all else x for i, x in enumerate(wide))
    for n, (rows, keys, cached, targets, page, row, query, keeps) in enumerate(meta.tolist()):
        new = slice(row, row + keys - cached)
        asked = slice(new.stop - rows, new.stop)
        own_k, own_v = (x[new].unflatten(1, (heads, -1)).to(q.dtype) for x in (k_all, v_all))
        if rows:
            u[query : query + rows] = u_all[asked].to(u.dtype)
            q[n, :, :rows] = (
                (q_all[asked] * q_scale).unflatten(1, (heads, -1)).transpose(0, 1).to(q.dtype)
            )
            held = page_ids[page : page + -(-cached // page_tokens)].long()
            for into, plane, own in ((k, k_plane, own_k), (v, v_plane, own_v)):
                into[n].zero_()
                into[n, :, :cached] = plane[held].flatten(0, 1)[:cached].transpose(0, 1)
                into[n, :, cached:keys] = own.transpose(0, 1)
        if keeps:
            token = torch.arange(cached, keys - targets, device=mixed.device)
            at = page_ids[page + token // page_tokens].long(), token % page_tokens
            k_plane[at] = own_k[: len(token)]
            v_plane[at] = own_v[: len(token)]


def hstu_scores(
    scores: Tensor,
    meta: Tensor,
    bounds: Tensor,
    row_times: Tensor,
    key_times: Tensor,
    tables: Tensor,
    near: Tensor,
    alpha: float,
) -> None:
    """Turn products of queries and keys into HSTU's weights, in place.

    y = alpha * score + time[bucket] + position[distance], then y / (1 + exp(y)); 0 where a query
    does not see a key.

    Args:
        scores: fp32, fp16 or bf16 [B, H, R, K].
        meta: int32 [B, 8].
        bounds: int32 [B, R / 32 + K / 256, 2], minimum and maximum time of each block of rows, then
            of keys; the definition does not need it.
        row_times: int32 [B, R], seconds.
        key_times: int32 [B, K].
        tables: fp32 [H, 2, 64]: time[bucket]; then time[bucket] + position[P - 1].
        near: fp32 [H, 8, P + 576]: position by falling distance, ends repeated; row s is shifted by
            7 - s.
        alpha: Factor on the scores.
    """
    positions = near.shape[2] - 2 * NEAR_END
    for n, (rows, keys, _, targets, *_) in enumerate(meta.tolist()):
        key = torch.arange(scores.shape[3], device=scores.device)
        own = torch.arange(keys - rows, keys, device=scores.device)[:, None]
        at = own.clamp(max=keys - targets)
        delta = (row_times[n, :rows, None].long() - key_times[n].long()).clamp(0, 2**31 - 2)
        bucket = ((delta + 1).float().view(torch.int32) >> 22) - 254
        distance = (at - key).clamp(0, positions - 1)
        bias = tables[:, 0][:, bucket] + near[:, 7][:, NEAR_END - 1 + positions - distance]
        y = alpha * scores[n, :, :rows].float() + bias
        weights = y / (1.0 + torch.exp(y))
        seen = (key < at) | (key == own)
        scores[n, :, :rows] = weights.masked_fill(~seen, 0.0).to(scores.dtype)


def hstu_finish(
    attention: Tensor, u: Tensor, norm: Tensor, meta: Tensor, out: Tensor, scale: float, eps: float
) -> None:
    """Normalise and gate the attention of each query.

    Args:
        attention: fp32, fp16 or bf16 [B, H, R, Dv].
        u: [Q, H * Dv].
        norm: fp32 [2, group], weight and bias of the norm over each head (group = Dv) or over a row
            (group = H * Dv).
        meta: int32 [B, 8].
        out: [Q, 1, H * Dv] = u * norm(a), or [Q, 3, H * Dv] = u, a, u * norm(a); a = scale *
            attention; written.
        scale: Factor on the attention.
        eps: Epsilon of the norm.
    """
    group = norm.shape[1]
    for n, (rows, _, _, _, _, _, query, _) in enumerate(meta.tolist()):
        mine = slice(query, query + rows)
        a = attention[n, :, :rows].float().transpose(0, 1).flatten(1) * scale
        deviation = a.unflatten(1, (-1, group))
        deviation = deviation - deviation.mean(2, keepdim=True)
        spread = ((deviation * deviation).mean(2, keepdim=True) + eps).sqrt()
        gated = (deviation / spread * norm[0] + norm[1]).flatten(1) * u[mine].float()
        out[mine, -1] = gated.to(out.dtype)
        if out.shape[1] == 3:
            out[mine, 0] = u[mine]
            out[mine, 1] = a.to(out.dtype)


def nothing(*_arguments: object) -> None:
    """Implement an operator that writes its results to arguments, for fake tensors."""
