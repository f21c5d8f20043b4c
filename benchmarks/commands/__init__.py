"""python -m benchmarks: one command for each measurement. Commands import what they need, late."""

from __future__ import annotations

import click

from benchmarks.commands.cascade import bench_cascade, bench_relay, bench_trunk
from benchmarks.commands.device import (
    bench_features,
    bench_generate,
    bench_kernels,
    bench_match,
    bench_rank,
    bench_store,
    bench_twin,
)
from benchmarks.commands.entrance import (
    bench_door,
    bench_front,
    bench_metrics,
    bench_protocols,
    bench_wire,
)
from benchmarks.commands.training import bench_match_train, bench_quality


@click.group()
def bench() -> None:
    """Measure. Every bench checks its results before it times anything."""


for _command in (
    *(bench_rank, bench_features, bench_generate, bench_match, bench_kernels, bench_twin, bench_store),
    *(bench_cascade, bench_trunk, bench_relay),
    *(bench_wire, bench_metrics, bench_protocols, bench_front, bench_door),
    *(bench_quality, bench_match_train),
):
    bench.add_command(_command)
