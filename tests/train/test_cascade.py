"""The cascade is chosen by half of the users and evaluated by the others.

A stage that hurts is named.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from npu_gr.train.cascade import CascadeWay, cascade_ways, choose_way, next_events, why
from npu_gr.train.data import to_train_on
from npu_gr.train.metrics import F64, difference_of_users, ndcg, ndcg_of_each
from tests.train.synthetic import planted

MISSED = float("inf")


def places(share: float, seed: int, num_users: int = 400) -> F64:
    """Found at a random place for a share of the users."""
    random = np.random.default_rng(seed)
    return np.where(random.random(num_users) < share, random.integers(0, 10, num_users), MISSED)


def test_every_set_of_few_sources_in_every_order() -> None:
    ways = cascade_ways(["shared_encoder", "match"], has_blend=True)
    assert len(ways) == len(set(ways)) == 3 * 4
    assert ways[0] == CascadeWay(("shared_encoder",), "retrieval")
    assert not any(
        way.order == "blended" for way in cascade_ways(["shared_encoder", "match"], has_blend=False)
    )
    four = {
        way.sources
        for way in cascade_ways(
            ["shared_encoder", "transitions", "generate", "match"], has_blend=False
        )
    }
    assert sorted(map(len, four)) == [1] * 4 + [2] * 6 + [3, 3, 4]
    five = cascade_ways(
        ["shared_encoder", "transitions", "neighbours", "generate", "match"], has_blend=True
    )
    assert len(five) == len(set(five)) == (5 + 10 + 1 + 2 + 1) * 4
    assert CascadeWay(("shared_encoder", "transitions", "neighbours"), "blended") in five


def test_the_best_of_half_is_evaluated_by_the_others() -> None:
    whole = CascadeWay(("shared_encoder", "match"), "rank")
    ways = {
        way: places(0.2, seed)
        for seed, way in enumerate(cascade_ways(["shared_encoder", "match"], has_blend=True))
    }
    best = CascadeWay(("shared_encoder",), "blended")
    ways[best] = places(0.5, 99)
    found = choose_way(ways, whole)
    assert found.way == best
    assert [row.way for row in found.rows[:2]] == [best, whole]
    assert {row.way.name for row in found.rows[2:]} == {"shared encoder alone", "match alone"}
    assert found.rows[0].less is None
    for row in found.rows[1:]:
        assert row.less is not None
        assert row.less.low > 0
    chooses = np.zeros(400, np.bool_)
    chooses[np.random.default_rng(0).permutation(400)[:200]] = True
    assert found.num_users == 200
    # those who chose do not evaluate
    assert found.rows[0].ndcg_at_10 == ndcg(ways[best][~chooses], 10)
    assert json.loads(json.dumps(found.as_dict()))["sources"] == ["shared_encoder"]
    assert "shared encoder, blended" in "\n".join(found.lines())


def test_of_many_ways_one_that_looks_better_by_chance_is_not_taken() -> None:
    whole, lucky = (
        CascadeWay(("shared_encoder", "transitions", "neighbours"), "blended"),
        CascadeWay(("match",), "retrieval"),
    )
    every = cascade_ways(
        ["shared_encoder", "transitions", "neighbours", "generate", "match"], has_blend=True
    )
    ways = dict.fromkeys(every, np.full(400, MISSED))
    ways[whole] = np.where(np.arange(400) % 40 == 1, 0.0, MISSED)
    ways[lucky] = np.where(np.arange(400) % 10 == 0, 0.0, MISSED)
    chooses = np.zeros(400, np.bool_)
    chooses[np.random.default_rng(0).permutation(400)[:200]] = True
    lucky_each, each = (ndcg_of_each(ways[way][chooses], 10) for way in (lucky, whole))
    gap = difference_of_users(lucky_each, each)
    assert gap.low > 0
    # it is one of two
    assert choose_way({way: ways[way] for way in (whole, lucky)}, whole).way == lucky
    assert choose_way(ways, whole).way == whole  # it is one of 68


@pytest.mark.parametrize(("more_hits", "is_taken"), [(1, False), (60, True)])
def test_a_simple_count_has_to_be_better_by_more_than_a_standard_error(
    more_hits: int, is_taken: bool
) -> None:
    """One that a few users make the highest would throw a better ranker away."""
    whole = CascadeWay(("shared_encoder", "transitions", "neighbours"), "blended")
    count = CascadeWay(("neighbours",), "retrieval")
    users = np.random.default_rng(0).permutation(400)[:200]  # those who choose
    ways = {way: np.full(400, MISSED) for way in (whole, count)}
    ways[whole][users[:60]] = 0
    ways[count][users[40 : 100 + more_hits]] = 0
    assert ndcg(ways[count], 10) > ndcg(ways[whole], 10)
    assert choose_way(ways, whole).way == (count if is_taken else whole)


def test_a_stage_that_makes_answers_worse_is_named_and_no_other_is() -> None:
    whole = CascadeWay(("shared_encoder", "match"), "rank")
    good = places(0.6, 1)
    ways = dict.fromkeys(cascade_ways(["shared_encoder", "match"], has_blend=False), good)
    assert choose_way(ways, whole).hurts == []
    ways[whole] = places(0.2, 2)
    hurts = choose_way(ways, whole).hurts
    assert "set recommend.sources without match in serve.yaml" in hurts[1]
    assert [line.partition(" makes the answers worse")[0] for line in hurts] == [
        "source shared encoder",
        "source match",
        "order rank",
    ]


def test_the_configured_way_stays_unless_another_is_measurably_better() -> None:
    whole = CascadeWay(("shared_encoder", "match"), "fused")
    ways = dict.fromkeys(cascade_ways(["shared_encoder", "match"], has_blend=True), places(0.3, 1))
    ways[CascadeWay(("shared_encoder",), "blended")] = places(0.31, 1)
    assert choose_way(ways, whole).way == whole
    assert [row.way for row in choose_way(ways, whole).rows].count(whole) == 1


def test_the_sentence_says_what_the_interval_says() -> None:
    low, high = places(0.2, 1), places(0.6, 2)
    assert ("is better than shared encoder alone") in why(
        "recommend", high, "shared encoder alone", low
    )
    assert "is worse than" in why("recommend", low, "shared encoder alone", high)
    assert "does not differ significantly from" in why(
        "recommend", low, "shared encoder alone", low
    )


def test_the_next_event_of_each_user_in_any_order_of_events() -> None:
    random = np.random.default_rng(0)
    log = planted(num_users=30, num_events=8)
    log = log[np.sort(random.choice(len(log), 150, replace=False))]
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    cases = next_events(log, known)
    for case in cases:
        own = log[log.users == log.user_names.index(case.user)]
        assert [*case.items, case.target] == own.items.tolist()
        assert [*case.timestamps, case.happened_at] == own.timestamps.tolist()
        assert case.values == own.values[:-1].tolist()
    has_two = np.bincount(log.users, minlength=30) > 1
    assert [case.user for case in cases] == [log.user_names[row] for row in np.flatnonzero(has_two)]
    some = next_events(log, known, 5)
    assert [case.user for case in some] == sorted(
        (case.user for case in some), key=log.user_names.index
    )
    assert len(some) == 5
    assert next_events(log, known, len(cases)) == cases
    assert next_events(log, np.ones(len(log), np.bool_)) == []
