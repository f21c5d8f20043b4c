"""`python -m benchmarks device`: ranks over HTTP on a device, against FastAPI on it.

Ranks of returning users, one after the other: an instance, against FastAPI with the same checkpoint
on the same device; and how often the instance used a device graph. `python -m benchmarks generate
--backend NAME` compares beams with torch's `scaled_dot_product_attention`, `python -m benchmarks
kernels --device NAME` single ops. Scores are compared before anything is timed.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import servers
from benchmarks.frame import BACKEND, SEED, Line, compared, tell, timed, timed_for
from npu_gr.backend.names import BackendName
from npu_gr.model.weights import load

OPTIONS = (BACKEND, SEED, timed_for(3.0))
TRAFFIC = servers.Traffic(history_tokens=200, num_candidates=100, num_users=32)
GRAPHS = "npu_gr_device_graph_calls_total"


def lines(backend: BackendName, seed: int, seconds: float) -> Iterator[Line]:
    """Yield the line of the ranks, after one for each outcome of device graphs.

    Raises:
        AssertionError: The scores are wrong; nothing was timed.
        Unavailable: The instance does not start, e.g. without the device.
    """
    with tempfile.TemporaryDirectory(prefix="npu_gr-device-") as folder:
        yield from _served(backend, seed, seconds, Path(folder))


def _served(name: BackendName, seed: int, seconds: float, folder: Path) -> Iterator[Line]:
    checkpoint = servers.place_checkpoint(None, folder / "ranker", seed)
    bodies = TRAFFIC.bodies(load(checkpoint), "bench", seed)
    admin_port = servers.free_port()
    settings = f"backend={name}", "native=auto", f"server.admin_port={admin_port}"
    ours = servers.instance("instance", checkpoint, folder, (*servers.ADMISSION_OFF, *settings))
    with servers.running("instance", ours) as server:
        servers.check(server, checkpoint, bodies[:2])
        servers.ask(server.port, bodies)
        own_s = _each_s(server.port, bodies, seconds)
        graphs = _graphs(admin_port)
    for outcome, count in sorted(graphs.items()):
        yield compared("device", f"device graphs {outcome}", count, "", "itself", count, 1.0)
    if not servers.has_fastapi():
        tell("device", "FastAPI is not installed (pip install 'npu_gr[bench]'): it is skipped")
        yield timed("device", "rank over HTTP", own_s, "itself", own_s)
        return
    with servers.running("FastAPI", servers.fastapi(checkpoint, folder, name)) as server:
        servers.check(server, checkpoint, bodies[:2])
        their_s = _each_s(server.port, bodies, seconds)
    yield timed("device", "rank over HTTP, returning users", own_s, "FastAPI, same model", their_s)


def _each_s(port: int, bodies: Sequence[dict[str, object]], seconds: float) -> list[float]:
    """Return the seconds of each rank, one after the other."""
    found: list[float] = []
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at:
        for body in bodies[:8]:
            began_at = time.perf_counter()
            servers.ask(port, [body])
            found.append(time.perf_counter() - began_at)
    return found


def _graphs(port: int) -> dict[str, float]:
    """Return an instance's calls of device graphs by outcome; empty = the device has none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(GRAPHS))
    named = {name.partition('"')[2].partition('"')[0]: float(n) for name, n in counts.items()}
    return {outcome: count for outcome, count in named.items() if count}
