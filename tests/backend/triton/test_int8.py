"""The Triton attention reads pages in int8 as they lie: numbers and scales, cached or new rows."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend.base import TIME_BUCKETS
from npu_gr.backend.calls import BiasTables, HstuCall, HstuShape
from npu_gr.backend.cuda import CUDABackend
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.backend.tiles import quantise
from npu_gr.backend.torch_ops import TorchOps
from tests.backend.test_cuda import Recorder
from tests.backend.triton.test_kernels import (
    DTYPES,
    REFERENCE,
    assert_close,
    cut,
    few,
    on,
    seeds,
    small_tiles,
)
from tests.engine.test_int8 import rounding, whole_history
from tests.engine.test_ring import RUNS, Chain, prefix, scores

pytestmark = [
    pytest.mark.triton,
    # the interpreter's
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


COMPILED = """
import tempfile
from pathlib import Path
from tests.backend.triton.sass import compiled, disassemble, disassembler
from tests.backend.triton.variants import H100, of_int8

tool = disassembler()
for v in of_int8(H100):
    made = compiled(v, 90)
    with tempfile.TemporaryDirectory() as folder:
        spills = tool and disassemble(made.asm["cubin"], tool, Path(folder)).spills
    is_code, fits = made.asm["cubin"][:4] == b"\\x7fELF", made.metadata.shared <= H100.shared_bytes
    print(is_code, fits, spills or 0)
"""


def test_it_compiles_for_sm_90_without_spills() -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'npu_gr[triton]'")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "True True 0\n" * 2


class Numbers:
    """Rows of two heads of odd widths, and the calls over them."""

    def __init__(
        self, past: int, new: int, seed: int, dtype: torch.dtype, sizes: list[int]
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        mixed = torch.randn(past + new, 2, 3 + 3 + 5, generator=random)
        mixed *= 10.0 ** torch.randint(-1, 2, (past + new, 2, 1), generator=random)
        q, k, v = mixed.to(dtype).split([3, 3, 5], dim=2)
        times = torch.randint(0, 10**9, (past + new,), generator=random)
        tables = (torch.randn(2, width, generator=random).to(dtype) for width in (9, TIME_BUCKETS))
        # as the pages of an arena: each row with its scale, and NaN behind the last token
        planes = [torch.full((past + 1, 2, width + 2), -1, dtype=torch.int8) for width in (3, 5)]
        for plane, rows in zip(planes, (k, v), strict=True):
            plane[:past] = quantise(rows[:past])
        slabs = cut(planes[0][:past], planes[1][:past], sizes)
        bias = BiasTables(*tables)
        self.new = HstuCall(
            *(q[past:], k[past:], v[past:], slabs, times, bias, 0.7), stored=torch.int8
        )
        self.shown = self.new._replace(times=times[:past], query_time=10**9 + 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(few, max_examples=3)
@given(
    past=st.integers(0, 40),
    new=st.integers(1, 35),
    sizes=st.lists(st.integers(1, 20), max_size=3),
    seed=seeds,
)
def test_attention_over_stored_rows(
    triton_device: torch.device,
    dtype: torch.dtype,
    past: int,
    new: int,
    sizes: list[int],
    seed: int,
) -> None:
    """Of the GPU's kernel and of the NPU's, as the definition reads the same bytes."""
    from npu_gr.backend.triton import hstu, hstu_ascend

    with pytest.MonkeyPatch.context() as monkeypatch:
        small_tiles(monkeypatch)
        case = Numbers(past, new, seed, dtype, sizes)
        for attention in (hstu.Attention(), hstu_ascend.NpuAttention()):
            read = on(triton_device, case.new).as_stored(is_causal=True)
            assert attention.takes(read.q, read.cached)
            got = attention.causal(read, read.cached)
            assert_close(got, REFERENCE.hstu_causal(case.new), DTYPES[dtype])
            read = on(triton_device, case.shown).as_stored(is_causal=False)
            got = attention.targets(read, read.cached)
            assert_close(got, REFERENCE.hstu_targets(case.shown), DTYPES[dtype])


def test_a_ranker_with_pages_in_int8(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tier's way to a prefix, by the kernels alone: the torch ops are not asked."""
    if triton_device.type != "cpu":
        pytest.skip("the pages of this test are the host's")
    own, chain = whole_history(0), Chain(0)
    backend = CUDABackend(Recorder())
    shape = HstuShape(2, 8, 8, torch.float32, torch.int8, 64, 16, False, True)
    assert list(backend.hstu_ways(shape)) == ["triton", "torch"]
    for op in ("hstu_causal", "hstu_targets"):
        monkeypatch.setattr(TorchOps, op, None)
    one, right = (
        rounding(own, each, arrangement="natural") for each in (backend, ReferenceBackend())
    )
    for start, stop in [pair for pair in chain.steps() if pair[1] <= 130]:
        for each in (one, right):
            each.arena.fill(RUNS, math.nan)
            if start:
                scores(each, chain.cold(start).leasing(None, RUNS))
        work = chain.cold(stop).leasing(prefix(RUNS, start), RUNS)
        want, cold = scores(right, work), scores(one, chain.cold(stop))
        hit = scores(one, chain.cold(stop).leasing(prefix(RUNS, stop), None))
        for got in (scores(one, work), cold, hit):
            assert abs(got - want).max() <= 1e-4 * abs(want).max(), (start, stop)
