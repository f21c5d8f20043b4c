"""A ranker's forward pass, or retrieve-then-rank, in one call of the CPU kernels.

`HstuPassKernel` mirrors `ops/cpu/hstu_pass_call.h`. A batch is one array of int64: each request's
numbers, page runs, times and ids, one request behind the other. The kernels check it, size their
scratch, and then compute every layer without the interpreter lock. The model's weights are
described once, and again when a weight is replaced or written to.

`HstuFindKernel` mirrors `ops/cpu/hstu_find_call.h`: NEXT, the search, and the ranking of the found
items. The kernels write the numbers of the second pass themselves, so that it need not wait for the
interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p, pointer
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from npu_gr.backend.calls import (
    FusedForwardCall,
    HstuFindCall,
    HstuFound,
    HstuHead,
    HstuSegment,
    HstuWeights,
)
from npu_gr.backend.cpu.hstu import AffineKernel, HstuKernels
from npu_gr.backend.cpu.items import ItemsJob
from npu_gr.backend.cpu.library import ELEMENT, TILE_ELEMENT, Native, address
from npu_gr.backend.tiles import TILE_TOKENS

_ERRORS = {
    -1: (ValueError, "the numbers of a pass do not describe its requests"),
    -2: (ValueError, "a pass has fewer pages than tokens, or pages outside of its arena"),
    -3: (IndexError, "an item row is outside of the model's items"),
    -4: (IndexError, "an action is outside of the model's actions"),
    -5: (ValueError, "the numbers of a search do not fit its requests"),
}


class _Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_double)]


class _Linear(Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("num_in", "num_out", "tile_dtype")),
    ]


class _Layer(Structure):
    _fields_ = [
        *((name, _Norm) for name in ("norm_in", "norm_attention")),
        *((name, _Linear) for name in ("uvqk", "v", "k", "out")),
        *((name, c_void_p) for name in ("position_bias", "time_bias")),
    ]


class PassHead(Structure):
    """Mirrors `struct PassHead`, field by field."""

    _fields_ = [("norm", _Norm), ("hidden", _Linear), ("out", _Linear)]


class _Model(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in ("dim", "num_layers", "num_heads", "qk_dim", "v_dim", "dtype")
        ),
        *((name, c_int64) for name in ("norm_group", "is_joined", "is_silu", "position_buckets")),
        *((name, c_double) for name in ("alpha", "scale")),
        *((name, c_int64) for name in ("recent", "first")),
        ("layers", POINTER(_Layer)),
    ]


class PassJob(Structure):
    """Mirrors `struct HstuPass`, field by field."""

    _fields_ = [
        ("model", POINTER(_Model)),
        ("head", POINTER(PassHead)),
        ("numbers", c_void_p),
        *((name, c_int64) for name in ("num_numbers", "num_segments")),
        *((name, c_void_p) for name in ("items", "actions")),
        *((name, c_int64) for name in ("num_items", "num_actions")),
        ("x", c_void_p),
        *((name, c_int64) for name in ("num_rows", "tile_dtype")),
        *((name, c_void_p) for name in ("out", "scratch")),
    ]


class _Places(NamedTuple):
    """The places of a model's weights: a module's parameters or buffers, and a name in them."""

    held: Sequence[tuple[Mapping[str, Tensor | None], str]]

    def stamps(self) -> list[int] | None:
        """Return addresses and version counters; None = a tensor has no version counter.

        Tensors made under inference_mode have none.
        """
        tensors: list[Any] = [place[name] for place, name in self.held]
        try:
            return [tensor.data_ptr() for tensor in tensors] + [
                tensor._version for tensor in tensors
            ]
        except RuntimeError:
            return None


class _Described(NamedTuple):
    """The description of a model's weights for the kernels."""

    places: _Places
    stamps: Sequence[int]
    model: Any  # pointer to _Model
    heads: Mapping[str, tuple[Any, int]]  # name of the head -> (pointer to PassHead, outputs)
    kept: Sequence[object]  # tensors and structures that the above point into


class PreparedPass(NamedTuple):
    """A pass whose head and output memory are not set yet."""

    native: PassJob
    heads: Mapping[str, tuple[Any, int]]  # see `_Described`
    num_candidates: int
    held: Sequence[object]  # owners of the memory that `native` points into


def checked(found: int) -> int:
    """Return a kernel's result, or raise the exception of a negative error code."""
    if found < 0:
        kind, why = _ERRORS[found]
        raise kind(why)
    return found


class HstuPassKernel:
    """Computes `Backend.fused_forward` for fp32 and bf16. Thread-safe."""

    def __init__(self, native: Native, hstu: HstuKernels, affine: AffineKernel) -> None:
        self._size = native.kernels.hstu_pass_bytes
        self.run = native.kernels.hstu_pass
        self._hstu = hstu
        self._affine = affine
        self._described: WeakKeyDictionary[nn.Module, _Described] = WeakKeyDictionary()

    def __call__(self, call: FusedForwardCall) -> npt.NDArray[np.float32] | None:
        ready = self.prepared(call)
        if ready is None:
            return None
        native, heads = ready.native, ready.heads
        head, width = heads.get(call.answer) or (None, native.model.contents.dim)
        out = np.empty((ready.num_candidates, width), np.float32)
        native.head, native.out = head, address(out)
        native.scratch = self._hstu.scratch.at(checked(self._size(byref(native))))
        self.run(byref(native))
        return out

    def prepared(self, call: FusedForwardCall) -> PreparedPass | None:
        """Describe a call, except its head and outputs; None = the kernels do not support it."""
        parts: list[Any] = []
        num_candidates = 0
        tile_dtype = call.segments[0].stored or call.dtype if call.segments else call.dtype
        for segment in call.segments:
            numbers = _numbers(segment, call.dtype, tile_dtype, call.embeddings is not None)
            if numbers is None:
                return None
            parts += numbers
            num_candidates += segment.num_candidates
        described = self._described.get(call.owner)
        if described is None or described.places.stamps() != described.stamps:
            with torch.inference_mode():
                described = self._describe(call.owner, call.weights(), call.dtype)
            if described is None:
                return None
            self._described[call.owner] = described
        batch = np.concatenate(parts)
        held: list[object] = [described, batch]
        native = PassJob(described.model, None, address(batch), len(batch), len(call.segments))
        if call.embeddings is not None:
            items, actions = call.embeddings
            native.items, native.actions = items.data_ptr(), actions.data_ptr()
            native.num_items, native.num_actions = items.shape[0], actions.shape[0]
        else:
            held.append(x := call.rows().contiguous())
            native.x, native.num_rows = x.data_ptr(), x.shape[0]
        native.tile_dtype = TILE_ELEMENT[tile_dtype]
        return PreparedPass(native, described.heads, num_candidates, held)

    def _describe(
        self, owner: nn.Module, weights: HstuWeights, dtype: torch.dtype
    ) -> _Described | None:
        """Describe a model; None = its dtypes differ, or writes to a weight cannot be detected."""
        first = weights.layers[0]
        of_layers = {
            linear.weight.dtype for layer in weights.layers for linear in (layer.uvqk, layer.out)
        }
        if of_layers != {dtype} or any(
            own.is_inference() for own in (*owner.parameters(), *owner.buffers())
        ):
            return None
        read: list[Tensor] = []
        kept: list[object] = []

        def floats(tensor: Tensor) -> int:
            read.append(tensor)
            kept.append(wide := tensor.detach().float().contiguous())
            return wide.data_ptr()

        def norm(of: nn.LayerNorm) -> _Norm:
            return _Norm(floats(of.weight), floats(of.bias), of.eps)

        def linear(of: nn.Linear, first: int = 0, last: int | None = None) -> _Linear:
            end = of.out_features if last is None else last
            read.extend(tensor for tensor in (of.weight, of.bias) if tensor is not None)
            packed = self._affine.packed(of, first, end)
            kept.append(packed)
            element = ELEMENT[packed.weight.dtype]
            return _Linear(
                packed.weight.data_ptr(),
                packed.bias.data_ptr(),
                of.in_features,
                end - first,
                element,
            )

        def head(of: HstuHead) -> tuple[Any, int]:
            hidden = linear(of.hidden) if of.hidden is not None else _Linear()
            made = pointer(PassHead(norm(of.norm), hidden, linear(of.out)))
            kept.append(made)
            return made, of.out.out_features

        uv, qk = weights.num_heads * weights.v_dim, weights.num_heads * weights.qk_dim
        layers = (_Layer * len(weights.layers))()
        for into, layer in zip(layers, weights.layers, strict=True):
            into.norm_in, into.norm_attention = norm(layer.norm_in), norm(layer.norm_attention)
            into.uvqk, into.out = linear(layer.uvqk), linear(layer.out)
            if layer is weights.layers[-1]:
                into.v, into.k = (
                    linear(layer.uvqk, uv, 2 * uv),
                    linear(layer.uvqk, 2 * uv + qk, 2 * (uv + qk)),
                )
            into.position_bias, into.time_bias = (
                floats(layer.bias.position),
                floats(layer.bias.time),
            )
        kept.append(layers)
        model = _Model(
            first.uvqk.in_features, len(weights.layers),
            weights.num_heads, weights.qk_dim, weights.v_dim,
            ELEMENT[dtype], first.norm_attention.weight.numel(), weights.is_joined,
            weights.silu_all, first.bias.position.shape[1], weights.alpha, weights.scale,
            *(weights.window or (0, 0))[:2], layers,
        )  # fmt: skip
        heads = {name: head(of) for name, of in weights.heads.items()}
        places = _places(owner, read)
        stamps = places.stamps()
        return None if stamps is None else _Described(places, stamps, pointer(model), heads, kept)


def _places(owner: nn.Module, read: Sequence[Tensor]) -> _Places:
    """Find the places of tensors in the model that owns them."""
    wanted = {id(tensor) for tensor in read}
    found = [
        (place, name)
        for module in owner.modules()
        for place in (module._parameters, module._buffers)
        for name, tensor in place.items()
        if id(tensor) in wanted
    ]
    assert len({id(place[name]) for place, name in found}) == len(wanted), (
        "a weight is none of the model's"
    )
    return _Places(found)


def _numbers(
    segment: HstuSegment, dtype: torch.dtype, tile_dtype: torch.dtype, has_ids: bool
) -> list[Any] | None:
    """Describe a request as arrays and lists of int64; None = not supported: its pages or gap."""
    cached, new, own, times, query_time, pages, keeps, ids, *gap, stored = segment
    if any(part % TILE_TOKENS for part in gap) or (stored or dtype) != tile_dtype:
        return None
    if len(times) != cached + new:
        raise ValueError(f"a request has {len(times)} times for {cached + new} tokens")
    if pages is None:
        if cached or keeps:
            return None
        numbers = [0, new, own, query_time, *[0] * 8, *gap]
    else:
        k, v = pages.k, pages.v
        if not pages.is_tiles or k.dtype != tile_dtype:
            return None
        numbers = [
            cached, new, own, query_time, keeps, len(pages.runs),
            k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), k.shape[2], k.shape[1], *gap,
        ]  # fmt: skip
        for run in pages.runs:
            numbers += run
    if not has_ids:
        return [numbers, times]
    if ids is None or (len(ids.items), len(ids.actions), len(ids.candidates)) != (new, new, own):
        raise ValueError("a request's ids are not those of its rows")
    return [numbers, times, *ids]


class _Find(Structure):
    _fields_ = [
        ("next", PassJob),
        ("items", ItemsJob),
        ("head", POINTER(PassHead)),
        *((name, c_void_p) for name in ("wanted", "least", "numbers")),
        ("num_bytes", c_int64),
        *((name, c_void_p) for name in ("num_scored", "logits", "products")),
    ]


class HstuFindKernel:
    """Computes `Backend.hstu_find` for fp32 and bf16. Thread-safe."""

    def __init__(self, native: Native, hstu: HstuKernels, passes: HstuPassKernel) -> None:
        self._kernels = native.kernels
        self._hstu = hstu
        self._passes = passes

    def __call__(self, call: HstuFindCall) -> HstuFound | None:
        if call.next.embeddings is None:
            return None
        ready = self._passes.prepared(call.next)
        if ready is None or not {"next", "logits"} <= ready.heads.keys():
            return None
        native, heads = ready.native, ready.heads
        native.head, dim = heads["next"]
        head, num_outputs = heads["logits"]
        table, k = call.items, call.k
        assert (table.dtype, table.is_contiguous(), table.shape[1]) == (torch.float32, True, dim)
        assert call.num_items <= table.shape[0]
        num = len(call.next.segments)
        num_wanted = sum(call.wanted)
        starts = [0, *itertools.accumulate(map(len, call.hidden))]
        job = ItemsJob(None, table.data_ptr(), num, call.num_items, dim, k)
        num_workspace = -(-self._kernels.best_items_bytes(byref(job)) // 8)
        # one array for each dtype: inputs and outputs first, then the kernels' workspace
        hidden_at, rows_at = 3 * num + 1, 3 * num + 1 + starts[-1]
        scored_at = rows_at + num * k
        work_at = scored_at + num
        numbers_at = work_at + num_workspace
        ints = np.empty(numbers_at + native.num_numbers + num_wanted, np.int64)
        logits_at, products_at = num * dim, num * dim + num_wanted * num_outputs
        score_at = products_at + num_wanted
        floats = np.empty(score_at + num * k, np.float32)
        ints[:hidden_at] = [*call.wanted, *call.least, *starts]
        for rows, start, end in zip(call.hidden, starts, starts[1:], strict=False):
            hidden = ints[hidden_at + start : hidden_at + end]
            hidden[:] = rows
            hidden.sort()
        at, out = address(ints), address(floats)
        native.out = job.queries = out
        job.score = out + 4 * score_at
        job.hidden_start, job.hidden = at + 16 * num, at + 8 * hidden_at
        job.item, job.workspace = at + 8 * rows_at, at + 8 * work_at
        find = _Find(
            native, job, head, at, at + 8 * num, at + 8 * numbers_at, 0,
            at + 8 * scored_at, out + 4 * logits_at, out + 4 * products_at,
        )  # fmt: skip
        find.num_bytes = checked(self._kernels.hstu_find_bytes(byref(find)))
        find.next.scratch = self._hstu.scratch.at(find.num_bytes)
        checked(self._kernels.hstu_find(byref(find)))
        return HstuFound(
            floats[:logits_at].reshape(num, dim),
            ints[rows_at:scored_at].reshape(num, k),
            ints[scored_at:work_at],
            floats[logits_at:products_at].reshape(num_wanted, num_outputs),
            floats[products_at:score_at],
        )
