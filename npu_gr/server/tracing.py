"""OpenTelemetry spans of the sampled requests: one for the request, one for each stage. Needs the extra `otel`.

The spans of the stages are made at the end, from the answer's `stages_s`: a request that is not sampled costs nothing,
and the service knows nothing of tracing. A caller's `traceparent` decides whether its request is sampled; of requests
without one, `server.trace_sample_ratio` are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from npu_gr.core.errors import ConfigError
from npu_gr.core.logs import Trace, begin
from npu_gr.core.secret import SecretUrl
from npu_gr.server.config import ServerConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer


class Tracing:
    """Begins the trace of every request, and a span where it is sampled. Without a tracer there are only the ids."""

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
                parts.append((stage, parts[-1][2], parts[-1][2] + seconds))
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
        remote = otel.SpanContext(int(trace.trace_id, 16), int(trace.parent_id, 16), True, otel.TraceFlags(1))
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
