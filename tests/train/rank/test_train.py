"""Training learns a planted rule and tastes, is deterministic, and stops at a NaN loss."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from npu_gr.core.errors import DataError
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.model.blend import OWN_WEIGHTS, ScoreBlend
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.weights import load, save
from npu_gr.train.data import InteractionLog, NextItem, build_log
from npu_gr.train.metrics import Difference
from npu_gr.train.rank import blend_choice as module
from npu_gr.train.rank import fit
from npu_gr.train.rank.blend import ItemList, count_transitions
from npu_gr.train.rank.evaluate import evaluated_logits
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.item_similarity import KINDS
from npu_gr.train.rank.losses import NextItemLikelihood, hold_out
from npu_gr.train.rank.options import NEXT, Task, TrainOptions
from npu_gr.train.rank.train import train_rank
from npu_gr.train.site.report import warning_of_ranker
from npu_gr.train.steps import TrainingProgress
from tests.models import CPU
from tests.train.synthetic import NUM_ITEMS, planted

TINY = TrainOptions(
    split="leave-one-out",
    dim=16,
    qk_dim=8,
    v_dim=8,
    head_dim=16,
    epochs=1,
    window_tokens=16,
    batch_tokens=256,
    refit=False,
)
GENRES = [ItemValues("genre", ["a", "b"], {item * 10: [item % 2] for item in range(NUM_ITEMS)})]


def test_the_ranker_learns_the_rule_and_the_users() -> None:
    options = msgspec.structs.replace(
        TINY, epochs=20, patience=0, learning_rate=1e-2, dropout=0.0, click_ratio=0.5
    )
    _, found = train_rank(planted(), GENRES, options)
    popularity = found.baselines[0]
    for row in (found.ranker, *found.parts):
        assert row.hr_at_10 > popularity.hr_at_10 + 0.3, row
    assert found.ranker.auc > 0.8


@pytest.mark.parametrize(("max_softmax_items", "best"), [(1, 2), (NUM_ITEMS, 1)])
def test_of_a_large_catalogue_the_epoch_that_ranks_best_is_kept_not_the_likeliest(
    monkeypatch: pytest.MonkeyPatch, max_softmax_items: int, best: int
) -> None:
    ranks = [9.0, 1.0, 5.0, 5.0, 0.0]  # of each epoch; patience ends before the last
    validations: list[NextItemLikelihood] = []

    def validated(_inputs: Any, _model: Any, targets: Sequence[NextItem]) -> NextItemLikelihood:
        epoch = len(validations)
        one = np.ones(len(targets))
        validations.append(NextItemLikelihood(-(1.0 + epoch) * one, ranks[epoch] * one))
        return validations[-1]

    monkeypatch.setattr(fit, "next_item_likelihood", validated)
    log = build_log(planted(), [], "leave-one-out")
    options = msgspec.structs.replace(
        TINY, epochs=5, patience=2, max_softmax_items=max_softmax_items
    )
    held_out = hold_out(log, options)
    found = fit.fit(held_out.log, [], (NEXT,), options, held_out.targets, "test", lambda _: None)
    assert found.num_epochs == best
    by_rank = [-math.log(1 + rank) for rank in ranks]
    curve = [-1.0, -2.0, -3.0] if best == 1 else by_rank[:4]
    assert found.curve == pytest.approx(curve)


def test_two_runs_are_equal_bit_for_bit_and_another_seed_is_not() -> None:
    weights = [
        train_rank(planted(), GENRES, msgspec.structs.replace(TINY, seed=seed))[
            0
        ].model.state_dict()
        for seed in (0, 0, 1)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["item.weight"], weights[2]["item.weight"])


def test_the_checkpoint_says_what_it_is_and_can_be_served(tmp_path: Path) -> None:
    seen: list[TrainingProgress] = []
    checkpoint, found = train_rank(planted(), GENRES, TINY, seen.append)
    save(checkpoint, tmp_path / "it")
    loaded = load(tmp_path / "it")
    assert loaded.action_values == (1.0, 5.0)
    assert loaded.item_ids.tolist() == [item * 10 for item in range(NUM_ITEMS)]
    assert loaded.model.config.tasks == ("next", "like")
    feature_ids = loaded.model.feature_ids_0
    assert isinstance(feature_ids, torch.Tensor)
    assert feature_ids[:, 0].tolist() == [item % 2 for item in range(NUM_ITEMS)]
    assert loaded.metrics["auc"] == found.ranker.auc
    stages = {"ranker: train", "ranker: neighbours", "ranker: evaluate"}
    assert {progress.stage for progress in seen} == stages
    assert seen[-1].done == seen[-1].total == found.num_next


def test_what_is_kept_for_validation_and_test_is_not_trained_on() -> None:
    log = planted()

    def with_others(num_last: int) -> Interactions:
        last = np.zeros(len(log), np.bool_)
        for user in range(60):
            last[np.flatnonzero(log.users == user)[-num_last:]] = True
        return dataclasses.replace(
            log,
            items=np.where(last, (log.items + 70) % (10 * NUM_ITEMS), log.items),
            values=np.where(last, 6 - log.values, log.values),
        )

    one, how = train_rank(log, [], TINY)
    test, both = (train_rank(with_others(num_last), [], TINY)[0] for num_last in (1, 2))
    weights = one.model.state_dict()
    for other in (test, both):
        assert all(
            torch.equal(weights[name], tensor) for name, tensor in other.model.state_dict().items()
        )
    assert one.order is not None
    assert test.order is not None
    assert both.order is not None
    assert np.array_equal(one.order.log_prob, test.order.log_prob)
    assert one.order.weights == test.order.weights
    assert one.order.weights != both.order.weights
    # the validation is counted once the weights are fitted
    trained = build_log(log, [], "leave-one-out")
    counted = count_transitions(trained, "next", one.order.decay)
    assert np.array_equal(one.order.log_prob, counted.log_prob)
    assert one.order.neighbours is not None
    named = [kind for kind in KINDS if f"neighbours: {kind.name}" in how.fitting]
    kind = max(named, key=lambda kind: len(kind.name))  # "last 5" is a part of "last 500"
    assert np.array_equal(one.order.neighbours.similarity, kind.counted(trained).similarity)
    assert one.order.neighbours.last_items == kind.last_items


def test_a_source_that_is_surely_better_alone_is_named_served_and_refitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gap = Difference(0.1, 0.05, 0.15, 0.001)
    evaluated: list[tuple[int, int]] = []

    def better(
        _: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
    ) -> dict[str, Any]:
        assert all(
            target.event == log.starts[target.user] + log.num_trained[target.user]
            for target in targets
        )
        evaluated.append((int(log.trained.sum()), len(lists)))
        return {"neighbours": gap}

    monkeypatch.setattr(module, "better_alone", better)
    served, found = train_rank(planted(), [], msgspec.structs.replace(TINY, refit=True))
    assert evaluated == [(60 * 28, 60)], "by the validation, not by the test"
    words = (
        "WARNING: neighbours alone ranks the validation better than the fitted score blend: "
        "NDCG@10 +0.1000 (+0.0500 .. +0.1500)"
    )
    for said in (found.text(), warning_of_ranker(found)):
        assert f"{words}; it is served instead" in said.splitlines()
    assert served.order is not None
    weights = dict(served.order.weights)
    assert all(weights.pop(name) != 0 for name in OWN_WEIGHTS)
    assert weights == dict.fromkeys(weights, 0.0) | {"neighbours": 1.0}
    assert "neighbours alone" in {part.model for part in found.parts}


def newest_item(log: Interactions) -> Interactions:
    """Let every user's last event have an item that no earlier event has."""
    last = len(log) - 1 - np.unique(log.users[::-1], return_index=True)[1]
    items = log.items.copy()
    items[last] = 990
    return dataclasses.replace(log, items=items)


def test_the_served_ranker_is_refitted_on_all_events_and_the_figures_are_of_the_evaluated_one() -> (
    None
):
    events = newest_item(planted())
    seen: list[TrainingProgress] = []
    evaluated, want = train_rank(events, [], TINY)
    served, found = train_rank(events, [], msgspec.structs.replace(TINY, refit=True), seen.append)
    assert found.ranker == want.ranker
    assert found.baselines == want.baselines
    assert (found.num_trained, found.num_served) == (60 * 28, 60 * 30)
    assert (want.num_trained, want.num_served) == (60 * 28, 60 * 28)
    assert served.metrics == evaluated.metrics | {"num_served": 1800.0}
    assert list(dict.fromkeys(step.stage for step in seen)) == [
        "ranker: train",
        "ranker: neighbours",
        "ranker: evaluate",
        "ranker: refit",
    ]
    # An item that only the newest events have: it has been a next item in the refit alone.
    row = served.item_ids.tolist().index(990)
    history = Segment(
        items=torch.tensor([0]),
        actions=torch.tensor([0]),
        times=torch.tensor([1_600_000_000]),
        candidates=torch.tensor([served.model.config.num_items]),
        candidate_time=1_600_100_000,
        is_next=True,
    )
    before, after = (
        (checkpoint.model.items.vectors() @ checkpoint.model(CPU, [history])[0][0])
        .softmax(0)[row]
        .item()
        for checkpoint in (evaluated, served)
    )
    assert after > before
    assert evaluated.order is not None
    assert served.order is not None
    assert served.order.weights == evaluated.order.weights
    assert row in served.order.successors
    assert row not in evaluated.order.successors
    assert served.order.neighbours is not None
    assert evaluated.order.neighbours is not None
    assert row in served.order.neighbours.items
    assert row not in evaluated.order.neighbours.items
    said = found.table().title
    assert said == (
        "evaluated on the last event of each user by a model of 1,680 events; served: "
        "refitted on all 1,800"
    )


def test_a_refit_repeats_bit_for_bit() -> None:
    options = msgspec.structs.replace(TINY, refit=True)
    one, other = (train_rank(planted(), GENRES, options)[0].model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_validation_refits_on_the_test_part_too() -> None:
    options = msgspec.structs.replace(TINY, refit=True, evaluate_on="validation")
    _, found = train_rank(planted(), [], options)
    assert (found.num_trained, found.num_served) == (60 * 27, 60 * 30)


def test_some_users_stand_for_all_where_ranking_the_catalogue_would_take_too_long() -> None:
    _, found = train_rank(planted(), [], msgspec.structs.replace(TINY, test_users=7))
    assert found.num_next == 7
    assert len(found.ranker.ranks.overall) == len(found.baselines[0].ranks.unseen) == 7


def test_evaluated_logits_are_what_the_server_answers_even_for_over_long_histories() -> None:
    options = msgspec.structs.replace(TINY, split="time", max_history_tokens=64)
    checkpoint, _ = train_rank(planted(), GENRES, options)
    log = build_log(planted(), GENRES, "time")
    got = evaluated_logits(LogInputs(log, checkpoint.model), checkpoint.model, 1)
    for place, event in enumerate(np.flatnonzero(~log.trained)[:40]):
        history = slice(log.starts[log.users[event]], event)
        segment = Segment(
            items=torch.from_numpy(log.items[history]),
            actions=torch.from_numpy(log.actions[history]),
            times=torch.from_numpy(log.times[history]),
            candidates=torch.from_numpy(log.items[event : event + 1]),
            candidate_time=int(log.times[event]),
        )
        assert math.isclose(
            got[place], checkpoint.model(CPU, [segment])[0][0, 1].item(), abs_tol=1e-4
        )


def test_one_task_alone_leaves_the_other_figures_out() -> None:
    only_like = msgspec.structs.replace(TINY, tasks=(Task(name="like", at_least=4.0),))
    _, found = train_rank(planted(), [], only_like)
    assert "auc" in found.as_dict()
    assert "hr_at_10" not in found.as_dict()
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(found.table())
    assert "ranker" in console.export_text()
    only_click = msgspec.structs.replace(TINY, tasks=(Task(name="next"),))
    assert "auc" not in train_rank(planted(), [], only_click)[1].as_dict()


def test_a_task_with_one_class_is_rejected() -> None:
    options = msgspec.structs.replace(TINY, tasks=(Task(name="like", at_least=0.0),))
    with pytest.raises(
        DataError,
        match=r"like: at_least 0.* gives every trained event the same "
        r"label, yes.*--set",
    ):
        train_rank(planted(), [], options)


def test_a_loss_that_is_not_finite_stops_with_its_epoch() -> None:
    options = msgspec.structs.replace(TINY, learning_rate=1e30, epochs=3)
    with pytest.raises(DataError, match=r"the loss is (nan|inf) in epoch"):
        train_rank(planted(), [], options)


def test_two_tasks_without_a_threshold_are_rejected() -> None:
    with pytest.raises(ValueError, match="at most one"):
        TrainOptions(tasks=(Task(name="click"), Task(name="view")))
