"""SLO arithmetic: what a request counts as, what share was good, what is left of the error budget. No clock in it.

Source: Google, The Site Reliability Workbook, chapters 2 and 5.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Result(StrEnum):
    """What a request counts as; the value of the `result` metric label."""

    GOOD = "good"  # answered within the threshold
    SLOW = "slow"  # answered later
    FAILED = "failed"  # refused for load, out of time, or broken


class Promise(StrEnum):
    """What an objective is about; the value of the `slo` metric label."""

    LATENCY = "latency"  # of the answered ones, those in time
    AVAILABILITY = "availability"  # of all, those answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What one kind of request promises."""

    kind: str  # rank | generate | signal
    threshold_s: float
    latency_ratio: float = 0.99
    availability_ratio: float = 0.999

    def ratio(self, promise: Promise) -> float:
        """The share that has to be good."""
        return self.latency_ratio if promise is Promise.LATENCY else self.availability_ratio


def judge(status: int, took_s: float, threshold_s: float) -> Result | None:
    """From an HTTP status and a duration; None = the caller's own fault, counted nowhere."""
    if status == 429 or status >= 500:
        return Result.FAILED
    if status >= 400:
        return None
    return Result.GOOD if took_s <= threshold_s else Result.SLOW


class Counts(NamedTuple):
    """Requests by result."""

    good: int = 0
    slow: int = 0
    failed: int = 0

    def bad_of(self, promise: Promise) -> tuple[int, int]:
        """Requests that broke the promise, and those that it was made to."""
        if promise is Promise.LATENCY:
            return self.slow, self.good + self.slow
        return self.failed, sum(self)

    def attainment(self, promise: Promise) -> float:
        """The share that kept the promise; 1 where nobody asked."""
        bad, total = self.bad_of(promise)
        return 1.0 - bad / total if total else 1.0

    def budget_remaining(self, promise: Promise, ratio: float) -> float:
        """1 = nothing broken, 0 = as much as the objective allows, below 0 = more."""
        return 1.0 - (1.0 - self.attainment(promise)) / (1.0 - ratio)


SLOT_S = 10.0
LONGEST_S = 3600.0


class Rolling:
    """Results since the start, and over the last hour in slots of ten seconds."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, list[int]]] = deque()
        self._total = [0, 0, 0]

    def add(self, now_at: float, result: Result) -> None:
        """One more, at an instant that never goes back."""
        slot, place = int(now_at // SLOT_S), _PLACE[result]
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, [0, 0, 0]))
            while self._slots[0][0] <= slot - LONGEST_S // SLOT_S:
                self._slots.popleft()
        self._slots[-1][1][place] += 1
        self._total[place] += 1

    def over(self, now_at: float, window_s: float) -> Counts:
        """Of the slots that began within the window, at most an hour."""
        oldest = int((now_at - window_s) // SLOT_S)
        sums = [0, 0, 0]
        for slot, counts in reversed(self._slots):
            if slot <= oldest:
                break
            sums = [a + b for a, b in zip(sums, counts, strict=True)]
        return Counts(*sums)

    @property
    def total(self) -> Counts:
        """Since the start."""
        return Counts(*self._total)


_PLACE = {result: index for index, result in enumerate(Result)}
