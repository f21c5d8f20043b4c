"""The HSTU kernels on the CPU emulator, on numpy arrays: see `ascend_emulator.py`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.ops.ascend_emulator import DTYPES, F32, I32, Array, Emulator, EmulatorReport, Machine

MACHINE = Machine()


class HstuSizes(NamedTuple):
    """The sizes that the three kernels share; `HstuSizes` of ops/ascendc/hstu_tiling.h."""

    requests: int
    row_slots: int
    key_slots: int
    heads: int
    qk_dim: int
    v_dim: int
    dtype: str = "float32"

    @property
    def numbers(self) -> Array:
        """As the library takes them."""
        return np.array([*self[:6], DTYPES[self.dtype]], np.uint32)


def bits(number: float) -> int:
    """Return the bits of a float32: every number of a kernel is an uint32."""
    return int(np.float32(number).view(np.uint32))


def hstu_rows(
    emulator: Emulator,
    sizes: HstuSizes,
    mixed: Array,
    meta: I32,
    page_ids: I32,
    planes: tuple[Array, Array],
    results: tuple[Array, Array, Array, Array],
    *,
    q_scale: float = 1.0,
    silu_all: bool = False,
    on: Machine = MACHINE,
) -> EmulatorReport:
    """Run ops/ascendc/kernels/hstu_rows.h.

    Args:
        emulator: the library.
        sizes: the numbers of the call.
        mixed: [rows, U | V | Q | K].
        meta: [requests, 8].
        page_ids: pages of all requests.
        planes: keys and values [pages, tokens, heads, dim]; written where a request keeps its rows.
        results: q, k, v and u, written.
        q_scale: factor on the queries.
        silu_all: SiLU of all parts, not of U alone.
        on: the machine; `tile` = tokens of a page in one step, `splits` = rows of a lot.
    """
    counts = len(mixed), len(results[3]), planes[0].shape[1], len(planes[0]), len(page_ids)
    numbers = *counts, int(silu_all), bits(q_scale)
    knobs = on.cores, on.ub_bytes, on.tile, on.splits
    return emulator.call(
        "emulator_hstu_rows",
        knobs,
        sizes.numbers,
        mixed,
        meta,
        page_ids,
        *planes,
        *results,
        *numbers,
    )


def hstu_scores(
    emulator: Emulator,
    sizes: HstuSizes,
    scores: Array,
    meta: I32,
    bounds: I32,
    row_times: I32,
    key_times: I32,
    tables: F32,
    near: F32,
    *,
    alpha: float = 1.0,
    on: Machine = MACHINE,
) -> EmulatorReport:
    """Run ops/ascendc/kernels/hstu_scores.h in place on [requests, heads, row_slots, key_slots].

    Args:
        emulator: the library.
        sizes: the numbers of the call.
        scores: products of queries and keys.
        meta, bounds, row_times, key_times: arrays that describe the batch.
        tables, near: bias tables of the layer.
        alpha: factor on the scores.
        on: the machine; `tile` = queries of a tile.
    """
    positions = near.shape[2] - 2 * 288
    arrays = scores, meta, bounds, row_times, key_times, tables, near
    knobs = on.cores, on.ub_bytes, on.tile
    return emulator.call(
        "emulator_hstu_scores", knobs, sizes.numbers, *arrays, positions, bits(alpha)
    )


def hstu_finish(
    emulator: Emulator,
    sizes: HstuSizes,
    attention: Array,
    u: Array,
    norm: F32,
    meta: I32,
    out: Array,
    *,
    scale: float,
    eps: float,
    on: Machine = MACHINE,
) -> EmulatorReport:
    """Run ops/ascendc/kernels/hstu_finish.h.

    Args:
        emulator: the library.
        sizes: the numbers of the call.
        attention: [requests, heads, row_slots, v_dim].
        u: [queries, heads * v_dim].
        norm: [2, group], weight and bias.
        meta: the array that describes the batch.
        out: [queries, 1 or 3, heads * v_dim], written.
        scale: factor on the attention.
        eps: the norm's epsilon.
        on: the machine; `tile` = queries of a step.
    """
    group = norm.shape[1]
    numbers = len(u), group, int(out.shape[1] == 3), bits(scale), bits(1.0 / group), bits(eps)
    knobs = on.cores, on.ub_bytes, on.tile
    return emulator.call(
        "emulator_hstu_finish", knobs, sizes.numbers, attention, u, norm, meta, out, *numbers
    )
