"""The modelled cost of a generate on an Ascend 910B: the last part of `benchmarks emulator`.

This is a model: no NPU has run it. A prompt of 1,024 tokens, then three levels of 8,192 codes: the
first is selected for one row, the others for all beams. The CPU emulator counts `csr_gather_topk`
and `beam_fork` at full size, on their busiest cores; products and vendor kernels are computed from
flops and bytes, as in `hstu_model.py`. The roof is the same work without overheads: flops at the
cube units' peak, or bytes at HBM's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.emulator_costs import modelled_us
from benchmarks.frame import Line, compared
from benchmarks.hstu_model import (
    BATCHED_SHARE,
    COLUMNS,
    CORES,
    CUBE_FLOP_PER_US,
    DENSE_SHARE,
    HBM_BYTES_PER_US,
    LAUNCH_US,
    VENDOR_US,
    CostColumn,
    product_us,
)
from tests.ops.ascend_emulator import Emulator, Machine

PROMPT = 1024
CODES = 8192
BEAMS = (128, 512)
LAYERS = 8
DIM = 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
MLP = 768
VENDOR_KERNELS = 6  # per layer: two norms, rotation, attention's start, gate, residuals
LAYER_LAUNCHES = 12  # those, four products, attention's two
STEP_LAUNCHES = 8  # of a level behind the layers: head, log-sum-exp, mask, selection, fork
GAPS_US = (2.0, 5.0)
# in and out of each product of a layer
PRODUCTS = (
    (DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    (HEADS * HEAD_DIM, DIM),
    (DIM, 2 * MLP),
    (MLP, DIM),
)


class Cost(NamedTuple):
    """Modelled time, roof and launches."""

    us: float
    roof_us: float
    launches: int

    def plus(self, other: Cost) -> Cost:
        """Add field by field."""
        return Cost(
            self.us + other.us, self.roof_us + other.roof_us, self.launches + other.launches
        )


def lines(seed: int) -> Iterator[Line]:
    """Yield the prefill, the step of each number of beams, and whole generates."""
    emulator = Emulator()
    column = COLUMNS[-1]  # what the columns differ in is a small part of it
    prefill = _layers(PROMPT, PROMPT / 2, column)
    yield _line(f"generate: prefill of {PROMPT:,} tokens", prefill)
    first = _selection(emulator, 1, BEAMS[-1], seed, column)
    for beams in BEAMS:
        step = _layers(beams, PROMPT, column)
        step = step.plus(_selection(emulator, beams, beams, seed, column))
        yield _line(f"generate: step of {beams} beams x {CODES:,} codes", step)
        yield _line(f"generate: {beams} beams, 3 levels", prefill.plus(first).plus(step).plus(step))


def _roof_us(flops: float, moved: float) -> float:
    return max(flops / CUBE_FLOP_PER_US, moved / HBM_BYTES_PER_US)


def _layers(rows: int, keys: float, column: CostColumn) -> Cost:
    """Model all layers for `rows` tokens, each of which reads `keys` keys."""
    us = roof_us = 0.0
    for inputs, outputs in PRODUCTS:
        us += product_us(1, rows, inputs, outputs, column, DENSE_SHARE)
        moved = 2 * (rows * (inputs + outputs) + inputs * outputs)
        roof_us += _roof_us(2.0 * rows * inputs * outputs, moved)
    # the group's query heads read their KV head's keys once; the scores stay on the chip
    flops = 4.0 * HEADS * rows * keys * HEAD_DIM
    attention_us = _roof_us(flops, 4.0 * keys * KV_HEADS * HEAD_DIM)
    us += attention_us / BATCHED_SHARE + VENDOR_KERNELS * VENDOR_US
    return Cost(LAYERS * us, LAYERS * (roof_us + attention_us), LAYERS * LAYER_LAUNCHES)


def _selection(emulator: Emulator, rows: int, k: int, seed: int, column: CostColumn) -> Cost:
    """Model the head of a level, the selection of k of its edges, and the fork of the beams."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, CODES)).astype(np.float32)
    degree = np.full(rows, CODES // 8 if rows > 1 else CODES, np.int32)
    lo = np.zeros(rows, np.int32)
    code = np.sort(random.permutation(CODES)[: degree[0]]).astype(np.int32)
    acc = np.sort(random.normal(size=rows).astype(np.float32))[::-1].copy()
    norm = np.log(np.exp(logits).sum(1))
    *_, report = emulator.csr_gather_topk(
        logits, norm, acc, lo, degree, code, None, k, on=Machine(CORES)
    )
    us = modelled_us({name: float(n) for name, n in report.critical.items()})
    us += report.launches * LAUNCH_US
    if rows > 1:
        slots = 2, KV_HEADS, HEAD_DIM
        planes = [np.zeros((LAYERS, rows, *slots), np.uint16) for _ in range(2)]
        parent = np.sort(random.integers(0, rows, rows)).astype(np.int32)
        forked = emulator.beam_fork(planes[0], planes[1], parent, 1, on=Machine(CORES))
        us += modelled_us({name: float(n) for name, n in forked.critical.items()}) + LAUNCH_US
    us += product_us(1, rows, DIM, CODES, column, DENSE_SHARE) + 3 * VENDOR_US
    moved = 2.0 * DIM * CODES + 4.0 * rows * CODES
    return Cost(us, _roof_us(2.0 * rows * DIM * CODES, moved), STEP_LAUNCHES)


def _line(case: str, cost: Cost) -> Line:
    more = " and ".join(f"{(cost.us + cost.launches * gap) / 1e3:.2f}" for gap in GAPS_US)
    return compared(
        "emulator",
        case,
        cost.us / 1e3,
        "ms (model)",
        f"the roof; with gaps of 2 and 5 us {more} ms",
        cost.roof_us / 1e3,
        cost.roof_us / cost.us,
    )
