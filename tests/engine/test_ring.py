"""A semi-local ranker over a ring of pages: every way to a prefix gives the cold scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced

from benchmarks.kernels_pass import SegmentWise
from npu_gr.backend.calls import FusedForwardCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import supported
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.core.arrays import F32
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.rank_engine import FindPass, RankEngine, RankPass
from npu_gr.model.hstu import HSTU
from tests.backend.cpu.test_hstu_pass import NOTHING, SHOWN_AT, Whole, engine, off, tokens
from tests.models import tiny_model

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels")

CANDIDATES = np.arange(9)
LENGTH = 700  # several windows
RUNS: tuple[PageRun, ...] = (PageRun(9, 3), PageRun(2, 5))
OTHER: tuple[PageRun, ...] = (PageRun(13, 1), PageRun(20, 2), PageRun(0, 1), PageRun(15, 4))


def model(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> HSTU:
    """A model whose window and first tokens end inside of pages or at their edges."""
    random = np.random.default_rng(seed)
    settings = {
        "attention_window_tokens": int(random.choice([1, 5, 64, 100, 130])),
        "attention_first_tokens": int(random.choice([0, 3, 64, 70])),
        "position_buckets": int(random.choice([2, 40, 300])),
        "item_features": (),
        "positions": str(random.choice(["none", "start"])),
        "num_layers": int(random.choice([1, 2, 3])),
    }
    return tiny_model(dtype, seed, **{**settings, **changes})


def ring(model: HSTU, backend: CPUBackend | ReferenceBackend, **changes: Any) -> RankEngine:
    shape = model.config
    return engine(
        model,
        backend,  # type: ignore[arg-type]
        window_tokens=shape.attention_window_tokens,
        first_tokens=shape.attention_first_tokens,
        **changes,
    )


class Chain:
    """One user's history, which grows by random deltas."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._all = tokens(LENGTH, seed)
        deltas = random.choice([1, 10, 63, 64, 65, 200], LENGTH)
        self.lengths = [0, *np.cumsum(deltas).tolist()]

    def cold(self, length: int) -> RankPass:
        return RankPass(self._all[:length], 0, CANDIDATES, SHOWN_AT)

    def steps(self) -> list[tuple[int, int]]:
        pairs = zip(self.lengths, self.lengths[1:], strict=False)
        return [(start, stop) for start, stop in pairs if stop <= LENGTH]


def prefix(runs: tuple[PageRun, ...], length: int) -> CachedPrefix | None:
    return CachedPrefix(runs, length) if length else None


def scores(one: RankEngine, work: RankPass) -> F32:
    return one.forward([work])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_chain_of_deltas_has_the_bits_of_a_cold_rank(dtype: torch.dtype) -> None:
    """Kept, read without keeping, hit, moved to other pages by way of DRAM, and in company.

    The cold rank encodes every token: its pages are those of full attention, its mask the window's.
    """
    for seed in range(6):
        own, chain, runs = model(seed, dtype), Chain(seed), RUNS
        one, every = ring(own, Whole()), engine(own, Whole())
        dram = KVArena(one.arena.layout, 9, torch.device("cpu"))
        for start, stop in chain.steps():
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
            one.arena.fill(runs, float("nan"))  # as another user's pages
            one.arena.copy_tokens_from(dram, spilled, runs, stop)
            again = work.leasing(prefix(runs, stop), None)
            found += one.forward([again, chain.cold(40)])[:1]
            assert [each.tobytes() for each in found] == [want.tobytes()] * 5, (seed, start, stop)


def test_every_pass_is_that_of_the_definition() -> None:
    """In one call, op by op on tiles, by plain torch on natural pages, and by a dense mask."""
    for seed in range(3):
        own, chain = model(seed), Chain(seed)
        whole, apart, plain, dense = (
            ring(own, Whole()),
            ring(own, SegmentWise()),
            ring(own, CPUBackend("off"), arrangement="natural"),
            engine(own, ReferenceBackend(), arrangement="natural"),  # type: ignore[arg-type]
        )
        for start, stop in chain.steps()[:6]:
            kept = chain.cold(stop).leasing(prefix(RUNS, start), RUNS)
            want = scores(dense, chain.cold(stop)) if stop < 300 else None
            found = [scores(each, kept) for each in (whole, apart, plain)]
            for each in found:
                assert off(each, found[0] if want is None else want) <= 1e-5, (seed, start, stop)


def test_next_and_what_it_finds_go_the_same_way() -> None:
    one, chain = ring(model(1, retrieval=True), Whole()), Chain(1)

    def found(work: RankPass) -> list[bytes]:
        (answer,) = one.find_all([FindPass(work, 5, NOTHING)])
        return [answer.vector.tobytes(), answer.rows.tobytes()]

    for start, stop in chain.steps():
        work = RankPass(chain.cold(stop).tokens, 0, NOTHING, SHOWN_AT)
        cold = found(work)
        assert found(work.leasing(prefix(RUNS, start), RUNS)) == cold
        assert found(work.leasing(prefix(RUNS, stop), None)) == cold


def test_a_long_history_costs_what_its_last_rows_depend_on() -> None:
    """Cold, kept or by a delta; and one token less would be another score."""
    own = model(0, attention_window_tokens=65, attention_first_tokens=3, num_layers=2)
    one, chain = ring(own, Whole()), Chain(3)
    layout = one.arena.layout.prefix
    assert (layout.first_end, layout.first_needed(LENGTH), layout.most_tokens) == (64, 512, 256)
    computed = list[int]()
    encode = one.backend.fused_forward

    def counted(call: FusedForwardCall) -> F32 | None:
        computed.extend(segment.num_new for segment in call.segments)
        found: F32 | None = encode(call)
        return found

    one.backend.fused_forward = counted  # type: ignore[method-assign]
    work = chain.cold(LENGTH)
    for cached, keep, most in ((0, None, 252), (0, RUNS, 252), (100, None, 188), (100, RUNS, 188)):
        if cached:
            scores(one, chain.cold(cached).leasing(None, RUNS))
        computed.clear()
        scores(one, work.leasing(prefix(RUNS, cached), keep))
        assert sum(computed) == most, (cached, keep)
    reach = LENGTH - 2 * 64  # of the two layers
    want = scores(one, work)
    for changed, is_seen in ((reach - 1, False), (reach, True), (2, True), (3, False)):
        rows = work.tokens.rows.copy()
        rows[changed] += 1
        other = scores(one, replaced(work, tokens=replaced(work.tokens, rows=rows)))
        assert (other.tobytes() != want.tobytes()) is is_seen, changed


def test_a_window_over_all_of_the_history_is_full_attention() -> None:
    whole = tiny_model(item_features=())
    settings: dict[str, Any] = {
        "attention_first_tokens": 0, "position_buckets": 40, "num_layers": 3, "positions": "none",
    }  # fmt: skip
    wide = model(0, attention_window_tokens=LENGTH + 1, **settings)
    wide.load_state_dict(whole.state_dict())
    want = scores(engine(whole, Whole()), Chain(0).cold(300))
    assert scores(ring(wide, Whole()), Chain(0).cold(300)).tobytes() == want.tobytes()
    narrow = model(0, attention_window_tokens=60, **settings)
    narrow.load_state_dict(whole.state_dict())
    assert off(scores(ring(narrow, Whole()), Chain(0).cold(300)), want) > 1e-3
