"""What a request leaves behind: one JSON line in the access log, and where it is sampled, spans of OpenTelemetry.

A line holds no user, no history and no API key, but the key's name. A user appears as a keyed hash,
and only where a key is configured. What the caller was told of an error is in it where we wrote
every word of it: the detail of a caller's own fault may repeat a part of the body. The newest lines
are kept for the status page.

The spans (extra `otel`) are made at the end, from the answer's `stages_s`: a request that is not
sampled costs nothing. A caller's `traceparent` decides whether its request is sampled; of the
others, `server.trace_sample_ratio` are.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from npu_gr.core.errors import ConfigError, DeadlineExceeded, NotTaken, NpuGrError, RequestError
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import Kind
from npu_gr.core.logs import ACCESS_LOG, QueuedHandler, ThrottledLog, Trace, begin, log_line
from npu_gr.core.request import Answer
from npu_gr.core.secret import SecretUrl, redacted
from npu_gr.handlers.base import HeldPermit
from npu_gr.server.auth.keys import ANYBODY, Key
from npu_gr.server.config import ServerConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer


log = logging.getLogger(ACCESS_LOG)

MOST_DETAIL = 200  # characters of a detail


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that a request ended with, without the exception: its traceback would hold the request's frames."""

    title: str
    detail: str | None  # what the caller was told, as far as it holds no word of the caller's


class ServerCall(msgspec.Struct, kw_only=True):
    """A request from its head to its end, over HTTP or gRPC: what was found out of it so far."""

    method: str
    route: str  # pattern of the path
    headers: Mapping[str, str]  # whatever the case of their names
    request_id: str
    trace: Trace
    span: Span | None  # None: it is not sampled
    arrived_at: float  # its head: the caller's time budget counts from here
    whole_at: float  # the end of its body; before that its head
    until_at: float = float("inf")  # when its caller gives up
    has_deadline: bool = False  # of gRPC
    kind: Kind[Any, Any] | None = None  # None: the route belongs to no kind
    key: Key = ANYBODY
    permit: HeldPermit | None = None  # None: it was not admitted here
    parsed_at: float | None = None
    user: UserKey | None = None  # None: it names none, or was rejected before its body was read
    answer: Answer | None = None  # of the service; None: there was none

    def left_s(self) -> float:
        """Return what is left of the caller's budget now that the body is parsed.

        Raises DeadlineExceeded: nothing.
        """
        self.parsed_at = now_at = time.monotonic()
        if now_at >= self.until_at:
            granted_ms = (self.until_at - self.arrived_at) * 1e3
            raise DeadlineExceeded(
                f"reading the request took the whole budget of {granted_ms:.0f} ms"
            )
        return self.until_at - now_at


class AccessLog:
    """Writes the lines, and remembers the newest ones that belong to a kind of request.

    Raises:
        ConfigError: the key file cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._logs_all = config.log_requests == "all"
        self._slow_s = config.slow_request_s
        self._key = (
            None if config.log_user_key_file is None else read_key_file(config.log_user_key_file)
        )
        self.newest = RecentRequests()
        # of a request that belongs to a kind
        self.on_line: Callable[[str, AccessLine], None] = self.newest.add
        self._faults = ThrottledLog(logging.getLogger(__name__))

    def write(
        self, call: ServerCall, status: int, duration_s: float, failure: Failure | None = None
    ) -> None:
        """Log a request that has ended: failed and slow ones as warnings, the others where all are logged.

        Args:
            call: the request.
            status: of its answer.
            duration_s: from its last byte to its answer.
            failure: of `failed`; None = it was answered, or the error is not ours.
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
            key=None if call.key is ANYBODY else call.key.name,
            user=self._hashed(call.user),
            error=None if failure is None else failure.title,
            detail=None if failure is None else failure.detail,
            answer_fields={} if answer is None else answer.log_fields(),
            stages_s={} if answer is None else answer.stages_s,
        )
        if call.kind is not None:
            self.on_line(call.kind.name, line)
        is_notable = line.status >= 500 or line.duration_s > self._slow_s
        if is_notable or self._logs_all:
            # the JSON is made by the handler
            log_line(log, logging.WARNING if is_notable else logging.INFO, line)

    def failed(self, error: Exception) -> Failure | None:
        """Describe the error that a request ends with.

        Of what fails behind the service warn once a second.
        """
        if not isinstance(error, NpuGrError):
            return None  # the translation to HTTP logs it whole
        if isinstance(error, RequestError):
            return Failure(title=error.title, detail=None)
        detail = redacted(str(error))[:MOST_DETAIL]
        if error.status >= 500 and not isinstance(error, DeadlineExceeded | NotTaken):
            cause = error.__cause__
            reason = (
                ""
                if cause is None
                else (f" ({type(cause).__name__}: {redacted(str(cause))[:MOST_DETAIL]})")
            )
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
            f"server.log_user_key_file: {path}: {len(key)} bytes, needs 16 to "
            f"{hashlib.blake2b.MAX_KEY_SIZE}"
        )
    return key


def lines_to_stdout() -> None:
    """Send the lines, and nothing else, to standard output.

    Everything else stays on standard error.
    """
    # a line never changes
    handler = QueuedHandler("stdout", sys.stdout.fileno(), formats_late=True)
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
        """Write the JSON, in the order above.

        Fields that are None, and empty stages, are left out.
        """
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
    """A request that belongs to a kind, at its end."""

    kind: str  # a name of `KINDS`
    line: AccessLine


class RecentRequests:
    """The newest requests that belong to a kind."""

    def __init__(self) -> None:
        self._newest: deque[EndedLine] = deque(maxlen=NEWEST)
        # apart for each kind, so that a storm of rejections pushes out no answer
        self._answered_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))

    def add(self, kind: str, line: AccessLine) -> None:
        """Keep a request that has ended; a rejection is never slow, so none is kept."""
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


class Tracing:
    """Begins the trace of every request, and a span where it is sampled.

    Without a tracer there are only the ids.
    """

    def __init__(self, tracer: Tracer | None = None, sample_ratio: float = 0.0) -> None:
        self._tracer = tracer
        self._sample_ratio = sample_ratio

    def begin(self, name: str, traceparent: str | None) -> tuple[Trace, Span | None]:
        """Begin the trace of a request that arrives now, and its span if it is sampled.

        Args:
            name: of the span.
            traceparent: the header of the caller; None = there is none.
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
        """End the span of a request now, with a child span for each of its parts.

            began_at     parsed_at                                    now
               |-- read --|-- stage --|-- stage --| ... |-- write ------|

        Args:
            span: as `begin` gave it.
            stages_s: of the answer; each stage begins where the one before ends.
            began_at: when the request arrived, on time.monotonic().
            parsed_at: when its body was parsed; None = it was not, so there are no child spans.
            attributes: of the request's span.
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
                # stages may overlap by a little, and no span ends after the request
                parts.append((stage, parts[-1][2], min(parts[-1][2] + seconds, now_at)))
            parts.append(("write", parts[-1][2], now_at))
        inside = otel.set_span_in_context(span)
        for name, from_at, to_at in parts:
            self._tracer.start_span(name, inside, start_time=unix_ns(from_at)).end(unix_ns(to_at))
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
def spans(config: ServerConfig) -> Iterator[Tracing]:
    """Trace as configured. Spans that wait for their batch are sent at the block's end."""
    if config.otlp_endpoint is None:
        yield Tracing()
        return
    provider = _provider(config.otlp_endpoint)
    try:
        yield Tracing(provider.get_tracer("npu_gr"), config.trace_sample_ratio)
    finally:
        provider.shutdown()


def _provider(endpoint: SecretUrl) -> TracerProvider:
    """Make the provider that sends spans to an OTLP collector over HTTP, in batches, from a thread of its own.

    Raises:
        ConfigError: the extra `otel` is not installed, or the endpoint is no URL.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"server.otlp_endpoint: needs the extra npu_gr[otel]: {error}") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "npu_gr"}))
    try:
        url, authorization = endpoint.without_user()
    except ValueError as error:
        raise ConfigError(f"server.otlp_endpoint: {error}") from None
    # user and password go as a header: what logs the address then cannot log them
    headers = {"Authorization": authorization} if authorization else None
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, headers=headers)))
    return provider
