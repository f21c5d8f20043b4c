"""The newest requests of an instance: for exact percentiles, for the slowest ones, and for bundles."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

NEWEST = 1024  # requests that are kept
_encode = msgspec.json.Encoder().encode


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the access log: fields that every request has, then those that its answer adds."""

    time_s: float  # unix, when the request ended
    request_id: str
    trace_id: str
    span_id: str
    method: str
    route: str
    status: int
    duration_s: float
    key: str | None  # name of the API key
    user: str | None  # keyed hash
    error: str | None  # its title
    detail: str | None  # what the caller was told of it
    answer_fields: dict[str, Any]  # what `Answer.log_fields` says
    stages_s: Mapping[str, float]

    def __str__(self) -> str:
        """Write the JSON, in the order above. Fields that are None, and empty stages, are left out."""
        line = {name: value for name in _FIXED if (value := getattr(self, name)) is not None}
        line["time_s"] = round(self.time_s, 3)
        line["duration_s"] = round(self.duration_s, 6)
        line |= {name: value for name, value in self.answer_fields.items() if value is not None}
        if self.stages_s:
            line["stages_s"] = {stage: round(seconds, 6) for stage, seconds in self.stages_s.items()}
        return _encode(line).decode()


_FIXED = (
    *("time_s", "request_id", "trace_id", "span_id", "method", "route", "status", "duration_s"),
    *("key", "user", "error", "detail"),
)


class EndedLine(NamedTuple):
    """A request that belongs to a kind, at its end."""

    kind: str  # a name of `KINDS`
    line: AccessLine


class NewestRequests:
    """The newest requests that belong to a kind."""

    def __init__(self) -> None:
        self._newest: deque[EndedLine] = deque(maxlen=NEWEST)
        # apart for each kind, so that a storm of refusals pushes out no answer
        self._answered_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))

    def add(self, kind: str, line: AccessLine) -> None:
        """Keep a request that has ended; a refusal is never slow, so none is kept."""
        if line.status < 400:
            self._answered_s[kind].append(line.duration_s)
        if line.status != 429:
            self.keep(kind, line)

    def keep(self, kind: str, line: AccessLine) -> None:
        """Keep a request that is no part of the percentiles: it was chosen because it was slow."""
        self._newest.append(EndedLine(kind, line))

    def lines(self) -> list[str]:
        """Their lines, oldest first, as JSON."""
        return [str(line) for _, line in list(self._newest)]

    def slowest(self, count: int, within_s: float) -> list[EndedLine]:
        """The slowest of them, slowest first.

        Args:
            count: requests at most.
            within_s: how long ago they ended at most.
        """
        since_at = time.time() - within_s
        recent = [ended for ended in self._newest if ended.line.time_s >= since_at]
        return sorted(recent, key=lambda ended: -ended.line.duration_s)[:count]

    def percentiles_s(self, kind: str) -> tuple[float, float] | None:
        """The exact P50 and P99 of the newest answered requests of a kind; None where there are none."""
        if not (answered_s := self._answered_s.get(kind)):
            return None
        p50, p99 = np.percentile(answered_s, [50, 99])
        return float(p50), float(p99)
