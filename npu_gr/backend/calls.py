"""The arguments of a backend's attention and selection ops, one immutable value per call.

Sizes: n new rows, p cached tokens before them, m tokens in all, c candidates, H heads, Dq and Dv
widths of a head, P position buckets, r rows (beams), E edges of one trie level. To add an argument
to an op, add a field here.

The calls are NamedTuples because building one takes less than 2 us, even on a busy CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from npu_gr.backend.tiles import Slab, Tiles, natural, quantise, rounded, stored_slabs

# a row of logits is normalised over all its columns, or over its valid edges only
Over = Literal["row", "valid"]


class BiasTables(NamedTuple):
    """Relative bias of one layer.

    It depends only on *differences* of positions and times, so splitting a pass stays exact.
    """

    position: Tensor  # [H, P], read at min(query position - key position, P - 1)
    time: Tensor  # [H, buckets], read at the bucket of query time - key time


class GraphShape(NamedTuple):
    """The sizes of a ranker's pass that one device graph replays."""

    requests: int
    rows: int  # most new tokens and candidates of a request
    keys: int  # most tokens and candidates of a request
    has_candidates: bool  # False: a prefill


class HstuShape(NamedTuple):
    """The properties of a ranker that decide which kernels can run its attention."""

    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype  # dtype of the weights
    kept_dtype: torch.dtype  # dtype of cached keys and values
    page_tokens: int
    norm_group: int  # width of the norm of the attention
    is_joined: bool  # the output matrix reads [U, attention, U * norm], not the last only
    is_biased: bool  # it has a relative bias
    has_plain_layers: bool = True  # see `HSTUConfig.has_plain_layers`
    has_plain_times: bool = True  # see `HSTUConfig.has_plain_times`


class AttentionWindow(NamedTuple):
    """Semi-local attention: the row at position t sees positions [0, first) and (t - recent, t].

    A candidate's position is that of the token after the history. Tokens that no row of a call sees
    may be left out of it: behind the first `gap_at` tokens `gap` positions are missing. Both are
    multiples of a page.
    """

    recent: int
    first: int
    gap_at: int = 0
    gap: int = 0

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position of each token of a call, and of the one after them: [n + 1]."""
        index = torch.arange(num_tokens + 1, device=device)
        return torch.where(index >= self.gap_at, index + self.gap, index)

    def sees(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return which tokens at positions [m] the rows at positions [n] see: bool [n, m]."""
        ago = rows[:, None] - columns[None, :]
        return (ago >= 0) & ((ago < self.recent) | (columns < self.first))


class HstuCall(NamedTuple):
    """Arguments of `hstu_causal` (new history rows) and of `hstu_targets` (candidate rows).

                 hstu_causal                                hstu_targets
    rows         n new history tokens                       c candidates
    cached       the p tokens before them                   all m history tokens
    times        int64 [p + n], cached and new tokens       int64 [m], the history
    a row sees   every cached token, new rows up to itself  every history token and itself

    With a window, a row sees of these tokens what `AttentionWindow` says.
    """

    q: Tensor  # [rows, H, Dq]
    # [rows, H, Dq]; hstu_causal: k and v are empty if `cached` already holds all p + n tokens
    k: Tensor
    v: Tensor  # [rows, H, Dv]
    # slabs in token order; empty = nothing is cached. Slabs of int8 are rows with their scales
    # (`tiles.quantise`), [m, H, D + 2].
    cached: Sequence[Slab | Tiles]
    # int64 [tokens] unix seconds; the position of a token is its index, or as `window` says
    times: Tensor
    bias: BiasTables
    alpha: float  # factor on q k^T
    # hstu_targets only: unix seconds shared by all candidates, whose shared position is m
    query_time: int = 0
    # hstu_causal only: int64 [rows] query times of the rows; None = their own times
    row_times: Tensor | None = None
    # hstu_targets only: int64 [] time of a candidate's own key; None = `query_time`
    own_time: Tensor | None = None
    # int64 [buckets - 1], first seconds of buckets 1, 2, ..; None = `time_bucket`
    edges: Tensor | None = None
    window: AttentionWindow | None = None  # None = full attention
    # int8 = the history's rows, cached or new, are read as they are once they were stored
    # (`tiles.quantise`); None = as they are given
    stored: torch.dtype | None = None

    def as_read(self, *, is_causal: bool) -> HstuCall:
        """Return the call in slabs whose numbers are those that are read (`stored`).

        Args:
            is_causal: k and v are new rows of the history; else they are those of candidates, which
                are never stored.
        """
        if self.stored != torch.int8:
            return self
        dtype = self.q.dtype
        slabs = natural(self.cached)
        cached = [(rounded(k).to(dtype), rounded(v).to(dtype)) for k, v in slabs]
        k, v = (rounded(self.k), rounded(self.v)) if is_causal else (self.k, self.v)
        return self._replace(cached=cached, k=k, v=v, stored=None)

    def as_stored(self, *, is_causal: bool) -> HstuCall:
        """Return the call for kernels that read slabs alone, of stored rows in int8 as they lie.

        Args:
            is_causal: As for `as_read`.
        """
        if self.stored != torch.int8:
            return self._replace(cached=natural(self.cached))
        new = (quantise(self.k), quantise(self.v)) if is_causal else (self.k, self.v)
        cached = stored_slabs(self.cached)
        return self._replace(cached=cached, k=new[0], v=new[1], stored=None)

    @property
    def is_plain(self) -> bool:
        """Whether every device's kernels support the call."""
        return self.has_plain_times and self.window is None and self.stored is None

    @property
    def has_plain_times(self) -> bool:
        """Whether the kernels' time buckets are those of the call."""
        return self.edges is None and self.row_times is None and self.own_time is None


class PagedKV(NamedTuple):
    """The pages of a request's tokens, cached or to be written."""

    runs: Sequence[tuple[int, int]]  # (first page, number of pages) in token order
    # all pages of the pool: [layers, pages, page tokens, H, Dq], or as tiles [layers, pages, tiles,
    # H, padded Dq * 64]
    k: Tensor
    v: Tensor  # as k, with Dv
    is_tiles: bool

    def planes(self, layer: int) -> Slab:
        """Return a layer's k and v of all pages of the pool."""
        return self.k[layer], self.v[layer]


class HstuIds(NamedTuple):
    """Embedding rows of a request's tokens and candidates, on the host."""

    items: npt.NDArray[np.int64]  # [num_new] item rows
    actions: npt.NDArray[np.integer]  # [num_new]; negative = 0
    candidates: npt.NDArray[np.int64]  # [num_candidates] item rows


class HstuSegment(NamedTuple):
    """One request's rows in a fused pass: cached tokens, then new tokens, then candidates."""

    num_cached: int
    num_new: int
    num_candidates: int
    times: npt.NDArray[np.int64]  # [num_cached + num_new] unix seconds, on the host
    query_time: int  # unix seconds shared by all candidates
    pages: PagedKV | None  # pages of the cached tokens, and of the new ones if `keeps`
    keeps: bool  # the new tokens' keys and values are written to their pages
    ids: HstuIds | None = None  # None = the embeddings alone do not make the rows
    # positions that are left out behind the first `gap_at` tokens, see `AttentionWindow`
    gap_at: int = 0
    gap: int = 0
    stored: torch.dtype | None = None  # as `HstuCall.stored`


class HstuPassCall(NamedTuple):
    """Arguments of `hstu_pass`: a batch, and the settings of all layers."""

    segments: Sequence[HstuSegment]
    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype  # dtype of weights, keys and values
    alpha: float  # factor on q k^T
    scale: float  # constant factor on the attention
    silu_all: bool  # SiLU on U, V, Q and K, not on U only
    norm_over: Literal["row", "head"]  # extent of the norm of the attention
    is_joined: bool  # the output matrix reads [U, attention, U * norm], not the last only


class HstuLayerWeights(NamedTuple):
    """A layer of a ranker: x + out(gate(attention)), with [U | V | Q | K] = uvqk(norm_in(x))."""

    norm_in: nn.LayerNorm
    uvqk: nn.Linear
    bias: BiasTables
    norm_attention: nn.LayerNorm  # over all heads' values, or over each head's values
    out: nn.Linear


class HstuHead(NamedTuple):
    """A head on a candidate's final row: out(silu(hidden(norm(row)))).

    Without `hidden` it is out(norm(row)).
    """

    norm: nn.LayerNorm
    hidden: nn.Linear | None
    out: nn.Linear


class HstuWeights(NamedTuple):
    """The weights and settings that a fused pass reads; see `HstuPassCall` for the settings."""

    layers: Sequence[HstuLayerWeights]
    heads: Mapping[str, HstuHead]  # by `FusedForwardCall.answer`
    num_heads: int
    qk_dim: int
    v_dim: int
    alpha: float
    scale: float
    silu_all: bool
    is_joined: bool
    window: AttentionWindow | None = None  # None = full attention


class FusedForwardCall(NamedTuple):
    """Arguments of `fused_forward`: a batch, from its embeddings or rows to the heads' outputs."""

    # the model that has the weights as parameters and buffers; its tensors may be replaced, its
    # modules not
    owner: nn.Module
    weights: Callable[[], HstuWeights]  # called when weights were replaced or written to
    dtype: torch.dtype  # dtype of weights, keys and values
    segments: Sequence[HstuSegment]
    # item and action tables [.., dim], the last action is a candidate's; None = use `rows`
    embeddings: tuple[Tensor, Tensor] | None
    # makes fp32 [rows, dim] of every segment's new tokens, then candidates, if `embeddings` is None
    rows: Callable[[], Tensor]
    answer: str  # name of a head in `HstuWeights.heads`; another name = the final rows


class HstuFindCall(NamedTuple):
    """Arguments of `hstu_find`: the NEXT pass, the search, and the scoring. B = requests."""

    next: FusedForwardCall  # each segment's only candidate is NEXT
    items: Tensor  # fp32 [>= I, dim], vectors that u is multiplied with
    num_items: int  # I
    k: int  # largest number of items to find, >= 1
    hidden: Sequence[npt.NDArray[np.int64]]  # [B] item rows to exclude, in any order
    wanted: Sequence[int]  # [B] largest number of found items to score, <= k
    least: Sequence[int]  # [B] if fewer items are found, none is scored


class HstuFound(NamedTuple):
    """Results of `hstu_find`, on the host. s = scored items of all requests, in order."""

    vectors: npt.NDArray[np.float32]  # [B, dim] u
    # [B, k] item rows, best first, ties by the lower row; -1 = no more items
    items: npt.NDArray[np.int64]
    num_scored: npt.NDArray[np.int64]  # [B] the first ones of `items`
    logits: npt.NDArray[np.float32]  # [s, tasks]
    products: npt.NDArray[np.float32]  # [s] inner products with u


class HstuLayerCall(NamedTuple):
    """Arguments of `HstuPass.mix`."""

    number: int  # index of the layer, from 0
    mixed: Tensor  # [rows, U | V | Q | K] of all segments, each part [H, D], before any SiLU
    bias: BiasTables
    norm: nn.LayerNorm  # norm of the attention
    is_last: bool  # only candidates' rows are needed


class BlendTables(NamedTuple):
    """The tables of a score blend, which `npu_gr/model/blend.py` explains.

    I = items, S = stored successors of an item, K = neighbours. Row I of `rest` and `shares` is
    that of a new item.
    """

    successors: npt.NDArray[np.int32]  # [I, S] item rows, ascending; -1 = padding
    log_prob: npt.NDArray[np.float32]  # [I, S]
    rest: npt.NDArray[np.float32]  # [I + 1]
    shares: npt.NDArray[np.float32]  # [I + 1]
    neighbours: npt.NDArray[np.int32]  # [I, K] as `successors`; K = 0: there are none
    similarity: npt.NDArray[np.float32]  # [I, K]
    decay: float  # factor of an event's weight per newer event
    scale: float  # factor of the similarity inside the logarithm; 0 = no logarithm
    is_summed: bool  # use the sum of similarities, not their mean
    weights: tuple[float, ...]  # retrieval, click, transitions, neighbours, popularity, own


class BlendCall(NamedTuple):
    """The candidates of one request, and the inputs of the blend."""

    recent: npt.NDArray[np.int64]  # [n] item rows of the last events, oldest first
    num_followed: int  # number of newest events whose successors are read
    num_liked: int  # number of newest events whose neighbours are read, each item once
    candidates: npt.NDArray[np.int64]  # [c] item rows
    retrieval: npt.NDArray[np.float32] | None  # [c]; None = 0, also of the next two
    click: npt.NDArray[np.float32] | None
    seen: npt.NDArray[np.float32] | None  # weighted terms of items of the history


class BlendSums(Protocol):
    """Computes the sums of one blend by a kernel of the host. Thread-safe."""

    def __call__(self, call: BlendCall) -> npt.NDArray[np.float32]:
        """Sum the terms of each candidate: float32 [c]."""
        ...

    def alike(self, liked: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Sum the similarities of every item to the distinct, known items of some events.

        Args:
            liked: int64 [n] item rows.

        Returns:
            float64 [I]; takes O(n K + I) time.
        """
        ...


class BeamCall(NamedTuple):
    """Arguments of `beam_attention`: each row reads the shared prefix and its beam's own tokens."""

    q: Tensor  # [r, Hq, D]
    shared: Sequence[Slab]  # slabs [m, Hkv, D] of the prefix; may be empty if num_slots > 0
    unshared: Slab  # k and v [W, S, Hkv, D], W >= r
    num_slots: int  # number of valid slots, 0..S; 0 = a row sees only the prefix
    # int64 [>= num_slots, r], row of `unshared` that holds slot s of each row; None = the row
    # itself
    ancestry: Tensor | None
    scale: float  # factor on q k^T
    # two stages and a merge; False: one softmax over the concatenation, faster for short prefixes
    is_split: bool = True


class Continuations(NamedTuple):
    """The valid edges of each beam: lo[i] .. lo[i] + degree[i] - 1 of one trie level."""

    lo: Tensor  # int64 [r]
    degree: Tensor  # int64 [r]; 0 = the beam has no continuation
    code: Tensor  # int32 (or int64) [E], code of each edge; a row's codes ascend
    allowed: Tensor | None = None  # bool [E], the request's filter; None = every edge is allowed


class TopkCall(NamedTuple):
    """Arguments of `beam_topk`: the logits of each beam, and the valid continuations."""

    logits: Tensor  # fp32, bf16 (or fp64) [r, columns]
    # fp32 (or fp64) [r], accumulated log-probability of each beam; -inf = a dead beam
    acc: Tensor
    follow: Continuations  # the valid edges
    width: int  # number of edges to select, >= 1
    over: Over = "row"  # extent of the normalisation of a row
    codes: slice | None = None  # columns of the codes 0, 1, ..; None = all columns
    scale: float = 1.0  # factor on every logit: 1 / temperature


class Choices(NamedTuple):
    """The selected continuations in the total order: `width`, or fewer if fewer edges are valid.

    A device that must not wait for the number of choices always returns `width`, padded at the end
    with score -inf, parent 0 and edge 0; a padded choice is a dead beam of the next round.
    """

    score: Tensor  # fp32 (fp64) [w] accumulated log-probability; NaN = a logit was not a number
    parent: Tensor  # int64 [w], beam that each choice continues
    edge: Tensor  # int64 [w], edge of the level, which is the trie state of the next round
