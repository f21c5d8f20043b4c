"""Says when a ranker that was promoted must go back to the one before it.

    SLO        ranks or recommends spend their error budget far too fast, and did not before
    SELFCHECK  scores from cached keys and values differ from those without
    ITEMS      the ten best items agree less with the ranker before than the shadow's did
    SCORES     so do the scores: correlation, or mean difference

The thresholds of SLO are those of the page alert (Google, The Site Reliability Workbook, chapter
5). Those of quality need a difference that is large, and no chance: three standard errors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from statistics import fmean, pvariance
from typing import NamedTuple

from npu_gr.metrics.slo import Counts, Objective, Promise
from npu_gr.replay.score_difference import ScoreDifference

GUARD_S = 300.0  # for which a promoted ranker is watched
SLO_S = 30  # window of the objectives, in seconds
LEAST_REQUESTS = 20  # in that window
MOST_BURN = 14.4  # error budget spent, over what may be spent
LEAST_FAILED = 2  # self-checks
MOST_FAILED_RATIO = 0.05
LEAST_COMPARED = 30  # ranks, of the shadow and since
NEWEST = 60  # compared ranks that count
MOST_FALL = 0.1  # of the mean overlap, and of the mean correlation
MOST_SHIFT = 0.5  # of the mean difference, in standard deviations of the scores
ERRORS = 3.0  # standard errors


class GuardReason(StrEnum):
    """Why a promoted ranker was rolled back; the value of the metric label `reason`."""

    SLO = "slo"
    SELFCHECK = "selfcheck"
    ITEMS = "items"
    SCORES = "scores"


class GuardVerdict(NamedTuple):
    """A reason to roll back, with the figures."""

    reason: GuardReason
    text: str


class Guard:
    """Watches one promoted ranker, with a look every second. Event loop only."""

    def __init__(
        self,
        objectives: Mapping[str, Objective],
        totals: Callable[[], Mapping[str, Counts]],
        before: Mapping[str, Counts],
        selfchecks: Callable[[], tuple[int, int]],
        shown: Sequence[ScoreDifference],
        since: Sequence[ScoreDifference],
    ) -> None:
        """Begin to watch.

        Args:
            objectives: Kind -> its objectives, of the kinds that the ranker answers.
            totals: Returns the results of each kind since the start of the process.
            before: Results of each kind in the minutes before the promotion.
            selfchecks: Returns the self-checks of the ranker, and how many failed.
            shown: Differences that the ranker had as a shadow.
            since: Those since the promotion, to the ranker before it; it grows.
        """
        self._objectives = objectives
        self._totals = totals
        self._before = before
        self._selfchecks = selfchecks
        self._shown = list(shown)
        self._since = since
        self._looks: deque[Mapping[str, Counts]] = deque([totals()], maxlen=SLO_S + 1)

    def look(self) -> GuardVerdict | None:
        """Return why the ranker must go back; None = it stays. Call it every second."""
        self._looks.append(self._totals())
        return self._slo() or self._selfcheck() or self._quality()

    def _slo(self) -> GuardVerdict | None:
        for kind, objective in self._objectives.items():
            now, then = self._looks[-1][kind], self._looks[0][kind]
            window = Counts(*(a - b for a, b in zip(now, then, strict=True)))
            for promise in Promise:
                bad, total = window.bad_of(promise)
                burn = burn_of(window, objective, promise)
                usual = burn_of(self._before[kind], objective, promise)
                if total >= LEAST_REQUESTS and burn >= max(MOST_BURN, 2 * usual):
                    text = (
                        f"{bad} of {total} {kind}s missed their {promise} objective, {burn:.0f} "
                        f"times what may; {usual:.1f} times before"
                    )
                    return GuardVerdict(GuardReason.SLO, text)
        return None

    def _selfcheck(self) -> GuardVerdict | None:
        checked, failed = self._selfchecks()
        if failed >= LEAST_FAILED and failed > MOST_FAILED_RATIO * checked:
            return GuardVerdict(GuardReason.SELFCHECK, f"{failed} of {checked} self-checks failed")
        return None

    def _quality(self) -> GuardVerdict | None:
        since = list(self._since)[-NEWEST:]
        if min(len(since), len(self._shown)) < LEAST_COMPARED:
            return None
        overlap = _change(
            [one.top_overlap for one in self._shown], [one.top_overlap for one in since]
        )
        if -overlap.mean > MOST_FALL and overlap.is_sure:
            text = f"top-10 overlap with the ranker before {overlap}"
            return GuardVerdict(GuardReason.ITEMS, text)
        related = _change(
            [one.correlation for one in self._shown], [one.correlation for one in since]
        )
        if -related.mean > MOST_FALL and related.is_sure:
            return GuardVerdict(GuardReason.SCORES, f"correlation with the scores before {related}")
        shift = _change([one.mean for one in self._shown], [one.mean for one in since])
        if abs(shift.mean) > MOST_SHIFT and shift.is_sure:
            return GuardVerdict(
                GuardReason.SCORES, f"mean difference to the scores before, sd {shift}"
            )
        return None


class _Change(NamedTuple):
    shown: float
    since: float
    error: float

    @property
    def mean(self) -> float:
        return self.since - self.shown

    @property
    def is_sure(self) -> bool:
        return abs(self.mean) > ERRORS * self.error

    def __str__(self) -> str:
        return (
            f"{self.since:.3f} after {self.shown:.3f} as a shadow (standard error {self.error:.3f})"
        )


def _change(shown: Sequence[float], since: Sequence[float]) -> _Change:
    error = math.sqrt(pvariance(shown) / len(shown) + pvariance(since) / len(since))
    return _Change(fmean(shown), fmean(since), error)


def burn_of(counts: Counts, objective: Objective, promise: Promise) -> float:
    """Return the share of bad requests over the share that may be bad."""
    return (1.0 - counts.attainment(promise)) / (1.0 - objective.ratio(promise))
