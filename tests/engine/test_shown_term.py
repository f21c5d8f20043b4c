"""The term of shown items is added once to its task's logit, whatever way a pass goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from benchmarks.kernels_pass import SegmentWise
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import supported
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.core.arrays import F32
from npu_gr.engine.rank_engine import FindPass, PrefetchedScores
from npu_gr.model.delta import TensorChange
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_input import shown_term
from npu_gr.model.served_weights import Patch
from npu_gr.model.weight_stamps import WeightStamps
from tests.backend.cpu.test_hstu_pass import NOTHING, Whole, engine
from tests.engine.test_ring import RUNS, Chain, prefix, scores
from tests.models import tiny_model

SHOWN = 1  # index of the task


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> HSTU:
    made = tiny_model(dtype, item_features=(), shown_task="like", **changes)
    torch.manual_seed(1)
    made.factors_of_shown.normal_()
    return made


@pytest.mark.skipif(not supported(), reason="no kernels")
@pytest.mark.parametrize("backend", [Whole, SegmentWise, ReferenceBackend])
def test_a_hit_has_the_bits_of_a_cold_rank_and_the_term_once(
    backend: type[CPUBackend] | type[ReferenceBackend],
) -> None:
    own, chain = model(), Chain(0)
    plain = tiny_model(item_features=())
    natural = {"arrangement": "natural"} if backend is ReferenceBackend else {}
    device: Any = backend()
    one, without = engine(own, device, **natural), engine(plain, device, **natural)
    for start, stop in chain.steps()[:4]:
        work = chain.cold(stop)
        want = scores(without, work).copy()
        term = shown_term(own)
        assert term is not None
        want[:, SHOWN] += term(work.tokens.rows, work.candidates)
        assert np.abs(want - scores(without, work)).max() > 0.1
        found = [
            scores(one, work),
            scores(one, work.leasing(prefix(RUNS, start), RUNS)),
            scores(one, work.leasing(prefix(RUNS, stop), None)),
            one.forward([chain.cold(40), replace(work, is_unrounded=True)])[1],
        ]
        if backend is ReferenceBackend:
            np.testing.assert_allclose(found, [want] * 4, rtol=1e-4, atol=1e-4)
        else:
            assert [each.tobytes() for each in found] == [want.tobytes()] * 4


@pytest.mark.parametrize("backend", [CPUBackend, lambda: CPUBackend("off")])
def test_items_that_are_scored_as_they_are_found_get_it_too(backend: Any) -> None:
    own = model(retrieval=True)
    one = engine(own, backend(), **({} if supported() else {"arrangement": "natural"}))
    history = replace(Chain(0).cold(80), candidates=NOTHING)
    (found,) = one.find_all([FindPass(history, 6, NOTHING, PrefetchedScores(None, 6))])
    assert found.scores is not None
    want = scores(one, replace(history, candidates=found.rows))
    np.testing.assert_allclose(found.scores.logits, want, rtol=1e-4, atol=1e-4)


def test_a_delta_changes_it_as_a_whole_checkpoint_does() -> None:
    now, later = model(), model()
    later.factors_of_shown[[3, 7]] *= 2
    one = engine(now, CPUBackend("off"), arrangement="natural")
    work = Chain(0).cold(60)

    def of(served: HSTU) -> F32:
        return scores(engine(served, CPUBackend("off"), arrangement="natural"), work)

    before = scores(one, work)
    change = TensorChange(np.array([3, 7]), later.factors_of_shown[[3, 7]])
    empty = np.empty(0, np.int64)
    patch = Patch(
        *([], {"factors_of_shown": change}, empty, torch.empty(0, 32), empty),
        *(False, False, 2),
    )
    assert not patch.reaches_prefixes
    was = one.weights.shown
    one.weights.write(patch, WeightStamps.none(300))
    assert one.weights.shown is not was  # it is a copy where the weights are on another device
    assert scores(one, work).tobytes() == of(later).tobytes() != before.tobytes()


def test_new_items_get_that_of_the_mean_item_and_no_candidate_changes_another() -> None:
    term = shown_term(model(torch.bfloat16))
    assert term is not None
    assert term.table.dtype == np.float32
    history, candidates = np.array([3, 5, 3, 900]), np.array([9, 300, 4, 9])
    found = term(history, candidates)
    assert found[1] == 0
    for place in range(4):
        assert term(history, candidates[place : place + 1]).tobytes() == found[place].tobytes()
    np.testing.assert_array_equal(term(history[:0], candidates), [*term.table[[9]][:, 0], 0,
        *term.table[[4, 9]][:, 0]])  # fmt: skip
    with pytest.raises(ValueError, match="shown_task: 'buy' is none of the tasks"):
        tiny_model(shown_task="buy")
    with pytest.raises(ValueError, match="shown_task: not with attention_window_tokens"):
        tiny_model(shown_task="like", attention_window_tokens=9)
    assert shown_term(tiny_model()) is None
