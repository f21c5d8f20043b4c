"""`python -m benchmarks router`: what the router adds to a request, beside Envoy and HAProxy where they are installed.

One instance answers at once. In front of it run the router and the balancers, each with the router's placement and on
one core. All are processes of their own. First one connection to each sends 36 kB ranks in turn (direct, router, Envoy,
HAProxy, direct, ...), which gives the added p50 and p99. Then many connections at once, again in turn and several times
over, give the processor time that each path's own process takes for a request; other load on the machine changes that
far less than the throughput. The client is wrk (in C) where it is installed. Every path's answer is checked first.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import yaml

from benchmarks.line import Line
from benchmarks.router_rig import INSTANCE, BenchConnection, connect, cpu_s, free_port, request_of, start
from npu_gr.core.settings import from_table
from npu_gr.fleet.balancers import envoy, haproxy
from npu_gr.router.config import RouterConfig

BODY_BYTES = 36_000
SMALL_BYTES = 1_000
CONNECTIONS = 32  # at once, for the processor time
ROUNDS = 5
ADDED_MS = 0.25  # the target: the router adds at most this at the median


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
    balancers = [name for name in ports if name not in ("direct", "router")]
    for name in ["router", *balancers]:
        for quantile in (50, 99):
            base, ours = (float(np.percentile(row, quantile) * 1e3) for row in (direct, took[name]))
            ok = ours - base <= ADDED_MS if name == "router" and quantile == 50 else None
            target = ADDED_MS if ok is not None else None
            yield line_of(f"{name} adds, p{quantile}", ours - base, "ms", "direct call", base, base / ours, target, ok)
    for name in balancers:
        base, ours = (float(np.percentile(took[path], 50) * 1e3) for path in (name, "router"))
        yield line_of("whole call, p50", ours, "ms", f"through {name}", base, base / ours)
    for size, used_s in per_size.items():
        ours = float(np.median(used_s["router"]) * 1e6)
        for name in balancers:
            base = float(np.median(used_s[name]) * 1e6)
            target = 1.0 if name == "envoy" else None
            ok = base / ours >= target if target is not None else None
            yield line_of(f"processor a request of {size} B", ours, "us", name, base, base / ours, target, ok)
        if not balancers:
            yield line_of(f"processor a request of {size} B", ours, "us", "none", float("nan"), float("nan"))


def line_of(
    case: str,
    ours: float,
    unit: str,
    baseline: str,
    value: float,
    ratio: float,
    target: float | None = None,
    ok: bool | None = None,
) -> Line:
    """Make a line of this bench; with a target where there is one."""
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
    instance = free_port()
    ports = {"direct": instance, "router": free_port()}
    table = {
        "port": ports["router"],
        "admin_port": free_port(),
        "discovery": {"instances": [{"name": "one", "host": "127.0.0.1", "port": instance}]},
        "limits": {"max_connections": 1000},
    }
    (folder / "router.yaml").write_text(yaml.safe_dump(table))
    (folder / "instance.py").write_text(INSTANCE)
    commands = {
        "direct": [sys.executable, str(folder / "instance.py"), str(instance)],
        "router": [sys.executable, "-m", "npu_gr", "route", "--config", str(folder / "router.yaml")],
    }
    for name, make in (("envoy", envoy), ("haproxy", haproxy)):
        binary = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if binary:
            ports[name] = free_port()
            config = from_table({**table, "port": ports[name], "admin_port": free_port()}, RouterConfig)
            path = folder / f"{name}.conf"
            path.write_text(make(config, config.discovery.instances))
            commands[name] = {
                "envoy": [binary, "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"],
                "haproxy": [binary, "-f", str(path), "-db"],
            }[name]
    return ports, {name: start(name, command, folder, stack) for name, command in commands.items()}


async def _latencies(ports: dict[str, int], seed: int, budget_s: float) -> dict[str, list[float]]:
    """Call every path in turn. Returns the seconds of the calls by the path's name."""
    request = request_of(seed, BODY_BYTES)
    one = {name: await connect(port, request) for name, port in ports.items()}
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
    return took


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

    paths = [name for name in ports if name != "direct"]
    each_s = max(0.2, budget_s / ROUNDS / len(paths))
    used_s: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(ROUNDS):
        for name in paths:
            pid = processes[name].pid
            before_s = cpu_s(pid)
            if shutil.which("wrk"):
                num = _wrk(folder, ports[name], size, max(1, round(each_s)))
            else:
                num = uvloop.run(_closed_loop(ports[name], request_of(0, size), each_s))
            used_s[name].append((cpu_s(pid) - before_s) / num)
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


async def _closed_loop(port: int, request: bytes, budget_s: float) -> int:
    """Load a path from here. Returns the number of requests."""
    connections = [await connect(port, request) for _ in range(CONNECTIONS)]
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
