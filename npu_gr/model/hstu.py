"""The HSTU ranker: one forward pass for prefill, append, cached rank and full inference.

A *segment* is one request's rows: new history tokens after p cached ones, then candidates. A batch is a list of
segments; linears run over all rows at once, attention per segment. Prefill is a segment without candidates, full
inference one without a past, so cold and cached scores come from the same lines of code.

Token of a behaviour = item + its side features + action + the event's own features. A candidate has no action yet: it
carries a learned "shown" embedding instead, the request's features and its own cross features. A model with features
of the user has one token of them in front. Order [user | history | candidates]; a candidate's position is the number of
tokens before all candidates.

A model with `retrieval` also answers what comes next. NEXT is a candidate without an item: item row `num_items`, one
past the last. Its final row becomes the user vector u, and the retrieval score of item i is u . e_i with the items'
input embeddings e.

Source: HSTU and M-FALCON, arXiv:2402.17152; exactness rules E1 to E9 of `docs/exactness.md`.
Invariants: history rows never depend on candidates or on later history; candidates never see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from npu_gr.backend.base import TIME_BUCKETS, Affine, Backend, HstuPass
from npu_gr.backend.calls import BiasTables, HstuCall, HstuLayerCall, HstuPassCall, HstuSegment, PagedKV
from npu_gr.backend.tiles import Slab, Tiles
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.feature_schema.schema import OFS, Of
from npu_gr.model.config import HSTUConfig
from npu_gr.model.feature_rows import FeatureTable, FeatureValues
from npu_gr.model.item_rows import ItemCodeRows, NewItems

EPS = 1e-6


_TORCH = TorchOps()  # differentiable, for training


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The rows of one request. All tensors are on the model's device."""

    items: Tensor  # int64 [e] item rows of the new events
    actions: Tensor  # int64 [e]
    times: (
        Tensor  # int64 [n] unix seconds of the new history tokens: the user's, if it is one of them, then the events'
    )
    candidates: Tensor  # int64 [c] item rows
    candidate_time: int = 0  # unix seconds
    is_next: bool = False  # `candidates` is NEXT alone: the result is u
    past: Past | None = None
    sink: Sink | None = None  # receives the new history rows' keys and values, layer by layer
    host: HostTokens | None = None  # the same, for a device that computes whole layers
    user: FeatureValues | None = None  # [1] makes the user's token the first of the new ones; None = there is none
    events: FeatureValues | None = None  # [e]; None of these three: missing
    request: FeatureValues | None = None  # [1]
    cross: FeatureValues | None = None  # [c]

    @property
    def num_tokens(self) -> int:
        """New history tokens, n."""
        return len(self.items) + (self.user is not None)

    @property
    def num_rows(self) -> int:
        """New history rows plus candidate rows."""
        return self.num_tokens + len(self.candidates)


class HSTULayer(nn.Module):
    """A layer without its attention: U, V, Q, K from the normed input; gated output and residual."""

    position_bias: Tensor
    time_bias: Tensor

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.uv_width = config.num_heads * config.v_dim
        self.qk_width = config.num_heads * config.qk_dim
        self.widths = [self.uv_width, self.uv_width, self.qk_width, self.qk_width]  # U, V, Q, K
        self.uvqk = nn.Linear(config.dim, sum(self.widths))
        joined = 3 if config.residual == "concat" else 1
        self.out = nn.Linear(joined * self.uv_width, config.dim)
        self.norm_in = nn.LayerNorm(config.dim, eps=EPS)
        group = config.v_dim if config.norm == "group" else self.uv_width
        self.norm_attention = nn.LayerNorm(group, eps=EPS)
        for name, buckets in (("position_bias", config.position_buckets), ("time_bias", TIME_BUCKETS)):
            table = torch.zeros(config.num_heads, buckets)
            if config.relative_bias == "none":
                self.register_buffer(name, table, persistent=False)  # zeros that no checkpoint holds
            else:
                self.register_parameter(name, nn.Parameter(table))

    @property
    def bias(self) -> BiasTables:
        """The layer's relative bias tables."""
        return BiasTables(self.position_bias, self.time_bias)

    def heads(self, x: Tensor, width: int) -> Tensor:
        """[..., H * width] -> [..., H, width]."""
        return x.view(*x.shape[:-1], self.config.num_heads, width)

    def project(self, x: Tensor, ops: Affine = _TORCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project rows x [..., dim] to U [..., H*Dv], V [..., H, Dv], Q and K [..., H, Dq]."""
        mixed = ops.affine(self.norm_in(x), self.uvqk, 0, sum(self.widths), self.config.activation == "uvqk")
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
        """Project K and V only: all that the last layer needs of history rows."""
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
            x: rows [..., dim].
            u: their gate [..., H*Dv].
            attention: scaled attention output [..., H, Dv].
            ops: computes the linear layer.
        """
        wide = attention.to(x.dtype)
        if self.config.norm == "group":
            normed = self.norm_attention(wide).flatten(-2)
        else:
            normed = self.norm_attention(wide.flatten(-2))
        gated = u * normed.to(u.dtype)
        if self.config.residual == "concat":
            gated = torch.cat([u, attention.flatten(-2), gated], dim=-1)
        mixed = ops.affine(gated, self.out, 0, self.config.dim, False)
        return x + mixed.to(x.dtype)


class HSTU(nn.Module):
    """The ranker's weights and its forward pass."""

    codes: ItemCodeRows  # only with `item_codes`
    item_feature_codes: Tensor
    item_feature_numbers: Tensor

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.item = nn.Embedding(config.num_items, config.dim)
        self.action = nn.Embedding(len(config.actions) + 1, config.dim)  # the last row: shown, not yet acted on
        self.feature = nn.ModuleList(
            nn.Embedding(f.num_values + 1, config.dim, padding_idx=f.num_values) for f in config.item_features
        )
        for index, f in enumerate(config.item_features):  # value ids of every item, num_values = padding
            ids = torch.full((config.num_items, f.max_values), f.num_values)
            self.register_buffer(f"feature_ids_{index}", ids)
        if config.item_codes:
            self.codes = ItemCodeRows(config.num_items, config.item_codes, config.dim)
        self.features = nn.ModuleDict(
            {of: FeatureTable(own, config.dim) for of in OFS if (own := config.features_of(of))}
        )
        if "user" in self.features:
            self.user_token = nn.Parameter(torch.empty(config.dim).normal_(std=0.02))
        if "item" in self.features:
            missing = self._table_of("item").missing(config.num_items)
            self.register_buffer("item_feature_codes", missing.codes.clone())
            self.register_buffer("item_feature_numbers", missing.numbers.clone())
        if config.positions != "none":
            self.position = nn.Embedding(config.max_history_tokens + 1, config.dim)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.num_layers))
        self.norm_head = nn.LayerNorm(config.dim, eps=EPS)
        self.head = nn.Sequential(
            nn.Linear(config.dim, config.head_dim), nn.SiLU(), nn.Linear(config.head_dim, len(config.tasks))
        )
        if config.retrieval:
            self.next_item = nn.Parameter(torch.empty(config.dim).normal_(std=0.02))
            self.norm_next = nn.LayerNorm(config.dim, eps=EPS)
            self.vector = nn.Linear(config.dim, config.dim)
            nn.init.eye_(self.vector.weight)
            nn.init.zeros_(self.vector.bias)
        for table in (self.item, self.action, *self.feature):
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=0.02)
        self._item_table: Tensor | None = None
        self._num_spare = 0  # of its rows
        self.kept_rows: Tensor | None = None  # of a step with row dropout, see `draw_kept`; None = every residual row

    def cast(self, dtype: torch.dtype) -> HSTU:
        """Compute in `dtype`, in place.

        The residual stream, features, norms and head of a bf16 model stay fp32: they are cheap, and a bf16 residual
        would turn every rounding difference of a split into a visible one.
        """
        self.to(dtype)
        if dtype == torch.bfloat16:
            self.features.float()
            self.norm_head.float()
            self.head.float()
            if self.config.retrieval:
                self.norm_next.float()
                self.vector.float()
            for layer in self.layers:
                assert isinstance(layer, HSTULayer)
                layer.norm_in.float()
                layer.norm_attention.float()
        self._item_table = None
        return self

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.item.weight.dtype
        return found

    @property
    def _residual_dtype(self) -> torch.dtype:
        found: torch.dtype = self.norm_head.weight.dtype
        return found

    def embed_items(self, rows: Tensor) -> Tensor:
        """Sum up what each item's vector is made of: [...] item rows -> [..., dim]; NEXT is one row."""
        if self.config.retrieval:
            items = self._embed_known(rows.clamp(max=self.config.num_items - 1))
            return torch.where((rows == self.config.num_items)[..., None], self.next_item, items)
        return self._embed_known(rows)

    def _embed_known(self, rows: Tensor) -> Tensor:
        x: Tensor = self.item(rows)
        if self.kept_rows is not None:
            x = x * self.kept_rows[rows]
        ids = [getattr(self, f"feature_ids_{index}")[rows] for index in range(len(self.config.item_features))]
        values = None
        if "item" in self.features:
            values = FeatureValues(self.item_feature_codes[rows], self.item_feature_numbers[rows])
        return self._add_common(x, ids, self.codes.of_item[rows] if self.config.item_codes else None, values)

    def _add_common(
        self, x: Tensor, feature_ids: Sequence[Tensor], codes: Tensor | None, values: FeatureValues | None
    ) -> Tensor:
        """Add what items have in common: the means of their features' values, and the rows of their codes."""
        for f, table, ids in zip(self.config.item_features, self.feature, feature_ids, strict=True):
            count = (ids != f.num_values).sum(-1, keepdim=True).clamp(min=1)
            x = x + table(ids).sum(-2) / count.to(x.dtype)
        if values is not None:
            x = x + self._table_of("item")(values).to(x.dtype)
        return x if codes is None else self.codes.add(x, codes)

    def item_parts(self) -> list[nn.Parameter]:
        """List the tables whose rows an item's vector is the sum of."""
        tables = [self.item, *self.feature, *(self.codes.levels if self.config.item_codes else ())]
        return [parameter for table in tables for parameter in table.parameters()]

    def freeze_items(self, num_spare: int = 0) -> None:
        """Fold everything into one table, so that serving gathers one row an item. Call after loading.

        Args:
            num_spare: rows for new items, behind those of the trained ones.
        """
        with torch.inference_mode():
            rows = torch.arange(self.config.num_items + self.config.retrieval, device=self.item.weight.device)
            parts = [self.embed_items(part) for part in rows.split(65536)]
            if num_spare:
                next_row = [parts[-1][-1:]] if self.config.retrieval else []
                parts[-1] = parts[-1][:-1] if self.config.retrieval else parts[-1]
                parts += [parts[0].new_zeros(num_spare, self.config.dim), *next_row]
            self._item_table = torch.cat(parts)
            self._num_spare = num_spare

    @property
    def num_rows(self) -> int:
        """Rows of items, the spare ones included."""
        return self.config.num_items + self._num_spare

    @torch.inference_mode()
    def new_item_vectors(self, new: NewItems) -> Tensor:
        """Sum up the vectors of items without residual rows: [n, dim]."""
        device = self.item.weight.device
        x = self.item.weight.new_zeros(len(new.codes), self.config.dim)
        ids = [torch.from_numpy(values).to(device) for values in new.features]
        codes = torch.from_numpy(new.codes).to(device) if self.config.item_codes else None
        values = None
        if "item" in self.features and new.values is not None:
            values = FeatureValues(*(part.to(device) for part in FeatureValues.of(new.values)))
        return self._add_common(x, ids, codes, values)

    @torch.inference_mode()
    def write_items(self, first_row: int, vectors: Tensor) -> None:
        """Write the vectors of new items, [n, dim], into spare rows of the frozen table that nobody reads yet."""
        assert self._item_table is not None
        assert self.config.num_items <= first_row <= self.num_rows - len(vectors)
        self._item_table[first_row : first_row + len(vectors)] = vectors

    def item_vectors(self) -> Tensor:
        """The vectors that u is compared with, fp32 [num_rows, dim]: the frozen table's, not a copy in fp32."""
        assert self._item_table is not None
        return self._item_table[: self.num_rows].float()

    def attention_scale(self, num_tokens: int) -> float:
        """1 / scaling_seqlen; by the runtime length only where the config asks for it (never with a cache)."""
        length = self.config.scaling_seqlen if self.config.scaling == "constant" else max(num_tokens, 1)
        return 1.0 / length

    def _table_of(self, of: Of) -> FeatureTable:
        table = self.features[of]
        assert isinstance(table, FeatureTable)
        return table

    def _embed(self, segments: Sequence[Segment], ops: Affine) -> Tensor:
        """[rows, dim] of every segment's history and candidates, in order."""
        items = torch.cat([part for s in segments for part in (s.items, s.candidates)])
        shown = len(self.config.actions)
        actions = torch.cat([p for s in segments for p in (s.actions, torch.full_like(s.candidates, shown))])
        x: Tensor = self.embed_items(items) if self._item_table is None else self._item_table[items]
        x = x + self.action(actions)
        if self.features:
            x = self._with_features(x, segments, ops)
        if self.config.positions != "none":
            x = x + self.position(torch.cat([self._positions(s) for s in segments]))
        return x.to(self._residual_dtype)

    def _with_features(self, x: Tensor, segments: Sequence[Segment], ops: Affine) -> Tensor:
        """Add features to rows of events and candidates, and put the users' tokens in front of their segments."""
        events = self._feature_rows("event", [(s.events, len(s.items)) for s in segments], ops)
        requests = self._feature_rows("request", [(s.request, 1) for s in segments], ops)
        cross = self._feature_rows("cross", [(s.cross, len(s.candidates)) for s in segments], ops)
        users = self._feature_rows("user", [(s.user, int(s.user is not None)) for s in segments], ops)
        rows: list[Tensor] = []
        wide = x.to(self._residual_dtype)  # whatever else is in the batch
        for place, s in enumerate(segments):
            history, shown, wide = wide.tensor_split((len(s.items), len(s.items) + len(s.candidates)))
            if users and s.user is not None:
                rows.append(self.user_token.to(wide.dtype) + users[place])
            rows.append(history + events[place] if events else history)
            if requests:
                shown = shown + requests[place]
            rows.append(shown + cross[place] if cross and not s.is_next else shown)
        return torch.cat(rows)

    def _feature_rows(self, of: Of, given: Sequence[tuple[FeatureValues | None, int]], ops: Affine) -> Sequence[Tensor]:
        """Embed the values of all segments at once, [n, dim] each; nothing where the model has no such features."""
        if of not in self.features:
            return ()
        table = self._table_of(of)
        values = [table.missing(n) if own is None else own for own, n in given]
        codes, numbers = (torch.cat(parts) for parts in zip(*values, strict=True))
        rows: Tensor = table(FeatureValues(codes, numbers), ops)
        return torch.split(rows, [n for _, n in given])

    def _positions(self, segment: Segment) -> Tensor:
        """Learned position of each row: counted from the start, or (an E2 breaker) from the end."""
        past = segment.past.num_tokens if segment.past else 0
        new = segment.num_tokens
        c = len(segment.candidates)
        index = torch.arange(past, past + new + 1, device=segment.items.device)
        if self.config.positions == "reverse":
            index = past + new - index
        index = index.clamp(max=self.config.max_history_tokens)
        return torch.cat([index[:new], index[new:].expand(c)])

    @torch.inference_mode()
    def forward(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Score every segment's candidates; hand every segment's new keys and values to its sink.

        Returns:
            Per segment [c, tasks] logits in fp32 (fp64 for an fp64 model), in candidate order; for a NEXT segment
            u [1, dim].
        """
        alpha = self.config.qk_dim**-0.5
        x = self._embed(segments, backend)
        if (whole := self._whole_pass(backend, segments)) is not None:
            rows = whole.run(self, partial(self._whole_layers, backend), x)
            parts = rows.split([len(s.candidates) for s in segments])
            return [self._answer(s, own, backend) for s, own in zip(segments, parts, strict=True)]
        starts = [0]
        for s in segments:
            starts.append(starts[-1] + s.num_rows)
        bounds = list(zip(segments, starts, strict=False))
        times = [s.times if s.past is None else torch.cat([s.past.times, s.times]) for s in segments]

        for index, layer in enumerate(self.layers[:-1]):
            assert isinstance(layer, HSTULayer)
            u, v, q, k = layer.project(x, backend)
            attention = torch.empty_like(v)
            for (s, start), at in zip(bounds, times, strict=True):
                n = s.num_tokens
                scale = self.attention_scale(len(at))
                past = s.past.slabs(index) if s.past else []
                history = slice(start, start + n)
                own = slice(start + n, start + s.num_rows)
                new = k[history], v[history]
                kept = s.sink(index, *new) if s.sink else None
                if kept is not None:
                    past = kept
                    new = (k[:0], v[:0])
                if n:
                    out = backend.hstu_causal(HstuCall(q[history], *new, past, at, layer.bias, alpha))
                    attention[history] = out.mul_(scale)
                if len(s.candidates):
                    slabs = [*past, new] if len(new[0]) else past
                    call = HstuCall(q[own], k[own], v[own], slabs, at, layer.bias, alpha, s.candidate_time)
                    out = backend.hstu_targets(call)
                    attention[own] = out.mul_(scale)
            x = layer.finish(x, u, attention, backend)
        return self._last_layer(backend, x, bounds, times, alpha)

    def _last_layer(
        self,
        backend: Backend,
        x: Tensor,
        bounds: Sequence[tuple[Segment, int]],
        times: Sequence[Tensor],
        alpha: float,
    ) -> list[Tensor]:
        """Run the last layer and the heads; of history rows only the keys and values are computed."""
        index = len(self.layers) - 1
        layer = self.layers[-1]
        assert isinstance(layer, HSTULayer)
        logits = []
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
                out = backend.hstu_targets(HstuCall(q, k, v, slabs, at, layer.bias, alpha, s.candidate_time))
                own = layer.finish(own, u, out.mul_(self.attention_scale(len(at))), backend)
            logits.append(self._answer(s, own, backend))
        return logits

    def _answer(self, segment: Segment, own: Tensor, backend: Backend) -> Tensor:
        return self.user_vectors(own, backend) if segment.is_next else self.task_logits(own, backend)

    def _whole_pass(self, backend: Backend, segments: Sequence[Segment]) -> HstuPass | None:
        """Ask the backend for kernels of whole layers; None = layers go segment by segment."""
        config = self.config
        rows = []
        for s in segments:
            if s.host is None:
                return None
            cached = s.past.num_tokens if s.past else 0
            new, own = s.num_tokens, len(s.candidates)
            keeps = s.sink is not None
            rows.append(HstuSegment(cached, new, own, s.host.times, s.candidate_time, s.host.pages, keeps))
        scales = {self.attention_scale(len(row.times)) for row in rows}
        if len(scales) != 1:
            return None
        return backend.hstu_pass(
            HstuPassCall(
                rows,
                config.num_heads,
                config.qk_dim,
                config.v_dim,
                self.dtype,
                config.qk_dim**-0.5,
                scales.pop(),
                config.activation == "uvqk",
                "head" if config.norm == "group" else "row",
                config.residual == "concat",
            )
        )

    def _whole_layers(self, backend: Backend, whole: HstuPass, x: Tensor) -> Tensor:
        """Run all layers: [rows, dim] of all segments -> [c, dim] of all candidates, and rows that mean nothing."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, HSTULayer)
            is_last = index == len(self.layers) - 1
            mixed = backend.affine(layer.norm_in(x), layer.uvqk, 0, sum(layer.widths), False)
            gated = whole.mix(HstuLayerCall(index, mixed, layer.bias, layer.norm_attention, is_last))
            if gated is None:
                return x[:0]
            x = whole.candidates(x) if is_last else x
            out = backend.affine(gated[: len(x)], layer.out, 0, self.config.dim, False)
            x = x + out  # the sum has the wider dtype, in one launch
        return x

    def task_logits(self, x: Tensor, ops: Affine = _TORCH) -> Tensor:
        """[..., dim] final candidate rows -> [..., tasks] logits, fp32 or fp64."""
        hidden, _, out = self.head
        assert isinstance(hidden, nn.Linear)
        assert isinstance(out, nn.Linear)
        wide = ops.affine(self.norm_head(x), hidden, 0, hidden.out_features, True)
        return ops.affine(wide, out, 0, out.out_features, False)

    def user_vectors(self, x: Tensor, ops: Affine = _TORCH) -> Tensor:
        """[..., dim] final rows of NEXT -> [..., dim] u, fp32 or fp64. Only with `retrieval`."""
        return ops.affine(self.norm_next(x), self.vector, 0, self.config.dim, False)
