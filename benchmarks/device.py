"""`python -m benchmarks device`: ranks on a device against torch.compile, and FastAPI on it.

    compiled   a rank with a cached prefix, against full inference by torch ops under torch.compile
    served     ranks of returning users over HTTP, one after the other: an instance, against FastAPI
               with the same checkpoint on the same device

`python -m benchmarks generate --backend NAME` compares beams with torch's
`scaled_dot_product_attention`, `python -m benchmarks kernels --device NAME` single ops. Scores are
compared before anything is timed.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import rank, servers
from benchmarks.frame import BACKEND, SEED, Line, compared, only, tell, timed, timed_for
from benchmarks.frame import timed_in_turn as in_turn
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import load

PARTS = ("compiled", "served")
OPTIONS = (BACKEND, SEED, timed_for(3.0), only(PARTS))
TOKENS = 1024
CANDIDATES = 500
LAYERS = 8
TRAFFIC = servers.Traffic(history_tokens=200, num_candidates=100, num_users=32)
GRAPHS = "npu_gr_device_graph_calls_total"


def lines(
    backend: BackendName, seed: int, seconds: float, parts: Sequence[str] = PARTS
) -> Iterator[Line]:
    """Yield the lines of each part.

    Raises:
        AssertionError: The scores are wrong; nothing was timed.
        ConfigError: This machine lacks the device.
    """
    if "compiled" in parts:
        yield _compiled(backend, seed, seconds)
    if "served" in parts:
        with tempfile.TemporaryDirectory(prefix="npu_gr-device-") as folder:
            yield from _served(backend, seed, seconds, Path(folder))


def _compiled(name: BackendName, seed: int, seconds: float) -> Line:
    device = choose(name)
    torch.manual_seed(seed)
    model = HSTU(rank.config(LAYERS)).to(device.device).eval()
    model.items.freeze()
    one = rank.CachedRank(model, device, TOKENS, CANDIDATES)
    plain = device.running("torch")
    full = torch.compile(lambda: model(plain, [one.cold])[0])

    def compiled() -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = full()
        device.synchronize()
        return scores

    want, got = compiled(), one.run(one.hit)
    drift = float((want - got).abs().max() / want.std())
    assert drift <= rank.TOLERANCE[torch.float32] * 100, f"scores drift by {drift:.1e}"
    theirs, ours = in_turn([compiled, lambda: one.run(one.hit)], seconds)
    case = f"rank L={TOKENS} M={CANDIDATES} layers={LAYERS} fp32"
    return timed("device", case, ours, "torch.compile, full inference", theirs)


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
