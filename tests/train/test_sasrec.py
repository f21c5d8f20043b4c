"""SASRec learns the planted rule, depends on the seed only, and sees no later items."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.next_item import baseline_figures
from npu_gr.train.sasrec import SASRec, SASRecOptions, sampled_loss
from npu_gr.train.shared_baselines import RankedBaselines
from tests.train.synthetic import planted

TINY = SASRecOptions(
    dim=16, num_layers=1, history_items=8, learning_rate=1e-2, epochs=12, dropout=0.1
)


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(), [], "leave-one-out")


@pytest.fixture(scope="module")
def fitted(log: InteractionLog) -> SASRec:
    return SASRec(log, "leave-one-out", 0, TINY)


def test_the_planted_rule_is_learnt(log: InteractionLog, fitted: SASRec) -> None:
    assert baseline_figures(log, log.next_items(), fitted).hr_at_10 > 0.85


def test_the_test_decides_nothing_and_the_seed_does(log: InteractionLog, fitted: SASRec) -> None:
    changed = log.items.copy()
    changed[~log.trained] = (changed[~log.trained] + 1) % log.num_items
    other = InteractionLog(
        **{name: getattr(log, name) for name in InteractionLog.__slots__} | {"items": changed}
    )
    again = SASRec(other, "leave-one-out", 0, TINY)
    np.testing.assert_array_equal(again.next_items(other, 3), fitted.next_items(log, 3))


def test_no_place_reads_a_later_one(log: InteractionLog, fitted: SASRec) -> None:
    items = torch.from_numpy(log.items[:8].copy())[None]
    later = items.clone()
    later[0, 5:] = 1
    with torch.no_grad():
        one, two = fitted._model(items), fitted._model(later)
    torch.testing.assert_close(one[0, :5], two[0, :5])
    assert not torch.allclose(one[0, 5], two[0, 5])


def test_of_many_draws_the_sampled_softmax_is_the_full_one() -> None:
    torch.manual_seed(0)
    rows, table, following = torch.randn(6, 4), torch.randn(30, 4), torch.randint(30, (6,))
    want = torch.nn.functional.cross_entropy(rows @ table.T, following)
    torch.testing.assert_close(
        sampled_loss(rows, table, following, 200_000), want, rtol=0.01, atol=0.01
    )
    assert sampled_loss(rows, table, following, 30) != want


def test_a_large_catalogue_is_sampled_and_the_rule_is_learnt(log: InteractionLog) -> None:
    sampled = msgspec.structs.replace(TINY, max_softmax_items=10, num_negatives=20)
    found = SASRec(log, "leave-one-out", 0, sampled)
    assert baseline_figures(log, log.next_items(), found).hr_at_10 > 0.85
    assert found.words.startswith("SASRec with a sampled softmax was trained as a baseline: 12 ")


def test_a_report_has_it_as_one_of_the_baselines(log: InteractionLog, fitted: SASRec) -> None:
    targets = log.next_items()
    others = RankedBaselines({}, (), None)
    found = others.and_one(log, targets, fitted)
    assert found.figures() == (baseline_figures(log, targets, fitted),)
    assert found.notes == (fitted.words,)
