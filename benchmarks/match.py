"""`python -m benchmarks match`: exact top-k over a million items, against torch, numpy and faiss.

The vectors are random, which is the hardest case for the threshold, because nothing clusters. Every
result, also of a baseline, is compared with numpy's before it is timed. Times are CPU time of the
process on one thread, so that other processes do not count.

    exact         passes of one to 32 queries
    approximate   the index `ivf` over clustered items: its recall, and the wall time of single
                  searches; `--only approximate --items 20000000` takes 9 GB and minutes
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.frame import (
    SEED,
    Line,
    compared,
    only,
    option,
    percentiles,
    tell,
    timed,
    timed_for,
    timed_in_turn,
)
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import F32
from npu_gr.vector_search.index import ExactIndex, recall
from npu_gr.vector_search.ivf import PROMISED, IvfIndex

PARTS = ("exact", "approximate")
OPTIONS = (
    option("--items", default=1_000_000, type=click.IntRange(1000), help="Items of the catalogue."),
    SEED,
    timed_for(5.0),
    only(PARTS),
)
DIM = 64
K = 500
BATCHES = (1, 2, 4, 8, 32)
TARGET = 0.9  # relative to the fastest baseline's speed
NEAR_K = 100
NEAR_USERS = 200  # users whose results are compared with the exact ones
NEAR_SEARCHES = 1000  # timed ones, of a user each
NEAR_MS = 20.0  # target of their P99
NOISE = 0.5  # deviation of items from the centre of their cluster, whose own is 1
BLOCK = 1 << 18


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


def lines(items: int, seed: int, seconds: float, parts: Sequence[str]) -> Iterator[Line]:
    """Yield the lines of the parts.

    Args:
        items: Number of items of the catalogue.
        seed: Random seed of the vectors.
        seconds: Seconds of each batch size.
        parts: Parts to run.

    Raises:
        AssertionError: A result is wrong; it was not timed.
    """
    if "exact" in parts:
        yield from _exact(items, seed, seconds)
    if "approximate" in parts:
        yield from _approximate(items, seed)


def _exact(items: int, seed: int, seconds: float) -> Iterator[Line]:
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


def _check(
    name: str, scores: F32, rows: npt.NDArray[np.int64], want: F32, want_rows: npt.NDArray[np.int64]
) -> None:
    assert np.allclose(scores, want, atol=1e-4), f"{name}: other scores than numpy"
    # rounding may swap near-equal sums
    assert (rows == want_rows).mean() > 0.99, f"{name}: other items than numpy"


def _approximate(num_items: int, seed: int) -> Iterator[Line]:
    """Build the index over clustered items, and search for single users.

    A user likes three clusters, so the best items lie around a point between them.
    """
    random = np.random.default_rng(seed)
    num_clusters = max(10, num_items // 1000)
    centres = random.standard_normal((num_clusters, DIM), np.float32)
    items = np.empty((num_items, DIM), np.float32)
    for first in range(0, num_items, BLOCK):
        part = items[first : first + BLOCK]
        random.standard_normal(part.shape, np.float32, out=part)
        part *= np.float32(NOISE)
        part += centres[random.integers(0, num_clusters, len(part))]
    liked = centres[random.integers(0, num_clusters, (2 * NEAR_USERS + NEAR_SEARCHES, 3))].sum(1)
    users: F32 = liked + random.standard_normal(liked.shape, np.float32) * np.float32(NOISE)
    exact = ExactIndex(items, CPUBackend())
    began_at = time.perf_counter()
    near = IvfIndex(items, users[: 2 * NEAR_USERS], exact)
    built_s = time.perf_counter() - began_at
    queries = torch.from_numpy(users[2 * NEAR_USERS :])
    case = f"ivf I={num_items} d={DIM} k={NEAR_K}, {near.num_probes} of {near.num_lists} lists"
    found = recall(
        near.search(queries[:NEAR_USERS], NEAR_K), exact.search(queries[:NEAR_USERS], NEAR_K)
    )
    yield compared(
        "match", f"{case}: recall of users it was not chosen by", found, "of the best",
        "promised", PROMISED, found / PROMISED, 1.0,
    )  # fmt: skip
    took: list[list[float]] = [[], []]
    for number in range(NEAR_SEARCHES):
        one = queries[number : number + 1]
        for index, seconds in zip((near, exact)[: 1 + (number < NEAR_USERS)], took, strict=False):
            began_at = time.perf_counter()
            index.search(one, NEAR_K)
            seconds.append(time.perf_counter() - began_at)
    for name, at, target in (("median", 50, None), ("P99", 99, NEAR_MS)):
        ours, whole = (float(np.percentile(one, at)) * 1e3 for one in took)
        yield compared(
            "match", f"{case}: {name}", ours, "ms", "exact", whole, whole / ours, None,
            None if target is None else ours <= target,
        )  # fmt: skip
    tell("match", f"{case}: built in {built_s:.0f} s")


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
