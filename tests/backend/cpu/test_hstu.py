"""HSTU kernels equal reference.py at every instruction set, and a cached prefix keeps the bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.backend import tiles
from npu_gr.backend.calls import AttentionWindow, BiasTables, HstuCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.hstu import HstuKernels
from npu_gr.backend.cpu.library import Native
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.backend.tiles import Slab, Tiles

REFERENCE = ReferenceBackend()
DTYPES = (torch.float32, torch.bfloat16)
# largest difference from fp64, as a share of the result's spread: rows in fp32 or bf16 over tiles
# of the same
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 6e-2}
FUZZ = settings(deadline=None, derandomize=True, max_examples=40)
SEED = st.integers(0, 2**31)


class Case:
    """Random rows of one layer; the seed decides everything, so a failure is one number."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def pick(*values: int) -> int:
            return values[int(torch.randint(len(values), (), generator=random))]

        self.heads, self.qk_dim = pick(1, 2, 3), pick(1, 2, 5, 8, 33, 64)
        self.v_dim = pick(1, 3, 16, 20, 48, 64, 80)
        self.past, self.new = pick(0, 1, 17, 63, 64, 65, 130), pick(1, 2, 5, 6, 7, 31, 64, 131)
        self.dtype = DTYPES[pick(0, 1)]
        self.stored = self.dtype if pick(0, 1, 1) else DTYPES[pick(0, 1)]
        self.cut = int(torch.randint(self.past + 1, (), generator=random))
        gap = pick(1, 4, 1000, 100_000, 2**26, 2**40)  # the last: further apart than 32 bits
        # some go back in time
        steps = torch.randint(-(gap // 4), gap, (self.past + self.new,), generator=random)
        self.times = 1_600_000_000 + torch.cumsum(steps, 0)
        window = AttentionWindow(pick(1, 5, 64, 100), pick(0, 3, 64, 70))
        self.window = window if pick(0, 1) else None
        self.shown_at = int(self.times[-1]) + pick(-5, 0, 100, 10**6)
        buckets = pick(2, 5, 64, 200)
        tables = (torch.randn(self.heads, size, generator=random) for size in (buckets, 64))
        self.bias = BiasTables(*(t.to(self.dtype) for t in tables))
        # columns of a wider matrix, as the model's projection gives them
        joined = torch.randn(
            self.past + self.new, self.heads * (2 * self.qk_dim + self.v_dim), generator=random
        )
        widths = [self.heads * w for w in (self.qk_dim, self.qk_dim, self.v_dim)]
        parts = joined.to(self.stored).to(self.dtype).split(widths, dim=1)
        self.q, self.k, self.v = (x.unflatten(1, (self.heads, -1)) for x in parts)

    def rows(self, start: int, stop: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[start:stop], self.k[start:stop], self.v[start:stop]

    def tiles(self, kernels: HstuKernels, num_tokens: int) -> list[Slab | Tiles]:
        """The first tokens, written in two parts into tiles full of NaN."""
        if not num_tokens:
            return []
        found = tiles.empty(-(-num_tokens // 64), self.heads, self.qk_dim, self.v_dim, self.stored)
        found.k.fill_(float("nan"))
        found.v.fill_(float("nan"))
        cut = min(self.cut, num_tokens)
        kernels.pack(found, 0, self.k[:cut], self.v[:cut])
        kernels.pack(found, cut, self.k[cut:num_tokens], self.v[cut:num_tokens])
        return [found._replace(num_tokens=num_tokens)]


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double() for x in tensors]


def wide_slab(k: Tensor, v: Tensor) -> Slab:
    return k.double(), v.double()


def wide_call(call: HstuCall) -> HstuCall:
    """The same call in fp64; nothing may be cached in tiles."""
    q, k, v = wide(call.q, call.k, call.v)
    return call._replace(q=q, k=k, v=v, bias=BiasTables(*wide(*call.bias)))


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    spread = max(float(want.abs().max()), 1e-3)
    assert float((got.double() - want).abs().max()) <= TOLERANCE[dtype] * spread


@FUZZ
@given(seed=SEED)
def test_history_rows(native: Native, seed: int) -> None:
    case, kernels = Case(seed), HstuKernels(native)
    call = HstuCall(
        *(*case.rows(case.past), case.tiles(kernels, case.past), case.times, case.bias, 0.3),
        window=case.window,
    )
    before = [wide_slab(case.k[: case.past], case.v[: case.past])] if case.past else []
    want = REFERENCE.hstu_causal(wide_call(call)._replace(cached=before))
    assert_near(kernels.causal(call), want, case.dtype)


@FUZZ
@given(seed=SEED)
def test_candidates(native: Native, seed: int) -> None:
    """Over tiles that end anywhere, over nothing, and over natural rows behind tiles."""
    case, kernels = Case(seed), HstuKernels(native)
    own, past = case.rows(case.past), case.tiles(kernels, case.past)
    call = HstuCall(
        *(*own, past, case.times[: case.past], case.bias, 0.3, case.shown_at), window=case.window
    )
    before = [wide_slab(case.k[: case.past], case.v[: case.past])] if case.past else []
    want = REFERENCE.hstu_targets(wide_call(call)._replace(cached=before))
    got = kernels.targets(call)
    assert_near(got, want, case.dtype)
    # without tiles, natural rows are packed in their own dtype
    if case.past and (case.cut or case.stored == case.dtype):
        behind = [
            *case.tiles(kernels, case.cut),
            (case.k[case.cut : case.past], case.v[case.cut : case.past]),
        ]
        again = kernels.targets(call._replace(cached=behind))
        assert torch.equal(again, got)


@FUZZ
@given(seed=SEED)
def test_a_cached_prefix_gives_the_same_bits(native: Native, seed: int) -> None:
    case, kernels = Case(seed), HstuKernels(native)
    if case.stored != case.dtype:
        return  # rounded on the way into the pages, by choice

    def attend(rows: tuple[Tensor, Tensor, Tensor], cached: list[Slab | Tiles]) -> Tensor:
        call = HstuCall(*rows, cached, case.times, case.bias, 0.3, window=case.window)
        return kernels.causal(call)

    cold = attend(case.rows(0), [])[case.past :]
    for num_cached in {case.past, case.cut}:
        hit = attend(case.rows(num_cached), case.tiles(kernels, num_cached))
        assert torch.equal(hit[case.past - num_cached :], cold)
    none = case.k[:0], case.v[:0]
    held = attend((case.q[case.past :], *none), case.tiles(kernels, len(case.q)))
    assert torch.equal(held, cold)  # the new rows in tiles as well
    natural: list[Slab | Tiles] = [
        (case.k[: case.cut], case.v[: case.cut]),
        (case.k[case.cut : case.past], case.v[case.cut : case.past]),
    ]
    assert torch.equal(attend(case.rows(case.past), natural), cold)


@FUZZ
@given(seed=SEED)
def test_packing_is_the_definition(native: Native, seed: int) -> None:
    case, kernels = Case(seed), HstuKernels(native)
    total = case.past + case.new
    (fast,) = case.tiles(kernels, total)
    assert isinstance(fast, Tiles)
    slow = fast._replace(
        k=torch.full_like(fast.k, float("nan")), v=torch.full_like(fast.v, float("nan"))
    )
    tiles.pack(slow, 0, case.k[: case.cut], case.v[: case.cut])
    tiles.pack(slow, case.cut, case.k[case.cut :], case.v[case.cut :])
    for got, want in ((fast.k, slow.k), (fast.v, slow.v)):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert not fast.v.isnan().any()
    k, v = tiles.unpack(fast)
    assert torch.equal(k, case.k.to(case.stored))
    assert torch.equal(v, case.v.to(case.stored))


def test_extremes(native: Native) -> None:
    """Saturated logits are right to 2e-38 of themselves; a NaN shows; no rows are no rows."""
    kernels = HstuKernels(native)
    bias = BiasTables(torch.zeros(1, 2), torch.zeros(1, 64))
    times = torch.zeros(2, dtype=torch.int64)
    for dtype in DTYPES:
        one = torch.ones(1, 1, 16, dtype=dtype)
        unit = torch.tensor([[[1.0, 0.0]]], dtype=dtype)
        for size in (-1e30, -200.0, -90.0, 0.0, 90.0, 1e4):
            q = torch.zeros(1, 1, 2, dtype=dtype)
            q[..., 0] = size
            got = kernels.causal(HstuCall(q, unit, one, [], times[:1], bias, 1.0))
            want = torch.nn.functional.silu(torch.tensor(float(q[0, 0, 0]), dtype=torch.float64))
            assert torch.allclose(
                got.double(), want.expand_as(got), rtol=1e-2, atol=1e-30 + 2e-38 * abs(size)
            )
        broken = torch.full((1, 1, 2), float("nan"), dtype=dtype)
        assert kernels.causal(HstuCall(broken, unit, one, [], times[:1], bias, 1.0)).isnan().all()
        empty = torch.empty(0, 1, 2, dtype=dtype), torch.empty(0, 1, 2, dtype=dtype), one[:0]
        assert kernels.causal(HstuCall(*empty, [(unit, one)], times[:1], bias, 1.0)).shape == (
            0,
            1,
            16,
        )
        assert kernels.targets(HstuCall(*empty, [(unit, one)], times[:1], bias, 1.0)).shape == (
            0,
            1,
            16,
        )


def test_what_has_no_kernel_runs_in_torch() -> None:
    backend, off = CPUBackend(), CPUBackend("off")
    assert off.arrangement(torch.float32, 64) == "natural"
    assert backend.arrangement(torch.float64, 64) == "natural"
    assert backend.arrangement(torch.float32, 32) == "natural"
    assert backend.arrangement(torch.bfloat16, 128) == ("tiles" if backend.native else "natural")
    q, k, v = torch.randn(3, 70, 2, 8).unbind(0)
    bias, times = BiasTables(torch.randn(2, 5), torch.randn(2, 64)), torch.arange(70)
    into = tiles.empty(2, 2, 8, 8, torch.float32)._replace(num_tokens=70)
    off.pack_kv(into, 0, k, v)
    call = HstuCall(q, k, v, [into], times, bias, 0.3, query_time=70)
    read, want = (off.hstu_targets(each) for each in (call, call._replace(cached=[(k, v)])))
    assert torch.equal(read, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_histories_and_every_bias_path(native: Native, dtype: torch.dtype) -> None:
    """Use several blocks of rows: far tiles with one or two time buckets, and unordered times."""
    torch.manual_seed(0)
    kernels, torch_ops = HstuKernels(native), CPUBackend("off")
    n, heads = 700, 2
    q, k, v = (torch.randn(n, heads, 16).to(dtype) for _ in range(3))
    bias = BiasTables(torch.randn(heads, 40), torch.randn(heads, 64))
    sorted_times = torch.cumsum(torch.randint(0, 90_000, (n,)), 0)
    for times in (sorted_times, sorted_times // 10_000_000, sorted_times[torch.randperm(n)]):
        call = HstuCall(q, k, v, [], times, bias, 0.25)
        assert_near(kernels.causal(call), torch_ops.hstu_causal(wide_call(call)), dtype)
