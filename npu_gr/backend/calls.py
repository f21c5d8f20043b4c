"""The arguments of a backend's attention and selection: one frozen value a call, documented here and nowhere else.

Sizes: n new rows, p cached tokens before them, m tokens in all, c candidates, H heads, Dq and Dv widths of a head,
P position buckets, r rows (beams), E edges of one trie level. To add an argument to an operation, add a field here.

The calls are NamedTuples: building one takes less than 2 us, measured on a busy CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from npu_gr.backend.tiles import Slab, Tiles

Over = Literal["row", "valid"]  # a row of logits is normalised over all its columns, or over its valid edges alone


class BiasTables(NamedTuple):
    """Relative bias of one layer: a function of position and time *differences*, so a split stays exact."""

    position: Tensor  # [H, P], read at min(query position - key position, P - 1)
    time: Tensor  # [H, TIME_BUCKETS], read at time_bucket(query time - key time)


class HstuShape(NamedTuple):
    """What of a ranker decides which kernels can run its attention at all."""

    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype  # of weights
    kept_dtype: torch.dtype  # of cached keys and values
    page_tokens: int
    norm_group: int  # numbers that the norm of the attention is over
    is_joined: bool  # the output matrix reads [U, attention, U * norm], not the last alone
    is_biased: bool  # by position and time


class HstuCall(NamedTuple):
    """Arguments of `hstu_causal` (new history rows) and of `hstu_targets` (candidate rows).

                 hstu_causal                                hstu_targets
    rows         n new history tokens                       c candidates
    cached       the p tokens before them                   all m history tokens
    times        int64 [p + n], cached and new tokens       int64 [m], the history
    a row sees   every cached token, new rows up to itself  every history token and itself, no other candidate
    """

    q: Tensor  # [rows, H, Dq]
    k: Tensor  # [rows, H, Dq]; hstu_causal takes k and v of no row where `cached` already holds all p + n tokens
    v: Tensor  # [rows, H, Dv]
    cached: Sequence[Slab | Tiles]  # slabs in token order; empty where nothing is cached
    times: Tensor  # int64 [tokens] unix seconds; the position of a token is its index
    bias: BiasTables
    alpha: float  # factor on q k^T
    query_time: int = 0  # hstu_targets only: unix seconds shared by all candidates, whose shared position is m


class PagedKV(NamedTuple):
    """The pages that hold, or are to hold, a request's tokens."""

    runs: Sequence[tuple[int, int]]  # (first page, number of pages) in token order
    planes: Callable[[int], Slab]  # layer -> k [pages, page tokens, H, Dq] and v [.., Dv] of all pages there are


class HstuSegment(NamedTuple):
    """One request's rows in a whole pass: `num_cached` tokens, new ones behind them, candidates last."""

    num_cached: int
    num_new: int
    num_candidates: int
    times: npt.NDArray[np.int64]  # [num_cached + num_new] unix seconds, on the host
    query_time: int  # unix seconds shared by all candidates
    pages: PagedKV | None  # of the cached tokens, and of the new ones if it keeps them
    keeps: bool  # the new tokens' keys and values go to their pages


class HstuPassCall(NamedTuple):
    """Arguments of `hstu_pass`: a batch, and what is the same in all layers."""

    segments: Sequence[HstuSegment]
    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype  # of weights, keys and values
    alpha: float  # factor on q k^T
    scale: float  # constant factor on the attention
    silu_all: bool  # SiLU on U, V, Q and K, not on U alone
    norm_over: Literal["row", "head"]  # what the norm of the attention is over
    is_joined: bool  # the output matrix reads [U, attention, U * norm], not the last alone


class HstuLayerCall(NamedTuple):
    """Arguments of `HstuPass.mix`."""

    number: int  # of the layer, from 0
    mixed: Tensor  # [rows, U | V | Q | K] of all segments, each part [H, D], before any SiLU
    bias: BiasTables
    norm: nn.LayerNorm  # of the attention
    is_last: bool  # only candidates go on


class BeamCall(NamedTuple):
    """Arguments of `beam_attention`: each row reads the whole shared prefix and the few tokens its beam has added."""

    q: Tensor  # [r, Hq, D]
    shared: Sequence[Slab]  # slabs [m, Hkv, D] of the prefix; may be empty if num_slots > 0
    unshared: Slab  # k and v [W, S, Hkv, D], W >= r
    num_slots: int  # valid slots, 0..S; 0 = a row sees the prefix alone
    ancestry: Tensor | None  # int64 [>= num_slots, r], row of `unshared` that holds slot s of each row; None = itself
    scale: float  # factor on q k^T


class Continuations(NamedTuple):
    """The valid edges of each beam: lo[i] .. lo[i] + degree[i] - 1 of one trie level."""

    lo: Tensor  # int64 [r]
    degree: Tensor  # int64 [r]; 0 = the beam has no continuation
    code: Tensor  # int32 (or int64) [E], the code that each edge stands for; a row's codes ascend
    allowed: Tensor | None = None  # bool [E], the request's filter; None = every edge is allowed


class TopkCall(NamedTuple):
    """Arguments of `beam_topk`: the logits of each beam, and which of them may be chosen."""

    logits: Tensor  # fp32, bf16 (or fp64) [r, columns]
    acc: Tensor  # fp32 (or fp64) [r], accumulated log-probability of each beam; -inf = a beam that is out
    follow: Continuations  # the valid edges
    width: int  # how many choices are wanted, >= 1
    over: Over = "row"  # what a row is normalised over
    codes: slice | None = None  # the columns of codes 0, 1, ..; None = all columns
    scale: float = 1.0  # factor on every logit: 1 / temperature


class Choices(NamedTuple):
    """The selected continuations in the total order: at most `width`, fewer where fewer edges are valid.

    A device that must not wait for the number of choices returns `width` places. Places that no edge fills stand last,
    with score -inf, parent 0 and edge 0; a beam with such a score is out in the next round.
    """

    score: Tensor  # fp32 (fp64) [w] accumulated log-probability; NaN = a logit was not a number
    parent: Tensor  # int64 [w], the beam that each choice continues
    edge: Tensor  # int64 [w], edge of the level, which is the trie state of the next round
