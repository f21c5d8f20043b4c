"""The arguments of a backend's attention and selection: one frozen value a call, documented here and nowhere else.

Sizes: n new rows, p cached tokens before them, m tokens in all, c candidates, H heads, Dq and Dv
widths of a head, P position buckets, r rows (beams), E edges of one trie level. To add an argument
to an operation, add a field here.

The calls are NamedTuples: building one takes less than 2 us, measured on a busy CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from npu_gr.backend.tiles import Slab, Tiles

# a row of logits is normalised over all its columns, or over its valid edges alone
Over = Literal["row", "valid"]


class BiasTables(NamedTuple):
    """Relative bias of one layer: a function of position and time *differences*, so a split stays exact."""

    position: Tensor  # [H, P], read at min(query position - key position, P - 1)
    time: Tensor  # [H, buckets], read at the bucket of query time - key time


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
    is_biased: bool  # by position or time
    has_plain_layers: bool = True  # around the attention nothing that kernels of whole layers lack
    has_plain_times: bool = True  # its calls are plain


class HstuCall(NamedTuple):
    """Arguments of `hstu_causal` (new history rows) and of `hstu_targets` (candidate rows).

                 hstu_causal                                hstu_targets
    rows         n new history tokens                       c candidates
    cached       the p tokens before them                   all m history tokens
    times        int64 [p + n], cached and new tokens       int64 [m], the history
    a row sees   every cached token, new rows up to itself  every history token and itself, no other candidate
    """

    q: Tensor  # [rows, H, Dq]
    # [rows, H, Dq]; hstu_causal takes k and v of no row where `cached` already holds all p + n
    # tokens
    k: Tensor
    v: Tensor  # [rows, H, Dv]
    cached: Sequence[Slab | Tiles]  # slabs in token order; empty where nothing is cached
    times: Tensor  # int64 [tokens] unix seconds; the position of a token is its index
    bias: BiasTables
    alpha: float  # factor on q k^T
    # hstu_targets only: unix seconds shared by all candidates, whose shared position is m
    query_time: int = 0
    # hstu_causal only: int64 [rows] as which the rows ask; None = their own times
    row_times: Tensor | None = None
    # hstu_targets only: int64 [] of a candidate's own key; None = `query_time`
    own_time: Tensor | None = None
    # int64 [buckets - 1] seconds: where buckets 1, 2, .. begin; None = `time_bucket`
    edges: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it asks for nothing that the kernels of devices lack."""
        return self.edges is None and self.row_times is None and self.own_time is None


class PagedKV(NamedTuple):
    """The pages that hold, or are to hold, a request's tokens."""

    runs: Sequence[tuple[int, int]]  # (first page, number of pages) in token order
    # [layers, pages, page tokens, H, Dq] of all pages there are; of tiles [.., tiles, H, padded Dq
    # * 64]
    k: Tensor
    v: Tensor  # [.., Dv], as k
    is_tiles: bool

    def planes(self, layer: int) -> Slab:
        """A layer's k and v of all pages there are."""
        return self.k[layer], self.v[layer]


class HstuIds(NamedTuple):
    """The rows of the embeddings that a request's tokens and candidates are made of, on the host."""

    items: npt.NDArray[np.int64]  # [num_new]
    actions: npt.NDArray[np.integer]  # [num_new]; below 0 = the first
    candidates: npt.NDArray[np.int64]  # [num_candidates] items


class HstuSegment(NamedTuple):
    """One request's rows in a whole pass: `num_cached` tokens, new ones behind them, candidates last."""

    num_cached: int
    num_new: int
    num_candidates: int
    times: npt.NDArray[np.int64]  # [num_cached + num_new] unix seconds, on the host
    query_time: int  # unix seconds shared by all candidates
    pages: PagedKV | None  # of the cached tokens, and of the new ones if it keeps them
    keeps: bool  # the new tokens' keys and values go to their pages
    ids: HstuIds | None = None  # None = they do not say it all


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


class HstuLayerWeights(NamedTuple):
    """A layer of a ranker: x + out(gate(attention)), with [U | V | Q | K] = uvqk(norm_in(x))."""

    norm_in: nn.LayerNorm
    uvqk: nn.Linear
    bias: BiasTables
    norm_attention: nn.LayerNorm  # over all heads' values, or over each head's
    out: nn.Linear


class HstuHead(NamedTuple):
    """What is made of a candidate's final row: out(silu(hidden(norm(row)))), or without `hidden` out(norm(row))."""

    norm: nn.LayerNorm
    hidden: nn.Linear | None
    out: nn.Linear


class HstuWeights(NamedTuple):
    """What of a ranker a whole pass reads. `HstuPassCall` says what the settings mean."""

    layers: Sequence[HstuLayerWeights]
    heads: Mapping[str, HstuHead]  # by `FusedForwardCall.answer`
    num_heads: int
    qk_dim: int
    v_dim: int
    alpha: float
    scale: float
    silu_all: bool
    is_joined: bool


class FusedForwardCall(NamedTuple):
    """Arguments of `fused_forward`: a batch, from its embeddings or rows to what is made of the final rows."""

    # the model, whose parameters and buffers the weights are; its modules stay, their tensors may
    # not
    owner: nn.Module
    weights: Callable[[], HstuWeights]  # called where they have to be read anew
    dtype: torch.dtype  # of weights, keys and values
    segments: Sequence[HstuSegment]
    embeddings: (
        tuple[Tensor, Tensor] | None
    )  # items and actions [.., dim], the last action a candidate's; None = `rows`
    # fp32 [rows, dim] of every segment's new tokens, then candidates; called without those
    rows: Callable[[], Tensor]
    answer: str  # a head; another name = the final rows


class HstuFindCall(NamedTuple):
    """Arguments of `hstu_find`: NEXT of each request, the search, and what of each is scored.

    B = requests.
    """

    next: FusedForwardCall  # NEXT is each segment's one candidate
    items: Tensor  # fp32 [>= I, dim], that u is compared with
    num_items: int  # I
    k: int  # most items to find, at least 1
    hidden: Sequence[npt.NDArray[np.int64]]  # [B] item rows that must not be found, in any order
    wanted: Sequence[int]  # [B] most of the found items that are scored, at most k
    least: Sequence[int]  # [B] if fewer are found, none is scored


class HstuFound(NamedTuple):
    """What `hstu_find` computed, on the host. s = all items that were scored, request after request."""

    vectors: npt.NDArray[np.float32]  # [B, dim] u
    # [B, k] rows, best first, of equals the lower row; -1 where there is no more
    items: npt.NDArray[np.int64]
    num_scored: npt.NDArray[np.int64]  # [B] of the first ones
    logits: npt.NDArray[np.float32]  # [s, tasks]
    products: npt.NDArray[np.float32]  # [s] u with each


class HstuLayerCall(NamedTuple):
    """Arguments of `HstuPass.mix`."""

    number: int  # of the layer, from 0
    mixed: Tensor  # [rows, U | V | Q | K] of all segments, each part [H, D], before any SiLU
    bias: BiasTables
    norm: nn.LayerNorm  # of the attention
    is_last: bool  # only candidates go on


class BlendTables(NamedTuple):
    """What a fitted order reads of its catalogue.

    I = items, S = successors kept of an item, K = neighbours.

    Row I of `rest` and `shares` is that of a new item. `npu_gr/model/blend.py` says what they mean.
    """

    successors: npt.NDArray[np.int32]  # [I, S] item rows, ascending; -1 = padding
    log_prob: npt.NDArray[np.float32]  # [I, S]
    rest: npt.NDArray[np.float32]  # [I + 1]
    shares: npt.NDArray[np.float32]  # [I + 1]
    neighbours: npt.NDArray[np.int32]  # [I, K] as `successors`; K = 0: there are none
    similarity: npt.NDArray[np.float32]  # [I, K]
    decay: float  # of an event's weight, with each newer event
    # of a mean similarity, or of a sum, in a logarithm; 0 = no logarithm: it counts itself
    scale: float
    is_summed: bool  # whether the sum of similarities counts, not their mean
    weights: tuple[float, ...]  # of retrieval, click, transitions, neighbours, popularity, seen


class BlendCall(NamedTuple):
    """The candidates of one request, and what its fitted order knows of them."""

    recent: npt.NDArray[np.int64]  # [n] item rows of the last events, oldest first
    num_followed: int  # of the newest of them, whose successors count
    num_liked: int  # and whose neighbours count, each item once
    candidates: npt.NDArray[np.int64]  # [c] item rows
    retrieval: npt.NDArray[np.float32] | None  # [c]; None of these three: 0
    click: npt.NDArray[np.float32] | None
    seen: npt.NDArray[np.float32] | None


class BlendSums(Protocol):
    """Sums of one order by a kernel of the host. Any thread may call."""

    def __call__(self, call: BlendCall) -> npt.NDArray[np.float32]:
        """Sum the terms of each candidate: float32 [c]."""
        ...

    def alike(self, liked: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Sum up the similarities of every item to the distinct known items of some events.

        Args:
            liked: int64 [n] item rows.

        Returns:
            float64 [I]; the work grows with n x K + I.
        """
        ...


class BeamCall(NamedTuple):
    """Arguments of `beam_attention`: each row reads the whole shared prefix and the few tokens its beam has added."""

    q: Tensor  # [r, Hq, D]
    shared: Sequence[Slab]  # slabs [m, Hkv, D] of the prefix; may be empty if num_slots > 0
    unshared: Slab  # k and v [W, S, Hkv, D], W >= r
    num_slots: int  # valid slots, 0..S; 0 = a row sees the prefix alone
    # int64 [>= num_slots, r], row of `unshared` that holds slot s of each row; None = itself
    ancestry: Tensor | None
    scale: float  # factor on q k^T
    # in two stages; one softmax over the concatenation is faster for short prefixes
    is_split: bool = True


class Continuations(NamedTuple):
    """The valid edges of each beam: lo[i] .. lo[i] + degree[i] - 1 of one trie level."""

    lo: Tensor  # int64 [r]
    degree: Tensor  # int64 [r]; 0 = the beam has no continuation
    code: Tensor  # int32 (or int64) [E], the code that each edge stands for; a row's codes ascend
    allowed: Tensor | None = None  # bool [E], the request's filter; None = every edge is allowed


class TopkCall(NamedTuple):
    """Arguments of `beam_topk`: the logits of each beam, and which of them may be chosen."""

    logits: Tensor  # fp32, bf16 (or fp64) [r, columns]
    # fp32 (or fp64) [r], accumulated log-probability of each beam; -inf = a beam that is out
    acc: Tensor
    follow: Continuations  # the valid edges
    width: int  # how many choices are wanted, >= 1
    over: Over = "row"  # what a row is normalised over
    codes: slice | None = None  # the columns of codes 0, 1, ..; None = all columns
    scale: float = 1.0  # factor on every logit: 1 / temperature


class Choices(NamedTuple):
    """The selected continuations in the total order: at most `width`, fewer where fewer edges are valid.

    A device that must not wait for the number of choices returns `width` places. Places that no
    edge fills stand last, with score -inf, parent 0 and edge 0; a beam with such a score is out in
    the next round.
    """

    score: Tensor  # fp32 (fp64) [w] accumulated log-probability; NaN = a logit was not a number
    parent: Tensor  # int64 [w], the beam that each choice continues
    edge: Tensor  # int64 [w], edge of the level, which is the trie state of the next round
