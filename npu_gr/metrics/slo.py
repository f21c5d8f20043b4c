"""SLO arithmetic: what a request counts as, which share was good, how much error budget is left.

Source: Google, The Site Reliability Workbook, chapters 2 and 5.

The arithmetic reads no clock. `RecentAnswers` keeps the newest answers by tenant and by version for
the status page, so no name is a metric's label.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Result(StrEnum):
    """How the objectives count one request; the value of the metric label `result`."""

    GOOD = "good"  # answered within the threshold
    SLOW = "slow"  # answered later
    FAILED = "failed"  # rejected for load, out of time, or broken


class Promise(StrEnum):
    """The two promises that each kind makes; the value of the metric label `slo`."""

    LATENCY = "latency"  # share of the answered requests that were answered in time
    AVAILABILITY = "availability"  # share of all requests that were answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The promises of one kind of request."""

    kind: str  # a name in `core.kinds.KINDS`
    threshold_s: float  # an answer within it is in time
    latency_ratio: float = 0.99
    availability_ratio: float = 0.999

    def ratio(self, promise: Promise) -> float:
        """The share of requests that must keep the promise."""
        return self.latency_ratio if promise is Promise.LATENCY else self.availability_ratio


LEAST_SHARE = 0.5  # of the threshold: nothing is promised to a caller who grants less


def is_promised(has_s: float, threshold_s: float) -> bool:
    """Whether a request has the time that the promise is about.

    Args:
        has_s: what its caller grants, from when the request was whole.
        threshold_s: an answer within it is in time.
    """
    return has_s >= LEAST_SHARE * threshold_s


def evaluate(
    status: int, took_s: float, threshold_s: float, has_s: float = float("inf")
) -> Result | None:
    """Count one request.

    Args:
        status: of its HTTP answer.
        took_s: from its last byte to the answer: how fast a caller sends is not our doing.
        threshold_s: an answer within it is in time.
        has_s: what the caller grants, from its last byte on.

    Returns:
        None where the caller is at fault (a 4xx other than 429, or a time that nothing is promised
        for): the objectives do not count it.
    """
    if status in (429, 504) and not is_promised(has_s, threshold_s):
        return None
    if status == 429 or status >= 500:
        return Result.FAILED
    if status >= 400:
        return None
    return Result.GOOD if took_s <= threshold_s else Result.SLOW


class Counts(NamedTuple):
    """Numbers of requests by result."""

    good: int = 0
    slow: int = 0
    failed: int = 0

    def bad_of(self, promise: Promise) -> tuple[int, int]:
        """Count the requests that broke the promise, and those to which it was made."""
        if promise is Promise.LATENCY:
            return self.slow, self.good + self.slow
        return self.failed, sum(self)

    def attainment(self, promise: Promise) -> float:
        """The share of requests that kept the promise; 1 if there were no requests."""
        bad, total = self.bad_of(promise)
        return 1.0 - bad / total if total else 1.0

    def budget_remaining(self, promise: Promise, ratio: float) -> float:
        """The share of the error budget that is left: 1 = untouched, 0 = spent, below 0 = overspent."""
        return 1.0 - (1.0 - self.attainment(promise)) / (1.0 - ratio)


SLOT_S = 10.0
LONGEST_S = 3600.0
RATE_S = 60.0  # that a rate is of


@dataclass(slots=True)
class _Slot:
    number: int  # seconds of the clock, over SLOT_S
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])


class Rolling:
    """Results since the start, and over the last hour in slots of `SLOT_S` seconds."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._total = [0, 0, 0]
        self._since_at = 0.0  # of the newest results that no pause of RATE_S parts
        self._last_at = float("-inf")

    def add(self, now_at: float, result: Result, num: int = 1) -> None:
        """Count results.

        Args:
            now_at: never goes back.
            result: of all of them.
            num: how many.
        """
        number = int(now_at // SLOT_S)
        place = _PLACE[result]
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number))
            while self._slots[0].number <= number - LONGEST_S // SLOT_S:
                self._slots.popleft()
        if now_at - self._last_at >= RATE_S:
            self._since_at = now_at
        self._last_at = now_at
        self._slots[-1].counts[place] += num
        self._total[place] += num

    def over(self, now_at: float, window_s: float) -> Counts:
        """Sum the slots that began within the last `window_s` seconds, `LONGEST_S` at most."""
        oldest = int((now_at - window_s) // SLOT_S)
        sums = [0, 0, 0]
        for slot in reversed(self._slots):
            if slot.number <= oldest:
                break
            sums = [a + b for a, b in zip(sums, slot.counts, strict=True)]
        return Counts(*sums)

    def good_per_s(self, now_at: float) -> float:
        """The rate of good results over the last minute, or since they began to come, if that is less."""
        begins_at = (int((now_at - RATE_S) // SLOT_S) + 1) * SLOT_S
        return self.over(now_at, RATE_S).good / max(now_at - max(begins_at, self._since_at), SLOT_S)

    @property
    def total(self) -> Counts:
        """All results since the start."""
        return Counts(*self._total)


_PLACE = {result: index for index, result in enumerate(Result)}


NEWEST = 2048  # answers that are kept
WITHIN_S = 300.0


class RecentAnswer(NamedTuple):
    """One answer of the service."""

    at: float  # on the clock of `RecentAnswers`
    tenant: str
    version: str  # of the model that answered; "" = no model did
    took_s: float
    is_good: bool  # within its kind's objective


class Share(NamedTuple):
    """What the newest answers of one tenant or version were."""

    num: int
    per_s: float
    within_slo_ratio: float
    p99_s: float


class RecentAnswers:
    """The newest answers, at most `NEWEST` of the last `WITHIN_S` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._newest: deque[RecentAnswer] = deque(maxlen=NEWEST)

    def add(self, tenant: str, version: str, took_s: float, *, is_good: bool) -> None:
        """Keep an answer."""
        self._newest.append(RecentAnswer(self._clock(), tenant, version, took_s, is_good))

    def shares(self, name_of: Callable[[RecentAnswer], str]) -> dict[str, Share]:
        """Sum them up.

        Args:
            name_of: which share an answer belongs to.

        Returns:
            The shares by name, the largest first.
        """
        now_at = self._clock()
        recent = [answer for answer in self._newest if answer.at >= now_at - WITHIN_S]
        since_at = max(self._began_at, now_at - WITHIN_S)
        if len(self._newest) == NEWEST:  # older ones are gone
            since_at = max(since_at, self._newest[0].at)
        span_s = max(now_at - since_at, 1.0)
        groups: dict[str, list[RecentAnswer]] = {}
        for answer in recent:
            groups.setdefault(name_of(answer), []).append(answer)
        return {
            name: _share(answers, span_s)
            for name, answers in sorted(groups.items(), key=lambda one: -len(one[1]))
        }


def _share(answers: list[RecentAnswer], span_s: float) -> Share:
    times_s = sorted(answer.took_s for answer in answers)
    return Share(
        num=len(answers),
        per_s=len(answers) / span_s,
        within_slo_ratio=sum(answer.is_good for answer in answers) / len(answers),
        p99_s=times_s[math.ceil(0.99 * len(times_s)) - 1],
    )
