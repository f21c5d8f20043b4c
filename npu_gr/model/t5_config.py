"""What decides a T5 model's numbers apart from its weights, and the buckets of its distances.

Source: T5 (arXiv:1910.10683), as transformers computes it.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch

from npu_gr.core.arrays import I64
from npu_gr.core.settings import Count, Positive

MAX_TOKENS = 4096  # of a prompt: a piece of the encoder holds scores of some hundred rows against all of them

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


class T5Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the numbers, apart from the weights."""

    vocab_size: Count
    dim: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    num_heads: Count
    head_dim: Count  # independent of dim / num_heads
    mlp_dim: Count
    activation: Activation
    is_gated: bool  # activation(x A) * (x B), as of T5 1.1; else activation(x A)
    num_buckets: Annotated[int, msgspec.Meta(ge=4)]  # of distances; the encoder has half of them for each direction
    max_distance: Count  # tokens; all that is further away is in one bucket
    norm_eps: Positive
    start_token: Annotated[int, msgspec.Meta(ge=0)]  # every answer begins behind it
    scales_head: bool  # the last row is multiplied by dim ** -0.5 before the head
    tied_head: bool = True  # the head is the token embedding

    def __post_init__(self) -> None:
        if self.num_buckets % 2:
            raise ValueError(f"num_buckets: {self.num_buckets} is odd, and the encoder has half of them a direction")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(f"max_distance: {self.max_distance} is not over half of num_buckets {self.num_buckets}")
        if self.start_token >= self.vocab_size:
            raise ValueError(f"start_token: {self.start_token} is not in the vocabulary of {self.vocab_size}")

    def buckets_before(self, distances: I64) -> I64:
        """Bucket of a key so many tokens before its query, in the decoder; the shape of the distances >= 0."""
        return _bucket(distances, self.num_buckets, self.max_distance)

    def buckets_around(self, offsets: I64) -> I64:
        """Bucket of a key at its query's position + offset, in the encoder; the shape of the offsets."""
        half = self.num_buckets // 2
        return _bucket(np.abs(offsets), half, self.max_distance) + half * (offsets > 0)


def _bucket(distances: I64, num_buckets: int, max_distance: int) -> I64:
    """A bucket for each distance up to half of the buckets, from there on logarithmic.

    In fp32 and by torch on the CPU, as models learnt it: another logarithm has other edges. So it is the same on
    every device.
    """
    exact = num_buckets // 2
    far = torch.from_numpy(np.maximum(distances, exact)).float()
    octaves = torch.log(far / exact) / math.log(max_distance / exact)
    bucket = np.minimum(exact + (octaves * (num_buckets - exact)).long().numpy(), num_buckets - 1)
    return np.where(distances < exact, distances, bucket)
