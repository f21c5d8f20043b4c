"""The guard goes back for what is large and no chance, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from npu_gr.metrics.slo import Counts, Objective
from npu_gr.replay.score_difference import SAME, ScoreDifference, score_difference
from npu_gr.service.guard import LEAST_COMPARED, Guard, GuardReason

RANK = "rank"
OBJECTIVES = {RANK: Objective(kind=RANK, threshold_s=0.05)}
FINE = Counts(good=100)


class Watched:
    """A guard, and what it looks at."""

    def __init__(self, before: Counts = FINE, shown: Sequence[ScoreDifference] = ()) -> None:
        self.total = Counts(good=1000, slow=400)  # of before the promotion
        self.selfchecks = (0, 0)
        self.since: list[ScoreDifference] = []
        self.guard = Guard(
            OBJECTIVES,
            lambda: {RANK: self.total},
            {RANK: before},
            lambda: self.selfchecks,
            shown,
            self.since,
        )

    def look(self, *results: Counts) -> GuardReason | None:
        for one in results:
            self.total = Counts(*(a + b for a, b in zip(self.total, one, strict=True)))
        found = self.guard.look()
        return None if found is None else found.reason


@pytest.mark.parametrize(
    ("results", "before", "reason"),
    [
        ([FINE], FINE, None),
        ([Counts(good=15, slow=4)], FINE, None),  # too few to say
        ([Counts(good=80, slow=20)], FINE, GuardReason.SLO),  # 20 times the budget
        ([Counts(good=88, slow=12)], FINE, None),
        ([Counts(good=98, failed=2)], FINE, GuardReason.SLO),  # of availability
        ([Counts(good=80, slow=20)], Counts(good=85, slow=15), None),  # as before
        ([Counts(good=60, slow=40)], Counts(good=85, slow=15), GuardReason.SLO),
    ],
)
def test_objectives(results: list[Counts], before: Counts, reason: GuardReason | None) -> None:
    assert Watched(before).look(*results) is reason


def test_a_bad_second_is_forgotten_after_its_window() -> None:
    watched = Watched()
    assert watched.look(Counts(good=80, slow=20)) is GuardReason.SLO
    assert [watched.look(Counts(good=1)) for _ in range(31)][-1] is None


@pytest.mark.parametrize(
    ("checked", "failed", "reason"),
    [(10, 0, None), (1, 1, None), (100, 3, None), (20, 2, GuardReason.SELFCHECK)],
)
def test_selfchecks(checked: int, failed: int, reason: GuardReason | None) -> None:
    watched = Watched()
    watched.selfchecks = checked, failed
    assert watched.look() is reason


def differences(num: int, seed: int, noise: float, shift: float = 0.0) -> list[ScoreDifference]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        a = random.normal(size=40).astype(np.float32)
        b = a + noise * random.normal(size=40) + shift
        found.append(score_difference(a, b.astype(np.float32)))
    return found


@pytest.mark.parametrize(
    ("num", "noise", "shift", "reason"),
    [
        (60, 0.5, 0.0, None),  # as the shadow did
        (60, 0.55, 0.1, None),
        (60, 5.0, 0.0, GuardReason.ITEMS),
        (LEAST_COMPARED - 1, 5.0, 0.0, None),
        (60, 0.5, 2.0, GuardReason.SCORES),
    ],
)
def test_quality(num: int, noise: float, shift: float, reason: GuardReason | None) -> None:
    for seed in range(5):
        watched = Watched(shown=differences(200, 10 + seed, 0.5))
        watched.since += differences(num, seed, noise, shift)
        assert watched.look() is reason


def test_without_figures_of_the_shadow_quality_is_not_judged() -> None:
    watched = Watched(shown=differences(LEAST_COMPARED - 1, 0, 0.5))
    watched.since += differences(100, 1, 5.0)
    assert watched.look() is None


def test_differences_by_hand() -> None:
    nan = np.nan
    a = np.array([1.0, 2.0, 3.0, nan], np.float32)
    assert score_difference(a, a) == SAME
    assert score_difference(a, np.full(4, nan, np.float32)) == SAME
    other = score_difference(a, np.array([3.0, 2.0, 1.0, 7.0], np.float32))
    assert other.correlation == pytest.approx(-1.0)
    assert other.mean == pytest.approx(0.0)
    assert not other.has_same_first
    moved = score_difference(a, a + 2)
    assert moved.mean == pytest.approx(2 / np.std([1, 2, 3]))
    assert moved.correlation == pytest.approx(1.0)
