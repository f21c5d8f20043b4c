"""npu-gr bench: one command for each measurement. Commands import what they need, late."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from npu_gr.cli.options import CONFIG, FILE, SET, THREAD_COUNT, run_async
from npu_gr.core import shipped

if TYPE_CHECKING:
    from npu_gr.bench.line import Line


DEMO = Path(".demo/ranker")  # where `npu-gr demo` leaves its ranker

AS_JSON_LINES = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
BACKEND = click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
SEED = click.option("--seed", default=0, show_default=True)
THREADS = click.option("--threads", default=1, show_default=True, type=THREAD_COUNT)
SHIPPED_CONFIG = click.option(
    "--config",
    type=FILE,
    default="configs/cpu.yaml",
    show_default=True,
    callback=lambda _context, _option, path: shipped.found(path),
    help="Of the instance, as it ships.",
)
DEMO_CHECKPOINT = click.option(
    "--checkpoint", type=FILE, help="By default the demo's, if it is there; else an untrained model of its shape."
)


@click.group()
def bench() -> None:
    """Measure. Every bench checks its results before it times anything."""


@bench.command("rank")
@AS_JSON_LINES
@BACKEND
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@THREADS
@SEED
@click.option("--seconds", default=3.0, show_default=True, help="Time each case for so long.")
def bench_rank(as_json: bool, backend: str, dtype: str, threads: int, seed: int, seconds: float) -> None:
    """Compare cached with full inference, over lengths of history and numbers of candidates."""
    import torch

    from npu_gr.bench.rank import lines

    torch.set_num_threads(threads)
    _show(lines(backend, getattr(torch, dtype), seed, seconds), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("kernels")
@AS_JSON_LINES
@click.option("--isa", default="", help="Instruction set; by default the best of this CPU.")
@SEED
@click.option("--seconds", default=2.0, show_default=True, help="Time each case for so long.")
@click.option("--only", type=click.Choice(["roofs", "topk", "hstu", "pass"]), help="Run one part.")
@click.option(
    "--device", default="cpu", show_default=True, help="Another backend compares its ops with torch's on that device."
)
def bench_kernels(as_json: bool, isa: str, seed: int, seconds: float, only: str | None, device: str) -> None:
    """Compare native CPU kernels, on one thread, with the CPU's roofs, torch ops and a naive cached path."""
    import torch

    from npu_gr.bench import kernels_device
    from npu_gr.bench.kernels import PARTS, lines

    if device != "cpu":
        _show(kernels_device.lines(device, seed, seconds), device, seed, as_json)  # type: ignore[arg-type]
        return
    torch.set_num_threads(1)
    parts = tuple(part for part in PARTS if only in (None, part))
    _show(lines(isa, seed, seconds, parts), "cpu", seed, as_json)


@bench.command("wire")
@AS_JSON_LINES
@SEED
@click.option("--seconds", default=1.0, show_default=True, help="Time each case for so long.")
def bench_wire(as_json: bool, seed: int, seconds: float) -> None:
    """Compare reading a rank's body with raw columns and with lists of numbers."""
    from npu_gr.bench.wire import lines

    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("features")
@AS_JSON_LINES
@BACKEND
@THREADS
@SEED
@click.option("--seconds", default=3.0, show_default=True, help="Time each case for so long.")
def bench_features(as_json: bool, backend: str, threads: int, seed: int, seconds: float) -> None:
    """What features cost a cached rank, and reading them."""
    import torch

    from npu_gr.bench.features import lines

    torch.set_num_threads(threads)
    _show(lines(backend, seed, seconds), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("metrics")
@AS_JSON_LINES
@SEED
@click.option("--seconds", default=2.0, show_default=True, help="Time each case for so long.")
def bench_metrics(as_json: bool, seed: int, seconds: float) -> None:
    """Measure the CPU time that metrics, tracing and the access log add to a rank."""
    import torch

    from npu_gr.bench.metrics import lines

    torch.set_num_threads(1)
    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("generate")
@AS_JSON_LINES
@BACKEND
@THREADS
@SEED
@click.option("--seconds", default=5.0, show_default=True, help="Time each beam width for so long.")
@click.option("--transformers/--no-transformers", default=True, help="Run that baseline too: about a minute more.")
@click.option("--model", type=click.Choice(["decoder", "t5"]), default="decoder", show_default=True)
def bench_generate(
    as_json: bool, backend: str, threads: int, seed: int, seconds: float, transformers: bool, model: str
) -> None:
    """Compare semantic-ID beam search with dense search, no prefix cache, and Hugging Face transformers."""
    import torch

    from npu_gr.bench import generate, generate_t5

    torch.set_num_threads(threads)
    lines = generate_t5.lines if model == "t5" else generate.lines
    _show(lines(backend, seed, seconds, transformers), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("router")
@AS_JSON_LINES
@SEED
@click.option("--seconds", default=10.0, show_default=True)
@click.option("--picker", is_flag=True, help="Measure what asking the endpoint picker adds to Envoy instead.")
def bench_router(as_json: bool, seed: int, seconds: float, picker: bool) -> None:
    """Measure what the router adds to a call, beside Envoy if it is installed."""
    from npu_gr.bench import picker as picker_bench
    from npu_gr.bench import router as router_bench

    made = picker_bench.lines(seed, seconds) if picker else router_bench.lines(seed, seconds)
    _show(made, "cpu", seed, as_json)


@bench.command("twin")
@AS_JSON_LINES
@SEED
def bench_twin(as_json: bool, seed: int) -> None:
    """Count what Ascend's masked_topk and an HSTU pass do on the CPU twin, and model their time. Not a measurement."""
    from rich.console import Console

    from npu_gr.bench import hstu_model
    from npu_gr.bench.twin import lines, table

    about = "CPU twin of the Ascend 910B"
    if as_json:
        _show(chain(lines(seed), hstu_model.lines(seed)), about, seed, as_json)
    else:
        Console(width=max(120, Console().width)).print(table(lines(seed)))
        _show(hstu_model.lines(seed), about, seed, as_json)


@bench.command("cascade")
@AS_JSON_LINES
@BACKEND
@THREADS
@SEED
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(1))
@click.option("--count", default=15, show_default=True, type=click.IntRange(3), help="Requests of each arm.")
def bench_cascade(as_json: bool, backend: str, threads: int, seed: int, lengths: str, layers: int, count: int) -> None:
    """Measure a recommend end to end, with and without the relay."""
    import torch

    from npu_gr.bench.cascade import lines

    torch.set_num_threads(threads)
    tokens = [int(part) for part in lengths.split(",")]
    _show(lines(backend, tokens, layers, count, seed), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("trunk")
@CONFIG
@SET
@AS_JSON_LINES
@SEED
@click.option("--lengths", default="128,512,1024", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each run of the open loop.")
@click.option("--count", default=200, show_default=True, type=click.IntRange(5), help="Lone requests of each kind.")
def bench_trunk(
    config_path: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    seed: int,
    lengths: str,
    seconds: float,
    count: int,
) -> None:
    """Compare a recommend from one trunk with one from two models: CONFIG is a site's, and names both."""
    import torch

    from npu_gr.bench.trunk import lines
    from npu_gr.service.config import load

    async def work() -> list[Line]:
        tokens = [int(part) for part in lengths.split(",")]
        return [line async for line in lines(config_path, overrides, tokens, seconds, count, seed)]

    config = load(config_path, overrides)
    torch.set_num_threads(config.threads)
    _show(run_async(work), config.backend, seed, as_json)


@bench.command("relay")
@AS_JSON_LINES
@BACKEND
@THREADS
@SEED
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--candidates", default="100", show_default=True, help="Candidates of a rank, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(2))
@click.option("--dim", default=256, show_default=True, help="Of the model; a multiple of 64.")
@click.option("--count", default=200, show_default=True, type=click.IntRange(1), help="Requests of each run.")
@click.option(
    "--lowest",
    default=0.1,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="The lowest rate, as a share of what full inference could do.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="A Mooncake trace; one arm follows its returns.")
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(["arms", "longest", "trigger"]),
    help="Run these parts; repeatable.",
)
def bench_relay(
    as_json: bool,
    backend: str,
    threads: int,
    seed: int,
    lengths: str,
    candidates: str,
    layers: int,
    dim: int,
    count: int,
    lowest: float,
    trace: Path | None,
    parts: tuple[str, ...],
) -> None:
    """Measure the rate and the history length that keep the objective, with and without a relay: minutes a shape."""
    import torch

    from npu_gr.bench.relay import PARTS, lines
    from npu_gr.bench.relay_rig import Shape

    torch.set_num_threads(threads)
    tokens, rows = ([int(part) for part in text.split(",")] for text in (lengths, candidates))
    shapes = [Shape(n, c, layers, dim) for n in tokens for c in rows]
    found = lines(backend, shapes, count, lowest, seed, trace, parts or PARTS)  # type: ignore[arg-type]
    _show(found, backend, seed, as_json)


@bench.command("front")
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
    from npu_gr.bench.front import PARTS, FrontOptions, lines

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
    _show(lines(options), "cpu", seed, as_json)


@bench.command("protocols")
@AS_JSON_LINES
@SEED
@click.option(
    "--config",
    type=FILE,
    default="configs/cpu.yaml",
    show_default=True,
    callback=lambda _context, _option, path: shipped.found(path),
    help="Of the instance, as it ships.",
)
@click.option("--seconds", default=3.0, show_default=True, help="Of each way.")
def bench_protocols(as_json: bool, seed: int, config: Path, seconds: float) -> None:
    """Ranks over OIP and gRPC beside those under /v1."""
    from npu_gr.bench.protocols import ProtocolOptions, lines

    _show(lines(ProtocolOptions(config=config, seconds=seconds, seed=seed)), "cpu", seed, as_json)


@bench.command("door")
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
    parts: tuple[str, ...],
    ablations: tuple[str, ...],
    peers: bool,
    overrides: tuple[str, ...],
) -> None:
    """Measure over HTTP what is answered in time under any load, beside admission off and other servers: minutes."""
    from npu_gr.bench.door import PARTS, DoorOptions, lines, parse_ablations
    from npu_gr.bench.door_servers import Traffic

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
        seconds=seconds,
        seed=seed,
    )
    _show(lines(options), "cpu", seed, as_json)


@bench.command("store")
@AS_JSON_LINES
@SEED
def bench_store(as_json: bool, seed: int) -> None:
    """Measure what a DRAM tier of a million prefixes costs the event loop."""
    from npu_gr.bench.store import lines

    _show(lines(seed), "cpu", seed, as_json)


@bench.command("match")
@AS_JSON_LINES
@click.option(
    "--items", default=1_000_000, show_default=True, type=click.IntRange(1000), help="Items of the catalogue."
)
@SEED
@click.option("--seconds", default=5.0, show_default=True, help="Time each batch size for so long.")
def bench_match(as_json: bool, items: int, seed: int, seconds: float) -> None:
    """Compare exact top-k over all items with numpy and faiss, on one thread; and measure the HNSW index's recall."""
    import os

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before numpy loads: no other way holds for every BLAS
    import torch

    from npu_gr.bench.match import lines

    torch.set_num_threads(1)
    _show(lines(items, seed, seconds), "cpu", seed, as_json)


@bench.command("match-train")
@AS_JSON_LINES
@click.option("--edges", default=1_000_000, show_default=True, type=click.IntRange(1000), help="Edges of both domains.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(2), help="Steps of each stage to time.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@SEED
def bench_match_train(as_json: bool, edges: int, steps: int, threads: int, seed: int) -> None:
    """Measure what training on so many edges costs: CPU minutes and memory."""
    import torch

    from npu_gr.bench.match_train import lines

    torch.set_num_threads(threads)
    _show(lines(edges, steps, seed), "cpu", seed, as_json)


@bench.command("quality")
@AS_JSON_LINES
@click.option("--pairs", type=FILE, help="Folder with a folder of train.txt, perhaps test.txt, for each domain.")
@click.option("--log", "logs", multiple=True, type=FILE, help="Of the next item; MovieLens-100K if absent; repeatable.")
@click.option("--codes", type=FILE, help="Folder with inter.json and index_rqvae.json: the generator with given IDs.")
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(["match", "next", "codes", "features", "zozotown", "cold"]),
    help="Run these parts; the last three run only if they are named.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Trainings of each model.")
@click.option("--quick", is_flag=True, help="One seed and few steps: shows that everything runs, in minutes.")
@THREADS
def bench_quality(
    as_json: bool,
    pairs: Path | None,
    logs: tuple[Path, ...],
    codes: Path | None,
    parts: tuple[str, ...],
    seeds: int,
    quick: bool,
    threads: int,
) -> None:
    """Train what we serve, and compare it with the strongest simple baseline: a line a data set, way and figure."""
    from dataclasses import replace
    from itertools import chain

    import torch

    from npu_gr.bench.quality import FULL, QUICK, codes_lines, match_lines, next_lines
    from npu_gr.bench.quality_cold import cold_lines, warm_lines
    from npu_gr.dataset.log import read_log
    from npu_gr.features.interactions import movielens_100k, read_item_features

    torch.set_num_threads(threads)
    effort = QUICK if quick else replace(FULL, seeds=tuple(range(seeds)))
    found: list[Iterable[Line]] = []
    if "cold" in parts:
        log = movielens_100k()
        features = read_item_features(log.with_suffix(".item"), ["class", "release_year"])
        found += [cold_lines(read_log(log), features, log.name, effort.rank, effort.generate)]
        found += [warm_lines(read_log(log), features, log.name, effort.rank, effort.seeds)]
    if pairs is not None and (not parts or "match" in parts):
        found.append(match_lines(pairs, effort))
    if not parts or "next" in parts:
        found += [next_lines(read_log(log), log.name, effort) for log in logs or (movielens_100k(),)]
    if codes is not None and (not parts or "codes" in parts):
        found.append(codes_lines(read_log(codes / "inter.json"), codes / "index_rqvae.json", codes.name, effort))
    if "features" in parts:
        from npu_gr.bench.quality_features import movielens_lines

        found.append(movielens_lines(effort.features, effort.seeds))
    if "zozotown" in parts:
        from npu_gr.bench.quality_zozotown import zozotown_lines

        found.append(zozotown_lines(effort.seeds[0]))
    for name, folder in (("match", pairs), ("codes", codes)):
        if folder is None and name in parts:
            raise click.UsageError(f"--only {name} needs --{'pairs' if name == 'match' else 'codes'}")
    _show(chain(*found), "cpu", 0, as_json)


def _show(lines: Iterable[Line], device: str, seed: int, as_json: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from npu_gr.bench.line import environment

    about = environment(device, seed)
    if as_json:
        click.echo(json.dumps(about))
        for line in lines:
            click.echo(json.dumps(line.as_dict()))
        return
    found = list(lines)
    columns = ("baseline", "ours", "ratio", "difference, 95 %", "floor", "of it", "ok")
    numbers = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table(Column("case", overflow="fold"), *numbers, box=box.SIMPLE)
    for line in found:
        table.title = f"bench {line.bench}"
        table.add_row(
            line.case,
            f"{line.baseline_value:.3g} {line.unit}",
            f"{line.ours:.3g} {line.unit}",
            f"{line.ratio:.1f}x" if line.low is None else f"{line.ratio:.2f}x",
            "" if line.low is None else f"{line.low:+.4f} .. {line.high:+.4f}",
            "" if line.floor is None else f"{line.floor:.1f}x",
            "" if line.of_floor is None else f"{line.of_floor:.0%}",
            "" if line.ok is None else "yes" if line.ok else "no",
        )
    table.caption = f"baseline: {line.baseline}; {about['environment']['machine']}"
    Console(width=max(100, Console().width)).print(table)
