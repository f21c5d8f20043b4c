"""Spans leave the process as OTLP and are read by OpenTelemetry's types, as by a collector.

And by a collector: `python -m pytest -m bare tests/server/test_otlp.py` fetches one from the
package index, starts it between the process and the receiver, and asks for the same spans.
"""

from __future__ import annotations

import contextlib
import gzip
import platform
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from npu_gr.core.settings import from_table
from npu_gr.metrics.registry import Metrics
from npu_gr.server.access_log import spans
from npu_gr.server.config import ServerConfig
from tests.ports import free_port
from tests.server.fake import metrics_of_all_kinds

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@contextmanager
def receiver() -> Iterator[tuple[str, Queue[tuple[str, str | None, ExportTraceServiceRequest]]]]:
    """The part of a collector that takes spans over HTTP.

    Yields its URL, and what has come: path, authorization, request.
    """
    came = Queue[tuple[str, str | None, ExportTraceServiceRequest]]()

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["Content-Type"] == "application/x-protobuf"
            came.put(
                (
                    self.path,
                    self.headers.get("Authorization"),
                    ExportTraceServiceRequest.FromString(body),
                )
            )
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


def tell(config: ServerConfig, metrics: Metrics) -> tuple[str, dict[str, str | int]]:
    """Send the spans of one request, and say which span it was and what its attributes are."""
    with spans(config, count=metrics.process.spans) as tracing:
        trace, span = tracing.begin("POST /v1/rank", f"00-{TRACE}-{PARENT}-01")
        assert span is not None
        attributes: dict[str, str | int] = {
            "http.response.status_code": 503,
            "npu_gr.outcome": "miss_full",
        }
        tracing.end(span, {"lease": 0.001, "device": 0.002}, 0.0, 0.001, attributes)
        _, unsampled = tracing.begin("POST /v1/rank", None)
        assert unsampled is None
        return trace.span_id, attributes


def check(
    request: ExportTraceServiceRequest, span_id: str, attributes: dict[str, str | int]
) -> None:
    """What came is what was told."""
    (resource,) = request.resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}[
        "service.name"
    ] == "npu_gr"
    (scope,) = resource.scope_spans
    by_name = {one.name: one for one in scope.spans}
    assert list(by_name) == ["read", "lease", "device", "write", "POST /v1/rank"]
    whole = by_name.pop("POST /v1/rank")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert whole.span_id.hex() == span_id
    assert whole.status.code == 2, "an error"
    assert {one.parent_span_id for one in by_name.values()} == {whole.span_id}
    told = {one.key: one.value.string_value or one.value.int_value for one in whole.attributes}
    assert told == attributes
    device = by_name["device"]
    assert abs(device.end_time_unix_nano - device.start_time_unix_nano - 2_000_000) < 1000


def counted(metrics: Metrics, result: str) -> float | None:
    return metrics.registry.get_sample_value("npu_gr_spans_total", {"result": result})


def test_a_collector_gets_the_spans_of_a_request_with_the_password_in_a_header() -> None:
    metrics = metrics_of_all_kinds()
    with receiver() as (address, came):
        table = {"otlp_endpoint": f"http://me:secret@{address}", "trace_sample_ratio": 0.0}
        told = tell(from_table(table, ServerConfig), metrics)
        path, authorization, request = came.get(timeout=10)
        assert came.empty(), "one batch"
    assert counted(metrics, "ended") == counted(metrics, "sent") == 5
    assert (path, authorization) == ("/v1/traces", "Basic bWU6c2VjcmV0")
    check(request, *told)


def test_a_collector_that_does_not_answer_delays_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        metrics = metrics_of_all_kinds()
        tell(from_table({"otlp_endpoint": url, "trace_sample_ratio": 0.0}, ServerConfig), metrics)
        assert "5 of 5 spans were not sent" in caplog.text
        assert (counted(metrics, "ended"), counted(metrics, "sent")) == (5, 0)


@pytest.mark.bare
def test_a_real_collector_takes_them_and_passes_them_on(tmp_path: Path) -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("needs Linux on x86-64: the collector in rotel is for that")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "rotel==0.0.1a15",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        collector = Path(archive.extract("rotel/rotel-agent", tmp_path))
    collector.chmod(0o755)
    ports = [free_port(), free_port()]
    with receiver() as (address, came):
        listen = [
            f"--otlp-{name}-endpoint=127.0.0.1:{port}"
            for name, port in zip(("http", "grpc"), ports, strict=True)
        ]
        send = [
            f"--otlp-exporter-endpoint=http://{address.partition('/')[0]}",
            "--otlp-exporter-protocol=http",
        ]
        process = subprocess.Popen(
            [collector, "start", "--exporter=otlp", *listen, *send], cwd=tmp_path
        )
        try:
            while process.poll() is None:
                with (
                    contextlib.suppress(ConnectionRefusedError),
                    socket.create_connection(("127.0.0.1", ports[0])),
                ):
                    break
                time.sleep(0.01)
            assert process.poll() is None, "the collector ended"
            told = tell(
                from_table(
                    {"otlp_endpoint": f"http://127.0.0.1:{ports[0]}/v1/traces"}, ServerConfig
                ),
                metrics_of_all_kinds(),
            )
            path, _, request = came.get(timeout=30)
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert path == "/v1/traces"
    check(request, *told)
