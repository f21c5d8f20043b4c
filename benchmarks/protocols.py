"""`python -m benchmarks protocols`: a rank by each way into an instance, beside raw msgpack under /v1.

A real server process whose ranker answers zeros, so that what is left is everything but the model, and one caller over
one connection on the same machine: the time from the request's bytes to the answer's, and the server's CPU for it.
Every way's answer is compared with that of /v1 before anything is timed.
"""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import msgspec
import numpy as np

from benchmarks.door_servers import Server, Traffic, free_port, place_checkpoint, process
from benchmarks.line import Line, percentiles, timed_in_turn
from benchmarks.wire import inference_message, raw_infer
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.server.codec.media import MSGPACK
from npu_gr.server.middleware import OCTETS
from npu_gr.server.oip.routes import HEADER_LENGTH
from npu_gr.server.rpc.inference import INFERENCE, message

BASELINE = "/v1, raw msgpack"
NUM_CPU = 200  # ranks whose CPU is read together


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolOptions:
    """What `python -m benchmarks protocols` is asked for."""

    config: Path  # of the instance, as it ships
    checkpoint: Path | None = None  # None: an untrained model is made
    seconds: float = 3.0
    seed: int = 0
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to ask for the same rank."""

    name: str
    ask: Callable[[], Any]  # the answer, as it came
    scores: Callable[[Any], bytes]  # of the first task, raw float32


def lines(options: ProtocolOptions) -> Iterator[Line]:
    """Time every way, and read the server's CPU for it.

    Raises:
        AssertionError: a way answers with other scores than /v1. Unavailable: the server does not start.
    """
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        checkpoint = place_checkpoint(options.checkpoint, folder / "checkpoint", 2, 256, options.seed)
        body = options.traffic.bodies(load_checkpoint(checkpoint), "", options.seed)[0]
        port, rpc_port = free_port(), free_port()
        settings = [
            f"server.port={port}",
            f"server.admin_port={free_port()}",
            f"server.grpc_port={rpc_port}",
            "server.log_requests=slow",
            f"checkpoint={checkpoint}",
            f"features.path={folder / 'history.db'}",
        ]
        command = [sys.executable, "-m", "benchmarks.front_stub", str(options.config), *settings]
        server = stack.enter_context(process("stub", command, port, folder, ready="/readyz"))
        ways = _ways(stack, body, port, rpc_port, load_checkpoint(checkpoint).model.config.tasks[0])
        want = ways[0].scores(ways[0].ask())
        for way in ways:
            assert way.scores(way.ask()) == want, f"{way.name}: other scores than {BASELINE}"
        times = timed_in_turn([way.ask for way in ways], options.seconds * len(ways))
        base_ms = percentiles(times[0])[0] * 1e3
        base_cpu_ms = _cpu_ms(server, ways[0].ask)
        case = f"L={options.traffic.history_tokens} M={options.traffic.num_candidates}"
        for way, took_s in zip(ways[1:], times[1:], strict=True):
            ours_ms, p10, p90 = (s * 1e3 for s in percentiles(took_s))
            yield _line(f"{case} {way.name}: round trip", ours_ms, base_ms, p10, p90)
            yield _line(f"{case} {way.name}: server's CPU", _cpu_ms(server, way.ask), base_cpu_ms)


def _ways(stack: ExitStack, body: dict[str, Any], port: int, rpc_port: int, task: str) -> list[_Way]:
    http_client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    stack.callback(http_client.close)
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{rpc_port}"))

    def post(path: str, data: bytes, headers: dict[str, str]) -> tuple[bytes, str | None]:
        http_client.request("POST", path, data, headers)
        response = http_client.getresponse()
        told = response.read()
        assert response.status == 200, told
        return told, response.getheader(HEADER_LENGTH)

    def call(path: str, data: bytes) -> bytes:
        stub = channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        answer: bytes = stub(data, timeout=30.0)
        return answer

    columns = {name: np.array(column) for name, column in body["history"].items()}
    columns["actions"] = columns["actions"].astype(np.int16)
    candidates = np.array(body["candidates"])
    plain = {**body, "candidates": candidates.tobytes(), "history": {n: c.tobytes() for n, c in columns.items()}}
    packed = msgspec.msgpack.encode(plain)
    lists = msgspec.json.encode(body)
    head, data = raw_infer(body["user_id"], candidates, columns, {"binary_data_output": True})
    inferred = inference_message(body["user_id"], candidates, columns)

    def of_infer(told: tuple[bytes, str | None]) -> bytes:
        begins_at = int(told[1] or 0)
        first = msgspec.json.decode(told[0][:begins_at])["outputs"][0]
        return told[0][begins_at : begins_at + first["parameters"]["binary_data_size"]]

    def of_json(told: tuple[bytes, str | None]) -> bytes:
        return np.array(msgspec.json.decode(told[0])["scores"][task], np.float32).tobytes()

    answers = message("inference.ModelInferResponse")
    raw_headers = {"Content-Type": OCTETS, HEADER_LENGTH: str(len(head))}
    both = {"Content-Type": MSGPACK, "Accept": MSGPACK}
    return [
        _Way(BASELINE, lambda: post("/v1/rank", packed, both), lambda one: _msgpack_scores(one[0], task)),
        _Way("/v1, JSON", lambda: post("/v1/rank", lists, {"Content-Type": "application/json"}), of_json),
        _Way("infer over HTTP, raw", lambda: post("/v2/models/rank/infer", head + data, raw_headers), of_infer),
        _Way(
            "infer over gRPC, raw",
            lambda: call(f"/{INFERENCE}/ModelInfer", inferred),
            lambda one: bytes(answers.FromString(one).raw_output_contents[0]),
        ),
    ]


def _msgpack_scores(told: bytes, task: str) -> bytes:
    scores: bytes = msgspec.msgpack.decode(told)["scores"][task]
    return scores


def _cpu_ms(server: Server, ask: Callable[[], Any]) -> float:
    """CPU of all the server's processes for one rank."""

    def cpu_s() -> float:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in _threads(server)) * 1e-9

    before_s = cpu_s()
    for _ in range(NUM_CPU):
        ask()
    time.sleep(0.01)  # what is written behind the answer: its line in the log, its counts
    return (cpu_s() - before_s) / NUM_CPU * 1e3


def _threads(server: Server) -> Iterator[str]:
    for pid in server.pids:
        yield from (f"{pid}/task/{one.name}" for one in Path(f"/proc/{pid}/task").iterdir())


def _line(case: str, ours: float, base: float, p10: float | None = None, p90: float | None = None) -> Line:
    return Line(
        bench="protocols",
        case=case,
        ours=ours,
        unit="ms",
        baseline=BASELINE,
        baseline_value=base,
        ratio=base / ours,
        target=None,
        ok=None,
        p10=p10,
        p90=p90,
    )
