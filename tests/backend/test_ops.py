"""Every backend's ops equal the reference, on any sizes, any slabs, and times that are not in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend import torch_ops
from npu_gr.backend.base import TIME_BUCKETS, Backend, BiasTables, Slab, time_bucket
from npu_gr.backend.choose import choose
from npu_gr.backend.reference import ReferenceBackend, allowed
from npu_gr.errors import ConfigError

REFERENCE = ReferenceBackend()
HEADS, QK, V, BUCKETS = 2, 3, 5, 9
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("npu", marks=pytest.mark.npu),
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return choose(request.param)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small inputs cross chunk borders."""
    monkeypatch.setattr(torch_ops, "ROWS", 4)
    monkeypatch.setattr(torch_ops, "COLUMNS", 8)
    monkeypatch.setattr(torch_ops, "CANDIDATE_ROWS", 3)


def slabs(k: torch.Tensor, v: torch.Tensor, sizes: list[int]) -> list[Slab]:
    cut = [0]
    for size in sizes:
        cut.append(min(cut[-1] + size, len(k)))
    cut.append(len(k))
    return [(k[a:b], v[a:b]) for a, b in pairwise(cut) if a < b]


def inputs(seed: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(rows, HEADS, QK, generator=generator).to(dtype) for _ in range(2))
    v = torch.randn(rows, HEADS, V, generator=generator).to(dtype)
    times = torch.randint(-(10**6), 10**9, (rows,), generator=generator)
    tables = torch.randn(HEADS, BUCKETS, generator=generator), torch.randn(HEADS, TIME_BUCKETS, generator=generator)
    return q, k, v, times, *(table.to(dtype) for table in tables)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    got = got.cpu()
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    limit = TOLERANCE[want.dtype] * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    return not want.numel() or float((got.double() - want.double()).abs().max()) <= limit


shapes = given(data=st.data(), past=st.integers(0, 30), new=st.integers(0, 20), seed=st.integers(0, 2**30))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(deadline=None, derandomize=True, max_examples=40)
@shapes
def test_causal(backend: Backend, dtype: torch.dtype, data: st.DataObject, past: int, new: int, seed: int) -> None:
    q, k, v, times, position, time = inputs(seed, past + new, dtype)
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=4))
    args = q[past:], k[past:], v[past:], slabs(k[:past], v[:past], sizes), times, BiasTables(position, time), 0.7
    assert close(backend.hstu_causal(*_on(backend, args)), REFERENCE.hstu_causal(*args))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(deadline=None, derandomize=True, max_examples=40)
@shapes
def test_targets(backend: Backend, dtype: torch.dtype, data: st.DataObject, past: int, new: int, seed: int) -> None:
    q, k, v, times, position, time = inputs(seed, past + new, dtype)
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=4))
    shown_at = data.draw(st.integers(-(10**6), 10**9))
    history = slabs(k[:past], v[:past], sizes)
    args = q[past:], k[past:], v[past:], history, times[:past], shown_at, BiasTables(position, time), 0.7
    assert close(backend.hstu_targets(*_on(backend, args)), REFERENCE.hstu_targets(*args))


def _on(backend: Backend, args: object) -> object:
    """The same arguments on the backend's device."""
    if isinstance(args, torch.Tensor):
        return args.to(backend.device)
    if isinstance(args, BiasTables):
        return BiasTables(*(table.to(backend.device) for table in args))
    if isinstance(args, tuple | list):
        return type(args)(_on(backend, value) for value in args)
    return args


def test_the_mask() -> None:
    """History is causal; a candidate sees the history and itself."""
    table = [[allowed(i, j, 2) for j in range(4)] for i in range(4)]
    assert table == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]


def test_time_buckets() -> None:
    """Half octaves: never falling, distinct near zero, bounded, and skewed clocks count as now."""
    deltas = torch.tensor([-5, 0, 1, 2, 3, 60, 3600, 86_400, 2**31, 2**40])
    buckets = time_bucket(deltas).tolist()
    assert buckets[0] == buckets[1] == 0
    assert buckets == sorted(buckets)
    assert buckets[-1] < TIME_BUCKETS
    assert len(set(buckets[1:8])) == 7
    every = time_bucket(torch.arange(1 << 16))
    assert bool((every.diff() >= 0).all())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gpu' is none of cpu"):
        choose("gpu")  # type: ignore[arg-type]
