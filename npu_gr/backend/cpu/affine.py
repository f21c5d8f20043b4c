"""Linear layers through the CPU kernels: weights packed once, SiLU in registers; mirrors `Affine` of hstu_call.h.

A layer's packed weights live as long as the layer. They are packed again when its weight is replaced or written to.
For inference only: no gradient passes through.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int64, c_void_p
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from npu_gr.backend.cpu.hstu import HstuKernels
from npu_gr.backend.cpu.library import ELEMENT, Native
from npu_gr.backend.tiles import TILE_TOKENS, Tiles, padded


class _Affine(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_in", "num_out", "x_dtype", "tile_dtype", "y_dtype")),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("is_silu", c_int64),
        ("y", c_void_p),
        ("scratch", c_void_p),
    ]


class Packed(NamedTuple):
    """A layer's weights as the kernels read them."""

    stamp: tuple[int, int, int, int]  # address and version counter of the weight, then of the bias
    weight: Tensor  # tiles of 64 outputs
    bias: Tensor  # fp32, padded to whole tiles


class AffineKernel:
    """Compute `Backend.affine` for fp32 and bf16. Any thread may call."""

    def __init__(self, native: Native, hstu: HstuKernels) -> None:
        self._kernels = native.kernels
        self._hstu = hstu
        self._has_dot = native.has_bf16_dot
        self._packed: WeakKeyDictionary[nn.Linear, dict[tuple[int, int], Packed]] = WeakKeyDictionary()

    def __call__(self, x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
        packed = self.packed(layer, first, last)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = torch.empty(len(rows), last - first, dtype=layer.weight.dtype)
        if not y.numel():
            return y.view(*x.shape[:-1], last - first)
        call = _Affine(
            len(rows), rows.shape[1], last - first, ELEMENT[rows.dtype], ELEMENT[packed.weight.dtype], ELEMENT[y.dtype],
            rows.data_ptr(), rows.stride(0), packed.weight.data_ptr(), packed.bias.data_ptr(), is_silu, y.data_ptr(),
        )  # fmt: skip
        call.scratch = self._hstu.scratch_at(self._kernels.affine_scratch_bytes(byref(call)))
        self._kernels.affine(byref(call))
        return y.view(*x.shape[:-1], last - first)

    def packed(self, layer: nn.Linear, first: int, last: int) -> Packed:
        """Return outputs first..last - 1 of a layer as the kernels read them."""
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
