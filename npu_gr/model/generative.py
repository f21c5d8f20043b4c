"""A model that generates, and the nouns of a decode step. The engine knows no more of a model.

A prompt's KV, kept in pages, is *shared KV*: all beams of a request read it. What a beam adds is
*unshared KV*.

    decoder (`decoder.py`)   the keys and values of the prompt's tokens: one attention a layer over both kinds of KV
    T5 (`t5.py`)             the encoder's output as each decoder layer reads it: a layer has an attention for each kind

Source: shared and unshared KV: xGR (arXiv:2512.11529).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from npu_gr.backend.base import Affine, Backend, Slab, accumulator
from npu_gr.backend.calls import BeamCall
from npu_gr.core.arrays import I64

LayerSlabs = Callable[[int], Sequence[Slab]]  # layer -> (k, v), each [m, Hkv, D], in token order
Sink = Callable[[int, Tensor, Tensor], None]  # layer, k and v [n, Hkv, D] of the new tokens


class KVShape(NamedTuple):
    """Of a prompt's KV, and of what a beam adds to it."""

    num_layers: int
    num_heads: int  # KV heads
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnsharedKV:
    """Keys and values of the tokens that beams have added, as one decode step reads and writes them.

    W = rows of the slab, at least as many as the step has rows; S = its slots.
    """

    slabs: Callable[[int], Slab]  # layer -> (k, v), each [W, S, Hkv, D]; slot `step` is written
    step: int  # slots 0..step-1 are valid before the step, 0..step after it
    # int64 [step + 1, rows]: row of the slab that holds slot s; None = the row itself
    ancestry: Tensor | None = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> Slab:
        """Write the beams' keys and values [rows, Hkv, D] into their slot, and return the layer's slab."""
        slab = self.slabs(layer)
        slab[0][: len(k), self.step] = k
        slab[1][: len(v), self.step] = v
        return slab

    def held(self, layer: int, num_rows: int) -> Slab:
        """Return k and v [rows, step + 1, Hkv, D] of what each beam has added so far, this step included."""
        num_slots = self.step + 1
        keys, values = self.slabs(layer)
        if self.ancestry is None:
            return keys[:num_rows, :num_slots], values[:num_rows, :num_slots]
        rows = self.ancestry[:num_slots].T
        slots = torch.arange(num_slots, device=keys.device)
        return keys[rows, slots], values[rows, slots]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BeamStep:
    """The beams of one request in a decode step; rows = beams."""

    tokens: Tensor  # int64 [rows], the token each beam chose last
    position: int  # its position, the same for every beam: prompt length + step
    shared: LayerSlabs  # the whole prompt
    unshared: UnsharedKV
    # of each layer, the KV of the token that all beams begin with; empty = there is none
    begun: Sequence[Slab] = ()
    # two attention stages and a merge, or one stage, which is faster for short prompts; equal but
    # for rounding
    split: bool = True

    def attend(
        self, backend: Backend, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """Write the beams' keys and values into their slot, then attend over the prompt and the beams' own.

        Args:
            backend: whose attention runs.
            layer: index.
            q: [rows, Hq, D].
            k, v: [rows, Hkv, D] of the step's tokens.
            scale: factor on q k^T.

        Returns:
            [rows, Hq, D].
        """
        own = self.unshared
        slab = own.write(layer, k, v)
        slots, ancestry = own.step + 1, own.ancestry
        return backend.beam_attention(
            BeamCall(q, self.shared(layer), slab, slots, ancestry, scale, self.split)
        )

    def read_prompt(self, backend: Backend, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attend over the prompt alone: [rows, Hq, D] of q [rows, Hq, D].

        The arguments are those of `attend`.
        """
        slab = self.unshared.slabs(layer)
        return backend.beam_attention(
            BeamCall(q, self.shared(layer), slab, 0, None, scale, self.split)
        )


class Begun(NamedTuple):
    """A prompt read to its end: what the first round of a search needs."""

    hidden: Tensor  # [1, dim], what `logits` takes
    kv: Sequence[Slab] = ()  # as `BeamStep.begun`


class RMSNorm(nn.Module):
    """Compute x / rms(x) * weight over the last dimension, statistics in fp32, result in the weight's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        wide = x.to(accumulator(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(self.weight.dtype) * self.weight


def whole(ops: Affine, x: Tensor, layer: nn.Linear) -> Tensor:
    """All outputs [..., out] of a linear layer for x [..., in]."""
    return ops.affine(x, layer, 0, layer.out_features, False)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; those of a single one are not copied."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class GenerativeModel(nn.Module, ABC):
    """A model that generates, and what every one has: embedding and head.

    What computes runs on a device thread.
    """

    # a token's KV depends on it and those before it: a prompt's beginning can be kept
    is_divisible: ClassVar[bool]
    head: nn.Linear  # unless the head is tied

    def __init__(self, vocab_size: int, dim: int, tied_head: bool) -> None:
        """Make the embedding; `head` is left to the subclass, to stand behind its layers.

        Args:
            vocab_size: tokens.
            dim: width of a row.
            tied_head: the head is the token embedding.
        """
        super().__init__()
        self.tied_head = tied_head
        self.embedding = nn.Embedding(vocab_size, dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the KV."""
        found: torch.dtype = self.embedding.weight.dtype
        return found

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary, dim]: a row for each token's score."""
        weight: Tensor = self.embedding.weight if self.tied_head else self.head.weight
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of tokens, wide: the residual stream of a half-precision model stays fp32."""
        rows: Tensor = self.embedding(tokens)
        return rows.to(accumulator(rows.dtype))

    @torch.inference_mode()
    def logits(
        self,
        hidden: Tensor,
        token_range: tuple[int, int] | None = None,
        room: Callable[[int, int], Tensor] | None = None,
    ) -> Tensor:
        """Scores of the next token, not normalised.

        Args:
            hidden: [rows, dim] from `begin` or `decode`.
            token_range: first token and the one after the last, e.g. one codebook; None = the
                vocabulary.
            room: gives the result's memory, [rows, tokens]; None = new memory.

        Returns:
            [rows, tokens] in the weights' dtype.
        """
        first, end = token_range or (0, None)
        weight = self.head_weight[first:end]
        return torch.mm(hidden, weight.T, out=room(len(hidden), len(weight)) if room else None)

    @property
    @abstractmethod
    def kv_shape(self) -> KVShape:
        """Of a prompt's KV, and of the beams' own."""

    @abstractmethod
    def longest_prompt(self, num_levels: int) -> int:
        """Count the tokens that a prompt may have where semantic IDs of so many codes follow it."""

    @abstractmethod
    def encoding(
        self, backend: Backend, tokens: I64, start: int, past: LayerSlabs | None, sink: Sink
    ) -> Sequence[Callable[[], None]]:
        """Divide the encoding of a prompt into pieces, each bounded, that run in this order.

        Computes nothing itself.

        Args:
            backend: the model's device.
            tokens: [n] new tokens of the prompt, n >= 1; all of them where it is not divisible.
            start: position of the first one = how many tokens `past` holds.
            past: KV of the tokens before them; None where there are none.
            sink: is handed every layer's keys and values of all new tokens.
        """

    @abstractmethod
    def begin(self, backend: Backend, tokens: I64, prompt: Callable[[int], LayerSlabs]) -> Begun:
        """Read an encoded prompt to its end.

        Args:
            backend: the model's device.
            tokens: [n] of the whole prompt, n >= 1.
            prompt: gives the KV of its first tokens, as many as asked for.
        """

    @abstractmethod
    def decode(self, backend: Backend, steps: Sequence[BeamStep]) -> Tensor:
        """Run one step of all beams of some requests; write their keys and values into their slots.

        Returns:
            [rows of all steps, dim], step after step: what `logits` takes.
        """
