"""Causal decoders of the Llama family for serving: one prefill, then lock-step beam search.

Qwen3: RMSNorm of each query and key head; `Experts` is its mixture of experts. Qwen2: bias on q, k,
v. Llama and Mistral: neither, or bias on q, k, v and the output. All: RoPE, grouped queries,
SwiGLU, a head that is tied to the token embedding or separate. K is stored after norm and RoPE, so
a cached prefix needs no further work. The backend computes the attention; the prefix is *shared
KV*, the few tokens that a beam adds are *unshared KV*.

Source: Qwen3 (arXiv:2505.09388), Qwen2 (arXiv:2407.10671), Llama 3 (arXiv:2407.21783), Mistral
(arXiv:2310.06825); shared and unshared KV: xGR (arXiv:2512.11529). Invariant: a token's keys and
values depend on it and the tokens before it alone, so prefill may be cut anywhere.

RoPE: RoFormer (arXiv:2104.09864), with the scalings of the served families; `llama3` as its
checkpoints state it. Mixture of experts (each row goes through the few MLPs to which its router
gives most weight): Qwen3, as transformers computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import silu

from npu_gr.backend.base import Affine, Backend, accumulator
from npu_gr.backend.torch_ops import TorchOps
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
    joined,
    linear,
)


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How RoPE's frequencies of a model for short texts were changed for longer ones."""

    kind: Literal["linear", "llama3"]
    factor: Positive
    # llama3: wavelengths over original_max_tokens / this are divided by `factor`
    low_freq_factor: Positive = 1.0
    # llama3: wavelengths under original_max_tokens / this are not scaled
    high_freq_factor: Positive = 4.0
    original_max_tokens: Count = 8192  # llama3: positions of the model before it was scaled

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}"
            )


def rope_angles(first: int, num_tokens: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Compute RoPE's cos and sin of `num_tokens` positions from `first` on.

    Args:
        first: Position of the first token.
        num_tokens: Number of positions.
        frequencies: Result of `rope_frequencies`; decides the result's device.

    Returns:
        cos and sin, float32 [num_tokens, 1, head_dim / 2]: fp32, as the models were trained.
    """
    positions = torch.arange(
        first, first + num_tokens, dtype=torch.float32, device=frequencies.device
    )
    angles = positions[:, None, None] * frequencies
    return angles.cos(), angles.sin()


@lru_cache(maxsize=32)
def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Compute the frequency of each pair of a head: float32 [head_dim / 2], radians a position."""
    with torch.inference_mode(False):  # the cached tensor is used in training too
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        plain: Tensor = 1.0 / theta**exponent
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        turns = scaling.original_max_tokens * plain / (2 * math.pi)  # within the original positions
        unscaled = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        unscaled = unscaled.clamp(0.0, 1.0)
        return (1 - unscaled) * plain / scaling.factor + unscaled * plain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [n, H, D]; pair i is (x[i], x[i + D/2]), as in Hugging Face checkpoints."""
    low, high = x.to(accumulator(x.dtype)).chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mixture of experts of a decoder."""

    num_experts: Count
    num_per_token: Count  # number of experts that a row goes through
    mlp_dim: Count  # hidden width of one expert
    normalises: bool  # whether the weights of a row's experts sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with one MLP for all rows instead

    def __post_init__(self) -> None:
        if self.num_per_token > self.num_experts:
            raise ValueError(
                f"num_per_token: {self.num_per_token} is more than num_experts {self.num_experts}"
            )


class Experts(nn.Module):
    """The experts of one layer and their router."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(dim, config.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.mlp_dim, dim))
        self.down = nn.Parameter(torch.empty(config.num_experts, dim, config.mlp_dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, ops: Affine) -> Tensor:
        """Compute the experts' output for rows x: [..., dim] -> [..., dim].

        No shape depends on values, so the pass can be captured as a graph.
        """
        if x.ndim > 2:
            rows: Tensor = self(x.flatten(0, -2), ops)
            return rows.view(x.shape)
        config = self.config
        logits = ops.affine(x, self.router, 0, config.num_experts, False)
        weight, expert = (
            logits.to(accumulator(logits.dtype)).softmax(-1).topk(config.num_per_token, dim=-1)
        )
        if config.normalises:
            weight = weight / weight.sum(-1, keepdim=True)
        through = _grouped if _has_grouped(x, self.gate_up) else _gathered
        each = through(
            x.repeat_interleave(config.num_per_token, 0), expert.flatten(), self.gate_up, self.down
        )
        wide: Tensor = each.unflatten(0, weight.shape) * weight.to(x.dtype)[..., None]
        return wide.sum(1)


def _has_grouped(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a grouped matrix product for this device, dtype and shape.

    It multiplies all groups of rows in one launch, and the host need not know their sizes.
    """
    if not hasattr(functional, "grouped_mm"):  # torch before 2.10
        return False
    is_aligned = all(
        width * x.element_size() % 16 == 0 for width in (weight.shape[1] // 2, weight.shape[2])
    )
    if x.device.type == "cpu":
        return is_aligned and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_aligned and x.is_cuda and x.dtype == torch.bfloat16


def _grouped(x: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sort the rows by expert, and multiply each run of rows with its expert's weights."""
    order = expert.argsort(stable=True)
    ends = torch.searchsorted(
        expert[order], torch.arange(len(gate_up), device=x.device), right=True
    )
    ends = ends.to(torch.int32)
    gate, up = functional.grouped_mm(x[order], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    mixed = functional.grouped_mm(silu(gate) * up, down.transpose(1, 2), offs=ends)
    return torch.empty_like(mixed).index_copy_(0, order, mixed)


def _gathered(x: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Copy each row's expert weights and multiply: slow, for any device and dtype."""
    gate, up = torch.bmm(gate_up[expert], x[..., None])[..., 0].chunk(2, dim=-1)
    return torch.bmm(down[expert], (silu(gate) * up)[..., None])[..., 0]


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the scores, except the weights."""

    vocab_size: Count
    dim: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count  # independent of dim / num_heads
    mlp_dim: Count
    max_tokens: Count  # largest number of positions
    rope_theta: Positive
    norm_eps: Positive
    qk_norm: bool  # RMSNorm of every query and key head (Qwen3)
    qkv_bias: bool  # bias on q, k, v (Qwen2)
    tied_head: bool  # the head is the token embedding
    out_bias: bool = False  # bias on the attention's output (Llama with attention_bias)
    rope_scaling: RopeScaling | None = None
    experts: ExpertsConfig | None = None  # replace the MLP, except in `dense_layers`

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: RoPE turns pairs, {self.head_dim} is odd")

    @property
    def kv_shape(self) -> KVShape:
        """Shape of a token's KV."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim)

    def angles(self, first: int, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Compute cos and sin [num_tokens, 1, head_dim / 2] of positions from `first`, in fp32."""
        frequencies = rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling, device)
        return rope_angles(first, num_tokens, frequencies)


_TORCH = TorchOps()  # differentiable, for training


class DecoderLayer(nn.Module):
    """A decoder layer without its attention.

    It makes q, k, v of the rows, and the next layer's rows of the attention output.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.q_width = config.num_heads * config.head_dim
        self.kv_width = config.num_kv_heads * config.head_dim
        self.norm_in = RMSNorm(config.dim, config.norm_eps)
        self.qkv = nn.Linear(config.dim, self.q_width + 2 * self.kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(self.q_width, config.dim, bias=config.out_bias)
        if config.qk_norm:
            self.norm_q = RMSNorm(config.head_dim, config.norm_eps)
            self.norm_k = RMSNorm(config.head_dim, config.norm_eps)
        self.norm_mlp = RMSNorm(config.dim, config.norm_eps)
        self.experts: Experts | None = None
        if config.experts is not None and index not in config.experts.dense_layers:
            self.experts = Experts(config.dim, config.experts)
        else:
            self.gate_up = nn.Linear(config.dim, 2 * config.mlp_dim, bias=False)
            self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, ops: Affine = _TORCH
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows x [n, dim] to Q [n, Hq, D], K and V [n, Hkv, D].

        Q and K are rotated by cos and sin [n, 1, D / 2].
        """
        every = linear(ops, self.norm_in(x), self.qkv)
        q, k, v = every.split([self.q_width, self.kv_width, self.kv_width], dim=-1)
        return self._queries(q, cos, sin), self._keys(k, cos, sin), self._heads(v)

    def project_last(
        self, x: Tensor, cos: Tensor, sin: Tensor, num_rows: int, ops: Affine
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project K and V of every row, but Q of the last `num_rows` rows only: the last layer."""
        normed = self.norm_in(x)
        last = slice(len(x) - num_rows, None)
        q = ops.affine(normed[last], self.qkv, 0, self.q_width, False)
        kv = ops.affine(normed, self.qkv, self.q_width, self.qkv.out_features, False)
        k, v = kv.split([self.kv_width, self.kv_width], dim=-1)
        return self._queries(q, cos[last], sin[last]), self._keys(k, cos, sin), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.config.head_dim))
        return heads

    def _queries(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self._heads(q)
        return rotate(self.norm_q(heads) if self.config.qk_norm else heads, cos, sin)

    def _keys(self, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self._heads(k)
        return rotate(self.norm_k(heads) if self.config.qk_norm else heads, cos, sin)

    def finish(self, x: Tensor, attention: Tensor, ops: Affine = _TORCH) -> Tensor:
        """Compute the next layer's rows [n, dim] of x [n, dim] and attention [n, Hq, D]."""
        x = x + linear(ops, attention.flatten(-2), self.out).to(x.dtype)
        normed = self.norm_mlp(x)
        if self.experts is not None:
            mixed: Tensor = self.experts(normed, ops)
        else:
            gate, up = linear(ops, normed, self.gate_up).chunk(2, dim=-1)
            mixed = linear(ops, silu(gate) * up, self.down)
        return x + mixed.to(x.dtype)


class Decoder(GenerativeModel):
    """The weights, prefill and one decode step."""

    is_divisible = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.vocab_size, config.dim, config.tied_head)
        self.config = config
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied_head:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def kv_shape(self) -> KVShape:
        return self.config.kv_shape

    def longest_prompt(self, num_levels: int) -> int:
        """Return the longest prompt, in tokens.

        Beams add all tokens of an item but the last, which is never read.
        """
        return self.config.max_tokens - (num_levels - 1)

    def _layer(self, index: int) -> DecoderLayer:
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        return layer

    @torch.inference_mode()
    def prefill(
        self,
        backend: Backend,
        tokens: Tensor,
        start: int,
        past: LayerSlabs | None,
        sink: Sink | None,
        num_rows: int = 1,
    ) -> Tensor:
        """Run new tokens of one prompt; pass every layer's new keys and values to the sink.

        Args:
            backend: Computes the attention and the linear layers.
            tokens: int64 [n], n >= 1, on the model's device.
            start: Position of the first new token = number of tokens in `past`.
            past: KV of the cached tokens before them; None = there are none.
            sink: Takes the new tokens' keys and values; None = they are not stored.
            num_rows: Number of final rows to return, 1..n.

        Returns:
            [num_rows, dim] of the last tokens, after the final norm: the input of `logits`.
        """
        scale = self.config.head_dim**-0.5
        cos, sin = self.config.angles(start, len(tokens), tokens.device)
        x = self.embed(tokens)
        for index in range(len(self.layers)):
            layer = self._layer(index)
            if index + 1 < len(self.layers):
                q, k, v = layer.project(x, cos, sin, backend)
            else:
                q, k, v = layer.project_last(x, cos, sin, num_rows, backend)
                x = x[len(x) - num_rows :]
            before = past(index) if past else []  # read before the sink adds to it
            if sink:
                sink(index, k, v)
            x = layer.finish(x, backend.causal_attention(q, k, v, before, scale), backend)
        hidden: Tensor = self.norm(x)
        return hidden

    def _between(self, index: int, ops: Affine) -> Callable[..., tuple[Tensor, ...]]:
        """Return the row-wise work of a decode step before the attention of layer `index`.

        It begins behind the attention of layer index - 1; `index` = num_layers ends the step.
        """

        def work(
            x: Tensor, cos: Tensor, sin: Tensor, attention: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            if attention is not None:
                x = self._layer(index - 1).finish(x, attention, ops)
            if index == len(self.layers):
                return (x,)
            return x, *self._layer(index).project(x, cos, sin, ops)

        return work

    @torch.inference_mode()
    def decode(self, backend: Backend, steps: Sequence[BeamStep]) -> Tensor:
        scale = self.config.head_dim**-0.5
        device = steps[0].tokens.device
        counts = [len(step.tokens) for step in steps]
        angles = [self.config.angles(step.position, 1, device) for step in steps]
        cos, sin = (
            torch.cat(
                [each[i].expand(count, -1, -1) for each, count in zip(angles, counts, strict=True)]
            )
            for i in (0, 1)
        )
        rows = [self.embed(torch.cat([step.tokens for step in steps])), cos, sin]
        for index in range(len(self.layers)):
            x, q, k, v = backend.row_wise(self, index, self._between(index, backend), rows)
            own = zip(steps, q.split(counts), k.split(counts), v.split(counts), strict=True)
            parts = [
                step.attend(backend, index, own_q, own_k, own_v, scale)
                for step, own_q, own_k, own_v in own
            ]
            rows = [x, cos, sin, joined(parts)]
        (x,) = backend.row_wise(
            self, len(self.layers), self._between(len(self.layers), backend), rows
        )
        hidden: Tensor = self.norm(x)
        return hidden

    def encoding(
        self, backend: Backend, tokens: I64, start: int, past: LayerSlabs | None, sink: Sink
    ) -> Sequence[Callable[[], None]]:
        """Return one piece of work: prefill is divided by tokens instead."""

        def run() -> None:
            self.prefill(backend, backend.upload(tokens), start, past, sink)

        return [run]

    def begin(self, backend: Backend, tokens: I64, prompt: Callable[[int], LayerSlabs]) -> Begun:
        """Run the last token of the prompt again: its final row was not stored."""
        last = len(tokens) - 1
        return Begun(
            self.prefill(
                backend, backend.upload(tokens[last:]), last, prompt(last) if last else None, None
            )
        )
