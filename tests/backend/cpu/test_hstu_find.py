"""One native call for NEXT, search and rank gives the bits of three calls, in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.backend.calls import HstuFindCall, HstuFound
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import Native, supported
from npu_gr.core.arrays import I64
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.rank_engine import FindPass, NextItems, PrefetchedScores, RankEngine, RankPass
from npu_gr.model.hstu import HSTU
from tests.backend.cpu.test_hstu_pass import engine, tokens
from tests.models import tiny_model

DTYPES = (torch.float32, torch.bfloat16)
NOTHING: I64 = np.empty(0, np.int64)
SHOWN_AT = 1_700_000_000


class AtOnce(CPUBackend):
    """The CPU, which must take every search."""

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        found = super().hstu_find(call)
        assert found is not None
        return found


class StepByStep(CPUBackend):
    """The CPU without the one call."""

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        return None


@dataclass
class Case:
    """One request's way to its prefix, and what it asks for."""

    seed: int
    num_tokens: int
    num_cached: int
    keeps: bool
    k: int
    max_candidates: int
    least: int = 0
    merges: bool = False
    is_ranked: bool = True

    def prefill(self, one: RankEngine) -> None:
        if self.num_cached:
            cut = tokens(self.num_tokens, self.seed)[: self.num_cached]
            one.forward([RankPass(cut, 0, NOTHING, 0, keep=self.runs)])

    @property
    def runs(self) -> tuple[PageRun, ...]:
        first = 6 * (self.seed % 4)
        return PageRun(first + 4, 2), PageRun(first, 4)

    def work(self) -> FindPass:
        random = np.random.default_rng(self.seed)
        history = tokens(self.num_tokens, self.seed)
        # in any order, some of them twice
        hidden = random.integers(0, 300, int(random.integers(0, 200)))
        cached = CachedPrefix(self.runs, self.num_cached) if self.num_cached else None
        merge = (
            (lambda rows: np.concatenate([[299], rows[rows != 299][::2]])) if self.merges else None
        )
        ahead = PrefetchedScores(merge, self.max_candidates, self.least) if self.is_ranked else None
        keep = self.runs if self.keeps else None
        return FindPass(
            RankPass(history, 0, NOTHING, SHOWN_AT, cached, keep), self.k, hidden, ahead
        )


CASES = (
    Case(0, 130, 130, False, 40, 40),
    Case(1, 130, 64, True, 60, 25),
    Case(2, 0, 0, False, 5, 9),
    Case(3, 70, 0, True, 300, 200),  # more than there are
    Case(4, 33, 0, False, 12, 12),
    Case(5, 200, 130, False, 7, 7),
    Case(6, 65, 65, False, 20, 20, least=21),
    Case(7, 65, 65, False, 20, 20, least=20),
    Case(8, 100, 100, False, 30, 9, merges=True),
    Case(9, 90, 64, False, 30, 9, is_ranked=False),
    Case(10, 384, 383, True, 1, 1),
    Case(11, 50, 50, False, 300, 300, least=300),  # some are hidden, so fewer are found
)
TOO_FEW = (6, 11)  # seeds of cases that find fewer than they need


def same(got: NextItems, want: NextItems) -> None:
    np.testing.assert_array_equal(got.rows, want.rows)
    assert got.vector.tobytes() == want.vector.tobytes()
    assert (got.scores is None) == (want.scores is None)
    if got.scores is None or want.scores is None:
        return
    assert got.candidates is not None
    assert want.candidates is not None
    np.testing.assert_array_equal(got.candidates, want.candidates)
    assert got.scores.logits.tobytes() == want.scores.logits.tobytes()
    assert got.scores.retrieval is not None
    assert want.scores.retrieval is not None
    assert got.scores.retrieval.tobytes() == want.scores.retrieval.tobytes()


def alone(case: Case, one: RankEngine) -> NextItems:
    case.prefill(one)
    return one.find_all([case.work()])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_once_is_step_by_step(native: Native, dtype: torch.dtype) -> None:
    model = tiny_model(dtype, retrieval=True)
    at_once, apart = (engine(model, kind(isa=native.isa)) for kind in (AtOnce, StepByStep))
    for case in CASES:
        got, want = alone(case, at_once), alone(case, apart)
        same(got, want)
        assert not np.isin(got.rows, case.work().hidden).any(), case
        ranked = case.is_ranked and case.seed not in TOO_FEW
        assert (got.scores is not None) == ranked, case
        if got.scores is not None:
            assert got.candidates is not None
            assert len(got.candidates) == min(case.max_candidates, len(got.rows)), case
            cold = RankPass(
                tokens(case.num_tokens, case.seed), 0, got.candidates, SHOWN_AT, vector=got.vector
            )
            rank = apart.forward([cold])[0]  # by a rank of its own, without a prefix
            assert got.scores.retrieval is not None
            assert (
                np.column_stack([got.scores.logits, got.scores.retrieval]).tobytes()
                == rank.tobytes()
            ), case
        if case.keeps:  # what it wrote is the prefix
            for kept, wanted in zip(
                at_once.arena.copies(case.runs), apart.arena.copies(case.runs), strict=True
            ):
                assert torch.equal(
                    kept[:, : case.num_tokens // 64], wanted[:, : case.num_tokens // 64]
                )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_company_changes_no_bit(native: Native, dtype: torch.dtype) -> None:
    one = engine(tiny_model(dtype, retrieval=True), AtOnce(isa=native.isa))

    def together(cases: Sequence[Case]) -> None:
        want = [alone(case, one) for case in cases]
        for case in cases:
            case.prefill(one)
        for got, expected in zip(one.find_all([case.work() for case in cases]), want, strict=True):
            same(got, expected)

    together(CASES[:4])
    together([CASES[6], CASES[4], CASES[9], CASES[7]])
    together([CASES[8], CASES[5], CASES[2]])


@pytest.fixture
def model() -> HSTU:
    return tiny_model(retrieval=True)


needs_kernels = pytest.mark.skipif(not supported(), reason="no kernels")


@needs_kernels
def test_what_was_found_is_kept_for_a_request_that_no_longer_waits(model: HSTU) -> None:
    one, work = engine(model, AtOnce()), CASES[4].work()
    found = one.find_all([work])[0]
    assert work.ahead is not None
    assert work.ahead.found is not None
    same(work.ahead.found, found)


@needs_kernels
def test_other_models_go_step_by_step() -> None:
    """Features and heads that the call does not know, and pages that hold another dtype."""
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"head_activation": "gelu"}, {}),
        ({"positions": "absolute"}, {}),
        ({"scaling": "runtime"}, {}),
        ({}, {"dtype": "bfloat16"}),
    ]
    for changes, layout in ways:
        answers = list[HstuFound | None]()

        class Noted(CPUBackend):
            def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
                answers.append(super().hstu_find(call))  # noqa: B023  (called in this round alone)
                return answers[-1]  # noqa: B023

        model = tiny_model(retrieval=True, **changes)
        case = CASES[3]
        same(
            alone(case, engine(model, Noted(), **layout)),
            alone(case, engine(model, StepByStep(), **layout)),
        )
        assert not any(answer is not None for answer in answers), (changes, layout)


@needs_kernels
def test_what_is_outside_is_rejected_by_name(model: HSTU) -> None:
    one, good = engine(model, AtOnce()), CASES[4].work()
    history = tokens(33, 4)
    history.rows[3] = 301  # NEXT's own is the last
    with pytest.raises(IndexError, match="item row"):
        one.find_all([FindPass(RankPass(history, 0, NOTHING, SHOWN_AT), 5, NOTHING)])
    assert one.find_all([good])[0].scores is not None
