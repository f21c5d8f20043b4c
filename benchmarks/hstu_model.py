"""The modelled cost of an HSTU pass on a 910B: the second part of `benchmarks emulator`.

This is a model: no NPU has run the kernels.

The CPU emulator counts the three kernels of a layer at full size; a launch takes the slowest of its
vector work and its two movers, on its busiest core. Products and vendor kernels are computed from
flops and bytes. The host's time is reported too: the number of launches times the time of a
dispatch, for passes that are not one graph.

Each case is computed with two columns of public constants: Huawei's operator generator (autofuse),
and counts that pto-isa calibrated on a 910B3; if the second has no figure, the first is used for
both. `docs/measured/ascend.md` has the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.frame import Line, compared
from npu_gr.backend.calls import BiasTables
from npu_gr.backend.npu.hstu_batch import Entry, batch_times, layer_tables, relative
from npu_gr.backend.npu.hstu_slots import PassSlots, key_slots, row_slots
from tests.ops.ascend_emulator import KINDS, Emulator, Machine
from tests.ops.hstu_emulator import HstuSizes, hstu_finish, hstu_rows, hstu_scores

HEADS = 4
DIM = 64  # per head
LAYERS = 8
PAGE_TOKENS = 128
CHUNK_TOKENS = 1024
CORES = 40  # vector cores of the smallest 910B
CLOCK_PER_US = 1850.0
LAUNCH_US = 1.25  # overhead of a launch: 300 + 1517 + 497 cycles
WIDTH = HEADS * DIM

# by kind: cycles of an element, cycles of an instruction
Costs = dict[str, tuple[float, float]]
Counts = Sequence[dict[str, int]]  # counters of each core
AUTOFUSE: Costs = {
    "with_scalar": (0.0141, 22),
    "with_tensor": (0.0206, 23),
    "exp": (0.0307, 28),
    "div": (0.0454, 29),
    "compare": (0.0161, 22),
    "select": (0.0229, 44),
    "widen": (0.0147, 20),
    "narrow": (0.0087, 20),
    "gather": (0.1875, 15),
    "compact": (0.0313, 14),
}
CALIBRATED: Costs = {
    "with_scalar": (1 / 64, 26),
    "with_tensor": (2.1 / 64, 24),
    "exp": (2 / 64, 31),
    "div": (4.03 / 64, 31),
    "compare": (2 / 64, 27),
    "select": (2 / 64, 27),
    "widen": (2 / 64, 32),
    "narrow": (2 / 64, 32),
    "gather": AUTOFUSE["gather"],
    "compact": (14 / 64, 14),
}
CUBE_FLOP_PER_US = 303e6  # 20 cube cores, bf16
BATCHED_SHARE = 0.8  # share of it that batched products reach; assumed
DENSE_SHARE = 0.5  # share of it that linear layers reach; assumed
HBM_BYTES_PER_US = 1.6e6
PRODUCT_US = 2.0  # start-up of a product; assumed
VENDOR_US = 3.0  # time of a small vendor kernel; assumed
VENDOR_KERNELS = 3  # per layer: norm, cast, residual
LAUNCHES = 10  # per layer: those, two linear layers, our three, two products
LAST_VENDOR_KERNELS = 2  # of a prefill's last layer, which has no residual
LAST_LAUNCHES = 4  # of a prefill's last layer: those, a linear layer, hstu_rows
DISPATCH_US = (5.0, 10.0)  # host time of a launch


class CostColumn(NamedTuple):
    """One set of constants."""

    name: str
    costs: Costs
    output_bytes_per_us: float  # output bandwidth of a product


COLUMNS = (
    CostColumn("autofuse", AUTOFUSE, 20 * 70 * 2**30 / 1e6),
    CostColumn("calibrated", CALIBRATED, 20 * 41 * 2**30 / 1e6),
)


def kernel_us(cores: Counts, column: CostColumn) -> float:
    """Model a launch of one of our kernels by its slowest core.

    Args:
        cores: Counters of each core.
        column: The constants.
    """
    return max(core_us(counts, column, len(cores)) for counts in cores) + LAUNCH_US


def core_us(counts: dict[str, int], column: CostColumn, cores: int) -> float:
    """Model one of `cores` cores: the slowest of its vector work and its movers."""
    vector = sum(
        column.costs[kind][0] * counts[f"{kind}_elements"]
        + column.costs[kind][1] * counts[f"{kind}_instructions"]
        for kind in KINDS
    )
    long_bytes = counts["mte2_long_bytes"]
    load = long_bytes / (9.91 + 15.9 / cores) + (counts["mte2_bytes"] - long_bytes) / (
        7.91 + 7.31 / cores
    )
    store = counts["mte3_bytes"] / (9.96 + 3.79 / cores)
    return max(vector, load, store) / CLOCK_PER_US


def product_us(batch: int, m: int, k: int, n: int, column: CostColumn, share: float) -> float:
    """Model a vendor's product of [batch, m, k] and [batch, k, n] in bf16."""
    flop_us = 2.0 * batch * m * k * n / (share * CUBE_FLOP_PER_US)
    input_us = 2 * batch * (m * k + k * n) / HBM_BYTES_PER_US
    return max(flop_us, 2 * batch * m * n / column.output_bytes_per_us, input_us) + PRODUCT_US


class Layer(NamedTuple):
    """The counters of each core in our three kernels of one layer, and its sizes.

    The last layer of a prefill only fills pages: its queries are not needed.
    """

    rows: Counts
    scores: Counts
    finish: Counts
    num_rows: int
    row_slots: int
    key_slots: int
    requests: int = 1

    def us(self, column: CostColumn) -> float:
        """Model the layer."""
        ours = sum(
            kernel_us(cores, column) for cores in (self.rows, self.scores, self.finish) if cores
        )
        if not self.scores:  # only keys and values
            linear_us = product_us(1, self.num_rows, WIDTH, 4 * WIDTH, column, DENSE_SHARE)
            return ours + linear_us + LAST_VENDOR_KERNELS * VENDOR_US
        batch = self.requests * HEADS
        batched = (
            product_us(batch, self.row_slots, DIM, self.key_slots, column, BATCHED_SHARE),
            product_us(batch, self.row_slots, self.key_slots, DIM, column, BATCHED_SHARE),
        )
        linear = (
            product_us(1, self.num_rows, WIDTH, 4 * WIDTH, column, DENSE_SHARE),
            product_us(1, self.num_rows, WIDTH, WIDTH, column, DENSE_SHARE),
        )
        return ours + sum(batched) + sum(linear) + VENDOR_KERNELS * VENDOR_US


def counted(
    emulator: Emulator,
    cached: int,
    new: int,
    candidates: int,
    seed: int,
    cores: int = CORES,
    is_last: bool = False,
    requests: int = 1,
    padded: PassSlots | None = None,
    heads: int = HEADS,
) -> Layer:
    """Run a layer's kernels on the emulator, for a user's rows behind `cached` tokens.

    Args:
        emulator: The emulator.
        cached, new, candidates: Sizes of a request.
        seed: Seed of the times.
        cores: Vector cores.
        is_last: Whether it is the last layer.
        requests: Equal requests of the pass.
        padded: Sizes of the pass; None = as without graphs.
        heads: Heads of a row.
    """
    random = np.random.default_rng(seed)
    rows = new + candidates
    asking = candidates if is_last else rows
    entry = Entry(asking, cached + rows, cached, candidates, 0, 0, 0, int(new > 0))
    slots = row_slots(asking), key_slots(entry.keys)
    if padded is not None:
        slots = padded.rows, padded.keys
    sizes = HstuSizes(requests, *slots, heads, DIM, DIM, "bfloat16")
    gaps_s = np.where(random.random(cached + new) < 0.9, 40, 30_000) * random.exponential(
        size=cached + new
    )
    history = gaps_s.astype(np.int64).cumsum()  # sessions of ten events, hours apart
    times = relative(history, int(history[-1]) + 60, candidates)
    assert times is not None
    entries = [
        entry._replace(first_row=number * rows, first_query=number * asking)
        for number in range(requests)
    ]
    laid = batch_times(entries, [times] * requests, *slots)
    tables = layer_tables(BiasTables(torch.zeros(heads, 256), torch.zeros(heads, 64)))
    on = Machine(cores)
    meta = np.array(entries, np.int32)

    def numbers(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
        return np.zeros(shape, np.uint16)

    pages = -(-(cached + new) // PAGE_TOKENS)
    planes = numbers(pages, PAGE_TOKENS, heads, DIM), numbers(pages, PAGE_TOKENS, heads, DIM)
    q, k, v = (numbers(requests, heads, count, DIM) for count in (slots[0], slots[1], slots[1]))
    u = numbers(requests * asking, heads * DIM)
    ids = np.arange(pages, dtype=np.int32)
    hstu_rows(
        emulator,
        sizes,
        numbers(requests * rows, 4 * heads * DIM),
        meta,
        ids,
        planes,
        (q, k, v, u),
        q_scale=-0.125,
        silu_all=True,
        on=on,
    )
    made = emulator.cores()
    if not asking:
        return Layer(made, (), (), requests * rows, *slots, requests)
    scores = numbers(requests, heads, *slots)
    hstu_scores(
        emulator,
        sizes,
        scores,
        meta,
        laid.bounds,
        laid.rows,
        laid.keys,
        tables.times.numpy(),
        tables.near.numpy(),
        on=on,
    )
    weighed = emulator.cores()
    norm = np.ones((2, heads * DIM), np.float32)
    out = numbers(requests * asking, 1, heads * DIM)
    hstu_finish(
        emulator,
        sizes,
        numbers(requests, heads, slots[0], DIM),
        u,
        norm,
        meta,
        out,
        scale=-1e-3,
        eps=1e-6,
        on=on,
    )
    return Layer(made, weighed, emulator.cores(), requests * rows, *slots, requests)


def chained_us(whole: Layer, part: Layer, chains: int, column: CostColumn) -> float:
    """Model a layer whose heads are divided among streams: chains of product, scores, product.

    Cube cores then work on one chain while vector cores weigh the scores of another. Products wait
    for cube cores in order, all first products first; `hstu_scores` for vector cores.

    Args:
        whole: The layer.
        part: The same with the heads of one chain.
        chains: Number of chains.
        column: The constants.
    """
    batch, rows, keys = HEADS // chains, part.row_slots, part.key_slots
    first_us = product_us(batch, rows, DIM, keys, column, BATCHED_SHARE)
    second_us = product_us(batch, rows, keys, DIM, column, BATCHED_SHARE)
    scores_us = kernel_us(part.scores, column)
    vector_free_us, cube_free_us = 0.0, chains * first_us
    for chain in range(1, chains + 1):
        vector_free_us = max(vector_free_us, chain * first_us) + scores_us
        cube_free_us = max(cube_free_us, vector_free_us) + second_us
    batch, rows, keys = HEADS, whole.row_slots, whole.key_slots
    in_turn_us = product_us(batch, rows, DIM, keys, column, BATCHED_SHARE)
    in_turn_us += product_us(batch, rows, keys, DIM, column, BATCHED_SHARE)
    in_turn_us += kernel_us(whole.scores, column)
    return whole.us(column) - in_turn_us + cube_free_us


def chains(
    seed: int, lengths: Sequence[int] = (4160, 15_000), candidates: int = 512
) -> Iterator[Line]:
    """Yield ranks in two and four chains against one after the other: a design, not our code."""
    emulator = Emulator()
    for tokens in lengths:
        whole = counted(emulator, tokens, 0, candidates, seed)
        for number in (2, 4):
            part = counted(emulator, tokens, 0, candidates, seed, heads=HEADS // number)
            for column in COLUMNS:
                ours_ms = LAYERS * chained_us(whole, part, number, column) / 1e3
                plain_ms = LAYERS * whole.us(column) / 1e3
                case = f"rank {candidates} of {tokens:,} tokens in {number} chains, {column.name}"
                yield compared(
                    *("emulator", case, ours_ms, "ms (model)", "in one chain, as our code"),
                    *(plain_ms, plain_ms / ours_ms),
                )


def lines(
    seed: int, history: int = 4096, suffix: int = 64, candidates: int = 512
) -> Iterator[Line]:
    """Yield a rank with a cached prefix, and a prefill, each with both columns."""
    emulator = Emulator()
    chunks = [
        (start, min(CHUNK_TOKENS, history - start)) for start in range(0, history, CHUNK_TOKENS)
    ]
    cases = (
        (
            f"rank {candidates} of {history + suffix} tokens",
            [(history + suffix, 0, candidates)],
            0.8,
        ),
        (
            f"prefill {history} in chunks of {CHUNK_TOKENS}",
            [(start, count, 0) for start, count in chunks],
            3.5,
        ),
    )
    for name, passes, target_ms in cases:
        layers = [counted(emulator, *sizes, seed) for sizes in passes]
        last = [counted(emulator, *sizes, seed, is_last=True) for sizes in passes]
        launches = sum(
            LAUNCHES * (LAYERS - 1) + (LAUNCHES if layer.scores else LAST_LAUNCHES)
            for layer in last
        )
        host_ms = launches * DISPATCH_US[0] / 1e3, launches * DISPATCH_US[1] / 1e3
        for column in COLUMNS:
            ours_us = (LAYERS - 1) * sum(layer.us(column) for layer in layers) + sum(
                layer.us(column) for layer in last
            )
            ours_ms = ours_us / 1e3
            host = f"target in graphs; eager dispatch {host_ms[0]:.1f} to {host_ms[1]:.1f} ms more"
            case = f"{name}, {LAYERS} layers, {column.name}"
            yield compared(
                "emulator", case, ours_ms, "ms (model)", host, target_ms, target_ms / ours_ms, 1.0
            )
