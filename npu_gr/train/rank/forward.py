"""The ranker's forward pass for training: many users, and many moments of each, at once, padded, with gradients.

It computes the same function as `HSTU.forward`. A user's history is encoded once. The candidates of moment i attend
to the events before event i alone, at position i and at the time of event i: every event of a history is a request,
and all of them share one encoding. Attention is dense, [H, B, T, C, N], so N should be a few hundred at most.

Shapes: B users, N history tokens, T moments a user, C candidates a moment, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout, silu

from npu_gr.backend.base import Slab, time_bucket
from npu_gr.model.hstu import HSTU, HSTULayer

CLOSED = -1e4  # a logit whose SiLU, and whose SiLU's gradient, is exactly zero


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryBatch:
    """Events of B users, oldest first, padded at the end with any valid item rows."""

    items: Tensor  # int64 [B, N] item rows
    actions: Tensor  # int64 [B, N]
    times: Tensor  # int64 [B, N] unix seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """Candidates, scored just before some of the events."""

    at: Tensor  # int64 [B, T] index of the event
    candidates: Tensor  # int64 [B, T, C] item rows


def encode(model: HSTU, histories: HistoryBatch, groups: Sequence[Moments], dropout_ratio: float = 0.0) -> list[Tensor]:
    """Compute the final rows of candidates, ready for `model.task_logits`.

    Args:
        model: with `scaling: constant`, and positions that do not count from the end.
        histories: the users' events.
        groups: moments with equally many candidates each; all groups share the encoding of the histories.
        dropout_ratio: of embedded rows and of each layer's update.

    Returns:
        For each group float32 [B, T, C, dim].
    """
    config = model.config
    assert config.scaling == "constant"
    assert config.positions != "reverse"
    num_tokens = histories.items.shape[1]
    every = torch.arange(num_tokens).expand_as(histories.items)
    candidate_action = torch.tensor(len(config.actions))  # the row after the real actions: not acted on yet

    x = _embed(model, histories.items, histories.actions, every)
    rows = [_embed(model, m.candidates, candidate_action, m.at[..., None]) for m in groups]
    x, *rows = (dropout(part, dropout_ratio) for part in (x, *rows))
    causal = _Visibility(config.position_buckets, histories.times, every, own=True)
    visible = [_Visibility(config.position_buckets, histories.times, m.at, own=False) for m in groups]
    scale = model.attention_scale(num_tokens)

    for layer in model.layers:
        assert isinstance(layer, HSTULayer)

        def update(x: Tensor, u: Tensor, attention: Tensor, layer: HSTULayer = layer) -> Tensor:
            new = layer.finish(x, u, attention * scale)
            return x + dropout(new - x, dropout_ratio) if dropout_ratio else new

        if layer is model.layers[-1]:
            k, v = layer.project_kv(x)  # nothing reads the history's final rows, so they are not computed
        else:
            u, v, q, k = layer.project(x)
            x = update(x, u, _attend(q[:, :, None], (k, v), causal.bias(layer))[:, :, 0])
        for index, visibility in enumerate(visible):
            u, own_v, q, own_k = layer.project(rows[index])
            attention = _attend(q, (k, v), visibility.bias(layer)) + _attend_itself(layer, q, own_k, own_v)
            rows[index] = update(rows[index], u, attention)
    return rows


def _embed(model: HSTU, items: Tensor, actions: Tensor, positions: Tensor) -> Tensor:
    """Embed items, actions and positions; side features are averaged once for each distinct item of the batch."""
    distinct, place = torch.unique(items, return_inverse=True)
    x: Tensor = model.embed_items(distinct)[place] + model.action(actions)
    if model.config.positions != "none":
        x = x + model.position(positions.clamp(max=model.config.max_history_tokens))
    return x


class _Visibility:
    """The history tokens that the rows at some positions see, and the distance and time to each."""

    def __init__(self, position_buckets: int, times: Tensor, at: Tensor, *, own: bool) -> None:
        """Let the rows at positions `at` [B, T] see the tokens before them, and with `own` the one at their position.

        Args:
            position_buckets: longer distances share the last bucket.
            times: int64 [B, N] unix seconds of the history.
            at: int64 [B, T].
            own: for rows of the history itself.
        """
        ago = at[:, :, None] - torch.arange(times.shape[1])
        self.closed = ago < 0 if own else ago <= 0  # [B, T, N]
        self.distance = ago.clamp(0, position_buckets - 1).flatten()
        self.bucket = time_bucket(times.gather(1, at)[:, :, None] - times[:, None, :]).flatten()

    def bias(self, layer: HSTULayer) -> Tensor:
        """Compute the relative bias, [H, B, T, 1, N]; `CLOSED` where a row does not see the token."""
        position, time = layer.bias
        both = position.index_select(1, self.distance) + time.index_select(1, self.bucket)
        return both.view(-1, *self.closed.shape).masked_fill(self.closed, CLOSED).unsqueeze(3)


def _attend(q: Tensor, history: Slab, bias: Tensor) -> Tensor:
    """Attend with q [B, T, C, H, Dq] to the history's k [B, N, H, Dq] and v [B, N, H, Dv]: [B, T, C, H, Dv]."""
    k, v = history
    users, moments, candidates, heads, width = q.shape
    queries = q.permute(3, 0, 1, 2, 4).reshape(heads * users, -1, width)
    keys = k.permute(2, 0, 3, 1).reshape(heads * users, width, -1)
    values = v.permute(2, 0, 1, 3).reshape(heads * users, -1, v.shape[3])
    logits = torch.bmm(queries * width**-0.5, keys).view(heads, users, moments, candidates, -1) + bias
    out = torch.bmm(silu(logits).view(heads * users, moments * candidates, -1), values)
    return out.view(heads, users, moments, candidates, -1).permute(1, 2, 3, 0, 4)


def _attend_itself(layer: HSTULayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from each candidate to itself, at distance 0 and time 0: [B, T, C, H, Dv]."""
    position, time = layer.bias
    logits = (q * k).sum(-1) * layer.config.qk_dim**-0.5 + position[:, 0] + time[:, 0]
    return silu(logits)[..., None] * v
