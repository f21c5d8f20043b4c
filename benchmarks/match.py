"""`python -m benchmarks match`: exact top-k over a million items, against torch, numpy and faiss.

The vectors are random, which is the hardest case for the threshold, because nothing clusters. Every
result, also of a baseline, is compared with numpy's before it is timed. Times are CPU time of the
process on one thread, so that other processes do not count. The figure of the approximate index is
its recall.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.frame import SEED, Line, option, percentiles, timed, timed_for, timed_in_turn
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import F32
from npu_gr.vector_search.matcher import ExactIndex, HnswIndex, recall

OPTIONS = (
    option("--items", default=1_000_000, type=click.IntRange(1000), help="Items of the catalogue."),
    SEED,
    timed_for(5.0),
)
DIM = 64
K = 500
BATCHES = (1, 2, 4, 8, 32)
TARGET = 0.9  # relative to the fastest baseline's speed
HNSW_ITEMS = 100_000
HNSW_QUERIES = 50
HNSW_K = 100
HNSW_RECALL = 0.95  # at least


def numpy_top_k(queries: F32, items: F32, k: int) -> tuple[F32, npt.NDArray[np.int64]]:
    """Compute all scores, partition them, sort the best: the baseline in numpy.

    Args:
        queries: float32 [b, d].
        items: float32 [n, d].
        k: Number of items, <= n.

    Returns:
        Scores and rows of the items, both [b, k], best first.
    """
    scores = queries @ items.T
    some = np.argpartition(scores, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(scores, some, 1), axis=1)
    rows = np.take_along_axis(some, order, 1)
    return np.take_along_axis(scores, rows, 1), rows


def torch_top_k(queries: Tensor, items: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute all scores, then `topk`: the baseline in torch."""
    found = torch.mm(queries, items.T).topk(k)
    return found.values, found.indices


def lines(items: int, seed: int, seconds: float) -> Iterator[Line]:
    """Yield a line for each batch size, and one for the approximate index.

    Args:
        items: Number of items of the catalogue.
        seed: Random seed of the vectors.
        seconds: Seconds of each batch size.

    Raises:
        AssertionError: A result is wrong; it was not timed.
    """
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((items, DIM), np.float32)
    table = torch.from_numpy(vectors)
    flat = _flat(vectors)
    backend = CPUBackend()
    exact = ExactIndex(vectors, backend)
    for batch in BATCHES:
        queries = random.standard_normal((batch, DIM), np.float32)
        run = partial(exact.search, torch.from_numpy(queries), K)
        ours = run()
        scores, rows = numpy_top_k(queries, vectors, K)
        _check("ours", ours.scores.numpy(), ours.items.numpy(), scores, rows)
        baselines: dict[str, Callable[[], Any]] = {
            "torch mm + topk": partial(torch_top_k, torch.from_numpy(queries), table, K),
            "numpy": partial(numpy_top_k, queries, vectors, K),
        }
        if flat is not None:
            baselines["faiss IndexFlatIP"] = partial(flat.search, queries, K)
        for name, search in baselines.items():
            found, found_rows = map(np.asarray, search())
            _check(name, found, found_rows, scores, rows)
        samples = timed_in_turn([run, *baselines.values()], seconds, clock=time.process_time)
        times = dict(zip(baselines, samples[1:], strict=True))
        fastest = min(times, key=lambda name: percentiles(times[name])[0])
        case = f"I={items} d={DIM} k={K} B={batch} {backend.kernels}"
        baseline = f"the fastest of {', '.join(baselines)}: {fastest}"
        yield timed("match", case, samples[0], baseline, times[fastest], TARGET, unit="ms CPU")
    if flat is not None:
        yield _hnsw(random)


def _check(
    name: str, scores: F32, rows: npt.NDArray[np.int64], want: F32, want_rows: npt.NDArray[np.int64]
) -> None:
    assert np.allclose(scores, want, atol=1e-4), f"{name}: other scores than numpy"
    # rounding may swap near-equal sums
    assert (rows == want_rows).mean() > 0.99, f"{name}: other items than numpy"


def _hnsw(random: np.random.Generator) -> Line:
    centres = random.standard_normal((1000, DIM), np.float32)
    clusters = random.integers(0, 1000, HNSW_ITEMS + HNSW_QUERIES)
    noise = random.standard_normal((len(clusters), DIM), np.float32)
    rows: F32 = (centres[clusters] + noise * np.float32(0.5)).astype(np.float32)
    items = rows[:HNSW_ITEMS]
    queries = torch.from_numpy(rows[HNSW_ITEMS:])
    exact = ExactIndex(items, CPUBackend())
    near = HnswIndex(items)
    found = recall(near.search(queries, HNSW_K), exact.search(queries, HNSW_K))
    runs: list[Callable[[], object]] = [
        partial(i.search, queries[:1], HNSW_K) for i in (near, exact)
    ]
    ours, baseline = timed_in_turn(runs, 1.0, clock=time.process_time)
    case = f"hnsw I={HNSW_ITEMS} k={HNSW_K} B=1 recall {found:.3f}"
    return replace(
        timed("match", case, ours, "exact", baseline, unit="ms CPU"), ok=found >= HNSW_RECALL
    )


def _flat(vectors: F32) -> Any:
    """Make the exact index of faiss, with torch's number of threads; None = not installed."""
    try:
        faiss = importlib.import_module("faiss")
    except ImportError:
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    flat = faiss.IndexFlatIP(DIM)
    flat.add(vectors)
    return flat
