"""The blend counts transitions by its formula, and its weights maximise the likelihood."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from npu_gr.history_store.interactions import Interactions
from npu_gr.model.blend import (
    DECAY,
    LAST_ALONE,
    LAST_EVENTS,
    OWN_OR_NEXT,
    PRIOR,
    WEIGHTS,
    ScoreBlend,
    own_or_next,
)
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.own_items import OwnItems
from npu_gr.train.data import InteractionLog, NextItem, build_log
from npu_gr.train.metrics import F64
from npu_gr.train.rank import blend as module
from npu_gr.train.rank.blend import (
    RETRIEVAL_ALONE,
    ItemList,
    ListSizes,
    count_blend,
    count_transitions,
    fit_blend,
    retrieved_lists,
)
from npu_gr.train.rank.blend_choice import choose_transitions, with_own_or_next
from npu_gr.train.rank.fit import new_model
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.options import LIKE, NEXT, TrainOptions
from tests.models import CPU
from tests.train.synthetic import NUM_ITEMS, planted


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(), [], "leave-one-out")


def by_definition(log: InteractionLog, decay: float = DECAY) -> F64:
    """P(column | row), counted pair by pair."""
    counts = np.zeros((log.num_items, log.num_items))
    uses = np.zeros(log.num_items)
    for start, trained in zip(log.starts.tolist(), log.num_trained.tolist(), strict=False):
        events = log.items[start : start + trained].tolist()
        for place, item in enumerate(events):
            uses[item] += 1
            for lag, later in enumerate(events[place + 1 : place + 1 + LAST_EVENTS]):
                counts[item, later] += decay**lag
    share = (uses + 1) / (uses.sum() + log.num_items)
    table: F64 = (counts + PRIOR * share) / (counts.sum(1, keepdims=True) + PRIOR)
    return table


@pytest.mark.parametrize("decay", [DECAY, LAST_ALONE])
def test_transitions_are_counted_by_their_formula(log: InteractionLog, decay: float) -> None:
    order = count_transitions(log, "next", decay)
    table = by_definition(log, decay)
    for item in range(NUM_ITEMS):
        got = np.exp(order.transitions(np.array([item]), np.arange(NUM_ITEMS)))
        np.testing.assert_allclose(got, table[item], rtol=1e-4)


@pytest.mark.parametrize(("apart", "decay"), [(1, LAST_ALONE), (2, DECAY)])
def test_the_validation_says_whether_the_last_event_alone_counts(apart: int, decay: float) -> None:
    """By a rule, half of the items follow the item so many events before."""
    random = np.random.default_rng(0)
    num_users, num_events = 60, 30
    items = random.integers(NUM_ITEMS, size=(num_users, num_events))
    for place in range(apart, num_events):
        follows = random.random(num_users) < 0.5
        items[follows, place] = (items[follows, place - apart] * 7 + 3) % NUM_ITEMS
    interactions = Interactions(
        np.tile(np.arange(num_users, dtype=np.int32), num_events),
        items.T.ravel(),
        np.ones(items.size),
        np.repeat(np.arange(num_events), num_users),
        [f"u{user}" for user in range(num_users)],
    )
    log = build_log(interactions, [], "leave-one-out").without_last()
    assert choose_transitions(log, "next", log.next_items()).decay == decay


def test_the_most_probable_successors_are_kept(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SUCCESSORS", 3)
    order = count_transitions(log, "next")
    table = by_definition(log)
    assert order.successors.shape == (NUM_ITEMS, 3)
    for item in range(NUM_ITEMS):
        assert set(order.successors[item].tolist()) == set(np.argsort(-table[item])[:3].tolist())
        assert np.exp(
            order.transitions(np.array([item]), np.arange(NUM_ITEMS))
        ).sum() == pytest.approx(1, abs=1e-5)


def test_a_log_without_pairs_has_popularity_alone(log: InteractionLog) -> None:
    order = count_transitions(replace(log, num_trained=np.ones(log.num_users, np.int64)), "click")
    assert order.successors.shape == (NUM_ITEMS, 0)


def test_what_the_validation_keeps_is_not_counted(log: InteractionLog) -> None:
    shorter = replace(log, num_trained=log.num_trained - 1)
    changed = log.items.copy()
    changed[log.starts[:-1] + shorter.num_trained] = 7
    one, other = (
        count_transitions(which, "click") for which in (shorter, replace(shorter, items=changed))
    )
    assert np.array_equal(one.successors, other.successors)
    assert np.array_equal(one.log_prob, other.log_prob)


def chosen_lists(
    weights: list[float], num_users: int, log: InteractionLog
) -> tuple[list[ItemList], list[NextItem]]:
    """Lists of random terms, of which every user has chosen one item by these weights."""
    random = np.random.default_rng(0)
    lists, targets = [], []
    for _ in range(num_users):
        terms = random.normal(size=(NUM_ITEMS, len(WEIGHTS))).astype(np.float32)
        terms[:, 5] = random.random(NUM_ITEMS) < 0.3
        scores = terms @ np.array(weights)
        item = random.choice(NUM_ITEMS, p=np.exp(scores) / np.exp(scores).sum())
        lists.append(ItemList(np.arange(NUM_ITEMS), *terms.T))
        targets.append(NextItem(0, int(np.flatnonzero(log.items == item)[0])))
    return lists, targets


def test_the_weights_that_decided_are_found(log: InteractionLog) -> None:
    weights = [0.6, 0.2, 0.3, 0.4, 0.5, -1.5, 0.7, -0.4, 0.3]
    lists, targets = chosen_lists(weights, 2000, log)
    found = fit_blend(count_transitions(log, "next"), log, lists, targets, free=WEIGHTS)
    assert [found.weights[name] for name in WEIGHTS] == pytest.approx(weights, abs=0.1)


@pytest.mark.parametrize(("weight", "repeats"), [(1.0, True), (0.0, True), (1.0, False)])
def test_own_or_next_is_kept_where_people_repeat_and_it_is_better(
    log: InteractionLog, weight: float, repeats: bool
) -> None:
    weights = [0.6, 0.2, 0.3, 0.4, 0.5, 0.5, 0.2, -0.4, weight]
    lists, targets = chosen_lists(weights, 400, log)
    if not repeats:
        lists = [one._replace(seen=np.zeros_like(one.seen)) for one in lists]
    usual = fit_blend(count_transitions(log, "next"), log, lists, targets)
    assert usual.weights[OWN_OR_NEXT] == 0
    found = with_own_or_next(usual, log, lists, targets)
    assert (found is usual) == (not weight or not repeats)
    if found is not usual:
        assert found.weights[OWN_OR_NEXT] == pytest.approx(weight, abs=0.2)


def test_a_weight_that_is_not_free_stays(log: InteractionLog) -> None:
    start = dict(zip(WEIGHTS, [0.6, 0.2, 0.3, 0.4, 0.5, 0.0, 0.1, 0.2, 0.3], strict=True))
    lists, targets = chosen_lists([*(start | {"seen": -1.5}).values()], 2000, log)
    found = fit_blend(
        count_transitions(log, "next"), log, lists, targets, start=start, free=("seen",)
    )
    assert found.weights == pytest.approx(start | {"seen": -1.5}, abs=0.2)
    assert {**found.weights, "seen": 0.0} == start
    assert fit_blend(found, log, [], [], start=start, free=("seen",)).weights == start


def test_the_scale_of_a_term_changes_its_weight_alone(log: InteractionLog) -> None:
    """So few lists that the ridge decides much, and some of them shorter than others."""
    lists, targets = chosen_lists([1.0, 0.4, 0.3, 0.4, 0.5, -1.5, 0.2, 0.1, 0.0], 6, log)
    own = [int(log.items[event]) for _, event in targets]
    lists[0] = ItemList(
        *(term[(np.arange(len(term)) < 3) | (lists[0].items == own[0])] for term in lists[0])
    )
    counted = count_transitions(log, "next")
    scaled = [
        found._replace(click=found.click * 100, neighbours=found.neighbours / np.float32(100))
        for found in lists
    ]
    want, got = (
        fit_blend(counted, log, lists, targets).weights,
        fit_blend(counted, log, scaled, targets).weights,
    )
    assert abs(want["click"]) > 1e-3
    factors = dict.fromkeys(WEIGHTS, 1.0) | {"click": 0.01, "neighbours": 100.0}
    assert got == pytest.approx(
        {name: want[name] * factors[name] for name in WEIGHTS}, rel=1e-2, abs=1e-6
    )


def test_lists_without_the_next_item_say_nothing(log: InteractionLog) -> None:
    counted = count_transitions(log, "next")
    lists, targets = chosen_lists([1.0, *[0.0] * (len(WEIGHTS) - 1)], 5, log)
    own = [int(log.items[event]) for _, event in targets]
    lists = [
        ItemList(*(term[found.items != item] for term in found))
        for found, item in zip(lists, own, strict=True)
    ]
    assert fit_blend(counted, log, lists, targets).weights == RETRIEVAL_ALONE


def test_lists_hold_the_best_of_all_and_of_the_unseen_and_what_is_served(
    log: InteractionLog,
) -> None:
    torch.manual_seed(0)
    options = TrainOptions(dim=16, qk_dim=8, v_dim=8, head_dim=16)
    model = new_model(log, [], (NEXT, LIKE), options).eval()
    model.items.freeze()
    counted = count_blend(log, "next")
    targets = log.next_items()[:3]
    others = set()  # that the neighbours alone found
    for target, found in zip(
        targets,
        retrieved_lists(LogInputs(log, model), model, counted, targets, ListSizes(5, 3, 4, 2)),
        strict=True,
    ):
        history = log.items[log.starts[target.user] : target.event]
        u = answer(model, log, target, np.array([NUM_ITEMS]), is_next=True)[0]
        retrieval = (model.items.vectors() @ u).numpy()
        unseen = [item for item in np.argsort(-retrieval).tolist() if item not in history][:5]
        followers = counted.top(history, 3).tolist()
        neighbours = counted.nearest(history, 4).tolist()
        own = OwnItems.of(history)
        found_by = {*np.argsort(-retrieval)[:5].tolist(), *unseen, *followers, *neighbours}
        found_by |= {*own.best(2).tolist()}
        assert found.items.tolist() == sorted(found_by)
        others |= {*neighbours} - {*np.argsort(-retrieval)[:5].tolist(), *unseen, *followers}
        np.testing.assert_allclose(found.retrieval, retrieval[found.items], atol=1e-6)
        np.testing.assert_allclose(
            found.click, answer(model, log, target, found.items)[:, 0].numpy(), atol=1e-6
        )
        assert np.array_equal(found.transitions, counted.transitions(history, found.items))
        assert np.array_equal(found.neighbours, counted.alike(history, found.items))
        assert np.array_equal(found.popularity, counted.popularity[found.items])
        assert np.array_equal(found.seen, np.isin(found.items, history))
        assert np.array_equal((found.seen, found.own_count, found.own_age), own.terms(found.items))
        more = own_or_next(counted, own, found.items, history, found.items)
        assert np.array_equal(found.own_or_next, more)
        weights = (1.0, 2.0, 3.0, 4.0, 6.0, 5.0, 7.0, 8.0, 9.0)
        want: ScoreBlend = replace(counted, weights=dict(zip(WEIGHTS, weights, strict=True)))
        sums = (
            found.retrieval
            + 2 * found.click
            + 3 * found.transitions
            + 4 * found.neighbours
            + 5 * found.seen
            + 7 * found.own_count
            + 8 * found.own_age
            + 9 * found.own_or_next
        )
        sums += 6 * found.popularity
        np.testing.assert_allclose(found.scores(want), sums, rtol=1e-4)
    assert others


def test_lists_hold_the_best_unseen_items_by_linear_neighbours(log: InteractionLog) -> None:
    """Linear neighbours may be the whole blend, so a list needs enough unseen ones."""
    torch.manual_seed(0)
    model = new_model(log, [], (NEXT,), TrainOptions(dim=16, qk_dim=8, v_dim=8, head_dim=16)).eval()
    model.items.freeze()
    counted = count_blend(log, "next")
    assert counted.neighbours is not None
    linear = replace(counted.neighbours, is_summed=True, is_linear=True)
    weights = dict.fromkeys(WEIGHTS, 0.0) | {"neighbours": 1.0, "popularity": 0.1}
    order = replace(counted, weights=weights, neighbours=linear)
    targets = log.next_items()
    lists = retrieved_lists(LogInputs(log, model), model, order, targets, ListSizes(1, 1, 4))
    found_more = 0
    for (user, event), found in zip(targets, lists, strict=True):
        history = log.items[log.starts[user] : event]
        unseen = np.setdiff1d(np.arange(NUM_ITEMS), history)
        scores = order.alike(history, unseen) + np.float32(0.1) * order.popular(unseen)
        best = unseen[np.argsort(-scores, kind="stable")[:4]]
        assert set(best.tolist()) <= set(found.items.tolist())
        found_more += not set(best.tolist()) <= set(order.nearest(history, 4).tolist())
    assert found_more


def answer(
    model: HSTU,
    log: InteractionLog,
    target: NextItem,
    candidates: np.ndarray,
    *,
    is_next: bool = False,
) -> torch.Tensor:
    history = slice(int(log.starts[target.user]), target.event)
    segment = Segment(
        items=torch.from_numpy(log.items[history]),
        actions=torch.from_numpy(log.actions[history]),
        times=torch.from_numpy(log.times[history]),
        candidates=torch.from_numpy(candidates),
        candidate_time=int(log.times[target.event]),
        is_next=is_next,
    )
    found: torch.Tensor = model(CPU, [segment])[0]
    return found
