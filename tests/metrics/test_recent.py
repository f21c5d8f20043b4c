"""The newest answers sum up to what they were, by whatever they are parted."""

from __future__ import annotations

import pytest

from npu_gr.metrics.slo import NEWEST, WITHIN_S, RecentAnswer, RecentAnswers, Share
from tests.clock import Clock


def of_tenant(answer: RecentAnswer) -> str:
    return answer.tenant


def test_shares_are_those_of_the_last_minutes_and_the_largest_comes_first() -> None:
    clock = Clock()
    recent = RecentAnswers(clock)
    recent.add("gone", "v1", 1.0, is_good=True)
    clock.now_at += WITHIN_S + 1
    for place in range(100):
        recent.add("large", "v1", place / 100, is_good=place < 75)
    recent.add("small", "v2", 0.5, is_good=False)
    large, small = recent.shares(of_tenant).values()
    assert large._replace(per_s=0) == Share(100, 0, 0.75, 0.98)
    assert small._replace(per_s=0) == Share(1, 0, 0.0, 0.5)
    assert [large.per_s, small.per_s] == pytest.approx([100 / WITHIN_S, 1 / WITHIN_S])
    assert list(recent.shares(lambda one: one.version)) == ["v1", "v2"]
    assert RecentAnswers(clock).shares(of_tenant) == {}


def test_a_rate_is_right_from_the_first_second_and_where_older_answers_fell_out() -> None:
    clock = Clock()
    recent = RecentAnswers(clock)
    clock.now_at += 4
    for _ in range(12):
        recent.add("t", "", 0.1, is_good=True)
    assert recent.shares(of_tenant)["t"].per_s == 3
    for _ in range(NEWEST * 2):
        clock.now_at += 0.01
        recent.add("t", "", 0.1, is_good=True)
    share = recent.shares(of_tenant)["t"]
    assert share.num == NEWEST
    assert share.per_s == pytest.approx(100, rel=0.01)
