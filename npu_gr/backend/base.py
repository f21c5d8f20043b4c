"""What a device must do. `reference.py` is the slow definition of every op; `choose.py` picks one by name.

Shapes: n new rows, p cached tokens before them, m keys, c candidates, H heads, Dq and Dv per-head widths,
P position buckets, B time buckets. A *slab* is a pair (k [m, H, Dq], v [m, H, Dv]) of consecutive tokens;
a list of slabs is in token order. Softmax attention has grouped queries: query head h reads KV head h // (Hq / Hkv).

Source: HSTU, arXiv:2402.17152: A = SiLU(alpha Q K^T + bias) * scale * mask, O = A V, no softmax. Without a
softmax the output over all keys is the plain sum of the outputs over any split of them, which is what makes a
cached prefix exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.tiles import Slab as Slab
from npu_gr.backend.tiles import Tiles

Arrangement = Literal["natural", "tiles"]  # how cached keys and values lie in a page: as slabs, or as `Tiles`

Over = Literal["row", "valid"]  # what a row of logits is normalised over: all its columns, or its valid edges

TIME_BUCKETS = 64  # half octaves of seconds up to 2**31


class BiasTables(NamedTuple):
    """Relative bias of one layer: a function of position and time *differences*, so a split stays exact."""

    position: Tensor  # [H, P] by min(query position - key position, P - 1)
    time: Tensor  # [H, TIME_BUCKETS] by time_bucket(query time - key time)


class Continuations(NamedTuple):
    """What may follow each beam: edges lo .. lo + degree - 1 of one trie level. E = edges of the level."""

    lo: Tensor  # int64 [rows]
    degree: Tensor  # int64 [rows]; 0 = nothing may
    code: Tensor  # int32 (or int64) [E] code that each edge stands for; a row's codes ascend
    allowed: Tensor | None = None  # bool [E] the request's filter; None = all


class Choices(NamedTuple):
    """The selected continuations in the total order; at most as many as asked, fewer where there are fewer.

    A device that is not to wait for the number gives all places: those that nothing fills stand last, with a score
    of -inf, parent 0 and edge 0; a beam with such a score is out in the next round.
    """

    score: Tensor  # fp32 (fp64) [w] accumulated log-probability; NaN = a logit was not a number
    parent: Tensor  # int64 [w] beam that it continues
    edge: Tensor  # int64 [w] edge of the level, which is the state of the next one


def time_bucket(delta_s: Tensor) -> Tensor:
    """Half-octave bucket of a time difference; integer arithmetic, so the same on every device and dtype.

    Args:
        delta_s: int64, seconds; negative (clock skew) counts as 0.

    Returns:
        int32, same shape, in [0, TIME_BUCKETS).
    """
    octave_and_half = (delta_s.clamp(0, 2**31 - 1) + 1).to(torch.float32).view(torch.int32) >> 22
    return (octave_and_half - (127 << 1)).clamp(0, TIME_BUCKETS - 1)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Backend(Protocol):
    """One device. Every method is called on the device thread only."""

    name: str
    device: torch.device
    kernels: str  # what runs the hot ops: "torch", or the instruction set of the native kernels
    pins_host_memory: bool  # host tiers should be page-locked for asynchronous copies
    ops: Mapping[str, str]  # an op that has more than one implementation -> the one that is used
    on_fallback: Callable[[str], None]  # told the op each time a call does not fit that implementation

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """A copy of a host array on the device; the host does not wait for it."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """Within the block, this thread has its own queue of work on the device."""
        ...

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work`, whose copies between tiers go beside the computing, behind what this thread has queued so far.

        Returns:
            What waits, on any thread, until the bytes are there.
        """
        ...

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """Fork beams in place: the first slots of row i become those of row parent[i], in every layer.

        Args:
            keys, values: [L, W, S, Hkv, D].
            parent: int64 [rows], rows <= W, not decreasing (but for beams that are out).
            num_slots: valid slots; the others are not touched.
        """
        ...

    def arrangement(self, dtype: torch.dtype, page_tokens: int) -> Arrangement:
        """How HSTU's pages should lie, so that its attention reads them without a transform."""
        ...

    def pack_kv(self, into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
        """Write rows into tiles; `tiles.pack` is the definition."""
        ...

    def affine(self, x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
        """Outputs first..last of a linear layer, then SiLU if asked: [..., last - first].

        In the dtype of the layer's weight, which x is converted to. Not differentiable.
        """
        ...

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """work(*rows), every row of whose results depends on the same row of the inputs and on weights alone.

        Args:
            owner: whose weights the work reads; with `what` it names the work, which is the same at every call.
            work: launches only.
            rows: [n, ...] each.

        Returns:
            [n, ...] each, to be read before this thread calls `row_wise` or `beam_topk` again.
        """
        ...

    def hstu_causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Sequence[Slab | Tiles],
        times: Tensor,
        bias: BiasTables,
        alpha: float,
    ) -> Tensor:
        """History rows: each new row sees every cached token and the new rows up to itself.

        Args:
            q, k: [n, H, Dq] of the new rows. v: [n, H, Dv]. Or k and v without a row: `past` has all p + n tokens.
            past: slabs of the p tokens before them; empty where there are none.
            times: int64 [p + n], unix seconds of cached and new tokens. Position of a token = its index.
            alpha: factor on q k^T.

        Returns:
            [n, H, Dv] in q's dtype, *not* yet multiplied by the constant attention scale.
        """
        ...

    def hstu_targets(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        history: Sequence[Slab | Tiles],
        times: Tensor,
        query_time: int,
        bias: BiasTables,
        alpha: float,
    ) -> Tensor:
        """Candidate rows: each sees all m history tokens and itself, never another candidate.

        Args:
            q, k: [c, H, Dq]. v: [c, H, Dv]: the candidates' own rows.
            history: slabs of all m history tokens.
            times: int64 [m] unix seconds of the history.
            query_time: unix seconds shared by all candidates; their shared position is m.

        Returns:
            [c, H, Dv] as `hstu_causal`.
        """
        ...

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], scale: float) -> Tensor:
        """Softmax attention of new rows: each sees every cached token and the new rows up to itself.

        Args:
            q: [r, Hq, D] of the last r <= n of the new rows.
            k, v: [n, Hkv, D] of all new rows.
            past: slabs [m, Hkv, D] of the tokens before them; empty where there are none.
            scale: factor on q k^T.

        Returns:
            [r, Hq, D] in q's dtype.
        """
        ...

    def beam_attention(
        self,
        q: Tensor,
        shared: Sequence[Slab],
        unshared: Slab,
        num_slots: int,
        ancestry: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Softmax attention of beams: each row sees the whole shared prefix and its own few tokens. Two stages.

        Args:
            q: [rows, Hq, D].
            shared: slabs [m, Hkv, D] of the prefix; may be empty if num_slots > 0.
            unshared: k and v [W, S, Hkv, D], W >= rows.
            num_slots: valid slots, 0..S; 0 = the row sees the prefix alone.
            ancestry: int64 [>= num_slots, rows], the slab's row that holds slot s of each row; None = the row itself.
            scale: factor on q k^T.

        Returns:
            [rows, Hq, D] in q's dtype.
        """
        ...

    def beam_attention_plain(
        self,
        q: Tensor,
        shared: Sequence[Slab],
        unshared: Slab,
        num_slots: int,
        ancestry: Tensor | None,
        scale: float,
    ) -> Tensor:
        """`beam_attention` in one stage, one softmax over the concatenation: for short prefixes."""
        ...

    def beam_topk(
        self,
        logits: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        over: Over = "row",
        codes: slice | None = None,
        scale: float = 1.0,
    ) -> Choices:
        """Constrain, then select: the `width` best of acc[row] + log-probability of each valid, allowed edge.

        The log-probability of an edge is its scaled logit less the log-sum-exp of what `over` names. Total order:
        score descending, then beam ascending, then edge (so code) ascending.

        Args:
            logits: fp32, bf16 (or fp64) [rows, columns].
            acc: fp32 (or fp64) [rows] accumulated log-probability of each beam; -inf = a beam that is out.
            follow: the valid edges.
            width: how many are wanted, >= 1.
            over: what a row is normalised over.
            codes: the columns of codes 0, 1, ..; None = all.
            scale: of every logit: 1 / temperature.

        Raises:
            FloatingPointError: a logit that the result depends on is NaN, or infinity.
        """
        ...

    def gathered_topk(
        self, hidden: Tensor, weight: Tensor, acc: Tensor, follow: Continuations, width: int, scale: float = 1.0
    ) -> Choices:
        """`beam_topk` over "valid" edges of the logits hidden @ weight.T, computed at the valid edges alone.

        Cheaper than the whole product where a beam has few children: below about a sixth of the codes.

        Args:
            hidden: [rows, dim].
            weight: [codes, dim], a row for each code.
        """
        ...

    def best_items(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        """The best k of all items for each query, by inner product; of equals the lower row first.

        Args:
            queries: float32 [B, d].
            items: float32 [I, d], finite.
            k: at least 1; may be more than there are items.
            hidden: pairs that are not to be found.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything that this thread has queued on the device is done."""
        ...
