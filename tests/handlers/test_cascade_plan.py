"""The pure part of the cascade: turns, order and the split of the deadline hold their laws."""

from __future__ import annotations

from itertools import pairwise, zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.arrays import I64
from npu_gr.core.request import LimitedBy, StageReport, StageResult
from npu_gr.handlers.cascade_plan import (
    RecommendConfig,
    best_first,
    each_once,
    fused_order,
    interleave,
    is_in,
    split,
    why_short,
)

Rows = st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=4)


@settings(derandomize=True, deadline=None)
@given(rows=Rows)
def test_turns_are_the_obvious_loop(rows: list[list[int]]) -> None:
    want: dict[int, int] = {}
    for turn in zip_longest(*rows):
        for row, item in enumerate(turn):
            if item is not None:
                want.setdefault(item, row)
    columns: list[I64] = [np.array(row, np.int64) for row in rows]
    items, sources = interleave(columns)
    assert (items.tolist(), sources.tolist()) == (list(want), list(want.values()))


Items = st.lists(st.integers(-3, 12) | st.integers(-(2**63), 2**63 - 1), max_size=12)


@settings(derandomize=True, deadline=None)
@given(items=Items, others=Items)
def test_the_fast_ways_of_sets_are_those_of_numpy(items: list[int], others: list[int]) -> None:
    ours, theirs = np.array(items, np.int64), np.array(others, np.int64)
    assert each_once(theirs).tolist() == np.unique(theirs).tolist()
    assert is_in(ours, np.sort(theirs)).tolist() == np.isin(ours, theirs).tolist()


@settings(derandomize=True, deadline=None)
@given(scores=st.lists(st.sampled_from([float("nan"), -1.0, 0.0, 0.0, 2.5]), max_size=12))
def test_the_best_come_first_and_the_unknown_last(scores: list[float]) -> None:
    want = sorted(
        range(len(scores)),
        key=lambda i: (scores[i] != scores[i], -scores[i] if scores[i] == scores[i] else 0),
    )
    assert best_first(np.array(scores, np.float32)).tolist() == want


@settings(derandomize=True, deadline=None)
@given(scores=st.lists(st.sampled_from([float("nan"), -1.0, 0.0, 2.5]), max_size=12))
def test_fusion_is_the_sum_of_reciprocal_places(scores: list[float]) -> None:
    row = np.array(scores, np.float32)
    ranked = best_first(row).tolist()
    gain = [1 / (60 + place) + 1 / (60 + ranked.index(place)) for place in range(len(scores))]
    fused = fused_order(row).tolist()
    assert sorted(fused) == list(range(len(scores)))
    assert all(gain[a] >= gain[b] - 1e-12 for a, b in pairwise(fused))


Times = st.floats(0.0, 10.0)


@settings(derandomize=True, deadline=None)
@given(
    budget_s=Times,
    rank_s=Times,
    hook=st.booleans(),
    hook_s=st.floats(0.001, 5.0),
    share=st.floats(0.01, 0.99),
    after=st.booleans(),
)
def test_the_stages_share_one_deadline(
    budget_s: float, rank_s: float, hook: bool, hook_s: float, share: float, after: bool
) -> None:
    config = RecommendConfig(
        hook="a:b" if hook else None,
        hook_after="a:b" if after else None,
        hook_budget_s=hook_s,
        max_rank_share=share,
    )
    retrieve_s, hook_deadline_at, rank_deadline_at, answer_at = (
        at_s - 100.0 for at_s in split(100.0, 100.0 + budget_s, rank_s, config)
    )
    assert -1e-9 <= retrieve_s <= hook_deadline_at <= rank_deadline_at <= answer_at
    assert answer_at <= budget_s + 1e-9
    for_hook_s = min(hook_s, answer_at / 4) if after else 0.0
    assert abs(answer_at - rank_deadline_at - for_hook_s) < 1e-9
    kept_s = rank_deadline_at - hook_deadline_at
    rank_s = max(rank_s, config.min_rank_s)
    assert kept_s <= rank_s + 1e-9  # no more than the cost model says
    assert kept_s <= share * rank_deadline_at + 1e-9  # nor than its share
    assert kept_s >= min(rank_s, share * rank_deadline_at) - 1e-9  # and no less than both
    if not hook:
        assert retrieve_s == hook_deadline_at


@pytest.mark.parametrize(
    ("is_full", "found", "excludes", "limited_by"),
    [
        (True, {"match": 3}, False, LimitedBy.LIMIT),
        (False, {"match": 10, "generate": 2}, True, LimitedBy.LIMIT),
        (False, {"match": 9, "generate": 2}, True, LimitedBy.FILTER),
        (False, {"match": 9, "rank": 50}, False, LimitedBy.SOURCES),
        (False, {"shared_encoder": 0}, False, LimitedBy.SOURCES),  # asked for nothing
        (False, {}, False, LimitedBy.SOURCES),
    ],
)
def test_why_a_cascade_is_short(
    is_full: bool, found: dict[str, int], excludes: bool, limited_by: LimitedBy
) -> None:
    reports = [
        StageReport(
            stage=stage, result=StageResult.OK, began_s=0.0, took_s=0.0, num_items=num_items
        )
        for stage, num_items in found.items()
    ]
    asked = {"match": 10, "generate": 5, "shared_encoder": 0}
    assert why_short(is_full=is_full, asked=asked, reports=reports, excludes=excludes) is limited_by
