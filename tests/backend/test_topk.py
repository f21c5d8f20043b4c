"""Every backend selects as the reference: ties, -inf, filters, dead beams; NaN is an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import select
from npu_gr.backend.calls import Choices, Continuations, Over, TopkCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.beams import NativeTopk
from npu_gr.backend.cpu.library import Native
from npu_gr.backend.reference import ReferenceBackend

REFERENCE, TORCH = ReferenceBackend(), CPUBackend("off")
FEW = torch.tensor([-2.0, -1.0, -1.0, 0.0, 0.5, -torch.inf])  # many ties on purpose
NORM_TOLERANCE = 1e-5  # of a log-sum-exp near 10: ten ulp

OVERS: tuple[Over, ...] = ("row", "valid")
seeds = st.integers(0, 2**30)


def continuations(
    random: torch.Generator, rows: int, num_codes: int, filtered: bool
) -> Continuations:
    """Rows of any degree, 0 and all codes among them, in one table with gaps."""
    degree = torch.randint(0, num_codes + 1, (rows,), generator=random)
    degree[torch.rand(rows, generator=random) < 0.1] = 0
    degree[torch.rand(rows, generator=random) < 0.1] = num_codes
    lo = torch.cat([torch.zeros(1, dtype=torch.int64), (degree + 3).cumsum(0)])
    code = torch.zeros(int(lo[-1]) + 1, dtype=torch.int32)
    for first, count in zip(lo.tolist(), degree.tolist(), strict=False):
        code[first : first + count] = (
            torch.randperm(num_codes, generator=random)[:count].sort().values.int()
        )
    allowed = torch.rand(len(code), generator=random) < 0.6 if filtered else None
    return Continuations(lo[:-1], degree, code, allowed)


def close(got: Choices, want: Choices) -> bool:
    """Scores are equal up to rounding; choices may swap only where rounding can swap the scores."""
    if got.score.shape != want.score.shape:
        return False
    near = torch.allclose(got.score.double(), want.score.double(), rtol=1e-5, atol=3e-5)
    swapped = (got.edge != want.edge) | (got.parent != want.parent)
    gaps = want.score.double().diff().abs() < 1e-4
    may_swap = torch.zeros(len(want.score), dtype=torch.bool)
    may_swap[:-1] |= gaps
    may_swap[1:] |= gaps
    may_swap[-1:] = True  # its neighbour is not in the list
    return near and not bool((swapped & ~may_swap).any())


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    rows=st.integers(0, 9),
    columns=st.sampled_from([1, 3, 15, 16, 17, 33, 255, 256, 257, 700]),
    cut=st.integers(0, 5),
    width=st.sampled_from([1, 2, 7, 40, 3000]),
    over=st.sampled_from(["row", "valid"]),
    half=st.booleans(),
    filtered=st.booleans(),
    seed=seeds,
)
def test_native(
    native: Native,
    rows: int,
    columns: int,
    cut: int,
    width: int,
    over: Over,
    half: bool,
    filtered: bool,
    seed: int,
) -> None:
    """Bit for bit what the torch path selects with the same norms, and the reference's result."""
    random = torch.Generator().manual_seed(seed)
    first, end = min(cut, columns - 1), max(columns - cut, min(cut, columns - 1) + 1)
    logits = torch.randn(rows, columns, generator=random) * 3
    if seed % 2:
        logits = FEW[torch.randint(0, len(FEW), (rows, columns), generator=random)]
    logits = logits.bfloat16() if half else logits
    acc = torch.randn(rows, generator=random) * (0.0 if seed % 3 == 0 else 2.0)
    acc[torch.rand(rows, generator=random) < 0.1] = -torch.inf
    follow = continuations(random, rows, end - first, filtered)
    norm = torch.full((rows,), torch.nan)
    codes = slice(first, end)
    got = NativeTopk(native).beam_topk(TopkCall(logits, acc, follow, width, over, codes), norm)
    exact = REFERENCE.beam_topk(TopkCall(logits, acc, follow, width, over, codes))
    assert close(got, exact)
    visited = ~norm.isnan()
    wide = logits.float()
    want = wide.logsumexp(1) if over == "row" else valid_norm(wide[:, codes], follow)
    assert torch.allclose(norm[visited], want[visited], rtol=1e-6, atol=NORM_TOLERANCE)
    again = select(wide[:, codes], torch.where(visited, norm, want), acc, follow, width)
    assert torch.equal(got.score, again.score)
    assert torch.equal(got.parent, again.parent)
    assert torch.equal(got.edge, again.edge)


def valid_norm(logits: Tensor, follow: Continuations) -> Tensor:
    rows = []
    for row, (lo, degree) in enumerate(
        zip(follow.lo.tolist(), follow.degree.tolist(), strict=True)
    ):
        edges = [e for e in range(lo, lo + degree) if follow.allowed is None or follow.allowed[e]]
        rows.append(logits[row, follow.code[edges].long()].logsumexp(0))
    return torch.stack(rows) if rows else torch.empty(0)


def test_beams_that_cannot_win_are_not_read_for_a_score(native: Native) -> None:
    """Log-probabilities are not positive: skip beams whose score is below the worst kept one."""
    logits = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    acc = torch.zeros(40)
    acc[5:] = -1e4
    every = torch.arange(512, dtype=torch.int32).repeat(40)
    follow = Continuations(torch.arange(40) * 512, torch.full((40,), 512), every)
    norm = torch.full((40,), torch.nan)
    got = NativeTopk(native).beam_topk(TopkCall(logits, acc, follow, 8), norm)
    assert torch.equal(~norm.isnan(), acc == 0)
    assert close(got, REFERENCE.beam_topk(TopkCall(logits, acc, follow, 8)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("over", ["row", "valid"])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_bad_logit_is_an_error(native: Native, bad: float, over: Over, row: int) -> None:
    """In a beam that wins, in one that cannot, and in a dead one; whatever bits the NaN has."""
    logits = torch.zeros(3, 300)
    logits[row, 7] = bad
    if bad != bad:
        logits.view(torch.int32)[row, 7] |= 0x155  # a payload that must survive the exponential
    acc = torch.tensor([0.0, -1e5, -torch.inf])
    follow = Continuations(
        torch.zeros(3, dtype=torch.int64), torch.full((3,), 300), torch.arange(300).int()
    )
    with pytest.raises(FloatingPointError, match="not a number"):
        NativeTopk(native).beam_topk(TopkCall(logits, acc, follow, 4, over))


@pytest.mark.parametrize("size", [1e-30, 80.0, 1e4, 3e6, 1e30])
def test_logits_of_any_size(native: Native, size: float) -> None:
    """Where 2**logit leaves fp32 and where its exponent leaves the integers of fp32."""
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 600, generator=random) * size
    logits[1], logits[2, ::2], logits[3] = -size, -torch.inf, -torch.inf
    follow = Continuations(
        torch.zeros(6, dtype=torch.int64), torch.full((6,), 600), torch.arange(600).int()
    )
    call = TopkCall(logits, torch.zeros(6), follow, 5)
    got = NativeTopk(native).beam_topk(call)
    want = REFERENCE.beam_topk(call)
    assert torch.allclose(got.score, want.score, rtol=1e-5, atol=1e-4)
    assert torch.equal(got.edge, want.edge)


def test_a_wide_beam_over_a_wide_codebook(native: Native) -> None:
    """The serving shape: rows scanned edge by edge, rows scanned by hits, and skipped rows."""
    random = torch.Generator().manual_seed(2)
    logits, acc = (
        torch.randn(192, 4096, generator=random) * 2,
        -torch.rand(192, generator=random) * 6,
    )
    follow = continuations(random, 192, 4096, filtered=True)
    norm = logits.logsumexp(1)
    got = NativeTopk(native).beam_topk(TopkCall(logits, acc, follow, 128), norm)
    want = select(logits, norm, acc, follow, 128)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_temperature(native: Native) -> None:
    random = torch.Generator().manual_seed(3)
    logits, follow = (
        torch.randn(5, 90, generator=random),
        continuations(random, 5, 90, filtered=False),
    )
    for over in OVERS:
        call = TopkCall(logits, torch.zeros(5), follow, 12, over, scale=0.4)
        assert close(NativeTopk(native).beam_topk(call), REFERENCE.beam_topk(call))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    rows=st.integers(0, 7),
    dim=st.sampled_from([1, 3, 16, 17, 40, 64]),
    num_codes=st.integers(1, 50),
    half=st.booleans(),
    filtered=st.booleans(),
    seed=seeds,
)
def test_gathered_head(
    native: Native, rows: int, dim: int, num_codes: int, half: bool, filtered: bool, seed: int
) -> None:
    """The whole head's result from the dots at valid edges alone; native and torch."""
    random = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, dim, generator=random) for n in (rows, num_codes))
    if half:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    acc, follow = (
        torch.randn(rows, generator=random),
        continuations(random, rows, num_codes, filtered),
    )
    want = REFERENCE.gathered_topk(hidden, weight, acc, follow, 6, 0.5)
    assert close(NativeTopk(native).gathered_topk(hidden, weight, acc, follow, 6, 0.5), want)
    assert close(TORCH.gathered_topk(hidden, weight, acc, follow, 6, 0.5), want)


def test_a_bad_weight_of_the_gathered_head_is_an_error(native: Native) -> None:
    weight = torch.ones(4, 8)
    weight[2, 3] = torch.nan
    follow = Continuations(
        torch.zeros(2, dtype=torch.int64), torch.full((2,), 4), torch.arange(4).int()
    )
    for backend in (NativeTopk(native).gathered_topk, TORCH.gathered_topk):
        with pytest.raises(FloatingPointError):
            backend(torch.ones(2, 8), weight, torch.zeros(2), follow, 3, 1.0)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 40),
    width=st.integers(1, 30),
    over=st.sampled_from(["row", "valid"]),
    seed=seeds,
)
def test_torch(rows: int, columns: int, width: int, over: Over, seed: int) -> None:
    """The path without kernels, in fp64 too."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(
        rows, columns, generator=random, dtype=torch.float64 if seed % 2 else torch.float32
    )
    acc, follow = (
        torch.randn(rows, generator=random).to(logits.dtype),
        continuations(random, rows, columns, True),
    )
    backend: Backend = TORCH
    got, want = (
        b.beam_topk(TopkCall(logits, acc, follow, width, over)) for b in (backend, REFERENCE)
    )
    assert close(got, want)
