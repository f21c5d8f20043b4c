"""Loads the library of the CPU kernels of `ops/cpu`, and declares the functions' types.

`pip install` builds the library if there is a C++ compiler (`setup.py`). ctypes releases the GIL
during each call; buffers are passed as `tensor.data_ptr()`.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

ABI = 13  # NPU_GR_ABI of ops/cpu/kernels.h
# best first; generic on x86-64, neon on aarch64
ISAS = ("avx512_bf16", "avx512", "avx2", "generic", "neon")
ELEMENT = {torch.float32: 0, torch.bfloat16: 1}  # dtypes of the kernels' buffers: enum Element
TILE_ELEMENT = {**ELEMENT, torch.int8: 2}  # of tiles of keys and values

LIBRARY = Path(__file__).with_name("_native.abi3.so")


class TopkJob(ctypes.Structure):
    """Mirrors `struct TopkJob` of `ops/cpu/kernels.h`, field by field."""

    _fields_ = [
        ("logits", c_void_p),
        ("element", c_int64),
        ("row_stride", c_int64),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("first_column", c_int64),
        ("num_codes", c_int64),
        ("over_valid", c_int64),
        ("scale", c_float),
        ("values", c_void_p),
        ("value_start", c_void_p),
        ("acc", c_void_p),
        ("lo", c_void_p),
        ("degree", c_void_p),
        ("code", c_void_p),
        ("allowed", c_void_p),
        ("width", c_int64),
        ("workspace", c_void_p),
        ("norm", c_void_p),
        ("score", c_void_p),
        ("parent", c_void_p),
        ("edge", c_void_p),
    ]


class HeadJob(ctypes.Structure):
    """Mirrors `struct HeadJob` of `ops/cpu/kernels.h`, field by field."""

    _fields_ = [
        ("hidden", c_void_p),
        ("weight", c_void_p),
        ("element", c_int64),
        ("hidden_stride", c_int64),
        ("weight_stride", c_int64),
        ("num_rows", c_int64),
        ("dim", c_int64),
        ("scale", c_float),
        ("lo", c_void_p),
        ("degree", c_void_p),
        ("code", c_void_p),
        ("value_start", c_void_p),
        ("values", c_void_p),
    ]


class BeamJob(ctypes.Structure):
    """Mirrors `struct BeamJob` of `ops/cpu/kernels.h`, field by field."""

    _fields_ = [
        ("q", c_void_p),
        ("element", c_int64),
        ("num_rows", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_float),
        ("num_slabs", c_int64),
        ("slab_keys", POINTER(c_void_p)),
        ("slab_values", POINTER(c_void_p)),
        ("slab_tokens", POINTER(c_int64)),
        ("num_slots", c_int64),
        ("own_keys", c_void_p),
        ("own_values", c_void_p),
        ("own_row_stride", c_int64),
        ("ancestry", c_void_p),
        ("ancestry_stride", c_int64),
        ("out", c_void_p),
        ("workspace", c_void_p),
    ]


class Table(ctypes.Structure):
    """Mirrors `struct Kernels` of `ops/cpu/kernels.h`, field by field."""

    _fields_ = [
        ("num_bytes", c_int64),
        ("abi", c_int64),
        ("isa", c_char_p),
        ("vector_bytes", c_int64),
        ("has_bf16_dot", c_int64),
        ("probe_fma_f32", CFUNCTYPE(c_float, c_int64)),
        ("probe_fma_bf16", CFUNCTYPE(c_float, c_int64)),
        ("probe_read", CFUNCTYPE(c_float, c_void_p, c_int64)),
        ("probe_flops_f32", c_int64),
        ("probe_flops_bf16", c_int64),
        ("beam_topk_bytes", CFUNCTYPE(c_int64, c_int64, c_int64, c_int64)),
        ("gathered_head", CFUNCTYPE(None, POINTER(HeadJob))),
        ("beam_topk", CFUNCTYPE(c_int64, POINTER(TopkJob))),
        ("beam_attention_bytes", CFUNCTYPE(c_int64, POINTER(BeamJob))),
        ("beam_attention", CFUNCTYPE(None, POINTER(BeamJob))),
        ("hstu_scratch_bytes", CFUNCTYPE(c_int64, c_void_p, c_int64)),
        ("hstu_causal", CFUNCTYPE(None, c_void_p)),
        ("hstu_targets", CFUNCTYPE(None, c_void_p)),
        ("pack_kv", CFUNCTYPE(None, c_void_p)),
        ("affine_scratch_bytes", CFUNCTYPE(c_int64, c_void_p)),
        ("affine", CFUNCTYPE(None, c_void_p)),
        ("hstu_pass_bytes", CFUNCTYPE(c_int64, c_void_p)),
        ("hstu_pass", CFUNCTYPE(None, c_void_p)),
        ("hstu_find_bytes", CFUNCTYPE(c_int64, c_void_p)),
        ("hstu_find", CFUNCTYPE(c_int64, c_void_p)),
        ("best_items_bytes", CFUNCTYPE(c_int64, c_void_p)),
        ("best_items", CFUNCTYPE(None, c_void_p)),
        ("item_products", CFUNCTYPE(c_int64, c_void_p)),
        ("order_bytes", CFUNCTYPE(c_int64, c_void_p)),
        ("blend_sums", CFUNCTYPE(None, c_void_p)),
        ("neighbour_sums", CFUNCTYPE(None, c_void_p, c_void_p)),
    ]


class NativeError(Exception):
    """The kernels cannot be used; the message says why."""


class Native:
    """The kernels of one instruction set: `kernels.<function>(...)`, typed as in `Table`."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.isa: str = kernels.isa.decode()
        self.vector_bytes: int = kernels.vector_bytes
        self.has_bf16_dot = bool(kernels.has_bf16_dot)


@cache
def load(isa: str = "", library: Path = LIBRARY) -> Native:
    """Load the kernels.

    Args:
        isa: One of `ISAS`; "" = the best that this CPU has.
        library: Path of the shared object.

    Raises:
        NativeError: The library was not built, or from other sources, or this CPU lacks the
            instruction set.
    """
    if not library.exists():
        raise NativeError(
            f"{library.name} was not built: no C++ compiler when npu_gr was installed"
        )
    try:
        found = ctypes.CDLL(str(library)).npu_gr_kernels
    except (OSError, AttributeError) as error:
        raise NativeError(f"{library.name} cannot be loaded: {error}") from error
    found.argtypes = [c_char_p]
    found.restype = POINTER(Table)
    table = found(isa.encode())
    if not table:
        raise NativeError(f"{library.name} has no kernels for {isa!r}, or this CPU cannot run them")
    kernels = table.contents
    if (kernels.num_bytes, kernels.abi) != (ctypes.sizeof(Table), ABI):
        raise NativeError(f"{library.name} was built from other sources: pip install npu_gr again")
    return Native(kernels)


class Scratch(threading.local):
    """Memory for one call of a thread; the thread's next call overwrites it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0  # stored, because `len` of a tensor dominates the time of a call

    def at(self, num_bytes: int) -> int:
        """Return the address of so many bytes, aligned to 64."""
        if self._num_bytes < num_bytes + 64:
            self._num_bytes = num_bytes + num_bytes // 4 + 64
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8)
        return -(-self._memory.data_ptr() // 64) * 64


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's memory; `array.ctypes` takes twice as long."""
    at: int = array.__array_interface__["data"][0]
    return at


def supported() -> list[str]:
    """List the instruction sets that can run here, best first; empty without a library."""
    return [isa for isa in ISAS if _is_supported(isa)]


def _is_supported(isa: str) -> bool:
    try:
        load(isa)
    except NativeError:
        return False
    return True
