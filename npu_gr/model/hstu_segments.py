"""Segments, and the ranker's layers over a batch of them: linears run over all rows at once, attention per segment.

A segment is the rows of one request in a pass of the ranker, and the cached tokens that they read. Every backend has
the ops of this pass. Kernels of whole layers or passes (`hstu_whole.py`) give its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.calls import HstuCall, HstuIds, PagedKV
from npu_gr.backend.tiles import Slab, Tiles
from npu_gr.model.config import HSTUConfig
from npu_gr.model.feature_rows import FeatureValues
from npu_gr.model.hstu_layer import HSTULayer


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Cached tokens of one user, as the attention reads them."""

    times: Tensor  # int64 [p] unix seconds
    slabs: Callable[[int], Sequence[Slab | Tiles]]  # layer -> its keys and values in token order

    @property
    def num_tokens(self) -> int:
        return len(self.times)


# (layer, k [n, H, Dq], v [n, H, Dv] of the new history rows) -> slabs of the whole history as it is now stored, which
# the attention then reads; None = the attention reads the rows themselves.
Sink = Callable[[int, Tensor, Tensor], Sequence[Slab | Tiles] | None]


class HostTokens(NamedTuple):
    """What the host knows of a segment's tokens: `Past` and `Sink` as numbers."""

    times: npt.NDArray[np.int64]  # [p + n] unix seconds
    pages: PagedKV | None  # of the cached tokens, and of the new ones if they are kept; None = neither
    ids: HstuIds | None = None  # of the new tokens and the candidates; None = the tensors alone have them


class LastEvent(NamedTuple):
    """A history whose rows ask with the time of the behaviour after them: what its last behaviour adds to `Segment`."""

    row_times: Tensor  # int64 [n], the times as which the history's rows ask
    action: Tensor  # int64 [1] of the last behaviour
    time: Tensor  # int64 [] of the last behaviour


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The rows of one request. All tensors are on the model's device."""

    items: Tensor  # int64 [e] item rows of the new events
    actions: Tensor  # int64 [e]
    times: Tensor  # int64 [n] unix seconds of the new history tokens: the user's if they are among them, then events'
    candidates: Tensor  # int64 [c] item rows
    candidate_time: int = 0  # unix seconds
    is_next: bool = False  # `candidates` is NEXT alone: the result is u
    past: Past | None = None
    sink: Sink | None = None  # receives the new history rows' keys and values, layer by layer
    host: HostTokens | None = None  # the same, for a device that computes whole layers
    last: LastEvent | None = None  # `candidates` is the last behaviour, which asks what comes next
    user: FeatureValues | None = None  # [1] makes the user's tokens the first of the new ones; None = there are none
    events: FeatureValues | None = None  # [e]; None of these three: missing
    request: FeatureValues | None = None  # [1]
    cross: FeatureValues | None = None  # [c]

    @property
    def num_tokens(self) -> int:
        """New history tokens, n."""
        return len(self.times)

    @property
    def num_user_tokens(self) -> int:
        """The user's among them."""
        return len(self.times) - len(self.items)

    @property
    def num_rows(self) -> int:
        """New history rows plus candidate rows."""
        return self.num_tokens + len(self.candidates)

    def asking_by_last(self) -> Segment:
        """Let the last behaviour be the row that answers, at the request's time. Needs a behaviour, and no past."""
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
    """Run all layers, and hand every segment's new keys and values to its sink.

    Args:
        layers: of the model.
        config: of the model.
        scale_of: factor on the attention over so many tokens.
        backend: that computes.
        segments: the batch.
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
            kept = s.sink(index, *new) if s.sink else None
            if kept is not None:
                past = kept
                new = (k[:0], v[:0])
            if n:
                asked = None if s.last is None else s.last.row_times
                call = HstuCall(q[history], *new, past, at, layer.bias, alpha, row_times=asked, edges=layer.time_edges)
                out = backend.hstu_causal(call)
                if config.context == "full" and (users := s.num_user_tokens):
                    out[:users] = backend.hstu_targets(_seeing_all(layer, call, users))
                attention[history] = out.mul_(scale)
            if len(s.candidates):
                slabs = [*past, new] if len(new[0]) else past
                out = backend.hstu_targets(_asking(layer, s, q[own], k[own], v[own], slabs, at, alpha))
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
    """Run the last layer; of history rows only the keys and values are computed."""
    index = len(layers) - 1
    layer = layers[-1]
    alpha = config.attention_alpha
    rows = []
    for (s, start), at in zip(bounds, times, strict=True):
        n = s.num_tokens
        slabs = list(s.past.slabs(index)) if s.past else []
        if n:
            k, v = layer.project_kv(x[start : start + n], backend)
            kept = s.sink(index, k, v) if s.sink else None
            slabs = [*slabs, (k, v)] if kept is None else list(kept)
        own = x[start + n : start + s.num_rows]
        if len(own):
            u, v, q, k = layer.project(own, backend)
            out = backend.hstu_targets(_asking(layer, s, q, k, v, slabs, at, alpha))
            own = layer.finish(own, u, out.mul_(scale_of(len(at))), backend)
        rows.append(own)
    return rows


def _seeing_all(layer: HSTULayer, call: HstuCall, num_rows: int) -> HstuCall:
    """Let the first rows of a whole history attend to all of it: as candidates would, whose own key adds nothing."""
    q = call.q[:num_rows]
    nothing = call.v.new_zeros(num_rows, *call.v.shape[1:])
    slabs = [*call.cached, (call.k, call.v)] if len(call.k) else call.cached
    return HstuCall(q, torch.zeros_like(q), nothing, slabs, call.times, layer.bias, call.alpha)


def _asking(
    layer: HSTULayer,
    segment: Segment,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slabs: Sequence[Slab | Tiles],
    times: Tensor,
    alpha: float,
) -> HstuCall:
    """Let a segment's candidates attend."""
    own = None if segment.last is None else segment.last.time
    at = segment.candidate_time
    return HstuCall(q, k, v, slabs, times, layer.bias, alpha, at, own_time=own, edges=layer.time_edges)
