"""Spans leave the process as OTLP and are read by OpenTelemetry's own types, as a collector reads them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from npu_gr.core.settings import from_table
from npu_gr.server.config import ServerConfig
from npu_gr.server.tracing import spans

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@contextmanager
def receiver() -> Iterator[tuple[str, Queue[tuple[str, str | None, ExportTraceServiceRequest]]]]:
    """What of a collector takes spans over HTTP: its URL, and what has come (path, authorization, request)."""
    came = Queue[tuple[str, str | None, ExportTraceServiceRequest]]()

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["Content-Type"] == "application/x-protobuf"
            came.put((self.path, self.headers.get("Authorization"), ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receive) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}/v1/traces", came
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_gets_the_spans_of_a_request_with_the_password_in_a_header() -> None:
    with receiver() as (address, came):
        config = from_table({"otlp_endpoint": f"http://me:secret@{address}", "trace_sample_ratio": 0.0}, ServerConfig)
        with spans(config) as tracing:
            trace, span = tracing.begin("POST /v1/rank", f"00-{TRACE}-{PARENT}-01")
            assert span is not None
            attributes: dict[str, str | int] = {"http.response.status_code": 503, "npu_gr.outcome": "miss_full"}
            tracing.end(span, {"lease": 0.001, "device": 0.002}, 0.0, 0.001, attributes)
            _, unsampled = tracing.begin("POST /v1/rank", None)
            assert unsampled is None
        path, authorization, request = came.get(timeout=10)
        assert came.empty(), "one batch"
    assert (path, authorization) == ("/v1/traces", "Basic bWU6c2VjcmV0")
    (resource,) = request.resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "npu_gr"
    (scope,) = resource.scope_spans
    by_name = {one.name: one for one in scope.spans}
    assert list(by_name) == ["read", "lease", "device", "write", "POST /v1/rank"]
    whole = by_name.pop("POST /v1/rank")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert whole.span_id.hex() == trace.span_id
    assert whole.status.code == 2, "an error"
    assert {one.parent_span_id for one in by_name.values()} == {whole.span_id}
    told = {one.key: one.value.string_value or one.value.int_value for one in whole.attributes}
    assert told == attributes
    device = by_name["device"]
    assert abs(device.end_time_unix_nano - device.start_time_unix_nano - 2_000_000) < 1000
