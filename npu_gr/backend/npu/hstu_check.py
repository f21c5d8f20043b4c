"""Cases for the check of the HSTU operators on a device: a batch of every kind of request, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.calls import BiasTables
from npu_gr.backend.npu.hstu_batch import Entry, batch_times, layer_tables, relative

# Of a result's greatest number: the device's exponential, division and root may be a few units in the last place off,
# and a rounding to 16 bits may then go the other way.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HEADS = 4
DIM = 64
PAGE_TOKENS = 64
KEYS = 1024
ROWS = 64
# a chunk, a rank on a prefix, both in one, a first chunk
ENTRIES = (
    Entry(64, 964, 900, 0, 0, 0, 0, 1),
    Entry(50, 650, 600, 50, 16, 64, 64, 0),
    Entry(40, 340, 300, 15, 26, 114, 114, 1),
    Entry(33, 33, 0, 0, 32, 154, 154, 1),
)


def cases(name: str) -> Iterator[list[Any]]:
    """Yield arguments of `hstu_rows`, `hstu_scores` or `hstu_finish`."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    meta = torch.tensor(ENTRIES, dtype=torch.int32)
    batch = len(ENTRIES)
    queries = sum(e.rows for e in ENTRIES)
    width = HEADS * DIM
    for dtype in TOLERANCE:
        if name == "hstu_rows":
            planes = [numbers(40, PAGE_TOKENS, HEADS, DIM).to(dtype) for _ in range(2)]
            ids = torch.randperm(40, generator=generator)[:33].int()
            made = [torch.zeros(batch, HEADS, slots, DIM, dtype=dtype) for slots in (ROWS, KEYS, KEYS)]
            mixed = numbers(queries, 4 * width).to(dtype)
            yield [mixed, meta, ids, *planes, *made, torch.zeros(queries, width, dtype=dtype), -0.125, True]
        elif name == "hstu_scores":
            random = np.random.default_rng(0)
            times = []
            for e in ENTRIES:
                history = random.integers(0, 90_000, e.keys - e.targets).cumsum()
                found = relative(history, int(history[-1]) + 7, e.targets)
                assert found is not None
                times.append(found)
            laid = batch_times(ENTRIES, times, ROWS, KEYS)
            tables = layer_tables(BiasTables(numbers(HEADS, 256), numbers(HEADS, 64)))
            arrays = [torch.from_numpy(x) for x in (laid.bounds, laid.rows, laid.keys)]
            scores = (numbers(batch, HEADS, ROWS, KEYS) * 3).to(dtype)
            yield [scores, meta, *arrays, tables.times, tables.near, -0.3]
        else:
            attention = numbers(batch, HEADS, ROWS, DIM).to(dtype)
            u = numbers(queries, width).to(dtype)
            for group, parts in ((DIM, 3), (width, 1)):
                yield [
                    attention,
                    u,
                    numbers(2, group),
                    meta,
                    torch.zeros(queries, parts, width, dtype=dtype),
                    -0.1,
                    1e-6,
                ]
