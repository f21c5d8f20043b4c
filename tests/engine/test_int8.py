"""A ranker whose pages are in int8: every way to a prefix gives the bits of a cold rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from benchmarks.kernels_pass import SegmentWise
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import supported
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.rank_engine import FindPass, RankEngine
from npu_gr.model.hstu import HSTU
from tests.backend.cpu.test_hstu_pass import NOTHING, Whole, engine, off
from tests.engine.test_ring import OTHER, RUNS, Chain, model, prefix, scores
from tests.models import tiny_model

needs_kernels = pytest.mark.skipif(not supported(), reason="no kernels")

# of the largest score: what rounding moves at most here, and what it moves at least
COARSE, FINE = 0.2, 1e-4


def rounding(own: HSTU, backend: Any, **changes: Any) -> RankEngine:
    shape = own.config
    windows = {
        "window_tokens": shape.attention_window_tokens,
        "first_tokens": shape.attention_first_tokens,
    }
    return engine(own, backend, **{"dtype": "int8", **windows, **changes})


def whole_history(seed: int, dtype: torch.dtype = torch.float32) -> HSTU:
    return tiny_model(dtype, seed, item_features=(), num_layers=3, position_buckets=40)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [Whole, SegmentWise])
def test_any_chain_of_deltas_has_the_bits_of_a_cold_rank(
    dtype: torch.dtype, backend: type[CPUBackend]
) -> None:
    """Kept, read without keeping, hit, moved to other pages by way of DRAM, and in company.

    With full attention, and with a window, whose ring overwrites pages.
    """
    for seed, own in enumerate((whole_history(0, dtype), model(1, dtype), model(3, dtype))):
        chain, runs = Chain(seed), RUNS
        one, every = rounding(own, backend()), engine(own, backend(), dtype="int8")
        dram = KVArena(one.arena.layout, 9, torch.device("cpu"))
        for start, stop in [pair for pair in chain.steps() if pair[1] <= 500]:
            work = chain.cold(stop)
            want = scores(every, work)
            found = [
                scores(one, work),
                scores(one, work.leasing(prefix(runs, start), None)),
                scores(one, work.leasing(prefix(runs, start), runs)),
                scores(one, work.leasing(prefix(runs, stop), None)),
            ]
            spilled, runs = (PageRun(1, 8),), OTHER if runs is RUNS else RUNS
            dram.copy_tokens_from(one.arena, OTHER if runs is RUNS else RUNS, spilled, stop)
            one.arena.fill(runs, math.nan)  # as another user's pages
            one.arena.copy_tokens_from(dram, spilled, runs, stop)
            again = work.leasing(prefix(runs, stop), None)
            found += one.forward([again, chain.cold(40)])[:1]
            assert [each.tobytes() for each in found] == [want.tobytes()] * 5, (seed, start, stop)


@needs_kernels
def test_next_and_what_it_finds_go_the_same_way() -> None:
    one = rounding(tiny_model(item_features=(), retrieval=True), Whole())

    def found(work: Any) -> list[bytes]:
        (answer,) = one.find_all([FindPass(work, 5, NOTHING)])
        return [answer.vector.tobytes(), answer.rows.tobytes()]

    for start, stop in Chain(1).steps()[:5]:
        work = changed(Chain(1).cold(stop), candidates=NOTHING)
        cold = found(work)
        assert found(work.leasing(prefix(RUNS, start), RUNS)) == cold
        assert found(work.leasing(prefix(RUNS, stop), None)) == cold


def test_every_pass_is_that_of_the_definition() -> None:
    """In one call, op by op on tiles, by plain torch on natural pages, and by a dense mask."""
    for seed, own in enumerate((whole_history(0), model(1))):
        chain = Chain(seed)
        natural: dict[str, Any] = {"arrangement": "natural"}
        ways = [
            rounding(own, CPUBackend("off"), **natural),
            rounding(own, ReferenceBackend(), **natural),
        ]
        if supported():
            ways += [rounding(own, Whole()), rounding(own, SegmentWise())]
        for start, stop in [pair for pair in chain.steps() if pair[1] <= 250]:
            kept = chain.cold(stop).leasing(prefix(RUNS, start), RUNS)
            want, *others = [scores(each, kept) for each in ways]
            exact = scores(ways[0], changed(chain.cold(stop), is_unrounded=True))
            for each in others:
                assert off(each, want) <= 5e-3, (seed, start, stop)
            assert off(scores(ways[0], chain.cold(stop)), want) <= 1e-5
            assert off(scores(ways[1], chain.cold(stop)), others[0]) <= 1e-5
            assert FINE <= off(want, exact) <= COARSE, (seed, start, stop)


@needs_kernels
def test_a_pass_without_rounding_is_one_of_the_models_own_dtype_in_any_company() -> None:
    own, chain = whole_history(0), Chain(0)
    plain, one = engine(own, Whole()), rounding(own, Whole())
    work = chain.cold(150)
    exact = changed(work, is_unrounded=True)
    want = [scores(one, work), scores(plain, work)]
    for got, right in zip(one.forward([work, exact]), want, strict=True):
        assert got.tobytes() == right.tobytes()


def test_a_page_takes_half_of_the_bytes_of_bfloat16() -> None:
    def layout(dtype: str, **changes: Any) -> KVLayout:
        shape: dict[str, Any] = {"num_layers": 8, "num_heads": 4, "qk_dim": 64, "v_dim": 64}
        return KVLayout(**{**shape, "dtype": dtype, **changes})

    for arrangement in ("natural", "tiles"):
        ours = layout("int8", arrangement=arrangement)
        assert ours.token_bytes == 8 * 4 * 2 * (64 + 2)
        assert ours.page_bytes / layout("bfloat16").page_bytes == pytest.approx(0.516, abs=1e-3)
        arena = KVArena(ours, 3, torch.device("cpu"))
        held = sum(part.nbytes for part in arena.copies([PageRun(0, 3)]))
        assert held == 3 * ours.page_bytes
    assert layout("int8").layout_id != layout("bfloat16").layout_id
