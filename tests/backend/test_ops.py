"""Every backend's ops equal the reference: any sizes, any memory layout, times out of order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from npu_gr.backend import torch_ops
from npu_gr.backend.base import TIME_BUCKETS, Backend, time_bucket
from npu_gr.backend.calls import BeamCall, BiasTables, HstuCall
from npu_gr.backend.choose import choose
from npu_gr.backend.reference import ReferenceBackend, allowed
from npu_gr.backend.tiles import Slab
from npu_gr.core.errors import ConfigError

REFERENCE = ReferenceBackend()
HEADS, QK, V, BUCKETS = 2, 3, 5, 9
GROUPS = (1, 2, 4, 8)  # query heads a KV head
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}
# to the exact result
SOFTMAX_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


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
    tables = (
        torch.randn(HEADS, BUCKETS, generator=generator),
        torch.randn(HEADS, TIME_BUCKETS, generator=generator),
    )
    return q, k, v, times, *(table.to(dtype) for table in tables)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    got = got.cpu()
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    limit = TOLERANCE[want.dtype] * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    return not want.numel() or float((got.double() - want.double()).abs().max()) <= limit


shapes = given(
    data=st.data(), past=st.integers(0, 30), new=st.integers(0, 20), seed=st.integers(0, 2**30)
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(deadline=None, derandomize=True, max_examples=40)
@shapes
def test_causal(
    backend: Backend, dtype: torch.dtype, data: st.DataObject, past: int, new: int, seed: int
) -> None:
    q, k, v, times, position, time = inputs(seed, past + new, dtype)
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=4))
    cached = slabs(k[:past], v[:past], sizes)
    call = HstuCall(q[past:], k[past:], v[past:], cached, times, BiasTables(position, time), 0.7)
    want = REFERENCE.hstu_causal(call)
    assert close(backend.hstu_causal(_on(backend, call)), want)
    held = call._replace(k=k[:0], v=v[:0], cached=[*cached, (k[past:], v[past:])])
    assert close(backend.hstu_causal(_on(backend, held)), want)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(deadline=None, derandomize=True, max_examples=40)
@shapes
def test_targets(
    backend: Backend, dtype: torch.dtype, data: st.DataObject, past: int, new: int, seed: int
) -> None:
    q, k, v, times, position, time = inputs(seed, past + new, dtype)
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=4))
    shown_at = data.draw(st.integers(-(10**6), 10**9))
    history = slabs(k[:past], v[:past], sizes)
    bias = BiasTables(position, time)
    call = HstuCall(q[past:], k[past:], v[past:], history, times[:past], bias, 0.7, shown_at)
    assert close(backend.hstu_targets(_on(backend, call)), REFERENCE.hstu_targets(call))


def kv(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, *shape, QK, generator=generator, dtype=torch.float64)
    return k, v


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@settings(deadline=None, derandomize=True, max_examples=15)
@given(data=st.data(), past=st.integers(0, 30), new=st.integers(1, 20), seed=st.integers(0, 2**30))
def test_causal_softmax(
    backend: Backend,
    dtype: torch.dtype,
    group: int,
    data: st.DataObject,
    past: int,
    new: int,
    seed: int,
) -> None:
    """Any past in any slabs, and queries of the last rows alone."""
    k, v = (plane.to(dtype) for plane in kv(seed, past + new, HEADS))
    rows = data.draw(st.integers(1, new))
    q = kv(seed + 1, rows, HEADS * group)[0].to(dtype)
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=4))
    args = q, k[past:], v[past:], slabs(k[:past], v[:past], sizes), 0.7
    assert close(backend.causal_attention(*_on(backend, args)), REFERENCE.causal_attention(*args))


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "joint"])
@pytest.mark.parametrize("dtype", SOFTMAX_TOLERANCE, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    data=st.data(),
    prefix=st.integers(0, 30),
    rows=st.integers(1, 21),
    sharpness=st.sampled_from([0.7, 60.0]),
    seed=st.integers(0, 2**30),
)
def test_beams(
    backend: Backend,
    is_split: bool,
    dtype: torch.dtype,
    group: int,
    data: st.DataObject,
    prefix: int,
    rows: int,
    sharpness: float,
    seed: int,
) -> None:
    """Split and plain attention equal attention over the concatenation, in any layout."""
    num_slots = data.draw(st.integers(0 if prefix else 1, 4))
    slots = num_slots + data.draw(st.integers(0, 2))
    k, v = (plane.to(dtype) for plane in kv(seed, prefix, HEADS))
    width = rows + data.draw(st.integers(0, 3))
    own_k, own_v = (plane.to(dtype) for plane in kv(seed + 1, width, slots, HEADS))
    own_k[:, num_slots:], own_v[:, num_slots:] = torch.nan, torch.nan  # slots that no op may read
    ancestry = None
    if data.draw(st.booleans()):
        ancestry = torch.randint(
            0, width, (slots, rows), generator=torch.Generator().manual_seed(seed)
        )
    q = kv(seed + 2, rows, HEADS * group)[0].to(dtype)
    shared = slabs(k, v, data.draw(st.lists(st.integers(1, 12), max_size=4)))
    call = BeamCall(q, shared, (own_k, own_v), num_slots, ancestry, sharpness, is_split)
    got = backend.beam_attention(_on(backend, call))
    want = REFERENCE.beam_attention(_as(call, torch.float64))
    assert got.shape == want.shape
    assert got.dtype == dtype
    limit = SOFTMAX_TOLERANCE[dtype] * (1.0 if dtype == torch.bfloat16 else max(1.0, sharpness))
    assert float((got.cpu().double() - want).abs().max()) <= limit


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "joint"])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_scores_far_from_zero_stay_finite(backend: Backend, is_split: bool, offset: float) -> None:
    """Each stage alone underflows or overflows.

    Relative to the common maximum the far one has no weight.
    """
    q = torch.ones(5, HEADS, 1)
    shared = [(torch.zeros(9, HEADS, 1), torch.full((9, HEADS, 1), 3.0))]
    own = torch.full((5, 1, HEADS, 1), offset), torch.full((5, 1, HEADS, 1), 7.0)
    got = backend.beam_attention(
        _on(backend, BeamCall(q, shared, own, 1, None, 1.0, is_split))
    ).cpu()
    assert torch.equal(got, torch.full((5, HEADS, 1), 7.0 if offset > 0 else 3.0))


def test_softmax_in_half_precision_sums_in_fp32(backend: Backend) -> None:
    """300 keys of equal weight: a bf16 sum stops growing at 256."""
    q, shared = torch.zeros(5, HEADS, 4), [(torch.zeros(299, HEADS, 4), torch.ones(299, HEADS, 4))]
    own = torch.zeros(5, 1, HEADS, 4), torch.full((5, 1, HEADS, 4), 302.0)
    call = _on(backend, BeamCall(q, shared, own, 1, None, 1.0))
    for is_split in (True, False):
        got = backend.beam_attention(_as(call, torch.bfloat16)._replace(is_split=is_split))
        assert torch.equal(got.cpu(), torch.full((5, HEADS, 4), 2.0, dtype=torch.bfloat16))


def _as(args: Any, dtype: torch.dtype) -> Any:
    """The same arguments with every floating tensor in another dtype."""
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, args)


def _on(backend: Backend, args: Any) -> Any:
    """The same arguments on the backend's device."""
    return tree_map_only(torch.Tensor, lambda x: x.to(backend.device), args)


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


def test_an_unknown_backend_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'gpu' is none of cpu"):
        choose("gpu")  # type: ignore[arg-type]
