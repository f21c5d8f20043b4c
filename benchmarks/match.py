"""`python -m benchmarks match`: exact top-k over a million items, beside numpy and faiss in the same run.

The vectors are random, which is the hardest case for the threshold: nothing clusters. Every answer is compared with
numpy's before it is timed. Times are the process' CPU time on one thread, so other processes on the machine do not
count. Of the approximate index the recall is the figure.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.line import Line, percentiles, timed_in_turn
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import F32
from npu_gr.matching.matcher import ExactIndex, HnswIndex, recall

DIM = 64
K = 500
BATCHES = (1, 2, 4, 8, 32)
TARGET = 0.9  # of the faster baseline's speed
HNSW_ITEMS = 100_000
HNSW_QUERIES = 50
HNSW_K = 100
HNSW_RECALL = 0.95  # at least


def numpy_top_k(queries: F32, items: F32, k: int) -> tuple[F32, npt.NDArray[np.int64]]:
    """The baseline: compute all scores, partition them, sort the best.

    Args:
        queries: float32 [b, d].
        items: float32 [n, d].
        k: at most n.

    Returns:
        Scores and rows of the items, both [b, k], best first.
    """
    scores = queries @ items.T
    some = np.argpartition(scores, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(scores, some, 1), axis=1)
    rows = np.take_along_axis(some, order, 1)
    return np.take_along_axis(scores, rows, 1), rows


def lines(num_items: int, seed: int, budget_s: float) -> Iterator[Line]:
    """One line for each batch size, and one for the approximate index.

    Args:
        num_items: of the catalogue.
        seed: of the vectors.
        budget_s: to time each batch size for.

    Raises:
        AssertionError: an answer is wrong; it was not timed.
    """
    random = np.random.default_rng(seed)
    items = random.standard_normal((num_items, DIM), np.float32)
    faiss = _faiss()
    flat = None
    if faiss is not None:
        faiss.omp_set_num_threads(torch.get_num_threads())
        flat = faiss.IndexFlatIP(DIM)
        flat.add(items)
    backend = CPUBackend()
    exact = ExactIndex(items, backend)
    for batch in BATCHES:
        queries = random.standard_normal((batch, DIM), np.float32)
        run = partial(exact.search, torch.from_numpy(queries), K)
        ours = run()
        scores, rows = numpy_top_k(queries, items, K)
        assert np.allclose(ours.scores.numpy(), scores, atol=1e-4), "other scores than numpy"
        assert (ours.items.numpy() == rows).mean() > 0.99, "other items than numpy"  # near-equal sums may swap
        baselines: dict[str, Callable[[], object]] = {"numpy": partial(numpy_top_k, queries, items, K)}
        if flat is not None:
            baselines["faiss IndexFlatIP"] = partial(flat.search, queries, K)
        samples = timed_in_turn([run, *baselines.values()], budget_s, clock=time.process_time)
        times = {name: percentiles(row)[0] for name, row in zip(baselines, samples[1:], strict=True)}
        fastest = min(times, key=lambda name: times[name])
        p50, p10, p90 = percentiles(samples[0])
        ratio = times[fastest] / p50
        yield Line(
            bench="match",
            case=f"I={num_items} d={DIM} k={K} B={batch} {backend.kernels}",
            ours=p50 * 1e3,
            unit="ms CPU",
            baseline=f"the faster of {' and '.join(baselines)}: {fastest}",
            baseline_value=times[fastest] * 1e3,
            ratio=ratio,
            target=TARGET,
            ok=ratio >= TARGET,
            p10=p10 * 1e3,
            p90=p90 * 1e3,
        )
    if faiss is not None:
        yield _hnsw(random)


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
    runs: list[Callable[[], object]] = [partial(i.search, queries[:1], HNSW_K) for i in (near, exact)]
    ours, baseline = (percentiles(row)[0] for row in timed_in_turn(runs, 1.0, clock=time.process_time))
    return Line(
        bench="match",
        case=f"hnsw I={HNSW_ITEMS} k={HNSW_K} B=1 recall {found:.3f}",
        ours=ours * 1e3,
        unit="ms CPU",
        baseline="exact",
        baseline_value=baseline * 1e3,
        ratio=baseline / ours,
        target=None,
        ok=found >= HNSW_RECALL,
    )


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        return None
