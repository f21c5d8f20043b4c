"""`python -m benchmarks emulator`: modelled cost of masked_topk and an HSTU pass on an Ascend 910B.

This is a model from public figures (`emulator_costs.py`), not a measurement: no NPU has run the
kernels.

masked_topk is compared with a full sort and with a top-k without a filter. The CPU emulator of the
910B counts the instructions and bytes of the real kernel; those of the other two are computed for
an implementation with the same instructions. One row runs on one core; loads, vector work and
stores overlap, so the slowest decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks import generate_model, hstu_model, hstu_sizes
from benchmarks.emulator_costs import modelled_us
from benchmarks.frame import SEED, Line, compared
from tests.ops.ascend_emulator import Emulator, Machine, packed

OPTIONS = (SEED,)
LENGTHS = (1024, 8192, 65_536)
KS = (32, 128, 512)
KEPT = (1.0, 0.3, 0.05)
ROWS = 4  # random rows; their mean is shown


def _passes(pairs: int) -> int:
    """Count the 4-way merge passes from groups of 32 to one list."""
    lists = -(-pairs // 32)
    passes = 0
    while lists > 1:
        lists = -(-lists // 4)
        passes = passes + 1
    return passes


def _sorting(groups: int, merged: int, n: int, k: int, loads: int) -> dict[str, float]:
    """Count masking (Select), sorting and merging; each pass and load has a barrier."""
    instructions = 2 * loads + 4
    return {
        "vector_instructions": instructions,
        "vector_repeats": -(-n // 64),
        "sort32_groups": groups,
        "merged_pairs": merged,
        "barriers": instructions,
        "flags": 4 * loads + 2,
        "mte2_bytes": 4 * n + -(-n // 8),
        "mte3_bytes": 8 * k,
    }


def full_sort(n: int, k: int) -> dict[str, float]:
    """Count a full sort, then a cut to k.

    It is optimistic: lists of over 4095 pairs need several merge instructions.
    """
    return _sorting(-(-n // 32), _passes(n) * n, n, k, loads=1 + _passes(n))


def plain_topk(n: int, k: int, tile: int) -> dict[str, float]:
    """Count masked_topk without its filter: sort each tile, merge its k best with the others."""
    tiles = -(-n // tile)
    padded = -(-k // 32) * 32
    a_tile = _passes(min(n, tile)) * min(n, tile) + padded + min(padded, tile)
    return _sorting(-(-n // 32), tiles * a_tile, n, k, loads=tiles * (2 + _passes(min(n, tile))))


def lines(seed: int) -> Iterator[Line]:
    """Yield the lines of masked_topk, then those of the other models.

    Raises:
        AssertionError: The kernel's result differs from a stable sort's.
    """
    emulator = Emulator()
    random = np.random.default_rng(seed)
    for n in LENGTHS:
        logits = random.normal(size=(ROWS, n)).astype(np.float32)
        for kept in KEPT:
            mask = random.random((ROWS, n)) < kept
            for k in KS:
                value, index, report = emulator.masked_topk(logits, packed(mask), k, on=Machine(1))
                scores = np.where(mask, logits, -np.inf)
                order = np.argsort(-scores, axis=1, kind="stable")[:, : value.shape[1]]
                want = np.take_along_axis(scores, order, axis=1)
                assert np.array_equal(value[:, : want.shape[1]], want), "masked_topk is wrong"
                found = np.where(want > -np.inf, order, -1)
                assert np.array_equal(index[:, : want.shape[1]], found), "masked_topk is wrong"
                ours_us = modelled_us({name: count / ROWS for name, count in report.total.items()})
                case = f"n={n} k={k} kept={kept:.0%}"
                for name, counts in (
                    ("full sort", full_sort(n, k)),
                    ("top-k, no filter", plain_topk(n, k, report.tile)),
                ):
                    us = modelled_us(counts)
                    yield compared("emulator", case, ours_us, "us (model)", name, us, us / ours_us)
    yield from hstu_model.lines(seed)
    yield from hstu_model.chains(seed)
    yield from hstu_sizes.lines(seed)
    yield from generate_model.lines(seed)
