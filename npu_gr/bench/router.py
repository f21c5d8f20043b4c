"""`npu-gr bench router`: what the router adds to a request, beside Envoy and HAProxy where they are installed.

One instance answers at once. In front of it run the router and the balancers, each with the router's placement and on
one core. All are processes of their own. First one connection to each sends 36 kB ranks in turn (direct, router, Envoy,
HAProxy, direct, ...), which gives the added p50 and p99. Then many connections at once, again in turn and several times
over, give the processor time that each path's own process takes for a request; other load on the machine changes that
far less than the throughput. The client is wrk (in C) where it is installed. Every path's answer is checked first.

Where Envoy and the extra `picker` are installed, one more path is Envoy that asks our router for the instance of each
request; what that adds is measured against Envoy alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
import yaml

from npu_gr.bench.line import Line
from npu_gr.core.settings import from_table
from npu_gr.fleet.balancers import envoy, haproxy
from npu_gr.router.config import RouterConfig

BODY_BYTES = 36_000
SMALL_BYTES = 1_000
CONNECTIONS = 32  # at once, for the processor time
ROUNDS = 5
ADDED_MS = 0.25  # the target: the router adds at most this at the median
PICKED_MS = 0.3  # the target: asking the picker adds at most this at the median
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
    """Measure the router and the balancers against the direct call, and against each other."""
    import uvloop

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports, processes = _start(folder, stack)
        took = uvloop.run(_latencies(ports, seed, budget_s))
        per_size = {
            size: _processor_times(folder, ports, processes, size, budget_s / 2) for size in (SMALL_BYTES, BODY_BYTES)
        }
    direct = took["direct"]
    balancers = [name for name in ports if name not in ("direct", "router", "picker")]
    for name in ["router", *balancers]:
        for quantile in (50, 99):
            base, ours = (float(np.percentile(row, quantile) * 1e3) for row in (direct, took[name]))
            ok = ours - base <= ADDED_MS if name == "router" and quantile == 50 else None
            target = ADDED_MS if ok is not None else None
            yield _line(f"{name} adds, p{quantile}", ours - base, "ms", "direct call", base, base / ours, target, ok)
    if "picker" in took:
        for quantile in (50, 99):
            base, ours = (float(np.percentile(took[path], quantile) * 1e3) for path in ("envoy", "picker"))
            target = PICKED_MS if quantile == 50 else None
            ok = ours - base <= target if target is not None else None
            yield _line(f"picker adds, p{quantile}", ours - base, "ms", "envoy alone", base, base / ours, target, ok)
    for name in balancers:
        base, ours = (float(np.percentile(took[path], 50) * 1e3) for path in (name, "router"))
        yield _line("whole call, p50", ours, "ms", f"through {name}", base, base / ours)
    for size, used_s in per_size.items():
        ours = float(np.median(used_s["router"]) * 1e6)
        for name in balancers:
            base = float(np.median(used_s[name]) * 1e6)
            target = 1.0 if name == "envoy" else None
            ok = base / ours >= target if target is not None else None
            yield _line(f"processor a request of {size} B", ours, "us", name, base, base / ours, target, ok)
        if not balancers:
            yield _line(f"processor a request of {size} B", ours, "us", "none", float("nan"), float("nan"))


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
        "limits": {"max_connections": 1000},
    }
    (folder / "router.yaml").write_text(yaml.safe_dump(table))
    (folder / "instance.py").write_text(_INSTANCE)
    commands = {
        "direct": [sys.executable, str(folder / "instance.py"), str(instance)],
        "router": [sys.executable, "-m", "npu_gr", "route", "--config", str(folder / "router.yaml")],
    }
    for name, make in (("envoy", envoy), ("haproxy", haproxy)):
        binary = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if binary:
            ports[name] = _free_port()
            config = from_table({**table, "port": ports[name], "admin_port": _free_port()}, RouterConfig)
            path = folder / f"{name}.conf"
            path.write_text(make(config, config.discovery.instances))
            commands[name] = {
                "envoy": [binary, "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"],
                "haproxy": [binary, "-f", str(path), "-db"],
            }[name]
    if "envoy" in ports and _can_pick():
        picker = {"port": _free_port()}
        (folder / "router.yaml").write_text(yaml.safe_dump({**table, "picker": picker}))
        ports["picker"] = _free_port()
        given = {**table, "port": ports["picker"], "admin_port": _free_port(), "picker": picker}
        config = from_table(given, RouterConfig)
        path = folder / "picker.conf"
        path.write_text(envoy(config, config.discovery.instances))
        commands["picker"] = [commands["envoy"][0], "-c", str(path), *commands["envoy"][3:]]
    processes = {}
    for name, command in commands.items():
        log = stack.enter_context((folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(_end, process)
        processes[name] = process
    return ports, processes


def _can_pick() -> bool:
    """Whether a router can have a picker here."""
    return all(importlib.util.find_spec(name) for name in ("hpack", "google.protobuf"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _request(seed: int, size: int) -> bytes:
    body = np.random.default_rng(seed).integers(32, 127, size, dtype=np.uint8).tobytes()
    head = b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def _latencies(ports: dict[str, int], seed: int, budget_s: float) -> dict[str, list[float]]:
    """Call every path in turn. Returns the seconds of the calls by the path's name."""
    request = _request(seed, BODY_BYTES)
    one = {name: await _connect(port, request) for name, port in ports.items()}
    took: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(100):
        for connection in one.values():
            await connection.send(request)
    while "picker" in one and not _is_picked(await one["picker"].send(request)):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    ends_at = time.perf_counter() + budget_s
    while time.perf_counter() < ends_at or len(took["direct"]) < 1000:
        for name, connection in one.items():
            began_at = time.perf_counter()
            answer = await connection.send(request)
            took[name].append(time.perf_counter() - began_at)
            assert name != "picker" or _is_picked(answer), "Envoy went on without the picker"
    for connection in one.values():
        connection.close()
    return took


def _is_picked(answer: bytes) -> bool:
    """Whether the picker chose: it writes the instance's name into the answer."""
    return b"x-npugr-instance:" in answer.lower()


def _processor_times(
    folder: Path, ports: dict[str, int], processes: dict[str, subprocess.Popen[bytes]], size: int, budget_s: float
) -> dict[str, list[float]]:
    """Load every path in turn, several times over.

    Args:
        folder: for the client's script.
        ports: by the path's name.
        processes: whose time counts.
        size: of the bodies, in bytes.
        budget_s: for all paths together.

    Returns:
        By the path's name, for each round the processor seconds of its own process a request.
    """
    import uvloop

    paths = [name for name in ports if name not in ("direct", "picker")]
    each_s = max(0.2, budget_s / ROUNDS / len(paths))
    used_s: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(ROUNDS):
        for name in paths:
            pid = processes[name].pid
            before_s = _cpu_s(pid)
            if shutil.which("wrk"):
                num = _wrk(folder, ports[name], size, max(1, round(each_s)))
            else:
                num = uvloop.run(_closed_loop(ports[name], _request(0, size), each_s))
            used_s[name].append((_cpu_s(pid) - before_s) / num)
    return used_s


def _wrk(folder: Path, port: int, size: int, seconds: int) -> int:
    """Load a path from a client in C. Returns the number of its requests, all of which were answered with 200."""
    script = folder / f"{size}.lua"
    script.write_text(f'wrk.method = "POST"\nwrk.headers["X-User-Id"] = "u"\nwrk.body = string.rep("x", {size})\n')
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), f"http://127.0.0.1:{port}/v1/rank"]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = re.search(r"(\d+) requests in", text)
    assert found is not None, text
    assert "Non-2xx" not in text, text
    assert "Socket errors" not in text, text
    return int(found[1])


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


async def _closed_loop(port: int, request: bytes, budget_s: float) -> int:
    """Load a path from here. Returns the number of requests."""
    connections = [await _connect(port, request) for _ in range(CONNECTIONS)]
    count = len(connections)
    ends_at = time.perf_counter() + budget_s

    async def go(connection: BenchConnection) -> None:
        nonlocal count
        while time.perf_counter() < ends_at:
            await connection.send(request)
            count += 1

    await asyncio.gather(*map(go, connections))
    for connection in connections:
        connection.close()
    return count


def _cpu_s(pid: int) -> float:
    """The processor time of a process, all of its threads, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
