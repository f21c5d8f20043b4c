"""The access log: one JSON line a request. The newest lines are kept for the status page.

A line holds no user, no history and no API key, but the key's name. A user appears as a keyed hash, and only where a
key is configured. What the caller was told of an error is in it where we wrote every word of it: the detail of a
caller's own fault may repeat a part of the body.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from npu_gr.core.errors import ConfigError, DeadlineExceeded, NotTaken, NpuGrError, RequestError
from npu_gr.core.history import UserKey
from npu_gr.core.logs import ACCESS_LOG, QueuedHandler, SeldomLog, Trace, log_line
from npu_gr.core.request import Answer
from npu_gr.core.secret import redacted
from npu_gr.server.config import ServerConfig

log = logging.getLogger(ACCESS_LOG)

MOST_DETAIL = 200  # characters of a detail


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that a request ended with, without the exception: its traceback would hold the request's frames."""

    title: str
    detail: str | None  # what the caller was told, as far as it holds no word of the caller's


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request at its end."""

    kind: str | None  # a name of `KINDS`; None: the route belongs to no kind
    trace: Trace
    request_id: str
    method: str
    route: str  # pattern of the path
    status: int
    duration_s: float
    key: str | None = None  # name of the API key; None: the route, or the instance, needs none
    failure: Failure | None = None  # None: it was answered, or the error is not ours
    user: UserKey | None = None  # None: it names none, or was refused before its body was read
    answer: Answer | None = None  # of the service; None: there was none


class AccessLog:
    """Writes the lines, and remembers the newest ones that belong to a kind of request.

    Raises:
        ConfigError: the key file cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._logs_all = config.log_requests == "all"
        self._slow_s = config.slow_request_s
        self._key = None if config.log_user_key_file is None else read_key_file(config.log_user_key_file)
        self.newest = NewestRequests()
        self.on_line: Callable[[str, AccessLine], None] = self.newest.add  # of a request that belongs to a kind
        self._faults = SeldomLog(logging.getLogger(__name__))

    def write(self, ended: EndedRequest) -> None:
        """Log a request that has ended: failed and slow ones as warnings, the others where all are logged."""
        answer = ended.answer
        failure = ended.failure
        line = AccessLine(
            time_s=time.time(),
            request_id=ended.request_id,
            trace_id=ended.trace.trace_id,
            span_id=ended.trace.span_id,
            method=ended.method,
            route=ended.route,
            status=ended.status,
            duration_s=ended.duration_s,
            key=ended.key,
            user=self._hashed(ended.user),
            error=None if failure is None else failure.title,
            detail=None if failure is None else failure.detail,
            answer_fields={} if answer is None else answer.log_fields(),
            stages_s={} if answer is None else answer.stages_s,
        )
        if ended.kind is not None:
            self.on_line(ended.kind, line)
        is_notable = line.status >= 500 or line.duration_s > self._slow_s
        if is_notable or self._logs_all:
            log_line(log, logging.WARNING if is_notable else logging.INFO, line)  # the JSON is made by the handler

    def failed(self, error: Exception) -> Failure | None:
        """Describe the error that a request ends with; of what fails behind the service warn once a second."""
        if not isinstance(error, NpuGrError):
            return None  # the translation to HTTP logs it whole
        if isinstance(error, RequestError):
            return Failure(title=error.title, detail=None)
        detail = redacted(str(error))[:MOST_DETAIL]
        if error.status >= 500 and not isinstance(error, DeadlineExceeded | NotTaken):
            cause = error.__cause__
            reason = "" if cause is None else f" ({type(cause).__name__}: {redacted(str(cause))[:MOST_DETAIL]})"
            cause_name = f"{type(error).__name__} {type(cause).__name__}"
            self._faults.warning(cause_name, f"requests fail: {error.title}: {detail}{reason}")
        return Failure(title=error.title, detail=detail)

    def _hashed(self, user: UserKey | None) -> str | None:
        return None if user is None or self._key is None else hash_of(user, self._key)


def hash_of(user: UserKey, key: bytes) -> str:
    """Return what the lines have in the place of a user."""
    text = f"{len(user.tenant)}:{user.tenant}{user.user}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=8, key=key).hexdigest()


def read_key_file(path: str) -> bytes:
    """Read the key of the hashes.

    Raises:
        ConfigError: it cannot be used.
    """
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
    handler = QueuedHandler("stdout", sys.stdout.fileno(), formats_late=True)  # a line never changes
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False


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
