"""`python -m benchmarks protocols`: a rank by each protocol, against raw msgpack under /v1.

A real server process has a small ranker, and one client one connection on the same machine. It
measures the time from the request's bytes to the response's, and the server's CPU time. The
responses of all protocols are compared with those of /v1 before anything is timed.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import msgspec
import numpy as np

from benchmarks.frame import SEED, SHIPPED_CONFIG, Line, compared, timed, timed_for, timed_in_turn
from benchmarks.servers import Server, Traffic, instance, make_checkpoint, running
from benchmarks.wire import inference_message, raw_infer
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.server.grpc.inference import INFERENCE, message
from npu_gr.server.middleware import OCTETS
from npu_gr.server.oip.routes import HEADER_LENGTH
from npu_gr.server.schemas.media import MSGPACK
from tests.ports import free_port

OPTIONS = (SEED, SHIPPED_CONFIG, timed_for(3.0, "Seconds of each protocol."))
BASELINE = "/v1, raw msgpack"
NUM_CPU = 200  # ranks for one measurement of CPU time


@dataclass(frozen=True, slots=True)
class _Way:
    """One protocol for the same rank."""

    name: str
    ask: Callable[[], Any]  # returns the response
    scores: Callable[[Any], bytes]  # response -> scores of the first task, raw float32


def lines(seed: int, config: Path, seconds: float) -> Iterator[Line]:
    """Time every protocol, and measure the server's CPU time.

    Raises:
        AssertionError: A protocol's scores differ from those of /v1.
        Unavailable: The server does not start.
    """
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_checkpoint(folder / "checkpoint", 1, 64, seed)
        model = load_checkpoint(folder / "checkpoint")
        rpc_port = free_port()
        settings = (f"server.grpc_port={rpc_port}", "server.log_requests=slow")
        one = instance("protocols", folder / "checkpoint", folder, settings, config)
        server = stack.enter_context(running("protocols", one))
        traffic = Traffic()
        body = traffic.bodies(model, "", seed)[0]
        ways = _ways(stack, body, server.port, rpc_port, model.model.config.tasks[0])
        ways[0].ask()  # full inference, which caches the prefix
        want = ways[0].scores(ways[0].ask())
        for way in ways:
            assert way.scores(way.ask()) == want, f"{way.name}: other scores than {BASELINE}"
        times = timed_in_turn([way.ask for way in ways], seconds * len(ways))
        base_ms = _cpu_ms(server, ways[0].ask)
        for way, took_s in zip(ways[1:], times[1:], strict=True):
            case = f"L={traffic.history_tokens} M={traffic.num_candidates} {way.name}"
            yield timed("protocols", f"{case}: round trip", took_s, BASELINE, times[0])
            ours_ms = _cpu_ms(server, way.ask)
            yield compared(
                "protocols",
                f"{case}: server's CPU",
                ours_ms,
                "ms",
                BASELINE,
                base_ms,
                base_ms / ours_ms,
            )


def _ways(
    stack: ExitStack, body: dict[str, Any], port: int, rpc_port: int, task: str
) -> list[_Way]:
    http_client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    stack.callback(http_client.close)
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{rpc_port}"))

    def post(path: str, data: bytes, headers: dict[str, str]) -> tuple[bytes, str | None]:
        http_client.request("POST", path, data, headers)
        response = http_client.getresponse()
        content = response.read()
        assert response.status == 200, content
        return content, response.getheader(HEADER_LENGTH)

    def call(path: str, data: bytes) -> bytes:
        stub = channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        answer: bytes = stub(data, timeout=30.0)
        return answer

    columns = {name: np.array(column) for name, column in body["history"].items()}
    columns["actions"] = columns["actions"].astype(np.int16)
    candidates = np.array(body["candidates"])
    plain = {
        **body,
        "candidates": candidates.tobytes(),
        "history": {n: c.tobytes() for n, c in columns.items()},
    }
    packed = msgspec.msgpack.encode(plain)
    lists = msgspec.json.encode(body)
    head, data = raw_infer(body["user_id"], candidates, columns, {"binary_data_output": True})
    inferred = inference_message(body["user_id"], candidates, columns)

    def of_infer(response: tuple[bytes, str | None]) -> bytes:
        content, begins_at = response[0], int(response[1] or 0)
        first = msgspec.json.decode(content[:begins_at])["outputs"][0]
        return content[begins_at : begins_at + first["parameters"]["binary_data_size"]]

    def of_json(response: tuple[bytes, str | None]) -> bytes:
        return np.array(msgspec.json.decode(response[0])["scores"][task], np.float32).tobytes()

    answers = message("inference.ModelInferResponse")
    raw_headers = {"Content-Type": OCTETS, HEADER_LENGTH: str(len(head))}
    both = {"Content-Type": MSGPACK, "Accept": MSGPACK}
    return [
        _Way(
            BASELINE,
            lambda: post("/v1/rank", packed, both),
            lambda one: _msgpack_scores(one[0], task),
        ),
        _Way(
            "/v1, JSON",
            lambda: post("/v1/rank", lists, {"Content-Type": "application/json"}),
            of_json,
        ),
        _Way(
            "infer over HTTP, raw",
            lambda: post("/v2/models/rank/infer", head + data, raw_headers),
            of_infer,
        ),
        _Way(
            "infer over gRPC, raw",
            lambda: call(f"/{INFERENCE}/ModelInfer", inferred),
            lambda one: bytes(answers.FromString(one).raw_output_contents[0]),
        ),
    ]


def _msgpack_scores(content: bytes, task: str) -> bytes:
    scores: bytes = msgspec.msgpack.decode(content)["scores"][task]
    return scores


def _cpu_ms(server: Server, ask: Callable[[], Any]) -> float:
    """Measure the CPU time of all the server's processes for one rank."""

    def cpu_s() -> float:
        return (
            sum(
                int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
                for pid in _threads(server)
            )
            * 1e-9
        )

    before_s = cpu_s()
    for _ in range(NUM_CPU):
        ask()
    time.sleep(0.01)  # until the last response's log line and counts are written
    return (cpu_s() - before_s) / NUM_CPU * 1e3


def _threads(server: Server) -> Iterator[str]:
    for pid in server.pids:
        yield from (f"{pid}/task/{one.name}" for one in Path(f"/proc/{pid}/task").iterdir())
