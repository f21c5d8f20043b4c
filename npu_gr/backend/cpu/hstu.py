"""HSTU attention, packing of keys and values, and linear layers by the CPU kernels.

The structures mirror `ops/cpu/hstu_call.h`. Every call builds one structure of pointers; the
tensors behind them outlive the call.

Attention: rows that are not in tiles yet are first packed into scratch tiles, so that every tile
begins at a multiple of 64 tokens. Cached and full inference are therefore bit-equal.

Linear layers: weights are packed once, SiLU is applied in registers. The packed weights live as
long as the layer, and are packed again when a weight is replaced or written to. They are not
differentiable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from npu_gr.backend.calls import HstuCall
from npu_gr.backend.cpu.library import ELEMENT, TILE_ELEMENT, Native, Scratch
from npu_gr.backend.tiles import TILE_TOKENS, Slab, Tiles, empty, natural, padded


class _Tiles(Structure):
    _fields_ = [("k", c_void_p), ("v", c_void_p), ("num_tiles", c_int64)]


class _Rows(Structure):
    _fields_ = [("data", c_void_p), ("row_stride", c_int64), ("head_stride", c_int64)]


_SHAPE = [
    (name, c_int64)
    for name in ("num_rows", "num_heads", "qk_dim", "v_dim", "row_dtype", "tile_dtype")
]


class _Hstu(Structure):
    _fields_ = [
        *_SHAPE,
        *((name, _Rows) for name in ("q", "own_k", "own_v", "out")),
        ("runs", POINTER(_Tiles)),
        ("num_runs", c_int64),
        ("num_tokens", c_int64),
        ("times", c_void_p),
        ("query_time", c_int64),
        ("position_bias", c_void_p),
        ("position_buckets", c_int64),
        ("time_bias", c_void_p),
        ("alpha", c_double),
        *((name, c_int64) for name in ("recent", "first", "gap_at", "gap")),
        ("scratch", c_void_p),
    ]


class _Pack(Structure):
    _fields_ = [*_SHAPE, ("k", _Rows), ("v", _Rows), ("first_token", c_int64), ("into", _Tiles)]


def _rows(x: Tensor) -> _Rows:
    """Describe x [n, H, D], whose last stride is 1, by a pointer and strides."""
    return _Rows(x.data_ptr(), x.stride(0), x.stride(1))


def _tiles(tiles: Tiles) -> _Tiles:
    return _Tiles(tiles.k.data_ptr(), tiles.v.data_ptr(), len(tiles.k))


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.shape[2] <= 1 or x.stride(2) == 1 else x.contiguous()


class _Reused(threading.local):
    """Memory that calls of one thread reuse."""

    def __init__(self) -> None:
        # scratch tiles by shape
        self.own: dict[tuple[int, int, int, torch.dtype], Tiles] = {}


class HstuKernels:
    """The kernels of one instruction set, and the scratch memory that they reuse. Thread-safe."""

    def __init__(self, native: Native) -> None:
        self._kernels = native.kernels
        self._reused = _Reused()
        self.scratch = Scratch()

    def pack(self, into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
        if not len(k):
            return
        k = _unit_stride(k)
        v = _unit_stride(v)
        call = _Pack(
            len(k), k.shape[1], into.qk_dim, into.v_dim,
            ELEMENT[k.dtype], TILE_ELEMENT[into.k.dtype],
            _rows(k), _rows(v), first_token, _tiles(into),
        )  # fmt: skip
        self._kernels.pack_kv(byref(call))

    def takes(self, call: HstuCall) -> bool:
        """Whether the kernels support a call: a gap of its window must be one of whole tiles."""
        aligned = call.window is None or not (call.window.gap_at | call.window.gap) % TILE_TOKENS
        return call.q.dtype in ELEMENT and call.has_plain_times and aligned

    def causal(self, call: HstuCall) -> Tensor:
        return self._attend(self._kernels.hstu_causal, call, None, [*call.cached, (call.k, call.v)])

    def targets(self, call: HstuCall) -> Tensor:
        own = _unit_stride(call.k), _unit_stride(call.v)
        return self._attend(self._kernels.hstu_targets, call, own, call.cached)

    def _attend(
        self,
        op: Callable[[object], None],
        call: HstuCall,
        own: Slab | None,
        slabs: Sequence[Slab | Tiles],
    ) -> Tensor:
        """Attend to `slabs`; if `own` is given (candidates), each row also to its own key."""
        rows, heads, qk_dim = call.q.shape
        v_dim = call.v.shape[2]
        out = call.q.new_empty(rows, heads, v_dim)
        if not rows:
            return out
        runs = self._in_tiles(slabs, call.stored or call.q.dtype)
        assert sum(run.num_tokens for run in runs) == len(call.times)
        dtype = runs[0].k.dtype if runs else call.q.dtype
        q = _unit_stride(call.q)
        times = call.times.contiguous()
        position, time = (table.float().contiguous() for table in call.bias)
        own_k, own_v = own if own else (q, q)
        native = _Hstu(
            rows, heads, qk_dim, v_dim, ELEMENT[q.dtype], TILE_ELEMENT[dtype],
            _rows(q), _rows(own_k), _rows(own_v), _rows(out),
            (_Tiles * len(runs))(*map(_tiles, runs)), len(runs),
            len(times), times.data_ptr(), call.query_time,
            position.data_ptr(), position.shape[1], time.data_ptr(), call.alpha,
            *(call.window or (0, 0, 0, 0)),
        )  # fmt: skip
        native.scratch = self.scratch.at(
            self._kernels.hstu_scratch_bytes(byref(native), own is None)
        )
        op(byref(native))
        return out

    def _in_tiles(self, slabs: Sequence[Slab | Tiles], dtype: torch.dtype) -> list[Tiles]:
        """Return the tokens of all slabs as tiles, of which only the last may be partly filled.

        Full tiles are not copied.
        """
        slabs = [s for s in slabs if (s.num_tokens if isinstance(s, Tiles) else len(s[0]))]
        found: list[Tiles] = []
        while slabs and isinstance(first := slabs[0], Tiles):
            found.append(first)
            slabs = slabs[1:]
            # the next slab continues a partly filled tile: fill up a copy of it
            if first.num_tokens % TILE_TOKENS and slabs:
                full = first.num_tokens // TILE_TOKENS
                found[-1] = Tiles(
                    first.k[:full], first.v[:full], full * TILE_TOKENS, first.qk_dim, first.v_dim
                )
                rest = first.k[full : full + 1], first.v[full : full + 1]
                return [
                    *found,
                    self._packed(
                        slabs,
                        Tiles(*rest, first.num_tokens % TILE_TOKENS, *first[3:]),
                        first.k.dtype,
                    ),
                ]
        if slabs:
            found.append(self._packed(slabs, None, found[0].k.dtype if found else dtype))
        return found

    def _packed(
        self, slabs: Sequence[Slab | Tiles], begun: Tiles | None, dtype: torch.dtype
    ) -> Tiles:
        """Copy a partly filled tile, and pack the slabs behind it, into scratch tiles."""
        rows = natural(slabs)
        at = begun.num_tokens if begun else 0
        total = at + sum(len(k) for k, _ in rows)
        k, v = rows[0]
        into = self._own_tiles(-(-total // TILE_TOKENS), k.shape[1], k.shape[2], v.shape[2], dtype)
        if begun:
            into.k[0].copy_(begun.k[0])
            into.v[0].copy_(begun.v[0])
        for k, v in rows:
            self.pack(into, at, k, v)
            at += len(k)
        return into._replace(num_tokens=total)

    def _own_tiles(
        self, num_tiles: int, num_heads: int, qk_dim: int, v_dim: int, dtype: torch.dtype
    ) -> Tiles:
        key = (num_heads, qk_dim, v_dim, dtype)
        own = self._reused.own
        if key not in own or len(own[key].k) < num_tiles:
            own[key] = empty(num_tiles, num_heads, qk_dim, v_dim, dtype)
        held = own[key]
        return held._replace(k=held.k[:num_tiles], v=held.v[:num_tiles])


class _Affine(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in ("num_rows", "num_in", "num_out", "x_dtype", "tile_dtype", "y_dtype")
        ),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("is_silu", c_int64),
        ("y", c_void_p),
        ("scratch", c_void_p),
    ]


class Packed(NamedTuple):
    """A layer's packed weights."""

    stamp: tuple[int, int, int, int]  # address and version of the weight, then of the bias
    weight: Tensor  # tiles of 64 outputs
    bias: Tensor  # fp32, padded to whole tiles


class AffineKernel:
    """Computes `Backend.affine` for fp32 and bf16. Thread-safe."""

    def __init__(self, native: Native, hstu: HstuKernels) -> None:
        self._kernels = native.kernels
        self._hstu = hstu
        self._has_dot = native.has_bf16_dot
        self._packed: WeakKeyDictionary[nn.Linear, dict[tuple[int, int], Packed]] = (
            WeakKeyDictionary()
        )

    def __call__(self, x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
        packed = self.packed(layer, first, last)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = torch.empty(len(rows), last - first, dtype=layer.weight.dtype)
        if not y.numel():
            return y.view(*x.shape[:-1], last - first)
        call = _Affine(
            len(rows), rows.shape[1], last - first,
            ELEMENT[rows.dtype], ELEMENT[packed.weight.dtype], ELEMENT[y.dtype],
            rows.data_ptr(), rows.stride(0), packed.weight.data_ptr(), packed.bias.data_ptr(),
            is_silu, y.data_ptr(),
        )  # fmt: skip
        call.scratch = self._hstu.scratch.at(self._kernels.affine_scratch_bytes(byref(call)))
        self._kernels.affine(byref(call))
        return y.view(*x.shape[:-1], last - first)

    def packed(self, layer: nn.Linear, first: int, last: int) -> Packed:
        """Return the packed weights of outputs first..last - 1, cached while they are current."""
        weight = layer.weight
        bias = layer.bias
        of_bias = (0, 0) if bias is None else (bias.data_ptr(), bias._version)
        stamp = (weight.data_ptr(), weight._version, *of_bias)
        parts = self._packed.setdefault(layer, {})
        found = parts.get((first, last))
        if found is None or found.stamp != stamp:
            own = None if bias is None else bias[first:last]
            found = parts[first, last] = Packed(stamp, *self._pack(weight[first:last], own))
        return found

    def _pack(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        num_out, num_in = weight.shape
        dtype = weight.dtype if self._has_dot else torch.float32
        num_tiles = -(-num_out // TILE_TOKENS)
        keys = torch.zeros(num_tiles, 1, padded(num_in, 0)[0] * TILE_TOKENS, dtype=dtype)
        into = Tiles(keys, keys.new_empty(num_tiles, 1, 0), 0, num_in, 0)
        self._hstu.pack(into, 0, weight[:, None], weight.new_empty(num_out, 1, 0))
        wide = torch.zeros(num_tiles * TILE_TOKENS)
        if bias is not None:
            wide[:num_out] = bias
        return keys, wide
