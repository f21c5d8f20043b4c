"""Benches of what stands between a caller and the models."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.commands.options import AS_JSON_LINES, DEMO, DEMO_CHECKPOINT, SEED, SHIPPED_CONFIG
from benchmarks.commands.show import show
from npu_gr.cli.options import SET


@click.command("wire")
@AS_JSON_LINES
@SEED
@click.option("--seconds", default=1.0, show_default=True, help="Time each case for so long.")
def bench_wire(as_json: bool, seed: int, seconds: float) -> None:
    """Compare reading a rank's body with raw columns and with lists of numbers."""
    from benchmarks.wire import lines

    show(lines(seed, seconds), "cpu", seed, as_json)


@click.command("metrics")
@AS_JSON_LINES
@SEED
@click.option("--seconds", default=2.0, show_default=True, help="Time each case for so long.")
def bench_metrics(as_json: bool, seed: int, seconds: float) -> None:
    """Measure the CPU time that metrics, tracing and the access log add to a rank."""
    import torch

    from benchmarks.metrics import lines

    torch.set_num_threads(1)
    show(lines(seed, seconds), "cpu", seed, as_json)


@click.command("protocols")
@AS_JSON_LINES
@SEED
@SHIPPED_CONFIG
@click.option("--seconds", default=3.0, show_default=True, help="Of each way.")
def bench_protocols(as_json: bool, seed: int, config: Path, seconds: float) -> None:
    """Ranks over OIP and gRPC beside those under /v1."""
    from benchmarks.protocols import ProtocolOptions, lines

    show(lines(ProtocolOptions(config=config, seconds=seconds, seed=seed)), "cpu", seed, as_json)


@click.command("front")
@AS_JSON_LINES
@SEED
@SHIPPED_CONFIG
@DEMO_CHECKPOINT
@click.option("--workers", default="1,2", show_default=True, help="Numbers of front workers.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each load.")
@click.option("--only", "parts", multiple=True, help="Run these parts; repeatable.", metavar="PART")
def bench_front(
    as_json: bool,
    seed: int,
    config: Path,
    checkpoint: Path | None,
    workers: str,
    seconds: float,
    parts: tuple[str, ...],
) -> None:
    """Measure the CPU of each process a rank, with front workers."""
    from benchmarks.front import PARTS, FrontOptions, lines

    if checkpoint is None and DEMO.is_dir():
        checkpoint = DEMO
    options = FrontOptions(
        config=config,
        checkpoint=checkpoint,
        workers=[int(num) for num in workers.split(",")],
        seconds=seconds,
        seed=seed,
        parts=parts or PARTS,
    )
    show(lines(options), "cpu", seed, as_json)


@click.command("door")
@AS_JSON_LINES
@SEED
@SHIPPED_CONFIG
@DEMO_CHECKPOINT
@click.option("--layers", type=click.IntRange(1), help="Make an untrained model of so many layers.")
@click.option("--max-history", type=click.IntRange(16), help="Make an untrained model that reads so many tokens.")
@click.option("--history-tokens", default=60, show_default=True, type=click.IntRange(1), help="Of a rank.")
@click.option("--candidates", default=100, show_default=True, type=click.IntRange(1), help="Of a rank.")
@click.option("--users", default=256, show_default=True, type=click.IntRange(1), help="Who come again and again.")
@click.option("--seconds", default=4.0, show_default=True, help="Of each load; 60 is the long form.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1), help="Run every load so many times.")
@click.option("--only", "parts", multiple=True, help="Run these parts; repeatable.", metavar="PART")
@click.option("--ablate", "ablations", multiple=True, metavar="NAME:KEY=VALUE ...", help="One more server; repeatable.")
@click.option("--peers/--no-peers", default=True, help="Run FastAPI and LitServe, if they are installed.")
@SET
def bench_door(
    as_json: bool,
    seed: int,
    config: Path,
    checkpoint: Path | None,
    layers: int | None,
    max_history: int | None,
    history_tokens: int,
    candidates: int,
    users: int,
    seconds: float,
    repeats: int,
    parts: tuple[str, ...],
    ablations: tuple[str, ...],
    peers: bool,
    overrides: tuple[str, ...],
) -> None:
    """Measure over HTTP what is answered in time under any load, beside admission off and other servers: minutes."""
    from benchmarks.door import PARTS, DoorOptions, lines, parse_ablations
    from benchmarks.door_servers import Traffic

    if wrong := [part for part in parts if part not in PARTS]:
        raise click.BadParameter(f"{wrong[0]!r} is none of {', '.join(PARTS)}", param_hint="--only")
    is_made = layers is not None or max_history is not None
    if checkpoint is None and not is_made and DEMO.is_dir():
        checkpoint = DEMO
    options = DoorOptions(
        config=config,
        checkpoint=checkpoint,
        num_layers=layers or 2,
        max_history_tokens=max_history or 256,
        traffic=Traffic(history_tokens=history_tokens, num_candidates=candidates, num_users=users),
        overrides=overrides,
        ablations=parse_ablations(ablations),
        parts=parts or PARTS,
        with_peers=peers,
        repeats=repeats,
        seconds=seconds,
        seed=seed,
    )
    show(lines(options), "cpu", seed, as_json)
