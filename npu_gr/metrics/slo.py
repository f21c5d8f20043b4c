"""SLO arithmetic: the result of a request, the attainment, and the remaining error budget.

Source: Google, The Site Reliability Workbook, chapters 2 and 5.

The arithmetic reads no clock. `RecentAnswers` keeps the recent answers by tenant and by version for
the status page. Tenants and versions are not labels of metrics, because there can be many.
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
    # rejected for load, over its budget, an error of the server, or not answered within the
    # threshold when the client disconnected
    FAILED = "failed"


class Promise(StrEnum):
    """The two objectives of each kind; the value of the metric label `slo`."""

    LATENCY = "latency"  # share of the answered requests that were within the threshold
    AVAILABILITY = "availability"  # share of all requests that were answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objectives of one kind of request."""

    kind: str  # a name in `core.kinds.KINDS`
    threshold_s: float  # longest latency of a good answer
    latency_ratio: float = 0.99
    availability_ratio: float = 0.999

    def ratio(self, promise: Promise) -> float:
        """Return the share of requests that must be good."""
        return self.latency_ratio if promise is Promise.LATENCY else self.availability_ratio


ABANDONED = 499  # status of a request whose client disconnected, as nginx logs it
# share of the threshold; the objectives do not apply to requests with a shorter budget
LEAST_SHARE = 0.5


def is_promised(has_s: float, threshold_s: float) -> bool:
    """Whether the objectives apply to a request: its budget is at least half of the threshold.

    Args:
        has_s: The client's time budget, from the last byte of the request.
        threshold_s: Longest latency of a good answer.
    """
    return has_s >= LEAST_SHARE * threshold_s


def evaluate(
    status: int, took_s: float, threshold_s: float, has_s: float = float("inf")
) -> Result | None:
    """Return the result of one request for the objectives.

    Args:
        status: HTTP status of the answer; `ABANDONED` = the client did not wait for it.
        took_s: Seconds from the last byte of the request to the answer; the time in which the
            client sends the request does not count.
        threshold_s: Longest latency of a good answer.
        has_s: The client's time budget, from the last byte of the request.

    Returns:
        None = the objectives do not count the request, because of an error of the client (a 4xx
        other than 429, or a client that disconnects early), or because its budget was too short.
    """
    if status in (429, ABANDONED, 504) and not is_promised(has_s, threshold_s):
        return None
    if status == ABANDONED:
        return Result.FAILED if took_s > threshold_s else None
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
        """Return the number of bad requests for an objective, and of all requests it counts."""
        if promise is Promise.LATENCY:
            return self.slow, self.good + self.slow
        return self.failed, sum(self)

    def attainment(self, promise: Promise) -> float:
        """Return the share of good requests; 1 if there were no requests."""
        bad, total = self.bad_of(promise)
        return 1.0 - bad / total if total else 1.0

    def budget_remaining(self, promise: Promise, ratio: float) -> float:
        """Return the share of the error budget that is left: 1 = all, below 0 = overspent."""
        return 1.0 - (1.0 - self.attainment(promise)) / (1.0 - ratio)


SLOT_S = 10.0
LONGEST_S = 3600.0
RATE_S = 60.0  # window of `good_per_s`


@dataclass(slots=True)
class _Slot:
    number: int  # seconds of the clock // SLOT_S
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])


class Rolling:
    """Counts results since the start, and over the last hour in slots of `SLOT_S` seconds."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._total = [0, 0, 0]
        self._since_at = 0.0  # first result after the latest pause of at least RATE_S
        self._last_at = float("-inf")

    def add(self, now_at: float, result: Result, num: int = 1) -> None:
        """Count `num` equal results at `now_at`, a time of a monotonic clock."""
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
        """Return good results per second over the last minute, or since results began to come."""
        begins_at = (int((now_at - RATE_S) // SLOT_S) + 1) * SLOT_S
        return self.over(now_at, RATE_S).good / max(now_at - max(begins_at, self._since_at), SLOT_S)

    @property
    def total(self) -> Counts:
        """All results since the start."""
        return Counts(*self._total)


_PLACE = {result: index for index, result in enumerate(Result)}


NEWEST = 2048  # most answers to keep
WITHIN_S = 300.0  # oldest age of an answer in `RecentAnswers.shares`


class RecentAnswer(NamedTuple):
    """One answer of the service."""

    at: float  # on the clock of `RecentAnswers`
    tenant: str
    version: str  # of the model that answered; "" = no model did
    took_s: float
    is_good: bool  # within its kind's objective


class Share(NamedTuple):
    """The recent answers of one tenant or version."""

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
        """Group the recent answers by name.

        Args:
            name_of: Function answer -> name of its group.

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
