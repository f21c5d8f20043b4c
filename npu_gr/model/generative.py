"""The interface of a generative model to the engine, and the types of a decode step.

A prompt's KV, stored in pages, is *shared KV*: all beams of a request read it. The tokens that a
beam adds are *unshared KV*. What shared KV holds depends on the model:

    decoder (`decoder.py`)   keys and values of the prompt's tokens; each layer has one attention
                             over both kinds of KV
    T5 (`t5.py`)             the encoder's output as each decoder layer reads it; each layer has one
                             attention for each kind

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
    """Shape of a token's KV."""

    num_layers: int
    num_heads: int  # KV heads
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnsharedKV:
    """Keys and values of the tokens that beams have added, in one decode step.

    W = rows of the slab, at least the rows of the step; S = its slots, one a decode step.
    """

    slabs: Callable[[int], Slab]  # layer -> (k, v), each [W, S, Hkv, D]; slot `step` is written
    step: int  # slots 0..step-1 are valid before the step, 0..step after it
    # int64 [step + 1, rows]: row of the slab that holds slot s; None = the row itself
    ancestry: Tensor | None = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> Slab:
        """Write the beams' keys and values [rows, Hkv, D] into their slot; return the slab."""
        slab = self.slabs(layer)
        slab[0][: len(k), self.step] = k
        slab[1][: len(v), self.step] = v
        return slab

    def held(self, layer: int, num_rows: int) -> Slab:
        """Return k and v [rows, step + 1, Hkv, D] of each beam's tokens, including this step's."""
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

    tokens: Tensor  # int64 [rows], the token that each beam chose last
    position: int  # position of these tokens: prompt length + step
    shared: LayerSlabs  # the whole prompt
    unshared: UnsharedKV
    # KV, per layer, of the token that all beams begin with; empty = there is none
    begun: Sequence[Slab] = ()
    # True: attend to shared and unshared KV in two stages and merge; False: one stage, which is
    # faster for short prompts. The results differ only by rounding
    split: bool = True

    def attend(
        self, backend: Backend, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """Write the beams' keys and values, then attend over the prompt and each beam's tokens.

        Args:
            backend: Computes the attention.
            layer: Index of the layer.
            q: [rows, Hq, D].
            k, v: [rows, Hkv, D] of the step's tokens.
            scale: Factor on q k^T.

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
        """Attend over the prompt alone: q [rows, Hq, D] -> [rows, Hq, D]; see `attend`."""
        slab = self.unshared.slabs(layer)
        return backend.beam_attention(
            BeamCall(q, self.shared(layer), slab, 0, None, scale, self.split)
        )


class Begun(NamedTuple):
    """State after the prompt, for the first round of a beam search."""

    hidden: Tensor  # [1, dim], the input of `logits`
    kv: Sequence[Slab] = ()  # becomes `BeamStep.begun`


class RMSNorm(nn.Module):
    """Compute x / rms(x) * weight over the last dimension.

    Statistics are in fp32, the result in the weight's dtype.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        wide = x.to(accumulator(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(self.weight.dtype) * self.weight


def linear(ops: Affine, x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply a linear layer to x: [..., in] -> [..., out]."""
    return ops.affine(x, layer, 0, layer.out_features, False)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all parts; a single part is not copied."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class GenerativeModel(nn.Module, ABC):
    """Base class of generative models: embedding, head, and the methods that the engine calls.

    Methods that compute run on a device thread.
    """

    # whether a token's KV depends only on the tokens up to it: then a prompt's beginning is cached
    is_divisible: ClassVar[bool]
    head: nn.Linear  # unless the head is tied

    def __init__(self, vocab_size: int, dim: int, tied_head: bool) -> None:
        """Make the embedding; a subclass makes `head` after its layers.

        Args:
            vocab_size: Number of tokens.
            dim: Width of a row.
            tied_head: The head is the token embedding.
        """
        super().__init__()
        self.tied_head = tied_head
        self.embedding = nn.Embedding(vocab_size, dim)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and the KV."""
        found: torch.dtype = self.embedding.weight.dtype
        return found

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [vocabulary, dim]."""
        weight: Tensor = self.embedding.weight if self.tied_head else self.head.weight
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the rows of tokens, in fp32: the residual stream of a half-precision model."""
        rows: Tensor = self.embedding(tokens)
        return rows.to(accumulator(rows.dtype))

    @torch.inference_mode()
    def logits(
        self,
        hidden: Tensor,
        token_range: tuple[int, int] | None = None,
        room: Callable[[int, int], Tensor] | None = None,
    ) -> Tensor:
        """Compute the scores of the next token, not normalised.

        Args:
            hidden: [rows, dim] from `begin` or `decode`.
            token_range: First token and the one after the last, e.g. one codebook; None = the
                vocabulary.
            room: Allocates the result, [rows, tokens]; None = new memory.

        Returns:
            [rows, tokens] in the weights' dtype.
        """
        first, end = token_range or (0, None)
        weight = self.head_weight[first:end]
        return torch.mm(hidden, weight.T, out=room(len(hidden), len(weight)) if room else None)

    @property
    @abstractmethod
    def kv_shape(self) -> KVShape:
        """Shape of a token's KV, shared or unshared."""

    @abstractmethod
    def longest_prompt(self, num_levels: int) -> int:
        """Return the longest prompt, in tokens, before semantic IDs of `num_levels` codes."""

    @abstractmethod
    def encoding(
        self, backend: Backend, tokens: I64, start: int, past: LayerSlabs | None, sink: Sink
    ) -> Sequence[Callable[[], None]]:
        """Divide the encoding of a prompt into pieces of bounded time, to be run in order.

        Args:
            backend: Backend of the model's device.
            tokens: [n] new tokens of the prompt, n >= 1; the whole prompt if not `is_divisible`.
            start: Position of the first new token = number of tokens in `past`.
            past: KV of the tokens before them; None = there are none.
            sink: Takes every layer's keys and values of all new tokens.
        """

    @abstractmethod
    def begin(self, backend: Backend, tokens: I64, prompt: Callable[[int], LayerSlabs]) -> Begun:
        """Compute the state after an encoded prompt.

        Args:
            backend: Backend of the model's device.
            tokens: [n] of the whole prompt, n >= 1.
            prompt: Returns the KV of the first tokens; its argument is their number.
        """

    @abstractmethod
    def decode(self, backend: Backend, steps: Sequence[BeamStep]) -> Tensor:
        """Run one step of all beams of some requests; write their keys and values into their slots.

        Returns:
            [rows of all steps, dim], in the order of `steps`: the input of `logits`.
        """
