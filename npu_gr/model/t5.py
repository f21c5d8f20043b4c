"""T5 encoder-decoders for serving: the prompt is encoded once, then lock-step beam search.

Every token of the prompt sees every other one, so an encoded prompt is of no use for a longer one.
The cache stores what the decoder reads of it: the keys and values of each decoder layer's
cross-attention. They are the *shared KV* of the beams; the keys and values of a layer's
self-attention over the answer are *unshared KV*, except those of the start token, which all beams
of a request share.

RMSNorm without bias, no scale on q k^T; in both self-attentions a bias on the scores by the
distance of query and key, the same in every layer. The backend computes the cross-attention; the
encoder's attention, and that over the few tokens of an answer, are plain torch ops on every device.

Source: T5 (arXiv:1910.10683); as a generator of items: TIGER (arXiv:2305.05065); shared and
unshared KV: xGR (arXiv:2512.11529). Invariant: a prompt is always encoded in the same pieces, so
its KV is bit-equal in every request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from npu_gr.backend.base import Affine, Backend, Slab, accumulator
from npu_gr.core.arrays import I64
from npu_gr.core.settings import Count, Positive
from npu_gr.model.generative import (
    BeamStep,
    Begun,
    GenerativeModel,
    KVShape,
    LayerSlabs,
    RMSNorm,
    Sink,
    UnsharedKV,
    joined,
    linear,
)

# longest prompt: a piece of the encoder holds the scores of `ROWS` rows against all tokens
MAX_TOKENS = 4096

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


class T5Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the scores, except the weights."""

    vocab_size: Count
    dim: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    num_heads: Count
    head_dim: Count  # independent of dim / num_heads
    mlp_dim: Count
    activation: Activation
    is_gated: bool  # activation(x A) * (x B), as in T5 1.1; else activation(x A)
    # buckets of distances; the encoder has half of them for each direction
    num_buckets: Annotated[int, msgspec.Meta(ge=4)]
    max_distance: Count  # tokens; all larger distances share one bucket
    norm_eps: Positive
    start_token: Annotated[int, msgspec.Meta(ge=0)]  # first input of every answer
    scales_head: bool  # the last row is multiplied by dim ** -0.5 before the head
    tied_head: bool = True  # the head is the token embedding

    def __post_init__(self) -> None:
        if self.num_buckets % 2:
            raise ValueError(
                f"num_buckets: {self.num_buckets} is odd, and the encoder has half of "
                "them a direction"
            )
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance: {self.max_distance} is not over half of num_buckets "
                f"{self.num_buckets}"
            )
        if self.start_token >= self.vocab_size:
            raise ValueError(
                f"start_token: {self.start_token} is not in the vocabulary of {self.vocab_size}"
            )

    @property
    def kv_shape(self) -> KVShape:
        """Shape of a token's KV in the decoder."""
        return KVShape(self.num_decoder_layers, self.num_heads, self.head_dim)

    def buckets_before(self, distances: I64) -> I64:
        """Compute the decoder's buckets of distances >= 0 from key to query; keeps the shape."""
        return _bucket(distances, self.num_buckets, self.max_distance)

    def buckets_around(self, offsets: I64) -> I64:
        """Compute the encoder's buckets of key position - query position; keeps the shape."""
        half = self.num_buckets // 2
        return _bucket(np.abs(offsets), half, self.max_distance) + half * (offsets > 0)


def _bucket(distances: I64, num_buckets: int, max_distance: int) -> I64:
    """Map distances to buckets: one a distance up to half of the buckets, then logarithmic.

    Computed in fp32 by torch on the CPU, as in training, whatever the device: the edges depend on
    the implementation of the logarithm.
    """
    exact = num_buckets // 2
    far = torch.from_numpy(np.maximum(distances, exact)).float()
    octaves = torch.log(far / exact) / math.log(max_distance / exact)
    bucket = np.minimum(exact + (octaves * (num_buckets - exact)).long().numpy(), num_buckets - 1)
    return np.where(distances < exact, distances, bucket)


ROWS = 256  # rows of a piece of the encoder
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "silu": silu,
}

# layer, q, k, v [rows, H, D] -> attention over the answer
Answer = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def _heads(ops: Affine, x: Tensor, layer: nn.Linear, num_heads: int) -> Tensor:
    """Apply a linear layer to rows x [n, in] and split the result into heads [n, num_heads, D]."""
    heads: Tensor = linear(ops, x, layer).unflatten(-1, (num_heads, -1))
    return heads


class T5Layer(nn.Module):
    """The common part of encoder and decoder layers: the self-attention's projections, the MLP."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        self.norm_in = RMSNorm(config.dim, config.norm_eps)
        self.qkv = nn.Linear(config.dim, 3 * width, bias=False)
        self.out = nn.Linear(width, config.dim, bias=False)
        self.norm_mlp = RMSNorm(config.dim, config.norm_eps)
        self.up = nn.Linear(config.dim, config.mlp_dim * (2 if config.is_gated else 1), bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def project(self, x: Tensor, ops: Affine) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows x [n, dim] to Q, K and V, each [n, H, D]."""
        q, k, v = _heads(ops, self.norm_in(x), self.qkv, 3 * self.config.num_heads).chunk(3, dim=1)
        return q, k, v

    def attended(self, x: Tensor, attention: Tensor, ops: Affine) -> Tensor:
        """Add an attention's output [n, H, D] to the rows x [n, dim]."""
        return x + linear(ops, attention.flatten(-2), self.out).to(x.dtype)

    def finish(self, x: Tensor, ops: Affine) -> Tensor:
        """Compute the next layer's rows [n, dim] of rows to which all attention was added."""
        act = ACTIVATIONS[self.config.activation]
        wide = linear(ops, self.norm_mlp(x), self.up)
        if self.config.is_gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = act(gate) * up
        else:
            wide = act(wide)
        return x + linear(ops, wide, self.down).to(x.dtype)


class T5DecoderLayer(T5Layer):
    """A decoder layer: it also has cross-attention to the prompt."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        width = config.num_heads * config.head_dim
        self.norm_prompt = RMSNorm(config.dim, config.norm_eps)
        self.prompt_q = nn.Linear(config.dim, width, bias=False)
        self.prompt_kv = nn.Linear(config.dim, 2 * width, bias=False)
        self.prompt_out = nn.Linear(width, config.dim, bias=False)

    def project_prompt_q(self, x: Tensor, ops: Affine) -> Tensor:
        """Project rows x [n, dim] to Q [n, H, D] of the cross-attention."""
        return _heads(ops, self.norm_prompt(x), self.prompt_q, self.config.num_heads)

    def add_prompt(self, x: Tensor, attention: Tensor, ops: Affine) -> Tensor:
        """Add the cross-attention's output [n, H, D] to the rows x [n, dim]."""
        return x + linear(ops, attention.flatten(-2), self.prompt_out).to(x.dtype)


class T5(GenerativeModel):
    """The weights, the encoder and one decode step."""

    is_divisible = False

    def __init__(self, config: T5Config) -> None:
        super().__init__(config.vocab_size, config.dim, config.tied_head)
        self.config = config
        self.encoder = nn.ModuleList(T5Layer(config) for _ in range(config.num_encoder_layers))
        self.encoder_bias = nn.Parameter(torch.zeros(config.num_buckets, config.num_heads))
        self.encoder_norm = RMSNorm(config.dim, config.norm_eps)
        self.decoder = nn.ModuleList(
            T5DecoderLayer(config) for _ in range(config.num_decoder_layers)
        )
        self.decoder_bias = nn.Parameter(torch.zeros(config.num_buckets, config.num_heads))
        self.decoder_norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied_head:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def kv_shape(self) -> KVShape:
        return self.config.kv_shape

    def longest_prompt(self, num_levels: int) -> int:
        """Return our own limit, in tokens: the model has none, its distances are unbounded."""
        return MAX_TOKENS

    def encoder_layer(self, index: int) -> T5Layer:
        layer = self.encoder[index]
        assert isinstance(layer, T5Layer)
        return layer

    def decoder_layer(self, index: int) -> T5DecoderLayer:
        layer = self.decoder[index]
        assert isinstance(layer, T5DecoderLayer)
        return layer

    def encoding(
        self, backend: Backend, tokens: I64, start: int, past: LayerSlabs | None, sink: Sink
    ) -> Sequence[Callable[[], None]]:
        """Divide the encoding of the prompt into pieces of at most `ROWS` rows of one layer."""
        assert start == 0, "a prompt is encoded whole"
        return _Encoding(self, backend, tokens, sink).pieces()

    @torch.inference_mode()
    def begin(self, backend: Backend, tokens: I64, prompt: Callable[[int], LayerSlabs]) -> Begun:
        """Run the start token, which reads the whole prompt."""
        nothing = self.embedding.weight.new_zeros(1, 1, self.config.num_heads, self.config.head_dim)
        step = BeamStep(
            tokens=backend.upload(np.array([self.config.start_token])),
            position=0,
            shared=prompt(len(tokens)),
            unshared=UnsharedKV(slabs=lambda _: (nothing, nothing), step=0),
        )
        begun: list[Slab] = []

        def attend_to_itself(_layer: int, _q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            begun.append((k.clone(), v.clone()))
            return v  # the softmax over one key is 1

        return Begun(self._decoded(backend, [step], attend_to_itself), begun)

    @torch.inference_mode()
    def decode(self, backend: Backend, steps: Sequence[BeamStep]) -> Tensor:
        counts = [len(step.tokens) for step in steps]
        biases = [_answer_bias(self, backend, step.unshared.step) for step in steps]

        def answer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = zip(steps, biases, q.split(counts), k.split(counts), v.split(counts), strict=True)
            parts = []
            for step, bias, own_q, own_k, own_v in own:
                step.unshared.write(layer, own_k, own_v)
                held = step.unshared.held(layer, len(own_q))
                parts.append(answer_attention(own_q, step.begun[layer], held, bias))
            return joined(parts)

        return self._decoded(backend, steps, answer)

    def _decoded(self, backend: Backend, steps: Sequence[BeamStep], answer: Answer) -> Tensor:
        """Run the decoder's layers for the tokens of some steps.

        `answer` computes the self-attention over the answers so far.
        """
        counts = [len(step.tokens) for step in steps]
        rows = [self.embed(torch.cat([step.tokens for step in steps]))]
        for index in range(len(self.decoder)):
            x, q, k, v = backend.row_wise(
                self, ("answer", index), self._to_answer(index, backend), rows
            )
            attended = answer(index, q, k, v)
            x, q = backend.row_wise(
                self, ("prompt", index), self._to_prompt(index, backend), [x, attended]
            )
            parts = [
                step.read_prompt(backend, index, own_q, 1.0)
                for step, own_q in zip(steps, q.split(counts), strict=True)
            ]
            rows = [x, joined(parts)]
        (x,) = backend.row_wise(
            self, ("answer", len(self.decoder)), self._to_answer(len(self.decoder), backend), rows
        )
        hidden: Tensor = self.decoder_norm(x)
        return hidden * self.config.dim**-0.5 if self.config.scales_head else hidden

    def _to_answer(self, index: int, ops: Affine) -> Callable[..., tuple[Tensor, ...]]:
        """Return the row-wise work before the self-attention of layer `index`.

        It begins behind the cross-attention of layer index - 1.
        """

        def work(x: Tensor, attended: Tensor | None = None) -> tuple[Tensor, ...]:
            if attended is not None:
                before = self.decoder_layer(index - 1)
                x = before.finish(before.add_prompt(x, attended, ops), ops)
            return (
                (x,)
                if index == len(self.decoder)
                else (x, *self.decoder_layer(index).project(x, ops))
            )

        return work

    def _to_prompt(self, index: int, ops: Affine) -> Callable[..., tuple[Tensor, ...]]:
        """Return the row-wise work between the self- and the cross-attention of a layer."""
        layer = self.decoder_layer(index)

        def work(x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
            x = layer.attended(x, attended, ops)
            return x, layer.project_prompt_q(x, ops)

        return work


def answer_attention(q: Tensor, begun: Slab, own: Slab, bias: Tensor) -> Tensor:
    """Attend over an answer so far: the start token, and each beam's own tokens.

    Args:
        q: [rows, H, D].
        begun: k and v [1, H, D] of the start token.
        own: k and v [rows, slots, H, D] of each beam's own tokens, the query's last.
        bias: [1 + slots, H] bias on the scores.

    Returns:
        [rows, H, D] in q's dtype.
    """
    wide = accumulator(q.dtype)
    keys, values = (
        torch.cat([first.expand(len(q), 1, -1, -1), each], dim=1).to(wide)
        for first, each in zip(begun, own, strict=True)
    )
    # a product and a sum: with two to five keys the matrices are too small for a GEMM
    weights = ((q.to(wide)[:, None] * keys).sum(-1) + bias.to(wide)).softmax(1)
    return (weights[..., None] * values).sum(1).to(q.dtype)


class _Encoding:
    """The encoding of one prompt. Its pieces run in order, on any device thread."""

    def __init__(self, model: T5, backend: Backend, tokens: I64, sink: Sink) -> None:
        self._model = model
        self._backend = backend
        self._tokens = tokens
        self._sink = sink
        self._parts = [
            slice(first, min(first + ROWS, len(tokens))) for first in range(0, len(tokens), ROWS)
        ]
        self._rows: list[Tensor] = []  # [n, dim] of each part
        # of the running layer: queries of each part [n, H, D], keys and values [1, H, tokens, D]
        self._queries: list[Tensor] = []
        self._keys = self._values = torch.empty(0)
        # q, k, v of the next layer, of the finished parts
        self._coming: list[tuple[Tensor, Tensor, Tensor]] = []
        # [H, 2 tokens - 1] by offset; the first entry: the first key of the last query
        self._bias = torch.empty(0)
        self._hidden = torch.empty(0)  # [tokens, dim] final rows, which the decoder reads

    def pieces(self) -> list[Callable[[], None]]:
        """Return the pieces: the embedding, each part of each layer, each decoder layer's KV."""
        model = self._model
        layers = [
            partial(self._run, layer, part)
            for layer in range(model.config.num_encoder_layers)
            for part in range(len(self._parts))
        ]
        return [
            self._begin,
            *layers,
            *(partial(self._store_kv, layer) for layer in range(model.config.num_decoder_layers)),
        ]

    @torch.inference_mode()
    def _begin(self) -> None:
        model = self._model
        tokens = self._backend.upload(self._tokens)
        self._rows = [model.embed(tokens[part]) for part in self._parts]
        self._coming = [model.encoder_layer(0).project(rows, self._backend) for rows in self._rows]
        buckets = model.config.buckets_around(np.arange(1 - len(tokens), len(tokens)))
        self._bias = model.encoder_bias[self._backend.upload(buckets)].T.contiguous()

    @torch.inference_mode()
    def _run(self, index: int, part: int) -> None:
        """Compute one part's rows of a layer, and their q, k and v of the next layer."""
        model = self._model
        if part == 0:
            queries, keys, values = zip(*self._coming, strict=True)
            self._queries = list(queries)
            self._keys, self._values = (
                torch.cat(each).transpose(0, 1)[None] for each in (keys, values)
            )
            self._coming = []
        query = self._queries[part].transpose(0, 1)[None]
        mask = self._block(part).to(query.dtype)
        attention = scaled_dot_product_attention(
            query, self._keys, self._values, attn_mask=mask, scale=1.0
        )
        layer = model.encoder_layer(index)
        rows = layer.attended(self._rows[part], attention[0].transpose(0, 1), self._backend)
        rows = self._rows[part] = layer.finish(rows, self._backend)
        if index + 1 < len(model.encoder):
            self._coming.append(model.encoder_layer(index + 1).project(rows, self._backend))
        elif part + 1 == len(self._parts):
            self._hidden = model.encoder_norm(torch.cat(self._rows))
            self._queries = []  # free memory
            self._keys = self._values = torch.empty(0)

    def _block(self, part: int) -> Tensor:
        """Return the bias of a part's rows for each token: [1, H, rows, tokens]."""
        rows = self._parts[part]
        # the window at w begins at offset w - (tokens - 1)
        windows = self._bias.unfold(1, len(self._tokens), 1)
        at = len(self._tokens) - 1 - np.arange(rows.start, rows.stop)
        return windows[None, :, self._backend.upload(at)]

    @torch.inference_mode()
    def _store_kv(self, index: int) -> None:
        """Pass a decoder layer's cross-attention keys and values to the sink."""
        heads = self._model.config.num_heads
        both = _heads(
            self._backend, self._hidden, self._model.decoder_layer(index).prompt_kv, 2 * heads
        )
        self._sink(index, both[:, :heads], both[:, heads:])


def _answer_bias(model: T5, backend: Backend, step: int) -> Tensor:
    """Return the bias of the start token and each later one, for a query in slot `step`.

    Its shape is [1 + slots, H].
    """
    return model.decoder_bias[
        backend.upload(model.config.buckets_before(np.arange(step + 1, -1, -1)))
    ]
