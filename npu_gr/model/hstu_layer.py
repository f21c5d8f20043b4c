"""Layers of the HSTU ranker, their norms and time buckets, and the pass that runs them op by op.

Public code computes a time bucket in fp32 (log or sqrt of seconds, divided, floored). Vectorised
logarithms differ in the last digit between devices, and so would the bucket of a time difference at
an edge. Seconds are integers: the first second of each bucket is computed once, and comparing with
these edges is exact on every device.

A segment is the rows of one request in a pass, and the cached tokens that they read. Every backend
has the ops of this pass, which defines the results of the fused kernels (`hstu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize, silu

from npu_gr.backend.base import TIME_BUCKETS, Affine, Backend
from npu_gr.backend.calls import AttentionWindow, BiasTables, HstuCall, HstuIds, PagedKV
from npu_gr.backend.tiles import Slab, Tiles
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.model.config import HSTUConfig, TimeBuckets, TimePeriod
from npu_gr.model.feature_rows import FeatureValues

NEVER_S = 1 << 40  # 35,000 years


def bucket_by_formula(times: TimeBuckets, seconds: Tensor) -> Tensor:
    """Compute the bucket of int64 seconds >= 0 in fp32, as public code does: the definition."""
    scaled = seconds.clamp(min=1).float() / times.unit_s
    if times.function == "log":
        scaled = scaled.log()
    elif times.function == "sqrt":
        scaled = scaled.sqrt()
    return (scaled / times.divisor).floor().clamp(0, times.count - 1).long()


def edges_of(times: TimeBuckets) -> Tensor:
    """Find the first second of every bucket but the first, int64 [count - 1].

    Bisection works because the formula is monotonic. An empty bucket has `NEVER_S`.
    """
    wanted = torch.arange(1, times.count, device="cpu")  # also inside `shapes_only`
    low = torch.zeros_like(wanted)  # every earlier second is in a lower bucket
    high = torch.full_like(wanted, NEVER_S)
    while bool((high > low).any()):
        middle = (low + high) // 2
        reached = bucket_by_formula(times, middle) >= wanted
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle + 1)
        low = torch.minimum(low, high)
    return high


def window_of(config: HSTUConfig) -> AttentionWindow | None:
    """Return what a row sees of the history; None = all."""
    recent, first = config.attention_window_tokens, config.attention_first_tokens
    return AttentionWindow(recent, first) if recent else None


class PerHeadNorm(nn.Module):
    """Layer norm of each head by itself, with one weight and one bias a head."""

    def __init__(self, num_heads: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))
        self.bias = nn.Parameter(torch.zeros(num_heads))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H, Dv] -> the same shape."""
        return layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight[:, None] + self.bias[:, None]


class UnitLength(nn.Module):
    """Divides each row by its L2 norm, at least `eps`."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> the same shape."""
        return normalize(x, dim=-1, eps=self.eps)


class NormGate(nn.LayerNorm):
    """Computes x * sigmoid(norm(x))."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """[..., width] -> the same shape."""
        gate: Tensor = super().forward(input).sigmoid()
        return input * gate


class NormSiLU(nn.LayerNorm):
    """Computes silu(norm(x))."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """[..., width] -> the same shape."""
        return silu(super().forward(input))


class ClockMix(nn.Module):
    """Adds features of the request's time, e.g. the hour of the day, to rows by a linear layer.

    Each period gives the cosine and the sine of (units since 1970 mod num_units) / num_units *
    6.28, in fp32 like public code (seconds of this century are rounded to multiples of 128).
    """

    def __init__(self, dim: int, periods: Sequence[TimePeriod]) -> None:
        super().__init__()
        self.periods = periods
        self.linear = nn.Linear(dim + 2 * len(periods), dim)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """Mix the unix seconds `at`, int64 [...], into rows x [..., dim]: [..., dim]."""
        shown = []
        for period in self.periods:
            units = torch.div(at.float(), float(period.unit_s), rounding_mode="floor")
            angle = (
                torch.remainder(units, float(period.num_units)) / float(period.num_units) * 2 * 3.14
            )
            shown += [angle.cos(), angle.sin()]
        mixed: Tensor = self.linear(torch.cat([x, torch.stack(shown, -1).to(x.dtype)], dim=-1))
        return mixed


def head_norm(config: HSTUConfig) -> nn.Module:
    """Make the norm of a candidate's final row."""
    eps = config.norm_eps if config.head_norm_eps is None else config.head_norm_eps
    if config.head_norm == "layer":
        return nn.LayerNorm(config.dim, eps=eps)
    return UnitLength(eps) if config.head_norm == "l2" else nn.Identity()


def head_mlp(config: HSTUConfig) -> nn.Sequential:
    """Make the MLP from a final row to the logits."""
    eps = config.norm_eps if config.head_norm_eps is None else config.head_norm_eps
    plain: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU, "gelu": nn.GELU}
    normed = {"norm_gate": NormGate, "norm_silu": NormSiLU}
    kind = plain.get(config.head_activation)
    middle = normed[config.head_activation](config.head_dim, eps=eps) if kind is None else kind()
    return nn.Sequential(
        nn.Linear(config.dim, config.head_dim),
        middle,
        nn.Linear(config.head_dim, len(config.tasks)),
    )


_TORCH = TorchOps()  # differentiable, for training


class HSTULayer(nn.Module):
    """A layer without its attention.

    `project` makes U, V, Q and K of the input rows; `finish` gates, projects and adds the residual.
    """

    position_bias: Tensor
    time_bias: Tensor
    time_edges: Tensor | None  # int64 [buckets - 1] seconds; None = half octaves

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.uv_width = config.num_heads * config.v_dim
        self.qk_width = config.num_heads * config.qk_dim
        self.widths = [self.uv_width, self.uv_width, self.qk_width, self.qk_width]  # U, V, Q, K
        self.uvqk = nn.Linear(config.dim, sum(self.widths))
        joined = 3 if config.residual == "concat" else 1
        self.out = nn.Linear(joined * self.uv_width, config.dim)
        self.norm_in = nn.LayerNorm(config.dim, eps=config.norm_eps)
        group = config.v_dim if config.norm == "group" else self.uv_width
        per_head = config.norm == "head"
        norm = (
            PerHeadNorm(config.num_heads, config.norm_eps)
            if per_head
            else nn.LayerNorm(group, eps=config.norm_eps)
        )
        self.norm_attention = norm
        times = config.time_buckets
        self.register_buffer(
            "time_edges", None if times is None else edges_of(times), persistent=False
        )
        for name, buckets in (
            ("position_bias", config.position_buckets),
            ("time_bias", TIME_BUCKETS if times is None else times.count),
        ):
            table = torch.zeros(config.num_heads, buckets)
            if name.removesuffix("_bias") in config.relative_bias.split("_"):
                self.register_parameter(name, nn.Parameter(table))
            else:
                # zeros, not in checkpoints
                self.register_buffer(name, table, persistent=False)

    @property
    def bias(self) -> BiasTables:
        """The layer's relative bias tables."""
        return BiasTables(self.position_bias, self.time_bias)

    def heads(self, x: Tensor, width: int) -> Tensor:
        """[..., H * width] -> [..., H, width]."""
        return x.view(*x.shape[:-1], self.config.num_heads, width)

    def project(self, x: Tensor, ops: Affine = _TORCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project rows x [..., dim] to U [..., H*Dv], V [..., H, Dv], Q and K [..., H, Dq]."""
        mixed = ops.affine(
            self.norm_in(x), self.uvqk, 0, sum(self.widths), self.config.activation == "uvqk"
        )
        u, v, q, k = torch.split(mixed, self.widths, dim=-1)
        if self.config.activation == "u":
            u = silu(u)
        return (
            u,
            self.heads(v, self.config.v_dim),
            self.heads(q, self.config.qk_dim),
            self.heads(k, self.config.qk_dim),
        )

    def project_kv(self, x: Tensor, ops: Affine = _TORCH) -> Slab:
        """Project K and V only, for the history rows of the last layer."""
        normed = self.norm_in(x)
        is_silu = self.config.activation == "uvqk"
        uv = self.uv_width
        qk = self.qk_width
        v = ops.affine(normed, self.uvqk, uv, 2 * uv, is_silu)
        k = ops.affine(normed, self.uvqk, 2 * uv + qk, 2 * (uv + qk), is_silu)
        return self.heads(k, self.config.qk_dim), self.heads(v, self.config.v_dim)

    def finish(self, x: Tensor, u: Tensor, attention: Tensor, ops: Affine = _TORCH) -> Tensor:
        """Compute the next layer's rows.

        Args:
            x: [..., dim] rows.
            u: [..., H*Dv] gate of the rows.
            attention: [..., H, Dv] scaled attention output.
            ops: Computes the linear layer.
        """
        wide = attention.to(x.dtype)
        if self.config.norm == "layer":
            normed = self.norm_attention(wide.flatten(-2)).to(u.dtype)
        else:
            normed = self.norm_attention(wide).flatten(-2).to(u.dtype)
        gated = u * normed
        if self.config.residual == "concat":
            middle = normed if self.config.attention_norm_in_concat else attention.flatten(-2)
            gated = torch.cat([u, middle, gated], dim=-1)
        mixed = ops.affine(gated, self.out, 0, self.config.dim, False)
        return x + mixed.to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Cached tokens of one user, as the attention reads them."""

    times: Tensor  # int64 [p] unix seconds
    slabs: Callable[[int], Sequence[Slab | Tiles]]  # layer -> its keys and values in token order

    @property
    def num_tokens(self) -> int:
        return len(self.times)


# (layer, k [n, H, Dq], v [n, H, Dv] of the new history rows) -> slabs of the whole history as it is
# now stored, which the attention then reads; None = the attention reads the rows themselves.
Sink = Callable[[int, Tensor, Tensor], Sequence[Slab | Tiles] | None]


class HostTokens(NamedTuple):
    """A segment's tokens in host memory, for fused kernels: `Past` and `Sink` as numbers."""

    times: npt.NDArray[np.int64]  # [p + n] unix seconds
    # pages of the cached tokens, and of the new ones if they are stored; None = no pages
    pages: PagedKV | None
    # item rows and actions of the new tokens and the candidates; None = only the tensors have them
    ids: HstuIds | None = None


class LastEvent(NamedTuple):
    """The last event of a history whose rows query with the time of the event after them."""

    row_times: Tensor  # int64 [n], query times of the history's rows
    action: Tensor  # int64 [1] action of the last event
    time: Tensor  # int64 [] unix seconds of the last event


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The rows of one request. All tensors are on the model's device."""

    items: Tensor  # int64 [e] item rows of the new events
    actions: Tensor  # int64 [e]
    # int64 [n] unix seconds of the new history tokens: the user's, if they are new, then events'
    times: Tensor
    candidates: Tensor  # int64 [c] item rows
    candidate_time: int = 0  # unix seconds
    is_next: bool = False  # `candidates` is NEXT alone: the result is u
    past: Past | None = None
    sink: Sink | None = None  # receives the new history rows' keys and values, layer by layer
    host: HostTokens | None = None  # the same in host memory, for fused kernels
    last: LastEvent | None = None  # not None: `candidates` is the last event, the row of u
    # [1] features of the user, whose tokens are then the first of the new ones; None = no such
    user: FeatureValues | None = None
    events: FeatureValues | None = None  # [e]; here and below, None = all values are missing
    request: FeatureValues | None = None  # [1]
    cross: FeatureValues | None = None  # [c]
    # positions that are left out behind the first `gap_at` tokens, see `AttentionWindow`
    gap_at: int = 0
    gap: int = 0
    stored: torch.dtype | None = None  # see `HstuCall.stored`

    @property
    def num_tokens(self) -> int:
        """Number of new history tokens, n."""
        return len(self.times)

    @property
    def num_user_tokens(self) -> int:
        """Number of new tokens of the user."""
        return len(self.times) - len(self.items)

    @property
    def num_rows(self) -> int:
        """Number of new history rows and candidate rows."""
        return self.num_tokens + len(self.candidates)

    def window(self, config: HSTUConfig) -> AttentionWindow | None:
        """What a row of this segment sees of its tokens; None = all."""
        window = window_of(config)
        return window and window._replace(gap_at=self.gap_at, gap=self.gap)

    def queried_by_last_event(self) -> Segment:
        """Return the segment with its last event as the only candidate, at the request's time.

        Requires at least one event, and no past.
        """
        assert self.past is None
        assert self.sink is None
        last = LastEvent(self.times[1:], self.actions[-1:], self.times[-1])
        return Segment(
            items=self.items[:-1],
            actions=self.actions[:-1],
            times=self.times[:-1],
            candidates=self.items[-1:],
            candidate_time=self.candidate_time,
            is_next=True,
            last=last,
        )


def run_by_segments(
    layers: Sequence[HSTULayer],
    config: HSTUConfig,
    scale_of: Callable[[int], float],
    backend: Backend,
    segments: Sequence[Segment],
    x: Tensor,
) -> list[Tensor]:
    """Run all layers op by op, and pass every segment's new keys and values to its sink.

    Args:
        layers: Layers of the model.
        config: Configuration of the model.
        scale_of: Factor on the attention, by number of tokens.
        backend: Computes the ops.
        segments: The batch.
        x: [rows, dim] embeddings of each segment's history and candidates, in order.

    Returns:
        Per segment [c, dim] final rows of its candidates.
    """
    alpha = config.attention_alpha
    starts = [0]
    for s in segments:
        starts.append(starts[-1] + s.num_rows)
    bounds = list(zip(segments, starts, strict=False))
    times = [s.times if s.past is None else torch.cat([s.past.times, s.times]) for s in segments]

    for index, layer in enumerate(layers[:-1]):
        u, v, q, k = layer.project(x, backend)
        attention = torch.empty_like(v)
        for (s, start), at in zip(bounds, times, strict=True):
            n = s.num_tokens
            scale = scale_of(len(at))
            past = s.past.slabs(index) if s.past else []
            history = slice(start, start + n)
            own = slice(start + n, start + s.num_rows)
            new = k[history], v[history]
            stored = s.sink(index, *new) if s.sink else None
            if stored is not None:
                past = stored
                new = (k[:0], v[:0])
            if n:
                query_times = None if s.last is None else s.last.row_times
                call = HstuCall(
                    q[history],
                    *new,
                    past,
                    at,
                    layer.bias,
                    alpha,
                    row_times=query_times,
                    edges=layer.time_edges,
                    window=s.window(config),
                    stored=s.stored,
                )
                out = backend.hstu_causal(call)
                if config.context == "full" and (users := s.num_user_tokens):
                    out[:users] = backend.hstu_targets(_seeing_all(layer, call, users))
                attention[history] = out.mul_(scale)
            if len(s.candidates):
                slabs = [*past, new] if len(new[0]) else past
                out = backend.hstu_targets(
                    _candidate_call(layer, s, q[own], k[own], v[own], slabs, at, alpha)
                )
                attention[own] = out.mul_(scale)
        x = layer.finish(x, u, attention, backend)
    return _last_layer(layers, config, scale_of, backend, x, bounds, times)


def _last_layer(
    layers: Sequence[HSTULayer],
    config: HSTUConfig,
    scale_of: Callable[[int], float],
    backend: Backend,
    x: Tensor,
    bounds: Sequence[tuple[Segment, int]],
    times: Sequence[Tensor],
) -> list[Tensor]:
    """Run the last layer; history rows need only their keys and values."""
    index = len(layers) - 1
    layer = layers[-1]
    alpha = config.attention_alpha
    rows = []
    for (s, start), at in zip(bounds, times, strict=True):
        n = s.num_tokens
        slabs = list(s.past.slabs(index)) if s.past else []
        if n:
            k, v = layer.project_kv(x[start : start + n], backend)
            stored = s.sink(index, k, v) if s.sink else None
            slabs = [*slabs, (k, v)] if stored is None else list(stored)
        own = x[start + n : start + s.num_rows]
        if len(own):
            u, v, q, k = layer.project(own, backend)
            out = backend.hstu_targets(_candidate_call(layer, s, q, k, v, slabs, at, alpha))
            own = layer.finish(own, u, out.mul_(scale_of(len(at))), backend)
        rows.append(own)
    return rows


def _seeing_all(layer: HSTULayer, call: HstuCall, num_rows: int) -> HstuCall:
    """Make the call in which the first rows attend to the whole history.

    They attend like candidates whose own keys and values are zero.
    """
    q = call.q[:num_rows]
    nothing = call.v.new_zeros(num_rows, *call.v.shape[1:])
    slabs = [*call.cached, (call.k, call.v)] if len(call.k) else call.cached
    return HstuCall(
        *(q, torch.zeros_like(q), nothing, slabs, call.times, layer.bias, call.alpha),
        stored=call.stored,
    )


def _candidate_call(
    layer: HSTULayer,
    segment: Segment,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slabs: Sequence[Slab | Tiles],
    times: Tensor,
    alpha: float,
) -> HstuCall:
    """Make the call in which a segment's candidates attend to the history and themselves."""
    own = None if segment.last is None else segment.last.time
    at = segment.candidate_time
    return HstuCall(
        *(q, k, v, slabs, times, layer.bias, alpha, at),
        own_time=own,
        edges=layer.time_edges,
        window=segment.window(layer.config),
        stored=segment.stored,
    )
