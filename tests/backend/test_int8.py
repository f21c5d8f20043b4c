"""Rows in 8 bits: what is stored, and attention over it, is what `tiles.quantise` defines."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.backend import tiles
from npu_gr.backend.calls import AttentionWindow, BiasTables, HstuCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import Native
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.backend.tiles import Slab, Tiles, dequantise, quantise, rounded
from npu_gr.backend.torch_ops import TorchOps

FUZZ = settings(deadline=None, derandomize=True, max_examples=15)
SEED = st.integers(0, 2**31)
# of the result's spread: 16 bits of queries and weights; and rows in bf16
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}


@FUZZ
@given(seed=SEED)
def test_a_row_is_rounded_by_half_a_step_at_most_and_once(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    width = int(torch.randint(1, 80, (), generator=random))
    x = torch.randn(50, width, generator=random) * 10.0 ** torch.randint(
        -28, 20, (50, 1), generator=random
    )
    step = x.abs().amax(1, keepdim=True) / 127
    # a scale in bf16 is off by 1 / 256 at most
    assert bool(((rounded(x) - x).abs() <= step * (0.5 + 1 / 256) * (1 + 1 / 256)).all())
    assert torch.equal(rounded(rounded(x)), rounded(x))
    assert torch.equal(quantise(rounded(x)), quantise(x))
    assert int(quantise(x)[:, :-2].abs().amax()) == 127


def test_what_is_no_number_stays_none_and_what_is_next_to_nothing_becomes_zero() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0, nan], [inf, 1.0], [-inf, 0.0], [0.0, -0.0], [1e-35, -1e-38]])
    assert rounded(rows).isnan().all(1).tolist() == [True, True, True, False, False]
    assert not rounded(rows)[3:].any()


class Case:
    """Random rows of one layer; the seed decides everything."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def pick(*values: int) -> int:
            return values[int(torch.randint(len(values), (), generator=random))]

        self.heads = pick(1, 2, 3)
        self.qk_dim, self.v_dim = pick(1, 2, 5, 8, 33, 64, 600), pick(1, 3, 16, 20, 48, 80)
        self.past, self.new = pick(0, 1, 17, 63, 64, 65, 130), pick(1, 2, 5, 6, 7, 31, 64, 131)
        self.cut = int(torch.randint(self.past + 1, (), generator=random))
        self.dtype = (torch.float32, torch.bfloat16)[pick(0, 1)]
        self.times = torch.randint(0, 10**6, (self.past + self.new,), generator=random).sort()[0]
        self.window = AttentionWindow(pick(1, 64, 100), pick(0, 3, 70)) if pick(0, 1) else None
        shapes = (self.heads, pick(2, 5, 200)), (self.heads, 64)
        self.bias = BiasTables(
            *(torch.randn(shape, generator=random).to(self.dtype) for shape in shapes)
        )
        widths = [self.heads * w for w in (self.qk_dim, self.qk_dim, self.v_dim)]
        joined = torch.randn(self.past + self.new, sum(widths), generator=random)
        scales = 10.0 ** torch.randint(-2, 2, (self.past + self.new, 1), generator=random)
        if self.dtype == torch.float32:  # bf16 loses a sum of rows of very different sizes
            joined *= scales
        parts = joined.to(self.dtype).split(widths, 1)
        self.q, self.k, self.v = (x.unflatten(1, (self.heads, -1)) for x in parts)

    def tiles(self, backend: TorchOps, count: int) -> Tiles:
        """The first tokens, written in two parts into tiles full of NaN."""
        found = tiles.empty(
            -(-count // 64), self.heads, self.qk_dim, self.v_dim, torch.int8
        )._replace(num_tokens=count)
        for plane in found[:2]:
            plane.fill_(-1)
        cut = min(self.cut, count)
        backend.pack_kv(found, 0, self.k[:cut], self.v[:cut])
        backend.pack_kv(found, cut, self.k[cut:count], self.v[cut:count])
        return found

    def call(self, cached: list[Slab | Tiles], *, is_causal: bool) -> HstuCall:
        new = slice(self.past, None)
        return HstuCall(
            *(self.q[new], self.k[new], self.v[new], cached),
            self.times if is_causal else self.times[: self.past],
            *(self.bias, 1 / self.qk_dim),
            query_time=int(self.times[-1]) + 5,
            window=self.window,
            stored=torch.int8,
        )


def dense(call: HstuCall) -> Tensor:
    """The call by the definition, in fp64."""
    wide = [x.double() for x in call[:3]]
    cached = [(k.double(), v.double()) for k, v in tiles.natural(call.cached)]
    bias = BiasTables(*(table.double() for table in call.bias))
    wide_call = call._replace(q=wide[0], k=wide[1], v=wide[2], cached=cached, bias=bias)
    reference = ReferenceBackend()
    is_causal = len(call.times) > sum(len(k) for k, _ in cached)
    return (reference.hstu_causal if is_causal else reference.hstu_targets)(wide_call)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    spread = max(float(want.abs().max()), 1e-3)
    assert float((got.double() - want).abs().max()) <= TOLERANCE[dtype] * spread


@FUZZ
@given(seed=SEED)
def test_tiles_hold_the_rounded_rows(native: Native, seed: int) -> None:
    case, backend = Case(seed), CPUBackend(isa=native.isa)
    if not (count := case.past):
        return
    got, want = case.tiles(backend, count), case.tiles(TorchOps(), count)
    assert torch.equal(got.v, want.v), "zero behind the last token, too"
    for mine, right, rows in zip(
        tiles.unpack(got), tiles.unpack(want), (case.k, case.v), strict=True
    ):
        assert torch.equal(mine, right)
        assert torch.equal(mine, dequantise(quantise(rows[:count])))


@FUZZ
@given(seed=SEED)
def test_attention_reads_the_rounded_rows(native: Native, seed: int) -> None:
    """By kernels over tiles, and by plain torch; new rows and old ones, the same bits."""
    case, backend = Case(seed), CPUBackend(isa=native.isa)
    past: list[Slab | Tiles] = [case.tiles(backend, case.past)] if case.past else []
    rows = [(case.k[: case.past], case.v[: case.past])]
    call = case.call(past, is_causal=True)
    want, got = dense(call), backend.hstu_causal(call)
    assert_near(got, want, case.dtype)
    if case.dtype == torch.float32:
        assert_near(TorchOps().hstu_causal(call), want, case.dtype)
    everything = call._replace(q=case.q, k=case.k, v=case.v, cached=[])
    assert torch.equal(backend.hstu_causal(everything)[case.past :], got)
    targets = case.call(past, is_causal=False)
    want, got = dense(targets), backend.hstu_targets(targets)
    assert_near(got, want, case.dtype)
    if case.dtype == torch.float32:
        assert_near(TorchOps().hstu_targets(targets), want, case.dtype)
    assert torch.equal(backend.hstu_targets(targets._replace(cached=rows)), got)
    assert torch.equal(backend.hstu_targets(targets)[:1], _one(backend, targets))


def _one(backend: CPUBackend, call: HstuCall) -> Tensor:
    """The first candidate, without the others."""
    return backend.hstu_targets(call._replace(q=call.q[:1], k=call.k[:1], v=call.v[:1]))


def test_a_seen_row_that_is_no_number_shows(native: Native) -> None:
    case = Case(0)
    backend = CPUBackend(isa=native.isa)
    for plane in (case.k, case.v):
        before = plane[0].clone()
        plane[0, 0, 0] = float("nan")
        everything = case.call([], is_causal=True)._replace(q=case.q, k=case.k, v=case.v)
        out = backend.hstu_causal(everything._replace(window=None))
        assert bool(out[:, 0].isnan().any(-1).all())
        plane[0] = before
