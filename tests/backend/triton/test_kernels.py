"""The Triton kernels equal the reference, on any sizes, slabs and layouts.

Ties, -inf and NaN included.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from npu_gr.backend.base import TIME_BUCKETS
from npu_gr.backend.calls import (
    BeamCall,
    BiasTables,
    Choices,
    Continuations,
    HstuCall,
    Over,
    TopkCall,
)
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.backend.tiles import Slab
from npu_gr.core.health import UNKNOWN_S, Worker

pytestmark = [
    pytest.mark.triton,
    # the interpreter's
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

REFERENCE = ReferenceBackend()
# triton's interpreter multiplies the bits of bfloat16 matrices: there the other half type stands in
# for it
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DTYPES = {torch.float32: 2e-5, HALF: 6e-2}  # of the largest number
FEW = torch.tensor([-2.0, -1.0, -1.0, 0.0, -0.0, 0.5, -torch.inf])  # many ties on purpose

seeds = st.integers(0, 2**30)
few = settings(
    deadline=None,
    derandomize=True,
    max_examples=5,
    phases=[Phase.explicit, Phase.generate],  # in the interpreter, shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)


def on(device: torch.device, args: Any) -> Any:
    """The same arguments there."""
    return tree_map_only(Tensor, lambda x: x.to(device), args)


def cut(k: Tensor, v: Tensor, sizes: list[int]) -> list[Slab]:
    ends = [0]
    for size in sizes:
        ends.append(min(ends[-1] + size, len(k)))
    return [(k[a:b], v[a:b]) for a, b in pairwise([*ends, len(k)]) if a < b]


def assert_close(got: Tensor, want: Tensor, limit: float) -> None:
    assert got.shape == want.shape
    assert float((got.cpu().double() - want.double()).abs().max()) <= limit * max(
        1.0, float(want.abs().max())
    )


def forms() -> list[Any]:
    """The attention of a GPU, and that of an NPU."""
    from npu_gr.backend.triton import hstu, hstu_ascend

    return [hstu.Attention(), hstu_ascend.NpuAttention()]


def test_a_compile_tells_the_heartbeat() -> None:
    """Triton asks the hook before each compile, with keywords; the interpreter has none."""
    triton = pytest.importorskip("triton")
    worker = Worker()
    with worker.busy(2.0):
        importlib.import_module("npu_gr.backend.triton")
        assert not triton.knobs.runtime.jit_cache_hook(key="", repr="", already_compiled=False)
        assert [work.limit_s for work in worker.works()] == [UNKNOWN_S]


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small inputs cross tile borders."""
    from npu_gr.backend.triton import beams, hstu

    monkeypatch.setattr(beams, "ROWS", 16)
    monkeypatch.setattr(hstu, "ROWS", 16)
    monkeypatch.setattr(hstu, "KEYS", 16)  # of both
    monkeypatch.setattr(hstu, "MIN_STEPS", 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(few, max_examples=3)
@given(data=st.data(), past=st.integers(0, 40), new=st.integers(1, 35), seed=seeds)
def test_hstu(
    triton_device: torch.device,
    dtype: torch.dtype,
    data: st.DataObject,
    past: int,
    new: int,
    seed: int,
) -> None:
    """History and candidate rows with both biases; times out of order or beyond int32."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_tiles(monkeypatch)
        random = torch.Generator().manual_seed(seed)
        mixed = torch.randn(past + new, 2, 3 + 3 + 5, generator=random).to(dtype)
        q, k, v = mixed.split([3, 3, 5], dim=2)
        latest = data.draw(st.sampled_from([30, 10**9, 2**33]))
        times = torch.randint(-(10**6), latest, (past + new,), generator=random)
        tables = (torch.randn(2, width, generator=random).to(dtype) for width in (9, TIME_BUCKETS))
        slabs = cut(k[:past], v[:past], data.draw(st.lists(st.integers(1, 20), max_size=3)))
        shown_at = data.draw(st.sampled_from([-(10**7), -5, 10**8, 2**33]))
        bias = BiasTables(*tables)
        call = HstuCall(q[past:], k[past:], v[past:], slabs, times, bias, 0.7)
        moved = on(triton_device, call)
        shown = call._replace(times=times[:past], query_time=shown_at)
        moved_shown = on(triton_device, shown)
        for attention in forms():
            got = attention.causal(moved, moved.cached)
            assert got.dtype == dtype
            assert_close(got, REFERENCE.hstu_causal(call), DTYPES[dtype])
            got = attention.targets(moved_shown, moved_shown.cached)
            assert_close(got, REFERENCE.hstu_targets(shown), DTYPES[dtype])


def test_far_near_and_edge_meet_wherever_the_rows_begin(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each place of the first row within a step of keys; every distance has another number."""
    small_tiles(monkeypatch)
    k = torch.ones(51, 1, 16)
    bias = BiasTables(torch.arange(9)[None] ** 2 * 0.1, torch.zeros(1, TIME_BUCKETS))
    for past in range(17, 34):
        held = k[: past + 17]
        call = HstuCall(
            held[past:],
            k[:0],
            k[:0],
            [(held, held)],
            torch.zeros(len(held), dtype=torch.int64),
            bias,
            0.1,
        )
        moved = on(triton_device, call)
        want = REFERENCE.hstu_causal(
            call._replace(k=held[past:], v=held[past:], cached=[(k[:past], k[:past])])
        )
        for attention in forms()[past % 2 :][:1]:
            assert_close(attention.causal(moved, moved.cached), want, 1e-5)
        call = call._replace(k=held[past:], v=held[past:])
        moved = on(triton_device, call)
        for attention in forms()[past % 2 :][:1]:
            assert_close(attention.targets(moved, moved.cached), REFERENCE.hstu_targets(call), 1e-5)


@pytest.mark.parametrize("seconds", [2**31 - 3, 2**31 - 2, 2**31 - 1, 2**31, 2**40])
def test_the_last_span_that_fits_int32_and_the_first_that_does_not(
    triton_device: torch.device, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bucket of the table has another number, so the test detects a wrong bucket."""
    small_tiles(monkeypatch)
    q = torch.ones(20, 1, 16)
    times = torch.full((20,), seconds) - torch.tensor(
        [seconds, *((1 << (i + 1)) - i % 3 for i in range(19))]
    )
    bias = BiasTables(torch.zeros(1, 5), torch.arange(TIME_BUCKETS)[None].float())
    call = HstuCall(q, q, q, [], times, bias, 0.7)
    shown = call._replace(times=times, query_time=seconds, cached=[(q, q)])
    moved = on(triton_device, shown)
    for attention in forms():
        assert_close(
            attention.causal(on(triton_device, call), []), REFERENCE.hstu_causal(call), 1e-5
        )
        assert_close(attention.targets(moved, moved.cached), REFERENCE.hstu_targets(shown), 1e-5)


def test_equal_inputs_give_equal_bits_and_parts_follow_from_sizes_alone(
    triton_device: torch.device,
) -> None:
    """A long history under few rows is cut into parts; nothing is added by atomics."""
    from npu_gr.backend.triton import hstu

    random = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 700, 1, 16, generator=random)
    times = torch.randint(0, 10**9, (700,), generator=random)
    bias = BiasTables(*(torch.randn(1, width, generator=random) for width in (9, TIME_BUCKETS)))
    call = HstuCall(q[:3], k[:3], v[:3], [(k, v)], times, bias, 0.2, 10**9)
    moved = on(triton_device, call)
    once, again = (hstu.Attention().targets(moved, moved.cached) for _ in range(2))
    assert torch.equal(once, again)
    assert_close(once, REFERENCE.hstu_targets(call), 1e-5)
    for programs, num_keys, want in (
        (4, 4096, 16),
        (32, 4096, 8),
        (264, 4096, 1),
        (1, 0, 1),
        (1, 64, 1),
        (4, 600, 2),
    ):
        num_parts, span = hstu._parts(264, programs, num_keys, 64)
        assert num_parts == want
        assert (num_parts - 1) * span < max(1, num_keys) <= num_parts * span


def test_a_changed_table_is_seen(triton_device: torch.device) -> None:
    """In place, or by a model that is cast: the tensor is the same, its numbers are not."""
    from npu_gr.backend.triton import hstu

    attention = hstu.Attention()
    q = torch.ones(4, 1, 16, device=triton_device)
    tables = (
        torch.nn.Parameter(torch.zeros(1, 8, device=triton_device)),
        torch.zeros(1, 64, device=triton_device),
    )
    call = HstuCall(q, q, q, [], torch.arange(4, device=triton_device), BiasTables(*tables), 0.2)
    with torch.no_grad():
        for change in (lambda: None, lambda: tables[0].add_(1.0), lambda: tables[1].add_(1.0)):
            change()
            cpu = on(torch.device("cpu"), call)
            assert_close(attention.causal(call, []), REFERENCE.hstu_causal(cpu), 1e-5)
        tables[0].data = torch.full((1, 8), 3.0, device=triton_device)
        assert_close(
            attention.causal(call, []), REFERENCE.hstu_causal(on(torch.device("cpu"), call)), 1e-5
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@few
@given(
    data=st.data(),
    prefix=st.integers(0, 70),
    rows=st.integers(1, 21),
    group=st.sampled_from([1, 2, 4]),
    sharpness=st.sampled_from([0.7, 60.0]),
    seed=seeds,
)
def test_beams(
    triton_device: torch.device,
    dtype: torch.dtype,
    data: st.DataObject,
    prefix: int,
    rows: int,
    group: int,
    sharpness: float,
    seed: int,
) -> None:
    """Spans, slabs and own tokens merge to attention over the concatenation.

    Slots not yet valid are unread.
    """
    from npu_gr.backend.triton import beams

    with pytest.MonkeyPatch.context() as monkeypatch:
        small_tiles(monkeypatch)
        monkeypatch.setattr(beams, "SPAN", 32)
        random = torch.Generator().manual_seed(seed)
        num_slots = data.draw(st.integers(0 if prefix else 1, 3))
        k, v = torch.randn(2, prefix, 2, 3, generator=random).to(dtype)
        own_k, own_v = torch.randn(2, rows + 2, num_slots + 1, 2, 3, generator=random).to(dtype)
        own_k[:, num_slots:], own_v[:, num_slots:] = torch.nan, torch.nan
        q = torch.randn(rows, 2 * group, 3, generator=random).to(dtype)
        ancestry = None
        if data.draw(st.booleans()):
            ancestry = torch.randint(0, rows + 2, (num_slots + 1, rows), generator=random)
        shared = cut(k, v, data.draw(st.lists(st.integers(1, 40), max_size=2)))
        call = BeamCall(q, shared, (own_k, own_v), num_slots, ancestry, sharpness)
        moved = on(triton_device, call)
        assert beams.takes(moved)
        got = beams.attend(moved)
        assert got.dtype == dtype
        wide = [(a.double(), b.double()) for a, b in shared]
        own = own_k.double(), own_v.double()
        want = REFERENCE.beam_attention(call._replace(q=q.double(), shared=wide, unshared=own))
        assert_close(got, want, DTYPES[dtype] * (1.0 if dtype == HALF else max(1.0, sharpness)))


def continuations(
    random: torch.Generator, rows: int, num_codes: int, filtered: bool
) -> Continuations:
    """Rows of any degree, 0 and all codes among them, in one table with gaps."""
    degree = torch.randint(0, num_codes + 1, (rows,), generator=random)
    degree[torch.rand(rows, generator=random) < 0.15] = 0
    degree[torch.rand(rows, generator=random) < 0.15] = num_codes
    lo = torch.cat([torch.zeros(1, dtype=torch.int64), (degree + 3).cumsum(0)])
    code = torch.zeros(int(lo[-1]) + 1, dtype=torch.int32)
    for first, count in zip(lo.tolist(), degree.tolist(), strict=False):
        code[first : first + count] = (
            torch.randperm(num_codes, generator=random)[:count].sort().values.int()
        )
    return Continuations(
        lo[:-1], degree, code, torch.rand(len(code), generator=random) < 0.6 if filtered else None
    )


def assert_chosen(got: Choices, want: Choices) -> None:
    """Scores are equal up to rounding; choices may swap only where rounding can swap the scores."""
    score, parent, edge = (x.cpu() for x in got)
    assert score.shape == want.score.shape
    assert torch.allclose(score, want.score, rtol=1e-5, atol=3e-5)
    assert bool((score.diff() <= 0).all())
    gaps = want.score.diff().abs() < 1e-4
    may_swap = torch.ones(len(score), dtype=torch.bool)
    may_swap[:-1] = gaps
    may_swap[1:] |= gaps
    if len(score):
        may_swap[-1] = True  # its neighbour is not in the list
    assert not bool((((edge != want.edge) | (parent != want.parent)) & ~may_swap).any())


@settings(few, max_examples=15)
@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from([1, 17, 64, 65, 300]),
    margin=st.integers(0, 5),
    width=st.sampled_from([1, 2, 7, 40, 3000]),
    over=st.sampled_from(["row", "valid"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    filtered=st.booleans(),
    seed=seeds,
)
def test_beam_topk(
    triton_device: torch.device,
    rows: int,
    columns: int,
    margin: int,
    width: int,
    over: Over,
    dtype: torch.dtype,
    filtered: bool,
    seed: int,
) -> None:
    from npu_gr.backend.triton import topk

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(topk, "EDGES", 16)
        monkeypatch.setattr(topk, "BLOCKS", 4)
        monkeypatch.setattr(topk, "COLUMNS", 64)
        random = torch.Generator().manual_seed(seed)
        first, end = min(margin, columns - 1), max(columns - margin, min(margin, columns - 1) + 1)
        logits = torch.randn(rows, columns, generator=random) * 3
        if seed % 2:
            logits = FEW[torch.randint(0, len(FEW), (rows, columns), generator=random)]
        logits = logits.to(dtype)
        acc = torch.randn(rows, generator=random) * 2.0
        acc[torch.rand(rows, generator=random) < 0.1] = -torch.inf
        follow = continuations(random, rows, end - first, filtered)
        call = TopkCall(logits, acc, follow, width, over, slice(first, end), 0.8)
        assert_chosen(topk.beam_topk(on(triton_device, call)), REFERENCE.beam_topk(call))


@pytest.mark.parametrize("width", [1, 5, 40, 64, 200])
def test_ties_are_decided_by_beam_then_edge(triton_device: torch.device, width: int) -> None:
    """Exact arithmetic: four equal beams over four equal logits each, in many blocks.

    A half of them is better.
    """
    from npu_gr.backend.triton import topk

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(topk, "EDGES", 16)
        logits = torch.zeros(4, 64)
        acc = torch.tensor([0.0, 1.0, 0.0, 1.0])
        follow = Continuations(
            torch.arange(4) * 64, torch.full((4,), 64), torch.arange(64).int().repeat(4)
        )
        call = TopkCall(logits, acc, follow, width)
        got = topk.beam_topk(on(triton_device, call))
        want = REFERENCE.beam_topk(call)
        assert torch.equal(got.parent.cpu(), want.parent)
        assert torch.equal(got.edge.cpu(), want.edge)


@pytest.mark.parametrize("over", ["row", "valid"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_logit_is_an_error(triton_device: torch.device, over: Over, bad: float) -> None:
    """Of a dead beam too."""
    from npu_gr.backend.triton import topk

    logits = torch.zeros(2, 70)
    logits[1, 66] = bad
    follow = Continuations(torch.tensor([0, 0]), torch.tensor([70, 70]), torch.arange(70).int())
    call = TopkCall(logits, torch.tensor([0.0, -torch.inf]), follow, 4, over)
    with pytest.raises(FloatingPointError, match="not a number"):
        topk.beam_topk(on(triton_device, call))


@few
@given(rows=st.integers(1, 40), slots=st.integers(0, 3), seed=seeds, half=st.booleans())
def test_fork(triton_device: torch.device, rows: int, slots: int, seed: int, half: bool) -> None:
    """Parents in any order; rows and slots behind the valid ones stay."""
    from npu_gr.backend.triton import fork

    random = torch.Generator().manual_seed(seed)
    plane = torch.randn(2, 40, 3, 2, 3, generator=random).to(
        torch.bfloat16 if half else torch.float32
    )
    parent = torch.randint(0, 40, (rows,), generator=random)
    want, got = plane.clone(), plane.to(triton_device, copy=True)
    want[:, :rows, :slots] = plane[:, parent, :slots]
    fork.fork(got, parent.to(triton_device), slots)
    assert torch.equal(got.cpu(), want)


def test_zeros_of_both_signs_tie(triton_device: torch.device) -> None:
    from npu_gr.backend.triton import topk

    follow = Continuations(
        torch.tensor([0, 1]), torch.tensor([1, 1]), torch.zeros(2, dtype=torch.int32)
    )
    call = TopkCall(torch.tensor([[-0.0], [0.0]]), torch.tensor([-0.0, 0.0]), follow, 1)
    assert topk.beam_topk(on(triton_device, call)).parent.tolist() == [0]
