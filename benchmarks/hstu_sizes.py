"""The model of an Ascend 910B at the sizes of the papers: the third part of `benchmarks emulator`.

Ranks and prefills of 2,000 to 15,000 tokens by `hstu_model.py`, padded to the sizes of device
graphs, each with its roof: flops at the cube units' peak, or bytes at HBM's bandwidth, whichever
takes longer. A gap between dependent kernels is not known, so the cases say what 2 and 5 us add.
The chunks of a prefill cost an affine function of the tokens before them: the first and last are
counted. Then a trace: the share of its passes that find a graph captured before ready, and the
padding of their scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import rank
from benchmarks.frame import Line, compared
from benchmarks.hstu_model import (
    CHUNK_TOKENS,
    COLUMNS,
    CUBE_FLOP_PER_US,
    DIM,
    HBM_BYTES_PER_US,
    HEADS,
    LAST_LAUNCHES,
    LAUNCHES,
    LAYERS,
    WIDTH,
    CostColumn,
    Layer,
    counted,
)
from npu_gr.backend.npu.hstu_slots import graph_shapes, graph_slots, score_blocks
from npu_gr.backend.npu.limits import Slots
from tests.ops.ascend_emulator import Emulator

LENGTHS = (2000, 4000, 8000, 15_000)
REQUESTS = (1, 4, 8)
CANDIDATES = 512
GAPS_US = (2.0, 5.0)
PASSES = 20_000  # of a trace


class Trace(NamedTuple):
    """Ranks of a trace; lengths are even between their bounds."""

    tokens: tuple[int, int]
    candidates: tuple[int, int]
    batch: str  # one, mean 2 (geometric), or even from 1 to 8


TRACES = (
    Trace((2000, 15_000), (512, 512), "one"),
    Trace((200, 15_000), (50, 512), "mean 2"),
    Trace((200, 15_000), (50, 512), "even"),
)


def lines(seed: int) -> Iterator[Line]:
    """Yield ranks, prefills, then traces."""
    emulator = Emulator()
    for tokens in LENGTHS:
        for requests in REQUESTS:
            yield from _ranks(emulator, tokens, requests, seed)
    for tokens in LENGTHS:
        yield from _prefills(emulator, tokens, seed)
    for trace in TRACES:
        yield from _traced(trace, seed)


def _ranks(emulator: Emulator, tokens: int, requests: int, seed: int) -> Iterator[Line]:
    padded = graph_slots(requests, CANDIDATES, tokens + CANDIDATES)
    slots = Slots(*padded[:3], HEADS, DIM, DIM, torch.bfloat16)
    blocks = len(score_blocks(slots, [padded.rows] * padded.requests))
    together = padded.requests // blocks
    layer = counted(emulator, tokens, 0, CANDIDATES, seed, requests=together, padded=padded)
    roof_us = _roof_us(requests, tokens, CANDIDATES, is_cached=True)
    case = f"rank {CANDIDATES} of {tokens:,} tokens, {requests} at once"
    for column in COLUMNS:
        yield _line(
            case, column, LAYERS * blocks * layer.us(column), roof_us, LAYERS * blocks * LAUNCHES
        )


def _prefills(emulator: Emulator, tokens: int, seed: int) -> Iterator[Line]:
    chunks = -(-tokens // CHUNK_TOKENS)
    ends = (0, (chunks - 1) * CHUNK_TOKENS)
    layers = [counted(emulator, start, CHUNK_TOKENS, 0, seed) for start in ends]
    last = [counted(emulator, start, CHUNK_TOKENS, 0, seed, is_last=True) for start in ends]
    launches = chunks * (LAUNCHES * (LAYERS - 1) + LAST_LAUNCHES)
    roof_us = _roof_us(1, tokens, 0, is_cached=False)
    for column in COLUMNS:

        def mean_us(two: list[Layer], column: CostColumn = column) -> float:
            return sum(layer.us(column) for layer in two) / 2

        ours_us = chunks * ((LAYERS - 1) * mean_us(layers) + mean_us(last))
        yield _line(f"prefill {tokens:,} tokens", column, ours_us, roof_us, launches)


def _roof_us(requests: int, tokens: int, candidates: int, *, is_cached: bool) -> float:
    shape = rank.config(LAYERS, WIDTH)
    flops = rank.flops(shape, tokens, candidates, is_cached)
    moved = LAYERS * 2 * (2 * tokens * WIDTH + 5 * WIDTH * WIDTH)
    return requests * max(flops / CUBE_FLOP_PER_US, moved / HBM_BYTES_PER_US)


def _line(case: str, column: CostColumn, ours_us: float, roof_us: float, launches: int) -> Line:
    more = " and ".join(f"{(ours_us + launches * gap) / 1e3:.2f}" for gap in GAPS_US)
    return compared(
        "emulator",
        f"{case}, {column.name}",
        ours_us / 1e3,
        "ms (model)",
        f"the roof; with gaps of 2 and 5 us {more} ms",
        roof_us / 1e3,
        roof_us / ours_us,
    )


def _traced(trace: Trace, seed: int) -> Iterator[Line]:
    """Yield the share of passes that find a graph, and how much of their scores is padding."""
    random = np.random.default_rng(seed)
    captured = {shape[:3] for shape in graph_shapes(8, trace.tokens[1], CHUNK_TOKENS)}
    found = used = cells = 0
    for _ in range(PASSES):
        requests = {
            "one": 1,
            "mean 2": min(8, int(random.geometric(0.5))),
            "even": int(random.integers(1, 9)),
        }[trace.batch]
        tokens = random.integers(trace.tokens[0], trace.tokens[1] + 1, requests)
        rows = random.integers(trace.candidates[0], trace.candidates[1] + 1, requests)
        padded = graph_slots(requests, int(rows.max()), int((tokens + rows).max()))
        found += padded[:3] in captured
        used += int((rows * (tokens + rows)).sum())
        cells += padded.requests * padded.rows * padded.keys
    name = (
        f"trace of {trace.tokens[0]:,} to {trace.tokens[1]:,} tokens, {trace.candidates[0]} to "
        f"{trace.candidates[1]} candidates, batches: {trace.batch}"
    )
    share = 100 * found / PASSES
    words = f"{len(captured)} graphs; {1 - used / cells:.0%} of the scores are padding"
    yield compared("emulator", name, share, "% find a graph", words, 100.0, share / 100, 0.99)
