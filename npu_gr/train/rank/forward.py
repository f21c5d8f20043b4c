"""The ranker's forward pass for training: padded batches of histories, with gradients.

It computes the same function as `HSTU.forward`. Every event of a history is treated as a request
(a "moment"), and all moments of a user share one encoding of the history. The candidates of moment
i attend only to the events before event i, at position i and at the time of event i. Attention is
dense, [H, B, T, C, N], so N should be a few hundred at most.

The features of a user are one token in front of the events, as in service. Its time is that of the
first event, or that of the request if there is no event. All indices here count events, without
this token.

Shapes: B users, N events, L tokens (N, or N + 1 with the user's), T moments a user, C candidates a
moment, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from npu_gr.backend.base import Slab, time_bucket
from npu_gr.core.feature_schema.schema import Of
from npu_gr.model.feature_rows import FeatureValues
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import HSTULayer, window_of

# logit of a masked token: its SiLU, the SiLU's gradient and its softmax share are exactly zero
CLOSED = -1e4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryBatch:
    """Events of B users, oldest first, padded at the end with any valid item rows."""

    items: Tensor  # int64 [B, N] item rows
    actions: Tensor  # int64 [B, N]
    times: Tensor  # int64 [B, N] unix seconds
    user: FeatureValues | None = None  # [B]; None = the model has no user features
    events: FeatureValues | None = None  # [B, N]; None = the model has no event features


class EncodedHistories:
    """Keys and values of B histories in every layer; they do not depend on candidates."""

    def __init__(self, model: HSTU, histories: HistoryBatch, dropout_ratio: float = 0.0) -> None:
        """Encode the histories.

        Args:
            model: Ranker with `scaling: constant`, and positions that do not count from the end.
            histories: Events of the users.
            dropout_ratio: Dropout of embedded rows and of each layer's update, 0 .. 1.
        """
        assert model.config.scaling == "constant"
        assert model.config.positions != "reverse"
        assert model.config.num_user_tokens <= 1
        assert (histories.user is not None) == ("user" in model.features)
        self._model = model
        self._num_before = int(histories.user is not None)  # tokens before the first event
        self._times = torch.cat([histories.times[:, : self._num_before], histories.times], dim=1)
        self._dropout_ratio = dropout_ratio
        self._scale = model.attention_scale(self._times.shape[1])
        self._every = torch.arange(self._times.shape[1])  # tokens
        self._ago = self._every[:, None] - self._every  # [L, L]
        self._window = window_of(model.config)
        self._bucket = time_bucket(self._times[:, :, None] - self._times[:, None, :]).flatten()
        self._biases: list[Tensor] = []  # of each layer, [H, B, L, L], with later tokens masked
        self._slabs: list[Slab] = []

        x = self._placed(self._tokens(histories), self._every)
        for layer in model.layers:
            assert isinstance(layer, HSTULayer)
            self._biases.append(self._bias_of_every(layer))
            if layer is model.layers[-1]:
                # candidates read the keys and values only, so the final rows are not computed
                k, v = layer.project_kv(x)
            else:
                u, v, q, k = layer.project(x)
                attention = _attend(q[:, :, None], (k, v), self._biases[-1].unsqueeze(3))[:, :, 0]
                x = self._updated(layer, x, u, attention)
            self._slabs.append((k, v))

    def rows(
        self,
        candidates: Tensor,
        at: Tensor | None = None,
        request: FeatureValues | None = None,
        cross: FeatureValues | None = None,
    ) -> Tensor:
        """Compute the final rows of candidates.

        They are the input of `model.task_logits` and, for NEXT, of `model.user_vectors`.

        Args:
            candidates: int64 [B, T, C] item rows; `num_items` = NEXT, the placeholder of the next
                item.
            at: int64 [B, T] index of the event just before which they are scored; None = every
                event, T = N.
            request: [B, T] request features; None = the model has none.
            cross: [B, T, c] cross features of the first c candidates; None = the model has none.
                NEXT comes after these, and has none.

        Returns:
            float32 [B, T, C, dim].
        """
        config = self._model.config
        places = self._every[self._num_before :] if at is None else at + self._num_before
        # the last action embedding is that of candidates, which have no action yet
        x = self._items(candidates) + self._model.action(torch.tensor(len(config.actions)))
        x = self._placed(self._shown(x, request, cross), places[..., None])
        for index, layer in enumerate(self._model.layers):
            assert isinstance(layer, HSTULayer)
            if at is None:
                itself = torch.eye(len(self._every), dtype=torch.bool)
                bias = self._biases[index].masked_fill(itself, CLOSED)[:, :, self._num_before :]
            else:
                bias = self._bias_of(layer, places)
            u, own_v, q, own_k = layer.project(x)
            attention = _attend(q, self._slabs[index], bias.unsqueeze(3)) + _attend_itself(
                layer, q, own_k, own_v
            )
            x = self._updated(layer, x, u, attention)
        return x

    def _items(self, items: Tensor) -> Tensor:
        """Embed items, each distinct item of the batch once."""
        distinct, place = torch.unique(items, return_inverse=True)
        rows: Tensor = self._model.items.embed(distinct)[place]
        return rows

    def _tokens(self, histories: HistoryBatch) -> Tensor:
        """Embed histories without positions: [B, L, dim]."""
        x: Tensor = self._items(histories.items) + self._model.action(histories.actions)
        if "event" in self._model.features:
            x = x + self._features("event", histories.events)
        if histories.user is None:
            return x
        user = self._model.user_token + self._features("user", histories.user)
        return torch.cat([user[:, None], x], dim=1)

    def _shown(
        self, x: Tensor, request: FeatureValues | None, cross: FeatureValues | None
    ) -> Tensor:
        """Add request and cross features to the candidates' rows [B, T, C, dim]."""
        if "request" in self._model.features:
            x = x + self._features("request", request)[:, :, None]
        if "cross" in self._model.features and cross is not None:
            known = self._features("cross", cross)
            shown, following = x.tensor_split((known.shape[2],), dim=2)
            x = torch.cat([shown + known, following], dim=2)
        return x

    def _features(self, of: Of, values: FeatureValues | None) -> Tensor:
        assert values is not None, f"the model reads features of {of}"
        rows: Tensor = self._model.features[of](values)
        return rows

    def _placed(self, x: Tensor, positions: Tensor) -> Tensor:
        if self._model.config.positions != "none":
            x = x + self._model.position(positions.clamp(max=self._model.config.max_history_tokens))
        return dropout(x, self._dropout_ratio)

    def _updated(self, layer: HSTULayer, x: Tensor, u: Tensor, attention: Tensor) -> Tensor:
        new = layer.finish(x, u, attention * self._scale)
        return x + dropout(new - x, self._dropout_ratio) if self._dropout_ratio else new

    def _bias_of_every(self, layer: HSTULayer) -> Tensor:
        """Compute the relative bias between all tokens, [H, B, L, L].

        The positions are the same for all users, so their table is read once for the batch.
        """
        position, time = layer.bias
        num_tokens = len(self._every)
        by_place = _look_up(position, self._ago.clamp(0, position.shape[1] - 1).flatten())
        by_time = _look_up(time, self._bucket)
        both = by_place.view(-1, 1, num_tokens, num_tokens) + by_time.view(
            len(by_time), -1, num_tokens, num_tokens
        )
        return both.masked_fill((self._ago < 0) | self._outside(self._ago), CLOSED)

    def _bias_of(self, layer: HSTULayer, at: Tensor) -> Tensor:
        """Compute the relative bias between tokens `at` [B, T] and earlier ones: [H, B, T, L]."""
        position, time = layer.bias
        ago = at[:, :, None] - self._every
        bucket = time_bucket(
            self._times.gather(1, at)[:, :, None] - self._times[:, None, :]
        ).flatten()
        distance = ago.clamp(0, position.shape[1] - 1).flatten()
        both = _look_up(position, distance) + _look_up(time, bucket)
        return both.view(-1, *ago.shape).masked_fill((ago <= 0) | self._outside(ago), CLOSED)

    def _outside(self, ago: Tensor) -> Tensor:
        """Return which tokens have left the attention window of rows `ago` [..., L] after them."""
        if self._window is None:
            return torch.zeros((), dtype=torch.bool)
        return (ago >= self._window.recent) & (self._every >= self._window.first)


class _LookUp(torch.autograd.Function):
    """Reads columns of a small table; `bincount` makes its gradient ten times as fast."""

    @staticmethod
    def forward(context: Any, table: Tensor, columns: Tensor) -> Tensor:
        """Look up: table [H, n], columns int64 [m] -> [H, m]."""
        context.save_for_backward(columns)
        context.num_columns = table.shape[1]
        return table.index_select(1, columns)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (columns,) = context.saved_tensors
        rows = [torch.bincount(columns, row, minlength=context.num_columns) for row in gradients[0]]
        return torch.stack(rows).to(gradients[0].dtype), None


def _look_up(table: Tensor, columns: Tensor) -> Tensor:
    found: Tensor = _LookUp.apply(table, columns)  # type: ignore[no-untyped-call]
    return found


def dropout(x: Tensor, ratio: float) -> Tensor:
    """Set a share of the numbers to 0, and scale the others up.

    One random byte per number is faster than `torch.dropout`, and rounds the ratio to 1/256.

    Args:
        x: Tensor of any shape.
        ratio: Share to drop, 0 .. 1; 0 changes nothing.
    """
    threshold = round(ratio * 256)
    if not threshold:
        return x
    count = x.numel()
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
    is_kept = words.view(torch.uint8)[:count].view(x.shape) >= threshold
    return x * is_kept.to(x.dtype).mul_(256 / (256 - threshold))


def _attend(q: Tensor, history: Slab, bias: Tensor) -> Tensor:
    """Attend with q [B, T, C, H, Dq] to a history, k [B, L, H, Dq] and v [B, L, H, Dv].

    Returns [B, T, C, H, Dv].
    """
    k, v = history
    users, moments, candidates, heads, width = q.shape
    queries = q.permute(3, 0, 1, 2, 4).reshape(heads * users, -1, width)
    keys = k.permute(2, 0, 3, 1).reshape(heads * users, width, -1)
    values = v.permute(2, 0, 1, 3).reshape(heads * users, -1, v.shape[3])
    logits = (
        torch.bmm(queries * width**-0.5, keys).view(heads, users, moments, candidates, -1) + bias
    )
    out = torch.bmm(silu(logits).view(heads * users, moments * candidates, -1), values)
    return out.view(heads, users, moments, candidates, -1).permute(1, 2, 3, 0, 4)


def _attend_itself(layer: HSTULayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute each candidate's attention to itself, at distance 0 and time 0: [B, T, C, H, Dv]."""
    position, time = layer.bias
    logits = (q * k).sum(-1) * layer.config.qk_dim**-0.5 + position[:, 0] + time[:, 0]
    return silu(logits)[..., None] * v
