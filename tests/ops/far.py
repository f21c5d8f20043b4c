"""Cases with more than 2^32 elements in a tensor: they detect offsets of 32 bits.

No machine has the memory: the arrays are untouched pages, and of a launch of millions of cores the
emulator runs the first and the last ones.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.ops.ascend_emulator import I32, Emulator, Machine
from tests.ops.oracle import best, same

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on


def untouched(*shape: int, dtype: type[np.generic] = np.float32) -> npt.NDArray[Any]:
    """Zeros that take memory where they are touched, and only there."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return np.frombuffer(pages, dtype).reshape(shape)


class FarTopk(NamedTuple):
    """masked_topk of 64 columns and 2^26 rows more or less; a core each, of which four run."""

    rows: int
    biased: bool

    def check(self, emulator: Emulator) -> None:
        n = k = 64
        logits = untouched(self.rows, n)
        mask = untouched(self.rows, n // 8, dtype=np.uint8)
        bias = untouched(self.rows) if self.biased else None
        value = untouched(self.rows, k)
        index = untouched(self.rows, k, dtype=np.int32)
        seen = (0, 1, self.rows - 2, self.rows - 1)
        for row in seen:
            logits[row] = np.random.default_rng(row).normal(size=n)
            mask[row] = 0b01111110
            if bias is not None:
                bias[row] = row % 7
        shape = (self.rows, n, k, n // 8)
        emulator.call(
            "emulator_masked_topk",
            (self.rows, 0, 0, 1),
            0,
            logits,
            mask,
            bias,
            value,
            index,
            *shape,
        )
        allowed = np.unpackbits(mask[0], bitorder="little") != 0
        for row in seen:
            scores = np.where(allowed, logits[row], np.float32(-np.inf))
            want = best(scores if bias is None else scores + bias[row], k)
            same(value[row], want[0], f"value of row {row}")
            same(index[row], want[1], f"index of row {row}")


class FarFork(NamedTuple):
    """beam_fork of rows of a gigabyte, of which the first bytes are in use."""

    row_bytes: int
    used_bytes: int
    parent: I32
    on: Machine

    def check(self, emulator: Emulator) -> None:
        layers, held = 3, len(self.parent)
        planes = [untouched(layers, held, self.row_bytes, dtype=np.uint8) for _ in range(2)]
        random = np.random.default_rng(self.row_bytes)
        for plane in planes:
            plane[:, :, : self.used_bytes] = random.integers(
                1, 256, (layers, held, self.used_bytes)
            )
        want = [plane[:, self.parent, : self.used_bytes].copy() for plane in planes]
        sizes = layers, held, held, self.row_bytes, self.used_bytes
        emulator.call(
            "emulator_beam_fork", (self.on.cores, 0, self.on.chunk), *planes, self.parent, *sizes
        )
        for plane, rows in zip(planes, want, strict=True):
            assert np.array_equal(plane[:, :, : self.used_bytes], rows)
