"""`npu-gr bench match`: exact top-k over a million items, against numpy and faiss in the same run.

Random vectors, which is the hardest case for the threshold: nothing clusters. Every answer is checked against numpy's
before it is timed. CPU time of the process, on one thread, so that neighbours on the machine do not count. The
approximate index has its recall as its figure.
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

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.bench.line import Line, percentiles
from npu_gr.core.request import F32
from npu_gr.matching.index import ExactIndex, HnswIndex, recall

DIM, K, BATCHES = 64, 500, (1, 2, 4, 8, 32)
TARGET = 0.9  # of the faster baseline's speed
HNSW_ITEMS, HNSW_QUERIES, HNSW_K, HNSW_RECALL = 100_000, 50, 100, 0.95


def numpy_top_k(queries: F32, items: F32, k: int) -> tuple[F32, npt.NDArray[np.int64]]:
    """All scores, partitioned, then the best sorted."""
    scores = queries @ items.T
    some = np.argpartition(scores, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(scores, some, 1), axis=1)
    rows = np.take_along_axis(some, order, 1)
    return np.take_along_axis(scores, rows, 1), rows


def lines(num_items: int, seed: int, budget_s: float) -> Iterator[Line]:
    """A line a batch size, and one for the approximate index. A wrong answer is an AssertionError."""
    random = np.random.default_rng(seed)
    items = random.standard_normal((num_items, DIM), np.float32)
    faiss, flat = _faiss(), None
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
        samples = _cpu_in_turn([run, *baselines.values()], budget_s)
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
    items, queries = rows[:HNSW_ITEMS], torch.from_numpy(rows[HNSW_ITEMS:])
    exact, near = ExactIndex(items, CPUBackend()), HnswIndex(items)
    found = recall(near.search(queries, HNSW_K), exact.search(queries, HNSW_K))
    runs: list[Callable[[], object]] = [partial(i.search, queries[:1], HNSW_K) for i in (near, exact)]
    ours, baseline = (percentiles(row)[0] for row in _cpu_in_turn(runs, 1.0))
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


def _cpu_in_turn(functions: list[Callable[[], object]], budget_s: float, min_runs: int = 5) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    ends_at = time.perf_counter() + budget_s
    while len(samples[0]) < min_runs or time.perf_counter() < ends_at:
        for function, row in zip(functions, samples, strict=True):
            began_at = time.process_time()
            function()
            row.append(time.process_time() - began_at)
    return samples


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        return None
