"""`python -m benchmarks match-train`: CPU time and memory of training on a million edges.

Edges are synthetic (uniform users, long-tailed items), because time and memory depend only on the
sizes. A few steps of each stage are timed, and the time of a default training, without evaluations,
is computed from them.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator

import click
import numpy as np

from benchmarks.frame import COUNT, SEED, Line, compared, option
from npu_gr.train.evaluate import Graph
from npu_gr.train.match.domains import MatchData, hold_out
from npu_gr.train.match.train import MatchOptions, Trainer
from npu_gr.train.steps import TrainingProgress

OPTIONS = (
    option("--edges", default=1_000_000, type=click.IntRange(1000), help="Edges of both domains."),
    option("--steps", default=4, type=click.IntRange(2), help="Steps of each stage to time."),
    option("--threads", default=2, type=COUNT),
    SEED,
)
SOURCE_SHARE = 0.7  # share of the edges
EDGES_A_USER = 10
EDGES_AN_ITEM = 10
MINUTES = 10.0  # CPU time, at most
GIGABYTES = 4.0  # peak memory, at most


def lines(edges: int, steps: int, seed: int) -> Iterator[Line]:
    """Yield the CPU minutes of a default training, and the process' peak memory.

    Args:
        edges: Number of edges of both domains.
        steps: Steps of each stage to time, after one warm-up step.
        seed: Random seed of the edges.
    """
    timed = steps + 1
    options = MatchOptions(
        source_steps=timed, target_steps=timed, inter_steps=timed, evaluate_every=timed + 1,
        patience=0, batch_edges=min(65_536, edges // 16), batch_anchors=2048,
    )  # fmt: skip
    ends_at: dict[str, list[float]] = {}
    Trainer(synthetic(edges, seed), options).run(lambda done: _note(ends_at, done))
    defaults = MatchOptions()
    planned = {
        "source": defaults.source_steps,
        "target": defaults.target_steps,
        "inter": defaults.inter_steps,
    }
    step_s = {stage: float(np.median(np.diff(ends))) for stage, ends in ends_at.items()}
    minutes = sum(step_s[stage] * num for stage, num in planned.items()) / 60
    each = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in step_s.items())
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / 1e9
    )
    for case, ours, unit, most in (
        (f"{sum(planned.values())} steps ({each})", minutes, "CPU min", MINUTES),
        ("peak memory", peak, "GB", GIGABYTES),
    ):
        yield compared(
            "match-train", f"{edges} edges, {case}", ours, unit, "at most", most, most / ours, 1.0
        )


def synthetic(edges: int, seed: int) -> MatchData:
    """Make two domains with so many edges together, and a validation."""
    random = np.random.default_rng(seed)
    num_users = edges // EDGES_A_USER
    source = _graph(random, round(edges * SOURCE_SHARE), num_users)
    target, validation = hold_out(
        _graph(random, edges - len(source.users), num_users), random, 2, 2000
    )
    return MatchData(source, target, validation, target.none())


def _graph(random: np.random.Generator, num_edges: int, num_users: int) -> Graph:
    num_items = num_edges // EDGES_AN_ITEM
    users = random.integers(0, num_users, num_edges)
    items = (num_items * random.random(num_edges) ** 2).astype(np.int64)
    edges = np.unique(users * num_items + items)
    return Graph(edges // num_items, edges % num_items, num_users, num_items)


def _note(ends_at: dict[str, list[float]], done: TrainingProgress) -> None:
    if done.done < done.total:  # the last step of a stage includes its evaluation
        ends_at.setdefault(done.stage.removeprefix("match: "), []).append(time.process_time())
