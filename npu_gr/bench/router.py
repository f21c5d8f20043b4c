"""`npu-gr bench router`: the time that the router adds to a request; Envoy in the same run where it is installed.

One instance answers at once. In front of it run the router and Envoy. All three are processes of their own. First one
connection to each sends 36 kB ranks in turn (direct, router, Envoy, direct, ...), which gives the added p50 and p99.
Then many connections at once give requests per second of processor time, which other load on the machine does not
change. Every path's answer is checked before it is measured.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
import yaml

from npu_gr.bench.line import Line
from npu_gr.core.settings import from_table
from npu_gr.fleet.balancers import envoy
from npu_gr.router.config import RouterConfig

BODY_BYTES = 36_000
CONNECTIONS = 32  # at once, for the throughput
ADDED_MS = 0.25  # the target: the router adds at most this at the median
_INSTANCE = """
import asyncio, sys, uvloop
class Answers(asyncio.Protocol):
    def connection_made(self, transport): self.transport, self.left, self.head = transport, 0, b""
    def data_received(self, data):
        if not self.left:
            self.head += data
            at = self.head.find(b"\\r\\n\\r\\n")
            if at < 0: return
            low = self.head[:at].lower()
            length = int(low.partition(b"content-length:")[2].partition(b"\\r\\n")[0] or 0)
            self.left = length - (len(self.head) - at - 4) or -1
            self.head = b""
            if self.left > 0: return
        else:
            self.left -= len(data)
            if self.left: return
        self.left = 0
        self.transport.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
async def main():
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
uvloop.run(main())
"""


class BenchConnection(asyncio.Protocol):
    """A kept-alive connection to the instance, to the router or to Envoy."""

    def __init__(self) -> None:
        self._done: asyncio.Future[bytes] | None = None
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Complete the request once its whole answer is there."""
        self._answer += data
        if self._done is not None and self._answer.endswith(b"\r\n\r\nok"):
            self._done.set_result(self._answer)
            self._done = None
            self._answer = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that waits for its answer."""
        if self._done is not None:
            self._done.set_exception(ConnectionResetError("closed in the middle"))

    async def send(self, request: bytes) -> bytes:
        """Send one request and wait for its whole answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


def lines(seed: int, budget_s: float) -> Iterator[Line]:
    """Measure the router and Envoy against the direct call, and against each other."""
    import uvloop

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports, processes = _start(folder, stack)
        took, served = uvloop.run(_measure(ports, processes, seed, budget_s))
    direct = took["direct"]
    for name in [name for name in ports if name != "direct"]:
        for quantile in (50, 99):
            base, ours = (float(np.percentile(row, quantile) * 1e3) for row in (direct, took[name]))
            ok = ours - base <= ADDED_MS if name == "router" and quantile == 50 else None
            target = ADDED_MS if ok is not None else None
            yield _line(f"{name} adds, p{quantile}", ours - base, "ms", "direct call", base, base / ours, target, ok)
    if "envoy" in ports:
        base, ours = (float(np.percentile(took[name], 50) * 1e3) for name in ("envoy", "router"))
        yield _line("whole call, p50", ours, "ms", "through Envoy", base, base / ours)
        ratio = served["router"] / served["envoy"]
        yield _line("requests a core second", served["router"], "1/s", "Envoy", served["envoy"], ratio)
    else:
        yield _line("requests a core second", served["router"], "1/s", "none", float("nan"), float("nan"))


def _line(
    case: str,
    ours: float,
    unit: str,
    baseline: str,
    value: float,
    ratio: float,
    target: float | None = None,
    ok: bool | None = None,
) -> Line:
    return Line(
        bench="router",
        case=case,
        ours=ours,
        unit=unit,
        baseline=baseline,
        baseline_value=value,
        ratio=ratio,
        target=target,
        ok=ok,
    )


def _start(folder: Path, stack: ExitStack) -> tuple[dict[str, int], dict[str, subprocess.Popen[bytes]]]:
    """Start the processes. Returns their ports and the processes, by the path's name."""
    instance = _free_port()
    ports = {"direct": instance, "router": _free_port()}
    table = {
        "port": ports["router"],
        "admin_port": _free_port(),
        "discovery": {"instances": [{"name": "one", "host": "127.0.0.1", "port": instance}]},
    }
    (folder / "router.yaml").write_text(yaml.safe_dump(table))
    (folder / "instance.py").write_text(_INSTANCE)
    commands = {
        "direct": [sys.executable, str(folder / "instance.py"), str(instance)],
        "router": [sys.executable, "-m", "npu_gr", "route", "--config", str(folder / "router.yaml")],
    }
    binary = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if binary:
        ports["envoy"] = _free_port()
        config = from_table({**table, "port": ports["envoy"], "admin_port": _free_port()}, RouterConfig)
        (folder / "envoy.json").write_text(envoy(config, config.discovery.instances))
        commands["envoy"] = [binary, "-c", str(folder / "envoy.json"), "--concurrency", "1", "--use-dynamic-base-id"]
    processes = {}
    for name, command in commands.items():
        log = stack.enter_context((folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(_end, process)
        processes[name] = process
    return ports, processes


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


async def _measure(
    ports: dict[str, int], processes: dict[str, subprocess.Popen[bytes]], seed: int, budget_s: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Measure every path.

    Returns:
        By the path's name the seconds of its single calls, and its requests per second of processor time; the
        processor time is that of the path's own process.
    """
    body = np.random.default_rng(seed).integers(32, 127, BODY_BYTES, dtype=np.uint8).tobytes()
    head = b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\nContent-Length: %d\r\n\r\n"
    request = head % len(body) + body
    one = {name: await _connect(port, request) for name, port in ports.items()}
    took: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(100):
        for connection in one.values():
            await connection.send(request)
    ends_at = time.perf_counter() + budget_s
    while time.perf_counter() < ends_at or len(took["direct"]) < 1000:
        for name, connection in one.items():
            began_at = time.perf_counter()
            await connection.send(request)
            took[name].append(time.perf_counter() - began_at)
    for connection in one.values():
        connection.close()
    served = {}
    for name, port in ports.items():
        many = [await _connect(port, request) for _ in range(CONNECTIONS)]
        served[name] = await _throughput(many, request, processes[name].pid, budget_s / 2)
        for connection in many:
            connection.close()
    return took, served


async def _connect(port: int, request: bytes) -> BenchConnection:
    """Connect and check the first answer; wait until somebody listens and the router knows that the instance is up."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, connection = await asyncio.get_running_loop().create_connection(BenchConnection, "127.0.0.1", port)
                async with asyncio.timeout(1):
                    answer = await connection.send(request)
                assert answer.startswith(b"HTTP/1.1 200 "), answer
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
            else:
                return connection


async def _throughput(connections: Sequence[BenchConnection], request: bytes, pid: int, budget_s: float) -> float:
    count = 0
    ends_at = time.perf_counter() + budget_s

    async def go(connection: BenchConnection) -> None:
        nonlocal count
        while time.perf_counter() < ends_at:
            await connection.send(request)
            count += 1

    before_s = _cpu_s(pid)
    await asyncio.gather(*map(go, connections))
    return count / (_cpu_s(pid) - before_s)


def _cpu_s(pid: int) -> float:
    """The processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
