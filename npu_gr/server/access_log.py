"""One canonical JSON line for each request; the newest ones are kept for the status page.

No user, no history, no key: a user appears as a keyed hash, and only where a key is configured.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from npu_gr.core.errors import ConfigError
from npu_gr.core.request import GenerateAnswer, RankAnswer, RecommendAnswer, SignalAnswer, UserKey
from npu_gr.metrics.trace import Trace
from npu_gr.server.config import ServerConfig

log = logging.getLogger("npu_gr.request")

Answer = RankAnswer | GenerateAnswer | RecommendAnswer | SignalAnswer
NEWEST = 1024  # requests kept for the status page
_encode = msgspec.json.Encoder().encode


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The line's fields, in this order; those that do not apply are left out."""

    time_s: float  # unix, when the request ended
    request_id: str
    trace_id: str
    span_id: str
    method: str
    route: str
    status: int
    duration_s: float
    user: str | None = None  # keyed hash
    error: str | None = None
    verdict: str | None = None
    generate_verdict: str | None = None
    outcome: str | None = None
    reason: str | None = None
    model_version: str | None = None
    catalogue_version: str | None = None
    history_tokens: int | None = None
    prefix_tokens: int | None = None
    num_items: int | None = None  # scored, generated or recommended
    num_candidates: int | None = None  # of a recommend
    degraded: list[str] = []  # stages of a recommend that did not do their part: "generate out_of_time"
    stages_s: dict[str, float] = {}


class Journal:
    """Writes the lines, and remembers the newest of each kind.

    Raises:
        ConfigError: the key file cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._logs_all, self._slow_s = config.log_requests == "all", config.slow_request_s
        self._key = _read_key(config.log_user_key_file)
        self._newest: deque[tuple[str, Line]] = deque(maxlen=NEWEST)  # (kind, line)

    def write(
        self,
        kind: str | None,
        trace: Trace,
        facts: dict[str, Any],
        answer: Answer | None,
        user: UserKey | None,
    ) -> None:
        """A request has ended. `facts`: request_id, method, route, status, duration_s, error."""
        line = Line(
            time_s=round(time.time(), 3),
            trace_id=trace.trace_id,
            span_id=trace.span_id,
            user=self._hashed(user),
            **facts,
            **_of(answer),
        )
        if kind is not None:
            self._newest.append((kind, line))
        notable = line.status >= 500 or line.duration_s > self._slow_s
        if notable or self._logs_all:
            log.log(logging.WARNING if notable else logging.INFO, "%s", _Json(line))

    def slowest(self, count: int, within_s: float) -> list[tuple[str, Line]]:
        """The slowest of the newest requests, slowest first."""
        since_s = time.time() - within_s
        recent = [pair for pair in self._newest if pair[1].time_s >= since_s]
        return sorted(recent, key=lambda pair: -pair[1].duration_s)[:count]

    def percentiles_s(self, kind: str) -> tuple[float, float] | None:
        """P50 and P99 of the newest answered ones, exact."""
        durations = [line.duration_s for of, line in self._newest if of == kind and line.status < 400]
        if not durations:
            return None
        p50, p99 = np.percentile(durations, [50, 99])
        return float(p50), float(p99)

    def _hashed(self, user: UserKey | None) -> str | None:
        if user is None or self._key is None:
            return None
        text = f"{len(user.tenant)}:{user.tenant}{user.user}".encode()
        return hashlib.blake2b(text, digest_size=8, key=self._key).hexdigest()


class _Json:
    """A line that becomes text when somebody writes it."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __str__(self) -> str:
        return _encode(self._line).decode()


def _of(answer: Answer | None) -> dict[str, Any]:
    """What an answer tells."""
    if answer is None:
        return {}
    told: dict[str, Any] = {"model_version": answer.model_version, "history_tokens": answer.history.num_tokens}
    if isinstance(answer, SignalAnswer):
        generate = answer.generate_verdict
        return {
            **told,
            "verdict": answer.verdict.value,
            "generate_verdict": None if generate is None else generate.value,
        }
    told |= {
        "outcome": answer.outcome.value if answer.outcome else None,
        "reason": answer.reason.value or None,
        "prefix_tokens": answer.prefix_tokens,
        "stages_s": {stage: round(seconds, 6) for stage, seconds in answer.stages_s.items()},
    }
    if isinstance(answer, GenerateAnswer):
        return {**told, "catalogue_version": answer.catalogue_version, "num_items": len(answer.item_ids)}
    if isinstance(answer, RecommendAnswer):
        stages = [f"{r.stage} {r.result.value}" for r in answer.stages if r.stage in answer.degraded]
        told |= {"verdict": answer.verdict.value, "num_candidates": answer.num_candidates, "degraded": stages}
        return {**told, "num_items": len(answer.item_ids)}
    return {**told, "num_items": max(map(len, answer.scores.values()), default=0)}


def _read_key(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"server.log_user_key_file: {path}: {error.strerror}") from error
    if not 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ConfigError(
            f"server.log_user_key_file: {path}: {len(key)} bytes, needs 16 to {hashlib.blake2b.MAX_KEY_SIZE}"
        )
    return key


def lines_to_stdout() -> None:
    """Send the lines, and nothing else, to standard output; everything else stays on standard error."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False
