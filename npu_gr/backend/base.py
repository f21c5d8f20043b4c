"""The contract of a device.

`reference.py` is the slow definition of every op; `choose.py` picks a backend by name.

Shapes: n new rows, p cached tokens before them, m keys, c candidates, H heads, Dq and Dv per-head
widths, P position buckets, B time buckets. A *slab* is a pair (k [m, H, Dq], v [m, H, Dv]) of
consecutive tokens; a list of slabs is in token order. Softmax attention has grouped queries: query
head h reads KV head h // (Hq / Hkv). `calls.py` states the shapes and units of the attentions' and
the selection's arguments.

Source: HSTU, arXiv:2402.17152: A = SiLU(alpha Q K^T + bias) * scale * mask, O = A V, no softmax.
Without a softmax the output over all keys is the plain sum of the outputs over any split of them,
which is what makes a cached prefix exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.calls import (
    BeamCall,
    BlendSums,
    BlendTables,
    Choices,
    Continuations,
    FusedForwardCall,
    HstuCall,
    HstuFindCall,
    HstuFound,
    HstuLayerCall,
    HstuPassCall,
    HstuShape,
    TopkCall,
)
from npu_gr.backend.tiles import Slab as Slab
from npu_gr.backend.tiles import Tiles

# how cached keys and values lie in a page: as slabs, or as `Tiles`
Arrangement = Literal["natural", "tiles"]

TIME_BUCKETS = 64  # half octaves of seconds up to 2**31


def time_bucket(delta_s: Tensor) -> Tensor:
    """Half-octave bucket of a time difference.

    Integer arithmetic, so the same on every device and dtype.

    Args:
        delta_s: int64, seconds; negative (clock skew) counts as 0.

    Returns:
        int32, same shape, in [0, TIME_BUCKETS).
    """
    octave_and_half = (delta_s.clamp(0, 2**31 - 1) + 1).to(torch.float32).view(torch.int32) >> 22
    return (octave_and_half - (127 << 1)).clamp(0, TIME_BUCKETS - 1)


def bias_bucket(edges: Tensor | None, delta_s: Tensor) -> Tensor:
    """Bucket of the layer's time table for each time difference.

    Whole seconds are compared, so it is exact.

    Args:
        edges: as of `HstuCall`.
        delta_s: int64, seconds; negative counts as 0.

    Returns:
        int32, same shape.
    """
    if edges is None:
        return time_bucket(delta_s)
    return torch.bucketize(delta_s, edges, out_int32=True, right=True)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` are kept: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class DeviceQueues(Protocol):
    """A device's queues of work and the traffic between it and the host."""

    name: str
    device: torch.device
    kernels: str  # what runs the hot ops: "torch", or the instruction set of the native kernels
    pins_host_memory: bool  # host tiers should be page-locked for asynchronous copies
    ops: Mapping[str, str]  # an op that has more than one implementation -> the one that is used
    gathers_head: (
        # `gathered_topk` may be cheaper than the whole product; the host then asks for the number
        # of edges
        bool
    )
    # called with the op's name each time a call does not fit that implementation
    on_fallback: Callable[[str], None]

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """Bring a host array, which nobody writes to afterwards, to the device.

        The host does not wait for it.
        """
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Bring tensors to the host in fp32; the host waits for the device once."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """Give this thread its own queue of work on the device within the block."""
        ...

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work`, which copies between tiers, beside the computing but after what this thread has queued so far.

        Returns:
            A function that waits, on any thread, until the bytes have arrived.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything that this thread has queued on the device is done."""
        ...


class Layout(Protocol):
    """The layout of keys and values in memory, and the ops that only move them."""

    def arrangement(self, dtype: torch.dtype, page_tokens: int) -> Arrangement:
        """The layout of HSTU's pages that the device's attention reads without a transform."""
        ...

    def pack_kv(self, into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
        """Write rows into tiles; `tiles.pack` is the definition.

        Args:
            into: tiles to write; their other tokens stay, values behind the last written token
                become zero.
            first_token: index within `into` of the first row.
            k: [n, H, Dq].
            v: [n, H, Dv].
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


class Affine(Protocol):
    """A slice of a linear layer: the one op that a model's layer calls by itself."""

    def affine(self, x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
        """Compute outputs first..last - 1 of a linear layer, then SiLU if asked.

        A device's own is not differentiable.

        Args:
            x: [..., in_features], converted to the dtype of the layer's weight.
            layer: the weight [out, in] and bias [out] or None.
            first, last: range of outputs.
            is_silu: apply SiLU to the result.

        Returns:
            [..., last - first] in the weight's dtype.
        """
        ...


class HstuPass(Protocol):
    """A forward pass of a batch whose layers a device computes whole, all requests at once."""

    def run(
        self, owner: nn.Module, work: Callable[[HstuPass, Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Compute work(self, x), as launches or as one graph of them.

        Args:
            owner: the model; it names the work, which never changes.
            work: calls `mix` for each layer in order, and `candidates` behind the last but one.
                Launches only.
            x: [rows, dim] of all segments' new tokens and candidates, in order.

        Returns:
            The rows of `work` that are candidates, in order.
        """
        ...

    def mix(self, layer: HstuLayerCall) -> Tensor | None:
        """Compute a layer from its products U | V | Q | K to the rows that its output matrix reads.

        Returns:
            [rows, H * Dv], or three times as wide where the call is joined; of the last layer
            candidates' rows alone, None where there are none. May have rows behind the last one,
            which mean nothing.
        """
        ...

    def candidates(self, x: Tensor) -> Tensor:
        """Pick the candidates' rows of x [rows, dim]; may append rows that mean nothing."""
        ...


class Ops(Affine, Protocol):
    """The arithmetic: linear layers, attention, selection."""

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Compute work(*rows), where each row of a result depends only on the same row of the inputs and on weights.

        Args:
            owner: the module whose weights the work reads; with `what` it names the work, which
                never changes.
            what: names the work among those of `owner`.
            work: launches only: no wait for the device, no shape that depends on values.
            rows: [n, ...] each.

        Returns:
            [n, ...] each, to be read before this thread calls `row_wise` or `beam_topk` again.
        """
        ...

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        """Name what can run the attention of a ranker, as `ops` names it: the preferred first, plain torch ops last.

        A way is left out that no pass of the ranker would take. One that takes some passes alone is
        named; the others are counted as fallbacks.
        """
        ...

    def running(self, way: str) -> Self:
        """Return this device with one way of HSTU attention.

        Queues, memory, graphs and the other ops are shared.

        Args:
            way: one of `hstu_ways`. What it does not take, torch ops compute.
        """
        ...

    def hstu_pass(self, call: HstuPassCall) -> HstuPass | None:
        """Prepare a pass by kernels that compute whole layers; None = use `hstu_causal` and `hstu_targets`."""
        ...

    def fused_forward(self, call: FusedForwardCall) -> npt.NDArray[np.float32] | None:
        """Compute a whole pass in one call; None = use `hstu_pass`.

        Returns:
            [c, outputs of the head, or dim] of all candidates, in order, on the host: each tensor
            that is let go costs its thread the interpreter. New keys and values are in their pages.

        Raises:
            IndexError: an id is none of the embeddings'.
            ValueError: the call contradicts itself.
        """
        ...

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        """Compute NEXT, `best_items`, and the pass over what is found with `item_products`, in one call; same bits.

        Returns:
            None = use these ops one after the other.

        Raises:
            IndexError, ValueError: as `fused_forward`.
        """
        ...

    def hstu_causal(self, call: HstuCall) -> Tensor:
        """Attend from history rows: each new row sees every cached token and the new rows up to itself.

        Returns:
            [n, H, Dv] in q's dtype, *not* yet multiplied by the constant attention scale.
        """
        ...

    def hstu_targets(self, call: HstuCall) -> Tensor:
        """Attend from candidate rows: each sees all m history tokens and itself, never another candidate.

        Returns:
            [c, H, Dv] in q's dtype, *not* yet multiplied by the constant attention scale.
        """
        ...

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], scale: float
    ) -> Tensor:
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

    def beam_attention(self, call: BeamCall) -> Tensor:
        """Softmax attention of beams over the shared prefix and over each row's own tokens.

        Returns:
            [r, Hq, D] in q's dtype.
        """
        ...

    def beam_topk(self, call: TopkCall) -> Choices:
        """Constrain, then select: the `width` best of acc[row] + log-probability of each valid, allowed edge.

        The log-probability of an edge is its scaled logit less the log-sum-exp of what `call.over`
        names. Total order: score descending, then beam ascending, then edge (so code) ascending.

        Raises:
            FloatingPointError: a logit that the result depends on is NaN, or infinity.
        """
        ...

    def order_of(self, numbers: Tensor) -> Tensor:
        """Return the places that bring int64 [n] numbers, n <= 4096 or so, into ascending order.

        Equal ones stay.
        """
        ...

    def gathered_topk(
        self,
        hidden: Tensor,
        weight: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        scale: float = 1.0,
    ) -> Choices:
        """`beam_topk` over "valid" edges of the logits hidden @ weight.T, computed at the valid edges alone.

        Cheaper than the whole product where a beam has few children: below about a sixth of the
        codes.

        Args:
            hidden: [rows, dim].
            weight: [codes, dim], a row for each code.
            acc, follow, width, scale: the fields of `TopkCall`.
        """
        ...


class ItemOps(Protocol):
    """The arithmetic over all items of a catalogue."""

    def best_items(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        """Find the best k of all items for each query, by inner product.

        Of equals the lower row first.

        Args:
            queries: float32 [B, d].
            items: float32 [I, d], finite.
            k: at least 1; may be more than there are items.
            hidden: pairs that must not be found.
        """
        ...

    def item_products(self, query: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """Multiply a query with some items, each by itself: no product depends on the others.

        Args:
            query: float32 [d].
            items: float32 [I, d].
            rows: int64 [n] of items.

        Returns:
            float32 [n].

        Raises:
            IndexError: a row is none of the items'.
        """
        ...

    def blend_sums(self, tables: BlendTables) -> BlendSums | None:
        """Prepare the sums of a fitted order by a kernel of the host; None = numpy computes them.

        Args:
            tables: that nobody writes to afterwards.

        Returns:
            What any thread may call.
        """
        ...


class Backend(DeviceQueues, Layout, Ops, ItemOps, Protocol):
    """A device: its queues, its layout of keys and values, its ops.

    Call every method on the device thread only.
    """
