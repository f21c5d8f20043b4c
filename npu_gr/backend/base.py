"""The interface of a backend: queues, memory layout and ops of a device.

`reference.py` is the slow definition of every op; `choose.py` makes a backend by name.

Shapes: n new rows, p cached tokens before them, m keys, c candidates, H heads, Dq and Dv per-head
widths, P position buckets, B time buckets. A *slab* is a pair (k [m, H, Dq], v [m, H, Dv]) of
consecutive tokens; a list of slabs is in token order. Softmax attention has grouped queries: query
head h reads KV head h // (Hq / Hkv). `calls.py` has the shapes and units of the arguments of
attention and selection.

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
    GraphShape,
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

# layout of cached keys and values in a page: as slabs, or as `Tiles`
Arrangement = Literal["natural", "tiles"]

# names in `ops`: what a ranker's attention is, and what a generator uses
HSTU = "hstu_attention"
BEAM_OPS = ("softmax_attention", "beam_topk", "beam_fork")

TIME_BUCKETS = 64  # half octaves of seconds up to 2**31


def time_bucket(delta_s: Tensor) -> Tensor:
    """Compute the half-octave bucket of a time difference.

    Integer arithmetic makes it equal on every device.

    Args:
        delta_s: int64, seconds; negative (clock skew) counts as 0.

    Returns:
        int32, same shape, in [0, TIME_BUCKETS).
    """
    octave_and_half = (delta_s.clamp(0, 2**31 - 1) + 1).to(torch.float32).view(torch.int32) >> 22
    return (octave_and_half - (127 << 1)).clamp(0, TIME_BUCKETS - 1)


def bias_bucket(edges: Tensor | None, delta_s: Tensor) -> Tensor:
    """Compute the bucket of the layer's time table for each time difference.

    Comparing integers makes it exact.

    Args:
        edges: int64 [buckets - 1], first second of each bucket but the first; None = `time_bucket`.
        delta_s: int64, seconds; negative counts as 0.

    Returns:
        int32, same shape.
    """
    if edges is None:
        return time_bucket(delta_s)
    return torch.bucketize(delta_s, edges, out_int32=True, right=True)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class DeviceQueues(Protocol):
    """A device's queues of work, and copies between it and the host."""

    name: str
    device: torch.device
    kernels: str  # implementation of the hot ops: "torch", or the native kernels' instruction set
    pins_host_memory: bool  # whether host tiers should be page-locked for asynchronous copies
    ops: Mapping[str, str]  # op with several implementations -> the one in use
    # whether `gathered_topk` may be cheaper than the whole product; the host then waits for the
    # number of edges
    gathers_head: bool
    has_windows: bool  # whether its attention supports `AttentionWindow`
    has_int8: bool  # whether its attention reads keys and values in int8
    # called with the op's name each time a call does not fit the implementation in `ops`
    on_fallback: Callable[[str], None]
    # called with one of `graphs.OUTCOMES` for each call that may replay a device graph
    on_graph: Callable[[str], None]
    # called with "rows" or "scores" of a call that is padded to the size of a graph, how many they
    # are, and how many with padding
    on_padding: Callable[[str, int, int], None]

    def upload(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """Copy a host array to the device; the host does not wait.

        The array must not be written to afterwards.
        """
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Copy tensors to the host in fp32; the host waits for the device once."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """Give this thread its own queue of work on the device within the block."""
        ...

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run copies between tiers concurrently with the compute queue.

        They begin after everything that this thread has queued so far.

        Args:
            work: Queues the copies.

        Returns:
            A function that waits, on any thread, until the copies are done.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything that this thread has queued on the device is done."""
        ...

    def release_memory(self) -> None:
        """Return the memory that the allocator keeps for later to the device."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free memory of the device; None if it is that of the host."""
        ...


class Layout(Protocol):
    """The layout of keys and values in memory, and the ops that only move them."""

    def arrangement(self, dtype: torch.dtype, page_tokens: int) -> Arrangement:
        """Return the layout of HSTU's pages that the device's attention reads as it is."""
        ...

    def pack_kv(self, into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
        """Write rows into tiles; `tiles.pack` is the definition.

        Args:
            into: Tiles to write; earlier tokens stay, values behind the last written token become
                zero.
            first_token: Index within `into` of the first row.
            k: [n, H, Dq].
            v: [n, H, Dv].
        """
        ...

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """Fork beams in place, in every layer: copy the first slots of row parent[i] to row i.

        Args:
            keys, values: [L, W, S, Hkv, D].
            parent: int64 [rows], rows <= W, not decreasing (except for dead beams).
            num_slots: Number of slots to copy; the others are not touched.
        """
        ...


class Affine(Protocol):
    """The op of a model's linear layers."""

    def affine(self, x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
        """Compute outputs first..last - 1 of a linear layer, and apply SiLU if `is_silu`.

        Native kernels are not differentiable.

        Args:
            x: [..., in_features], converted to the dtype of the layer's weight.
            layer: Weight [out, in] and bias [out] or None.
            first, last: Range of outputs.
            is_silu: Apply SiLU to the result.

        Returns:
            [..., last - first] in the weight's dtype.
        """
        ...


class HstuPass(Protocol):
    """A forward pass by fused kernels, which compute a layer for all requests of a batch."""

    def run(
        self, owner: nn.Module, work: Callable[[HstuPass, Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Compute work(self, x), as single launches or as one graph.

        Args:
            owner: The model; key of the graph, so `work` must always be the same for it.
            work: Calls `mix` for each layer in order, and `candidates` before the last layer.
                Launches only: no wait for the device.
            x: [rows, dim] of all segments' new tokens and candidates, in order.

        Returns:
            The candidates' rows of `work`, in order.
        """
        ...

    def mix(self, layer: HstuLayerCall) -> Tensor | None:
        """Compute a layer from its projections U | V | Q | K to the input of its output matrix.

        Returns:
            [rows, H * Dv], or three times as wide if the pass is joined; padding rows may follow.
            The last layer returns only candidates' rows; None = there are no candidates.
        """
        ...

    def candidates(self, x: Tensor) -> Tensor:
        """Select the candidates' rows of x [rows, dim]; padding rows may follow."""
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
        """Compute work(*rows), which is row-wise, as single launches or as one graph.

        Each row of a result depends only on the same row of the inputs and on weights.

        Args:
            owner: Module whose weights the work reads. (owner, what) is the key of the graph, so
                `work` must always be the same for it.
            what: Distinguishes the works of one owner.
            work: Launches only: no wait for the device, no shape that depends on values.
            rows: [n, ...] each.

        Returns:
            [n, ...] each, to be read before this thread calls `row_wise` or `beam_topk` again.
        """
        ...

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        """List the implementations that can run a ranker's attention, by their names in `ops`.

        The preferred one comes first, "torch" last. An implementation that can run only some
        passes is listed; the other passes count as fallbacks.
        """
        ...

    def beam_ways(self) -> Mapping[str, Sequence[str]]:
        """List the implementations of a generator's ops that have several, in order as above.

        The keys are `BEAM_OPS`, by their names in `ops`.
        """
        ...

    def running(self, way: str, op: str = HSTU) -> Self:
        """Return this backend with one implementation of an op.

        Queues, memory, graphs and the other ops are shared.

        Args:
            way: One of `hstu_ways` or `beam_ways`. Torch ops compute the calls that it does not
                support.
            op: Name of the op in `ops`.
        """
        ...

    def graph_shapes(
        self, max_requests: int, max_tokens: int, chunk_tokens: int
    ) -> Sequence[GraphShape]:
        """List the passes of a ranker that are captured as graphs before its first request.

        Args:
            max_requests: Most requests of a pass.
            max_tokens: Most history tokens of a request.
            chunk_tokens: Tokens of a step of a prefill.
        """
        ...

    def hstu_pass(self, call: HstuPassCall) -> HstuPass | None:
        """Prepare a pass by fused kernels; None = use `hstu_causal` and `hstu_targets`."""
        ...

    def fused_forward(self, call: FusedForwardCall) -> npt.NDArray[np.float32] | None:
        """Compute a whole pass in one call; None = use `hstu_pass`.

        New keys and values are written to their pages.

        Returns:
            [c, outputs of the head, or dim] of all candidates, in order, as a numpy array: freeing
            a tensor takes the interpreter lock.

        Raises:
            IndexError: An id is not in the embeddings.
            ValueError: The call contradicts itself.
        """
        ...

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        """Compute NEXT, `best_items`, and the pass over the found items, in one call.

        The results are bit-equal to those of `fused_forward`, `best_items` and `item_products`.

        Returns:
            The results; None = use these ops one after the other.

        Raises:
            IndexError, ValueError: As `fused_forward`.
        """
        ...

    def hstu_causal(self, call: HstuCall) -> Tensor:
        """Attend from new history rows, each to every cached token and the new rows up to itself.

        Returns:
            [n, H, Dv] in q's dtype, *not* yet multiplied by the constant attention scale.
        """
        ...

    def hstu_targets(self, call: HstuCall) -> Tensor:
        """Attend from candidate rows, each to all m history tokens and itself, not the others.

        Returns:
            [c, H, Dv] in q's dtype, *not* yet multiplied by the constant attention scale.
        """
        ...

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], scale: float
    ) -> Tensor:
        """Softmax attention of new rows, each to every cached token and the new rows up to itself.

        Args:
            q: [r, Hq, D] of the last r <= n of the new rows.
            k, v: [n, Hkv, D] of all new rows.
            past: Slabs [m, Hkv, D] of the tokens before them; empty = there are none.
            scale: Factor on q k^T.

        Returns:
            [r, Hq, D] in q's dtype.
        """
        ...

    def beam_attention(self, call: BeamCall) -> Tensor:
        """Softmax attention of beams to the shared prefix and to each beam's own tokens.

        Returns:
            [r, Hq, D] in q's dtype.
        """
        ...

    def beam_topk(self, call: TopkCall) -> Choices:
        """Select the `width` valid, allowed edges with the best acc[row] + log-probability.

        The log-probability of an edge is its scaled logit less the log-sum-exp over `call.over`.
        Total order: score descending, then beam ascending, then edge (and so code) ascending.

        Raises:
            FloatingPointError: A logit that the result depends on is NaN or infinity.
        """
        ...

    def order_of(self, numbers: Tensor) -> Tensor:
        """Stable argsort of int64 [n] numbers, for n up to about 4096."""
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
        """Compute `beam_topk` over "valid" edges of the logits hidden @ weight.T.

        Only logits of valid edges are computed. It is cheaper than the whole product if a beam has
        few children, less than about a sixth of the codes.

        Args:
            hidden: [rows, dim].
            weight: [codes, dim], a row for each code.
            acc, follow, width, scale: Fields of `TopkCall`.
        """
        ...


class ItemOps(Protocol):
    """The ops over all items of a catalogue."""

    def best_items(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        """Find the best k of all items for each query, by inner product; ties by the lower row.

        Args:
            queries: float32 [B, d].
            items: float32 [I, d], finite.
            k: Number of items, >= 1; may exceed I.
            hidden: Pairs to exclude.
        """
        ...

    def item_products(self, query: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """Multiply a query with some items; no product depends on the number of items.

        Args:
            query: float32 [d].
            items: float32 [I, d].
            rows: int64 [n] item rows.

        Returns:
            float32 [n].

        Raises:
            IndexError: A row is out of range.
        """
        ...

    def blend_sums(self, tables: BlendTables) -> BlendSums | None:
        """Prepare the host kernel that computes the sums of a score blend.

        Args:
            tables: Tables of the blend, which must not be written to afterwards.

        Returns:
            A thread-safe function; None = there is no kernel, use numpy.
        """
        ...


class Backend(DeviceQueues, Layout, Ops, ItemOps, Protocol):
    """A device: queues, layout of keys and values, ops. Call it on device threads only."""
