"""The HSTU ranker: one forward pass for prefill, append, cached rank and full inference.

A *segment* is one request's rows: new history tokens after p cached ones, then candidates. A batch is a list of
segments. Prefill is a segment without candidates, full inference one without a past, so cold and cached scores come
from the same lines of code. `hstu_segments.py` runs the layers; where the backend has kernels of whole passes or of
whole layers, `hstu_whole.py` describes the model to them.

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

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from npu_gr.backend.base import Affine, Backend
from npu_gr.backend.calls import (
    HstuFindCall,
    HstuFound,
    HstuHead,
    HstuSegment,
    HstuWeights,
    HstuWholeCall,
)
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.arrays import F32
from npu_gr.core.feature_schema.factors import NUM_FACTORS
from npu_gr.core.feature_schema.schema import OFS, Of
from npu_gr.model.config import HSTUConfig
from npu_gr.model.feature_rows import FeatureTable, FeatureValues
from npu_gr.model.hstu_layer import HSTULayer
from npu_gr.model.hstu_segments import run_by_segments
from npu_gr.model.hstu_whole import run_whole_layers, told_in_numbers, weights_of, whole_pass
from npu_gr.model.item_rows import ItemCodeRows, NewItems
from npu_gr.model.norms import ClockMix, head_mlp, head_norm
from npu_gr.model.segment import Segment
from npu_gr.model.time_buckets import edges_of

_TORCH = TorchOps()  # differentiable, for training


class HSTU(nn.Module):
    """The ranker's weights and its forward pass."""

    codes: ItemCodeRows  # only with `item_codes`
    item_feature_codes: Tensor
    item_feature_numbers: Tensor
    factors_of_items: Tensor  # only with `mf_score`, as is the next one; see `core/feature_schema/factors.py`
    factors_of_actions: Tensor

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
            shape = (config.dim,) if config.user_tokens == "sum" else (config.num_user_tokens, config.dim)
            self.user_token = nn.Parameter(torch.empty(shape).normal_(std=0.02))
        if "item" in self.features:
            missing = self._table_of("item").missing(config.num_items)
            self.register_buffer("item_feature_codes", missing.codes.clone())
            self.register_buffer("item_feature_numbers", missing.numbers.clone())
        if config.has_factors:
            self.register_buffer("factors_of_items", torch.zeros(config.num_items, 1 + NUM_FACTORS))
            self.register_buffer("factors_of_actions", torch.zeros(len(config.actions)))
        if config.positions != "none":
            self.position = nn.Embedding(config.max_history_tokens + 1, config.dim)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.num_layers))
        self.norm_head = head_norm(config)
        self.head = nn.Sequential() if config.head == "dot" else head_mlp(config)
        if config.head == "product":
            self.candidate = nn.Embedding(config.num_items, config.dim)
        if config.head_periods:
            self.clock = ClockMix(config.dim, config.head_periods)
        if config.query_times is not None:
            self.query_time = nn.Embedding(config.query_times.count, config.dim)
            self.register_buffer("query_edges", edges_of(config.query_times), persistent=False)
        if config.has_next:
            self.next_item = nn.Parameter(torch.empty(config.dim).normal_(std=0.02))
            self.norm_next = nn.LayerNorm(config.dim, eps=config.norm_eps)
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
        would turn every rounding difference of a split into a visible one. Factors stay as they are: nothing of the
        model computes with them.
        """
        kept = {name: values for name, values in self.named_buffers(recurse=False) if name.startswith("factors_")}
        self.to(dtype)
        self._buffers.update(kept)
        if dtype == torch.bfloat16:
            self.features.float()
            self.norm_head.float()
            self.head.float()
            if self.config.head_periods:
                self.clock.float()
            if self.config.has_next:
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
        first = self.layers[0]
        assert isinstance(first, HSTULayer)
        return first.norm_in.weight.dtype

    def embed_items(self, rows: Tensor) -> Tensor:
        """Sum up what each item's vector is made of: [...] item rows -> [..., dim]; NEXT is one row."""
        if self.config.has_next:
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
            rows = torch.arange(self.config.num_items + self.config.has_next, device=self.item.weight.device)
            parts = [self.embed_items(part) for part in rows.split(65536)]
            if num_spare:
                next_row = [parts[-1][-1:]] if self.config.has_next else []
                parts[-1] = parts[-1][:-1] if self.config.has_next else parts[-1]
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
        return self.compared(self._item_table[: self.num_rows])

    def compared(self, rows: Tensor) -> Tensor:
        """Item rows [..., dim] as u is compared with them, fp32."""
        return (
            normalize(rows.float(), dim=-1, eps=self.config.norm_eps)
            if self.config.head_item_norm == "l2"
            else rows.float()
        )

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
        asking = [torch.full_like(s.candidates, shown) if s.last is None else s.last.action for s in segments]
        actions = torch.cat([part for s, own in zip(segments, asking, strict=True) for part in (s.actions, own)])
        x: Tensor = self.embed_items(items) if self._item_table is None else self._item_table[items]
        acted = self.action(actions.clamp(min=0))
        if self.config.is_interleaved:  # an item's token has action -1, an action's one of 0 ..
            x = torch.where((actions < 0)[:, None], x, acted + x * (actions == shown)[:, None])
        else:
            x = x + acted
        if self.features:
            x = self._with_features(x, segments, ops)
        if self.config.positions != "none":
            x = x + self.position(torch.cat([self._positions(s) for s in segments]))
        if self.config.query_times is not None:
            assert isinstance(self.query_edges, Tensor)
            is_float = self.config.query_times.of_float32
            parts = [part for s in segments for part in (_ahead(s, is_float), torch.zeros_like(s.candidates))]
            ahead = torch.cat(parts)
            x = x + self.query_time(torch.bucketize(ahead, self.query_edges, right=True))
        return x.to(self._residual_dtype)

    def _with_features(self, x: Tensor, segments: Sequence[Segment], ops: Affine) -> Tensor:
        """Add features to rows of events and candidates, and put the users' tokens in front of their segments."""
        events = self._feature_rows("event", [(s.events, len(s.items)) for s in segments], ops)
        requests = self._feature_rows("request", [(s.request, 1) for s in segments], ops)
        cross = self._feature_rows("cross", [(s.cross, len(s.candidates)) for s in segments], ops)
        users = self._user_rows(segments, ops)
        rows: list[Tensor] = []
        wide = x.to(self._residual_dtype)  # whatever else is in the batch
        for place, s in enumerate(segments):
            history, shown, wide = wide.tensor_split((len(s.items), len(s.items) + len(s.candidates)))
            if users and s.user is not None:
                rows.append(users[place])
            rows.append(history + events[place] if events else history)
            if requests:
                shown = shown + requests[place]
            rows.append(shown + cross[place] if cross and not s.is_next else shown)
        return torch.cat(rows)

    def _user_rows(self, segments: Sequence[Segment], ops: Affine) -> Sequence[Tensor]:
        """The users' tokens, [n, dim] of each segment; nothing where the model has none."""
        if self.config.user_tokens == "sum":
            rows = self._feature_rows("user", [(s.user, int(s.user is not None)) for s in segments], ops)
            return [self.user_token.to(own.dtype) + own for own in rows]
        if "user" not in self.features:
            return []
        nobody, table = self.user_token[:0], self._table_of("user")
        return [nobody if s.user is None else self.user_token + table.each(s.user, ops)[0] for s in segments]

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
        """Learned position of each row: counted from the start; or (an E2 breaker) from the end, the user's first."""
        past = segment.past.num_tokens if segment.past else 0
        new = segment.num_tokens
        c = len(segment.candidates)
        index = torch.arange(past, past + new + 1, device=segment.items.device)
        if self.config.positions == "reverse":
            index = past + new - index + self.config.num_user_tokens
            index[: segment.num_user_tokens] = torch.arange(segment.num_user_tokens, device=index.device)
        index = index.clamp(max=self.config.max_history_tokens)
        return torch.cat([index[:new], index[new:].expand(c)])

    @torch.inference_mode()
    def forward(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Score every segment's candidates; hand every segment's new keys and values to its sink.

        Returns:
            Per segment [c, tasks] logits in fp32 (fp64 for an fp64 model), in candidate order; for a NEXT segment
            u [1, dim].
        """
        if self.config.head == "dot":
            return self._by_last(backend, segments)
        return self._through_layers(backend, segments)

    def _by_last(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Multiply each last behaviour's row with the candidates' rows; without a behaviour every product is 0."""
        known = [s.asking_by_last() for s in segments if len(s.items)]
        found = iter(self._through_layers(backend, known) if known else [])
        answers = []
        for s in segments:
            nothing = self.action.weight.new_zeros(1, self.config.dim, dtype=self._residual_dtype)
            u = next(found) if len(s.items) else nothing
            if not s.is_next:
                items = self.embed_items(s.candidates) if self._item_table is None else self._item_table[s.candidates]
                u = (self.compared(items) * u).sum(1, keepdim=True)
            answers.append(u)
        return answers

    def _through_layers(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        told = told_in_numbers(self.config, segments)
        if told is not None:
            kinds = {s.is_next for s in segments}
            is_next = None if len(kinds) > 1 else kinds == {True}
            if (answers := self.in_one_call(backend, told, is_next, lambda: segments)) is not None:
                return [torch.from_numpy(own) for own in answers]
        x = self._embed(segments, backend)
        whole = None
        if told is not None:
            whole = whole_pass(self.config, self.attention_scale, self.dtype, backend, told)
        if whole is not None:
            rows = whole.run(self, partial(run_whole_layers, self._each_layer(), self.config.dim, backend), x)
            parts = rows.split([len(s.candidates) for s in segments])
            return [self._answer(s, own, backend) for s, own in zip(segments, parts, strict=True)]
        rows_of = run_by_segments(self._each_layer(), self.config, self.attention_scale, backend, segments, x)
        return [self._answer(s, own, backend) for s, own in zip(segments, rows_of, strict=True)]

    def _answer(self, segment: Segment, own: Tensor, backend: Backend) -> Tensor:
        if segment.is_next:
            return self.user_vectors(own, backend)
        if self.config.head_periods:
            own = self.clock(own, torch.full_like(segment.candidates, segment.candidate_time))
        beside = self.candidate(segment.candidates).to(own.dtype) if self.config.head == "product" else None
        return self.task_logits(own, backend, beside)

    def in_one_call(
        self,
        backend: Backend,
        told: Sequence[HstuSegment],
        is_next: bool | None,
        segments: Callable[[], Sequence[Segment]],
    ) -> list[F32] | None:
        """Compute what `forward` does by one call of the backend. Only where `config.has_plain_passes`.

        Args:
            backend: that computes.
            told: the batch.
            is_next: every segment is NEXT, or none is; None = some are.
            segments: makes the same batch of tensors, for what such a call leaves over; most passes need none.

        Returns:
            What `forward` does, on the host. None = the backend has no such kernel, or not for this model.
        """
        if self.config.scaling != "constant":
            return None  # one scale for all requests
        answer = "next" if is_next else "logits" if is_next is False and self.config.has_plain_head else "rows"
        found = backend.hstu_whole(self._whole_call(backend, told, segments, answer))
        if found is None:
            return None
        ends = itertools.accumulate(s.num_candidates for s in told)
        parts = [found[end - s.num_candidates : end] for s, end in zip(told, ends, strict=True)]
        if answer == "rows":
            with torch.inference_mode():
                rows = [torch.from_numpy(own) for own in parts]
                return [self._answer(s, own, backend).float().numpy() for s, own in zip(segments(), rows, strict=True)]
        return parts

    def find_in_one_call(
        self,
        backend: Backend,
        told: Sequence[HstuSegment],
        segments: Callable[[], Sequence[Segment]],
        search: Callable[[HstuWholeCall], HstuFindCall],
    ) -> HstuFound | None:
        """Find items, and score what of them is wanted, by one call of the backend.

        Args:
            backend, told, segments: as of `in_one_call`; every segment is NEXT.
            search: makes the call of that of NEXT.

        Returns:
            None = the backend has no such kernel, or not for this model.
        """
        config = self.config
        if not (config.has_plain_tokens and config.has_plain_head) or config.scaling != "constant":
            return None
        return backend.hstu_find(search(self._whole_call(backend, told, segments, "next")))

    def _whole_call(
        self, backend: Backend, told: Sequence[HstuSegment], segments: Callable[[], Sequence[Segment]], answer: str
    ) -> HstuWholeCall:
        table = self._item_table
        return HstuWholeCall(
            self,
            self._pass_weights,
            self.dtype if table is None else table.dtype,
            told,
            None if table is None or not self.config.has_plain_tokens else (table, self.action.weight),
            partial(self._embedded, segments, backend),
            answer,
        )

    @torch.inference_mode()
    def _embedded(self, segments: Callable[[], Sequence[Segment]], ops: Affine) -> Tensor:
        return self._embed(segments(), ops)

    def _each_layer(self) -> list[HSTULayer]:
        return cast("list[HSTULayer]", list(self.layers))

    def _pass_weights(self) -> HstuWeights:
        config = self.config
        heads = {}
        if config.has_plain_head:
            hidden, _, out = self.head
            assert isinstance(hidden, nn.Linear)
            assert isinstance(out, nn.Linear)
            assert isinstance(self.norm_head, nn.LayerNorm)
            heads["logits"] = HstuHead(self.norm_head, hidden, out)
        if config.has_next:
            heads["next"] = HstuHead(self.norm_next, None, self.vector)
        return weights_of(self._each_layer(), heads, config, self.attention_scale(0))

    def task_logits(self, x: Tensor, ops: Affine = _TORCH, beside: Tensor | None = None) -> Tensor:
        """Compute logits by the MLP.

        Args:
            x: [..., dim] final candidate rows; clocks are mixed in.
            ops: computes the linear layers.
            beside: [..., dim] rows of the candidates' own, of a model with head `product`.

        Returns:
            [..., tasks], fp32 or fp64.
        """
        hidden, middle, out = self.head
        assert isinstance(hidden, nn.Linear)
        assert isinstance(out, nn.Linear)
        is_silu = self.config.head_activation == "silu"
        normed = self.norm_head(x)
        wide = ops.affine(normed if beside is None else normed * beside, hidden, 0, hidden.out_features, is_silu)
        logits = ops.affine(wide if is_silu else middle(wide), out, 0, out.out_features, False)
        return logits if self.config.head_scale == 1.0 else logits * self.config.head_scale

    def user_vectors(self, x: Tensor, ops: Affine = _TORCH) -> Tensor:
        """[..., dim] final rows of NEXT, or of last behaviours -> [..., dim] u, fp32 or fp64. Only with `retrieval`."""
        if self.config.head == "dot":
            scaled: Tensor = self.norm_head(x) * self.config.head_scale
            return scaled
        return ops.affine(self.norm_next(x), self.vector, 0, self.config.dim, False)


def _ahead(segment: Segment, is_float: bool) -> Tensor:
    """Seconds from each new token to the request, int64 [n]; public code has the user's tokens of the year 1970.

    Args:
        segment: of the tokens.
        is_float: of times that float32 rounds, in this century to multiples of 128.
    """
    times = segment.times.clone()
    times[: segment.num_user_tokens] = 0
    at = torch.full_like(times, segment.candidate_time)
    return (at.float() - times.float()).long() if is_float else at - times
