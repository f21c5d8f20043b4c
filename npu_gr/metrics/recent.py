"""The newest answers of an instance by tenant and by version: for its status page, so no name is a metric's label."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

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
    in_time_ratio: float
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
        return {name: _share(answers, span_s) for name, answers in sorted(groups.items(), key=lambda one: -len(one[1]))}


def _share(answers: list[RecentAnswer], span_s: float) -> Share:
    times_s = sorted(answer.took_s for answer in answers)
    return Share(
        num=len(answers),
        per_s=len(answers) / span_s,
        in_time_ratio=sum(answer.is_good for answer in answers) / len(answers),
        p99_s=times_s[math.ceil(0.99 * len(times_s)) - 1],
    )
