"""The access log: one JSON line per request; and OpenTelemetry spans of sampled requests.

A line holds no user id, no history and no API key, but the key's name. The user appears as a keyed
hash, and only where `server.log_user_key_file` is set. The detail of an error is logged unless the
client caused the error, since such a detail may quote the body. The newest lines, and the slowest
of each kind, stay in memory for the status page and the debug bundle.

Spans (extra `otel`) are made at the end of a request from the answer's `stages_s`, so a request
that is not sampled costs nothing. The client's `traceparent` decides whether a request is sampled;
of requests without one, `server.trace_sample_ratio` are.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from npu_gr.core.errors import ConfigError, DeadlineExceeded, NotTaken, NpuGrError, RequestError
from npu_gr.core.health import Worker
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import Kind
from npu_gr.core.logs import ACCESS_LOG, QueuedHandler, ThrottledLog, Trace, begin, log_line
from npu_gr.core.request import Answer
from npu_gr.core.secret import SecretUrl, redacted
from npu_gr.handlers.base import HeldPermit
from npu_gr.metrics.slo import Objective
from npu_gr.server.auth.keys import ANONYMOUS, Key
from npu_gr.server.config import ServerConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Span, Tracer


log = logging.getLogger(ACCESS_LOG)

MOST_DETAIL = 200  # characters of a detail
SLOW_FACTOR = 2.0  # a request that takes so many times its kind's objective is a warning
LAST_SPANS_S = 1.0  # to send the last spans at the end
SEND_S = 60.0  # limit of sending a batch of spans, with the retries of the SDK


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that a request ended with.

    It does not refer to the exception, whose traceback would keep the request's frames alive.
    """

    title: str
    detail: str | None  # None = it may quote the client's body


class ServerCall(msgspec.Struct, kw_only=True):
    """The state of a request from its head to its end, over HTTP or gRPC."""

    method: str
    route: str  # pattern of the path
    headers: Mapping[str, str]  # names in any case
    request_id: str
    trace: Trace
    span: Span | None  # None: the request is not sampled
    arrived_at: float  # when its head was read; the client's time limit counts from here
    body_at: float  # when its body was complete; before that `arrived_at`
    until_at: float = float("inf")  # when the client stops waiting
    has_deadline: bool = False  # whether gRPC has sent a deadline
    kind: Kind[Any, Any] | None = None  # None: the route belongs to no kind
    key: Key = ANONYMOUS
    permit: HeldPermit | None = None  # None: it did not pass admission here
    parsed_at: float | None = None
    user: UserKey | None = None  # None: it names none, or was rejected before its body was parsed
    answer: Answer | None = None  # the service's answer; None: there was none

    def left_s(self) -> float:
        """Note that the body is parsed, and return the seconds left of the client's time limit.

        Raises DeadlineExceeded where none are left, unless the request must finish.
        """
        self.parsed_at = now_at = time.monotonic()
        if now_at >= self.until_at and not (self.kind and self.kind.must_finish):
            granted_ms = (self.until_at - self.arrived_at) * 1e3
            raise DeadlineExceeded(
                f"receiving and parsing took the whole time limit of {granted_ms:.0f} ms"
            )
        return self.until_at - now_at


class AccessLog:
    """Writes the access log, and remembers the newest requests that belong to a kind.

    Raises:
        ConfigError: The key file cannot be used.
    """

    def __init__(self, config: ServerConfig, objectives: Iterable[Objective] = ()) -> None:
        self._logs_all = config.log_requests == "all"
        self._slow_s = config.slow_request_s
        self._slow_by_kind_s = {
            one.kind: min(self._slow_s, SLOW_FACTOR * one.threshold_s) for one in objectives
        }
        self._key = (
            None if config.log_user_key_file is None else read_key_file(config.log_user_key_file)
        )
        self.newest = RecentRequests()
        # receives each line of a request that belongs to a kind
        self.on_line: Callable[[str, AccessLine], None] = self.newest.add
        self._faults = ThrottledLog(logging.getLogger(__name__))

    def write(
        self, call: ServerCall, status: int, duration_s: float, failure: Failure | None = None
    ) -> None:
        """Log a request that has ended.

        Failed and slow ones are warnings; the others are written where `log_requests` is "all".
        `slow_s` says which are slow.

        Args:
            call: The request.
            status: Status of its answer.
            duration_s: Seconds from the end of its body to its answer.
            failure: Result of `failed`; None = it was answered, or the error is logged elsewhere.
        """
        answer = call.answer
        line = AccessLine(
            time_s=time.time(),
            request_id=call.request_id,
            trace_id=call.trace.trace_id,
            span_id=call.trace.span_id,
            method=call.method,
            route=call.route,
            status=status,
            duration_s=duration_s,
            key=None if call.key is ANONYMOUS else call.key.name,
            user=self._hashed(call.user),
            error=None if failure is None else failure.title,
            detail=None if failure is None else failure.detail,
            answer_fields={} if answer is None else answer.log_fields(),
            stages_s={} if answer is None else answer.stages_s,
        )
        if call.kind is not None:
            self.on_line(call.kind.name, line)
        is_notable = line.status >= 500 or line.duration_s > self.slow_s(call.kind)
        if is_notable or self._logs_all:
            # the logging thread makes the JSON
            log_line(log, logging.WARNING if is_notable else logging.INFO, line)

    def slow_s(self, kind: Kind[Any, Any] | None) -> float:
        """Return the duration over which a request is a warning: see `SLOW_FACTOR`."""
        return self._slow_s if kind is None else self._slow_by_kind_s.get(kind.name, self._slow_s)

    def failed(self, error: Exception) -> Failure | None:
        """Describe the error that a request ends with.

        Errors of the instance or its dependencies are also logged as warnings, once a second each.
        """
        if not isinstance(error, NpuGrError):
            return None  # `http.from_error` logs it with its traceback
        if isinstance(error, RequestError):
            return Failure(title=error.title, detail=None)
        detail = redacted(str(error))[:MOST_DETAIL]
        if error.status >= 500 and not isinstance(error, DeadlineExceeded | NotTaken):
            cause = error.__cause__
            reason = (
                ""
                if cause is None
                else f" ({type(cause).__name__}: {redacted(str(cause))[:MOST_DETAIL]})"
            )
            cause_name = f"{type(error).__name__} {type(cause).__name__}"
            self._faults.warning(
                cause_name, f"requests are failing: {error.title}: {detail}{reason}"
            )
        return Failure(title=error.title, detail=detail)

    def _hashed(self, user: UserKey | None) -> str | None:
        return None if user is None or self._key is None else hash_of(user, self._key)


def hash_of(user: UserKey, key: bytes) -> str:
    """Return the keyed hash (BLAKE2b, 8 bytes as hex) that stands for a user in the log."""
    text = f"{len(user.tenant)}:{user.tenant}{user.user}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=8, key=key).hexdigest()


def read_key_file(path: str) -> bytes:
    """Read the key of the user hashes.

    Raises:
        ConfigError: The file cannot be read, or the key has the wrong length.
    """
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"server.log_user_key_file: {path}: {error.strerror}") from error
    if not 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ConfigError(
            f"server.log_user_key_file: {path} has {len(key)} bytes; a key has 16 to "
            f"{hashlib.blake2b.MAX_KEY_SIZE}"
        )
    return key


def lines_to_stdout() -> None:
    """Send the access log to standard output; all other logs stay on standard error."""
    # lines are immutable, so the logging thread may format them
    handler = QueuedHandler("stdout", sys.stdout.fileno(), formats_late=True)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False


NEWEST = 1024  # requests in memory
NUM_SLOW = 5  # slowest requests of each kind in memory
SLOW_WITHIN_S = 900.0  # an older request is not among them
_encode = msgspec.json.Encoder().encode


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the access log: fields of every request, then those of its answer."""

    time_s: float  # unix seconds at which the request ended
    request_id: str
    trace_id: str
    span_id: str
    method: str
    route: str
    status: int
    duration_s: float
    key: str | None  # name of the API key
    user: str | None  # keyed hash
    error: str | None  # title of the error
    detail: str | None  # detail of the error; None = it may quote the client's body
    answer_fields: dict[str, Any]  # result of `Answer.log_fields`
    stages_s: Mapping[str, float]

    def __str__(self) -> str:
        """Return the JSON in the order of the fields, without those that are None or empty."""
        line = {name: value for name in _FIXED if (value := getattr(self, name)) is not None}
        line["time_s"] = round(self.time_s, 3)
        line["duration_s"] = round(self.duration_s, 6)
        line |= {name: value for name, value in self.answer_fields.items() if value is not None}
        if self.stages_s:
            line["stages_s"] = {
                stage: round(seconds, 6) for stage, seconds in self.stages_s.items()
            }
        return _encode(line).decode()


_FIXED = (
    *("time_s", "request_id", "trace_id", "span_id", "method", "route", "status", "duration_s"),
    *("key", "user", "error", "detail"),
)


class EndedLine(NamedTuple):
    """The line of a request that belongs to a kind."""

    kind: str  # a name of `KINDS`
    line: AccessLine


class _Slowest:
    """The slowest requests of a kind, slowest first: at most `NUM_SLOW` of `SLOW_WITHIN_S`."""

    def __init__(self) -> None:
        self.lines: list[AccessLine] = []
        self._oldest_at = 0.0  # of `lines`

    def add(self, line: AccessLine) -> None:
        since_at = line.time_s - SLOW_WITHIN_S
        lines = self.lines
        is_full = len(lines) == NUM_SLOW and self._oldest_at >= since_at
        if is_full and line.duration_s <= lines[-1].duration_s:
            return
        kept = [line, *(one for one in lines if one.time_s >= since_at)]
        self.lines = sorted(kept, key=lambda one: -one.duration_s)[:NUM_SLOW]
        self._oldest_at = min(one.time_s for one in self.lines)


class RecentRequests:
    """The newest requests that belong to a kind, and the slowest ones of each kind."""

    def __init__(self) -> None:
        self._newest: deque[EndedLine] = deque(maxlen=NEWEST)
        # by kind, so that a busy kind does not push out the others
        self._answered_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._slowest: defaultdict[str, _Slowest] = defaultdict(_Slowest)

    def add(self, kind: str, line: AccessLine) -> None:
        """Remember a request that has ended, unless it was rejected with 429."""
        if line.status < 400:
            self._answered_s[kind].append(line.duration_s)
        if line.status != 429:
            self._newest.append(EndedLine(kind, line))
            self._slowest[kind].add(line)

    def lines(self) -> list[str]:
        """Return the lines as JSON, oldest first."""
        return [str(line) for _, line in list(self._newest)]

    def slowest(self) -> list[EndedLine]:
        """Return the slowest requests of each kind, see `NUM_SLOW` and `SLOW_WITHIN_S`."""
        since_at = time.time() - SLOW_WITHIN_S
        return [
            EndedLine(kind, line)
            for kind, slowest in self._slowest.items()
            for line in slowest.lines
            if line.time_s >= since_at
        ]

    def percentiles_s(self, kind: str) -> tuple[float, float] | None:
        """Compute P50 and P99 in seconds of a kind's newest answered requests; None = none."""
        if not (answered_s := self._answered_s.get(kind)):
            return None
        p50, p99 = np.percentile(answered_s, [50, 99])
        return float(p50), float(p99)


class Tracing:
    """Begins the trace of every request, and a span of each sampled one.

    Without a tracer there are ids only.
    """

    def __init__(self, tracer: Tracer | None = None, sample_ratio: float = 0.0) -> None:
        self._tracer = tracer
        self._sample_ratio = sample_ratio

    def begin(self, name: str, traceparent: str | None) -> tuple[Trace, Span | None]:
        """Begin the trace of a request that arrives now, and its span if it is sampled.

        Args:
            name: Name of the span.
            traceparent: The client's header; None = there is none.
        """
        trace = begin(traceparent)
        if self._tracer is None:
            return trace, None
        if not (trace.is_sampled if trace.parent_id else random.random() < self._sample_ratio):  # noqa: S311  (a sample)
            return trace, None
        span = _server_span(self._tracer, name, trace)
        ids = span.get_span_context()
        return Trace(f"{ids.trace_id:032x}", f"{ids.span_id:016x}", trace.parent_id, True), span

    def end(
        self,
        span: Span,
        stages_s: Mapping[str, float],
        began_at: float,
        parsed_at: float | None,
        attributes: Mapping[str, str | int],
    ) -> None:
        """End the span of a request now, with a child span per stage.

            began_at     parsed_at                                    now
               |-- read --|-- stage --|-- stage --| ... |-- write ------|

        Args:
            span: Span of `begin`.
            stages_s: Stage -> seconds; each stage begins where the one before ends.
            began_at: Arrival of the request, on time.monotonic().
            parsed_at: When its body was parsed; None = it was not, so there are no child spans.
            attributes: Attributes of the request's span.
        """
        from opentelemetry import trace as otel

        assert self._tracer is not None, "begin() made a span"
        now_at = time.monotonic()
        now_ns = time.time_ns()

        def unix_ns(instant_at: float) -> int:
            return now_ns - round((now_at - instant_at) * 1e9)

        parts: list[tuple[str, float, float]] = []  # (name, from, to), instants on time.monotonic()
        if parsed_at is not None:
            parts.append(("read", began_at, parsed_at))
            for stage, seconds in stages_s.items():
                # stages may overlap slightly; no span may end after the request
                parts.append((stage, parts[-1][2], min(parts[-1][2] + seconds, now_at)))
            parts.append(("write", parts[-1][2], now_at))
        parent = otel.set_span_in_context(span)
        for name, from_at, to_at in parts:
            self._tracer.start_span(name, parent, start_time=unix_ns(from_at)).end(unix_ns(to_at))
        for key, value in attributes.items():
            span.set_attribute(key, value)
        if int(attributes["http.response.status_code"]) >= 500:
            span.set_status(otel.StatusCode.ERROR)
        span.end(now_ns)


def _server_span(tracer: Tracer, name: str, trace: Trace) -> Span:
    from opentelemetry import trace as otel

    context = None
    if trace.parent_id is not None:
        remote = otel.SpanContext(
            int(trace.trace_id, 16), int(trace.parent_id, 16), True, otel.TraceFlags(1)
        )
        context = otel.set_span_in_context(otel.NonRecordingSpan(remote))
    return tracer.start_span(name, context, otel.SpanKind.SERVER)


@contextmanager
def spans(
    config: ServerConfig,
    worker: Worker | None = None,
    count: Callable[[str, int], None] = lambda _result, _num: None,
) -> Iterator[Tracing]:
    """Trace as configured while the block runs; at its end the pending spans are sent.

    Args:
        config: Section `server`.
        worker: Shows whether spans are sent.
        count: Receives the numbers of spans that ended, and of those that were sent.
    """
    if config.otlp_endpoint is None:
        yield Tracing()
        return
    numbers = Counter[str]()
    lock = threading.Lock()

    def counted(result: str, num: int) -> None:
        with lock:
            numbers[result] += num
        count(result, num)

    provider = _provider(config.otlp_endpoint, worker or Worker(), counted)
    try:
        yield Tracing(provider.get_tracer("npu_gr"), config.trace_sample_ratio)
    finally:
        # in a thread, since the SDK waits half a minute for a collector that does not answer
        stop = threading.Thread(target=provider.shutdown, name="npu_gr-spans", daemon=True)
        stop.start()
        stop.join(LAST_SPANS_S)
        if lost := numbers["ended"] - numbers["sent"]:
            logging.getLogger(__name__).warning(
                "server.otlp_endpoint: %d of %d spans were not sent, %.0f s after the last request",
                lost,
                numbers["ended"],
                LAST_SPANS_S,
            )


def _provider(
    endpoint: SecretUrl, worker: Worker, count: Callable[[str, int], None]
) -> TracerProvider:
    """Make the provider that sends spans to an OTLP collector over HTTP, in batches.

    Raises:
        ConfigError: The extra `otel` is not installed, or the endpoint is not a URL.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    except ImportError as error:
        raise ConfigError(f"server.otlp_endpoint: needs the extra npu_gr[otel]: {error}") from error

    class WatchedExporter(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            with worker.busy(SEND_S):
                result = super().export(spans)
            if result is SpanExportResult.SUCCESS:
                count("sent", len(spans))
            return result

    class CountedProcessor(BatchSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            count("ended", 1)
            super().on_end(span)

    resource = Resource.create({"service.name": "npu_gr"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `spans` does it
    try:
        url, authorization = endpoint.without_user()
    except ValueError as error:
        raise ConfigError(f"server.otlp_endpoint: {error}") from None
    # user and password go into a header, so that logs of the URL do not have them
    headers = {"Authorization": authorization} if authorization else None
    provider.add_span_processor(CountedProcessor(WatchedExporter(endpoint=url, headers=headers)))
    return provider
