"""`python -m benchmarks device`: ranks on a device, against FastAPI and torch.compile on it.

Ranks of returning users, one after the other: an instance, against FastAPI with the same checkpoint
on the same device; and how often the instance used a device graph. Then a full inference without
HTTP, against the same model in plain torch, as it is and by `torch.compile`. `python -m benchmarks
generate --backend NAME` compares beams with torch's `scaled_dot_product_attention`, `python -m
benchmarks kernels --device NAME` single ops. Scores are compared before anything is timed.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import servers
from benchmarks.cold import ColdRanker, dense_logits
from benchmarks.frame import (
    BACKEND,
    SEED,
    Line,
    compared,
    option,
    tell,
    timed,
    timed_for,
    timed_in_turn,
)
from npu_gr.backend.names import BackendName
from npu_gr.model.weights import load
from tests.ports import free_port

PARTS = ("served", "compiled")
OPTIONS = (
    BACKEND,
    option("--only", default=",".join(PARTS), help="parts, separated by commas"),
    SEED,
    timed_for(3.0),
)
TOLERANCE = 1e-3  # of a score, in the scores' standard deviations
TRAFFIC = servers.Traffic(history_tokens=200, num_candidates=100, num_users=32)
GRAPHS = "npu_gr_device_graph_calls_total"


def lines(backend: BackendName, only: str, seed: int, seconds: float) -> Iterator[Line]:
    """Yield the line of the ranks, after one for each outcome of device graphs; then plain torch's.

    Raises:
        AssertionError: The scores are wrong; nothing was timed.
        Unavailable: The instance does not start, e.g. without the device.
    """
    with tempfile.TemporaryDirectory(prefix="npu_gr-device-") as folder:
        checkpoint = servers.place_checkpoint(None, Path(folder) / "ranker", seed)
        if "served" in only.split(","):
            yield from _served(backend, checkpoint, seed, seconds, Path(folder))
        if "compiled" in only.split(","):
            yield from _compiled(backend, checkpoint, seed, seconds)


def _compiled(name: BackendName, checkpoint: Path, seed: int, seconds: float) -> Iterator[Line]:
    """Yield full inferences of the kernels against plain torch, eager and compiled."""
    bodies = TRAFFIC.bodies(load(checkpoint), "bench", seed)[:8]
    ours = ColdRanker(checkpoint, name)
    baselines = {
        "plain torch, eager": ColdRanker(checkpoint, name, dense_logits),
        "plain torch, torch.compile": ColdRanker(checkpoint, name, torch.compile(dense_logits)),
    }
    for baseline, theirs in baselines.items():
        for body in bodies:  # the first calls compile
            for task, want in ours.scores(body).items():
                got, right = torch.tensor(theirs.scores(body)[task]), torch.tensor(want)
                drift = float((got - right).abs().max() / right.std())
                assert drift < TOLERANCE, f"{baseline} differs by {drift:.1e}"
        calls = [partial(_score_all, ranker, bodies) for ranker in (ours, theirs)]
        own_s, their_s = timed_in_turn([*calls], seconds)
        yield timed("device", "8 full inferences, without HTTP", own_s, baseline, their_s)


def _score_all(ranker: ColdRanker, bodies: Sequence[dict[str, object]]) -> None:
    for body in bodies:
        ranker.scores(body)


def _served(
    name: BackendName, checkpoint: Path, seed: int, seconds: float, folder: Path
) -> Iterator[Line]:
    bodies = TRAFFIC.bodies(load(checkpoint), "bench", seed)
    admin_port = free_port()
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
