"""The ranker's weights, the vectors of its items, and the input rows of its layers.

An event's token is the sum of its item, the item's side features, its action, and the event's own
features. A candidate has no action yet: instead it has a learned "shown" embedding, the request's
features and its own cross features. A model with features of the user has tokens of them in front.
The rows are ordered [user | history | candidates]; a candidate's position is the number of tokens
before all candidates. NEXT is a candidate without an item: item row `num_items`, one past the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from npu_gr.backend.base import Affine
from npu_gr.core.feature_schema.computed import CrossFeatures, ItemValueTable
from npu_gr.core.feature_schema.factors import NUM_FACTORS, ItemFactors
from npu_gr.core.feature_schema.schema import OFS, Of
from npu_gr.model.config import HSTUConfig
from npu_gr.model.feature_rows import FeatureTable, FeatureValues, ItemCodeRows, NewItems
from npu_gr.model.hot_rows import HotRows
from npu_gr.model.hstu_layer import ClockMix, HSTULayer, Segment, edges_of, head_mlp, head_norm
from npu_gr.model.shown_term import NUM_COLUMNS, ShownTerm


class HSTUWeights(nn.Module):
    """The parameters and tables of a ranker; attributes have the names in the checkpoint."""

    codes: ItemCodeRows  # only with `item_codes`
    item_feature_codes: Tensor
    item_feature_numbers: Tensor
    # both only with `mf_score`; see `core/feature_schema/factors.py`
    factors_of_items: Tensor
    factors_of_actions: Tensor
    factors_of_shown: Tensor  # only with `shown_task`; see `shown_term.py`

    def __init__(self, config: HSTUConfig, *, has_item_rows: bool = True) -> None:
        """Make random weights.

        Args:
            config: Configuration of the model.
            has_item_rows: Whether items have own rows; False = vectors of items are in files.
        """
        super().__init__()
        self.config = config
        self.item = nn.Embedding(config.num_items if has_item_rows else 0, config.dim)
        # last row: shown, not yet acted on
        self.action = nn.Embedding(len(config.actions) + 1, config.dim)
        self.feature = nn.ModuleList(
            nn.Embedding(f.num_values + 1, config.dim, padding_idx=f.num_values)
            for f in config.item_features
        )
        # value ids of every item, num_values = padding
        for index, f in enumerate(config.item_features):
            ids = torch.full((config.num_items, f.max_values), f.num_values)
            self.register_buffer(f"feature_ids_{index}", ids)
        if config.item_codes:
            self.codes = ItemCodeRows(config.num_items, config.item_codes, config.dim)
        self.features = nn.ModuleDict(
            {of: FeatureTable(own, config.dim) for of in OFS if (own := config.features_of(of))}
        )
        if "user" in self.features:
            shape = (
                (config.dim,)
                if config.user_tokens == "sum"
                else (config.num_user_tokens, config.dim)
            )
            self.user_token = nn.Parameter(torch.empty(shape).normal_(std=0.02))
        if "item" in self.features:
            missing = self.table_of("item").missing(config.num_items)
            self.register_buffer("item_feature_codes", missing.codes.clone())
            self.register_buffer("item_feature_numbers", missing.numbers.clone())
        if config.has_factors:
            self.register_buffer("factors_of_items", torch.zeros(config.num_items, 1 + NUM_FACTORS))
            self.register_buffer("factors_of_actions", torch.zeros(len(config.actions)))
        if config.shown_task:
            self.register_buffer("factors_of_shown", torch.zeros(config.num_items, NUM_COLUMNS))
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
        self.items = ItemVectors(self)

    def cast(self, dtype: torch.dtype) -> Self:
        """Convert the weights to `dtype`, in place.

        The residual stream, features, norms and head of a bf16 model stay fp32: they are cheap, and
        a bf16 residual would amplify the rounding differences between split and whole prefills.
        Factors keep their dtype: the model does not compute with them.
        """
        kept = {
            name: values
            for name, values in self.named_buffers(recurse=False)
            if name.startswith("factors_")
        }
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
        self.items.thaw()
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the layers."""
        found: torch.dtype = self.item.weight.dtype
        return found

    @property
    def residual_dtype(self) -> torch.dtype:
        """Dtype of the rows between layers."""
        first = self.layers[0]
        assert isinstance(first, HSTULayer)
        return first.norm_in.weight.dtype

    def each_layer(self) -> list[HSTULayer]:
        """List the layers."""
        return cast("list[HSTULayer]", list(self.layers))

    def attention_scale(self, num_tokens: int) -> float:
        """Return 1 / scaling_seqlen; with runtime scaling (never with a cache) 1 / num_tokens."""
        length = (
            self.config.scaling_seqlen if self.config.scaling == "constant" else max(num_tokens, 1)
        )
        return 1.0 / length

    def table_of(self, of: Of) -> FeatureTable:
        """Return the table of one kind of features; the model must have such features."""
        table = self.features[of]
        assert isinstance(table, FeatureTable)
        return table


class ItemVectors:
    """The vectors of items: sums of their parts, or rows of what serving reads.

    Serving reads a frozen table, or the rows of a sharded checkpoint.
    """

    def __init__(self, model: HSTUWeights) -> None:
        self._model = model
        # frozen: [num_rows (+ 1 for NEXT), dim]; None = not frozen
        self.table: Tensor | None = None
        self.sharded: HotRows | None = None  # set to serve a sharded checkpoint
        self._num_spare = 0  # rows for new items in the table
        # residual rows of a training step with row dropout, see `draw_kept`; None = all
        self.kept_rows: Tensor | None = None

    def embed(self, rows: Tensor) -> Tensor:
        """Sum the parts of each item's vector: [...] item rows, NEXT allowed -> [..., dim]."""
        if self._model.config.has_next:
            items = self._embed_known(rows.clamp(max=self._model.config.num_items - 1))
            return torch.where(
                (rows == self._model.config.num_items)[..., None], self._model.next_item, items
            )
        return self._embed_known(rows)

    def _embed_known(self, rows: Tensor, residuals: Tensor | None = None) -> Tensor:
        """Sum the parts of trained items; None = their own residual rows."""
        x: Tensor = self._model.item(rows) if residuals is None else residuals
        if self.kept_rows is not None:
            x = x * self.kept_rows[rows]
        ids = [
            getattr(self._model, f"feature_ids_{index}")[rows]
            for index in range(len(self._model.config.item_features))
        ]
        values = None
        if "item" in self._model.features:
            values = FeatureValues(
                self._model.item_feature_codes[rows], self._model.item_feature_numbers[rows]
            )
        return self._add_common(
            x,
            ids,
            self._model.codes.of_item[rows] if self._model.config.item_codes else None,
            values,
        )

    def _add_common(
        self,
        x: Tensor,
        feature_ids: Sequence[Tensor],
        codes: Tensor | None,
        values: FeatureValues | None,
    ) -> Tensor:
        """Add the parts that items share: means of side features, schema features, code rows."""
        for f, table, ids in zip(
            self._model.config.item_features, self._model.feature, feature_ids, strict=True
        ):
            count = (ids != f.num_values).sum(-1, keepdim=True).clamp(min=1)
            x = x + table(ids).sum(-2) / count.to(x.dtype)
        if values is not None:
            x = x + self._model.table_of("item")(values).to(x.dtype)
        return x if codes is None else self._model.codes.add(x, codes)

    def parts(self) -> list[nn.Parameter]:
        """List the parameters of the tables of which an item's vector is the sum."""
        tables = [
            self._model.item,
            *self._model.feature,
            *(self._model.codes.levels if self._model.config.item_codes else ()),
        ]
        return [parameter for table in tables for parameter in table.parameters()]

    def freeze(self, num_spare: int = 0) -> None:
        """Fold all parts into one table, so that serving gathers one row an item.

        Call it after loading.

        Args:
            num_spare: Number of rows for new items, behind those of the trained ones.
        """
        weight, config = self._model.item.weight, self._model.config
        with torch.inference_mode():
            table = weight.new_zeros(config.num_items + num_spare + config.has_next, config.dim)
            rows = torch.arange(config.num_items, device=weight.device)
            for part in rows.split(65536):
                table[part[0] : part[-1] + 1] = self.embed(part)
            if config.has_next:
                table[-1] = self._model.next_item
            self.table = table
            self._num_spare = num_spare

    def drop_residuals(self) -> None:
        """Free the residual rows: the frozen table holds what serving reads of them."""
        assert self.table is not None
        weight = self._model.item.weight
        self._model.item.weight = nn.Parameter(weight.new_empty(0, weight.shape[1]), False)

    def thaw(self) -> None:
        """Discard the table, because the weights have changed."""
        self.table = None

    def rows(self, rows: Tensor) -> Tensor:
        """Look up item vectors, in what serving reads if it serves: [...] rows -> [..., dim]."""
        if self.sharded is not None:
            return self.sharded.rows(rows).to(self._model.dtype)
        return self.embed(rows) if self.table is None else self.table[rows]

    @property
    def num_rows(self) -> int:
        """Number of item rows, including the spare ones."""
        if self.sharded is not None:
            return self.sharded.num_rows
        return self._model.config.num_items + self._num_spare

    @torch.inference_mode()
    def new_vectors(self, new: NewItems) -> Tensor:
        """Compute the vectors of new items, which have no residual rows: [n, dim]."""
        device = self._model.item.weight.device
        x = self._model.item.weight.new_zeros(len(new.codes), self._model.config.dim)
        ids = [torch.from_numpy(values).to(device) for values in new.features]
        codes = torch.from_numpy(new.codes).to(device) if self._model.config.item_codes else None
        values = None
        if "item" in self._model.features and new.values is not None:
            values = FeatureValues(*(part.to(device) for part in FeatureValues.of(new.values)))
        return self._add_common(x, ids, codes, values)

    @torch.inference_mode()
    def fold(self, rows: Tensor, residuals: Tensor) -> Tensor:
        """Compute the vectors of trained items from their residual rows, [n, dim] each."""
        return self._embed_known(rows, residuals)

    @torch.inference_mode()
    def write(self, rows: Tensor, vectors: Tensor) -> None:
        """Write vectors, [n, dim], of rows that no pass reads now."""
        if self.sharded is not None:
            self.sharded.write(rows.cpu().numpy(), vectors)
            return
        assert self.table is not None
        assert int(rows.max()) < len(self.table)
        self.table[rows] = vectors

    def vectors(self) -> Tensor:
        """Return the vectors that u is multiplied with, fp32 [num_rows, dim].

        An fp32 table is not copied, unless its rows are normalised.
        """
        assert self.table is not None
        return self.compared(self.table[: self.num_rows])

    def compared(self, rows: Tensor) -> Tensor:
        """Convert item rows [..., dim] to the fp32 vectors that u is multiplied with."""
        return (
            normalize(rows.float(), dim=-1, eps=self._model.config.norm_eps)
            if self._model.config.head_item_norm == "l2"
            else rows.float()
        )


class InputRows:
    """Makes the first layer's rows of segments: items, actions, features, positions and times."""

    def __init__(self, model: HSTUWeights) -> None:
        self._model = model

    def of(self, segments: Sequence[Segment], ops: Affine) -> Tensor:
        """Embed every segment's history and candidates, in order: [rows, dim]."""
        items = torch.cat([part for s in segments for part in (s.items, s.candidates)])
        shown = len(self._model.config.actions)
        asking = [
            torch.full_like(s.candidates, shown) if s.last is None else s.last.action
            for s in segments
        ]
        actions = torch.cat(
            [part for s, own in zip(segments, asking, strict=True) for part in (s.actions, own)]
        )
        x: Tensor = self._model.items.rows(items)
        acted = self._model.action(actions.clamp(min=0))
        # the token of an item has action -1, that of an action >= 0
        if self._model.config.is_interleaved:
            x = torch.where((actions < 0)[:, None], x, acted + x * (actions == shown)[:, None])
        else:
            x = x + acted
        if self._model.features:
            x = self._with_features(x, segments, ops)
        if self._model.config.positions != "none":
            x = x + self._model.position(torch.cat([self._positions(s) for s in segments]))
        if self._model.config.query_times is not None:
            assert isinstance(self._model.query_edges, Tensor)
            is_float = self._model.config.query_times.of_float32
            parts = [
                part
                for s in segments
                for part in (_ahead(s, is_float), torch.zeros_like(s.candidates))
            ]
            ahead = torch.cat(parts)
            x = x + self._model.query_time(
                torch.bucketize(ahead, self._model.query_edges, right=True)
            )
        return x.to(self._model.residual_dtype)

    def _with_features(self, x: Tensor, segments: Sequence[Segment], ops: Affine) -> Tensor:
        """Add features to the rows of events and candidates; put the users' tokens in front."""
        events = self._feature_rows("event", [(s.events, len(s.items)) for s in segments], ops)
        requests = self._feature_rows("request", [(s.request, 1) for s in segments], ops)
        cross = self._feature_rows("cross", [(s.cross, len(s.candidates)) for s in segments], ops)
        users = self._user_rows(segments, ops)
        rows: list[Tensor] = []
        wide = x.to(self._model.residual_dtype)  # so that the dtype does not depend on the batch
        for place, s in enumerate(segments):
            history, shown, wide = wide.tensor_split(
                (len(s.items), len(s.items) + len(s.candidates))
            )
            if users and s.user is not None:
                rows.append(users[place])
            rows.append(history + events[place] if events else history)
            if requests:
                shown = shown + requests[place]
            rows.append(shown + cross[place] if cross and not s.is_next else shown)
        return torch.cat(rows)

    def _user_rows(self, segments: Sequence[Segment], ops: Affine) -> Sequence[Tensor]:
        """Embed the users' tokens: [n, dim] of each segment; empty if the model has none."""
        if self._model.config.user_tokens == "sum":
            rows = self._feature_rows(
                "user", [(s.user, int(s.user is not None)) for s in segments], ops
            )
            return [self._model.user_token.to(own.dtype) + own for own in rows]
        if "user" not in self._model.features:
            return []
        none, table = self._model.user_token[:0], self._model.table_of("user")
        return [
            none if s.user is None else self._model.user_token + table.each(s.user, ops)[0]
            for s in segments
        ]

    def _feature_rows(
        self, of: Of, given: Sequence[tuple[FeatureValues | None, int]], ops: Affine
    ) -> Sequence[Tensor]:
        """Embed one kind of features of all segments, [n, dim] each; empty if there are none."""
        if of not in self._model.features:
            return ()
        table = self._model.table_of(of)
        values = [table.missing(n) if own is None else own for own, n in given]
        codes, numbers = (torch.cat(parts) for parts in zip(*values, strict=True))
        rows: Tensor = table(FeatureValues(codes, numbers), ops)
        return torch.split(rows, [n for _, n in given])

    def _positions(self, segment: Segment) -> Tensor:
        """Compute the learned position of each row.

        Positions count from the start, or with `reverse` (which breaks rule E2) from the end; then
        the user's tokens have the first ones.
        """
        past = segment.past.num_tokens if segment.past else 0
        new = segment.num_tokens
        c = len(segment.candidates)
        index = torch.arange(past, past + new + 1, device=segment.items.device)
        index += segment.gap * (index >= segment.gap_at)
        if self._model.config.positions == "reverse":
            index = past + new - index + self._model.config.num_user_tokens
            index[: segment.num_user_tokens] = torch.arange(
                segment.num_user_tokens, device=index.device
            )
        index = index.clamp(max=self._model.config.max_history_tokens)
        return torch.cat([index[:new], index[new:].expand(c)])


def _ahead(segment: Segment, is_float: bool) -> Tensor:
    """Compute the seconds from each new token to the request, int64 [n].

    The user's tokens have the time 0 (1970), as in public code.

    Args:
        segment: Segment of the tokens.
        is_float: Round times to float32 first, in this century to multiples of 128 s.
    """
    times = segment.times.clone()
    times[: segment.num_user_tokens] = 0
    at = torch.full_like(times, segment.candidate_time)
    return (at.float() - times.float()).long() if is_float else at - times


def cross_features(model: HSTUWeights) -> CrossFeatures:
    """Make the object that computes the model's cross features.

    It shares the item tables of a model on the host, and copies those on another device.

    Raises:
        ValueError: A feature names an action or an item feature that the model lacks.
    """
    config = model.config
    tables = {
        feature.name: ItemValueTable(
            getattr(model, f"feature_ids_{index}").cpu().numpy(), feature.num_values
        )
        for index, feature in enumerate(config.item_features)
    }
    factors = None
    if config.has_factors:
        factors = ItemFactors(
            model.factors_of_items.cpu().numpy(), model.factors_of_actions.cpu().numpy()
        )
    return CrossFeatures(config.features_of("cross"), config.actions, tables, factors)


def shown_term(model: HSTUWeights) -> ShownTerm | None:
    """Make the term of shown items on the host; None = the model has none."""
    config = model.config
    if not config.shown_task:
        return None
    return ShownTerm(config.tasks.index(config.shown_task), model.factors_of_shown.cpu().numpy())
