"""npu-gr bench: one command for each measurement. They import late."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from npu_gr.bench.line import Line


@click.group()
def bench() -> None:
    """Measure; results are checked before anything is timed."""


@bench.command("rank")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="Time a case.")
def bench_rank(as_json: bool, backend: str, dtype: str, threads: int, seed: int, seconds: float) -> None:
    """Cached against full inference, over lengths and numbers of candidates."""
    import torch

    from npu_gr.bench.rank import lines

    torch.set_num_threads(threads)
    _show(lines(backend, getattr(torch, dtype), seed, seconds), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("kernels")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--isa", default="", help="Instruction set; the best of this CPU by default.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Time a case.")
@click.option("--only", type=click.Choice(["roofs", "topk", "hstu"]), help="One part.")
@click.option("--device", default="cpu", show_default=True, help="Or another backend: its ops against torch's there.")
def bench_kernels(as_json: bool, isa: str, seed: int, seconds: float, only: str | None, device: str) -> None:
    """Native CPU kernels on one thread: against what the CPU can do at most, torch ops and a naive cached path."""
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="Time a case.")
def bench_wire(as_json: bool, seed: int, seconds: float) -> None:
    """Reading a rank's body: raw columns against lists of numbers."""
    from npu_gr.bench.wire import lines

    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("metrics")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Time a case.")
def bench_metrics(as_json: bool, seed: int, seconds: float) -> None:
    """What counting, tracing and logging add to a rank, in CPU time."""
    import torch

    from npu_gr.bench.metrics import lines

    torch.set_num_threads(1)
    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("generate")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Time a beam width.")
@click.option("--transformers/--no-transformers", default=True, help="With that baseline: about a minute more.")
def bench_generate(as_json: bool, backend: str, threads: int, seed: int, seconds: float, transformers: bool) -> None:
    """Semantic-ID beam search against dense search, no prefix cache, and Hugging Face transformers."""
    import torch

    from npu_gr.bench.generate import lines

    torch.set_num_threads(threads)
    _show(lines(backend, seed, seconds, transformers), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("router")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=10.0, show_default=True)
def bench_router(as_json: bool, seed: int, seconds: float) -> None:
    """What the router adds to a call, and Envoy in the same run where it is installed."""
    from npu_gr.bench.router import lines

    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("twin")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
def bench_twin(as_json: bool, seed: int) -> None:
    """Ascend masked_topk on the CPU twin: instructions and bytes counted, time modelled. Not a measurement."""
    from rich.console import Console

    from npu_gr.bench.twin import lines, table

    if as_json:
        _show(lines(seed), "CPU twin of the Ascend 910B", seed, as_json)
    else:
        Console(width=max(120, Console().width)).print(table(lines(seed)))


@bench.command("cascade")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(1))
@click.option("--count", default=15, show_default=True, type=click.IntRange(3), help="Requests an arm.")
def bench_cascade(as_json: bool, backend: str, threads: int, seed: int, lengths: str, layers: int, count: int) -> None:
    """A recommend end to end, with and without the relay."""
    import torch

    from npu_gr.bench.cascade import lines

    torch.set_num_threads(threads)
    tokens = [int(part) for part in lengths.split(",")]
    _show(lines(backend, tokens, layers, count, seed), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("relay")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--candidates", default="100", show_default=True, help="Of a rank, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(2))
@click.option("--dim", default=256, show_default=True, help="Of the model; a multiple of 64.")
@click.option("--count", default=200, show_default=True, type=click.IntRange(1), help="Requests a run.")
@click.option(
    "--lowest",
    default=0.1,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="The lowest rate, of what full inference could do.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="A Mooncake trace: whose returns an arm follows.")
@click.option("--only", "parts", multiple=True, type=click.Choice(["arms", "longest", "trigger"]), help="Parts of it.")
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
    """Traffic within the objective, and length of history, with and without a relay: minutes a shape."""
    import torch

    from npu_gr.bench.relay import PARTS, lines
    from npu_gr.bench.relay_rig import Shape

    torch.set_num_threads(threads)
    tokens, rows = ([int(part) for part in text.split(",")] for text in (lengths, candidates))
    shapes = [Shape(n, c, layers, dim) for n in tokens for c in rows]
    found = lines(backend, shapes, count, lowest, seed, trace, parts or PARTS)  # type: ignore[arg-type]
    _show(found, backend, seed, as_json)


@bench.command("overload")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--seed", default=0, show_default=True)
@click.option("--tokens", default=512, show_default=True, type=click.IntRange(16), help="Of a history.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=10.0, show_default=True, help="Of arrivals, a rate.")
def bench_overload(as_json: bool, backend: str, seed: int, tokens: int, layers: int, seconds: float) -> None:
    """What is answered in time when up to 5 times as much is asked as the instance can do."""
    from npu_gr.bench.overload import lines

    _show(lines(backend, tokens, layers, seconds, seed), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("store")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
def bench_store(as_json: bool, seed: int) -> None:
    """What a DRAM tier of a million prefixes costs the event loop."""
    from npu_gr.bench.store import lines

    _show(lines(seed), "cpu", seed, as_json)


@bench.command("match")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--items", default=1_000_000, show_default=True, type=click.IntRange(1000), help="Of the catalogue.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Time a batch size.")
def bench_match(as_json: bool, items: int, seed: int, seconds: float) -> None:
    """Exact top-k over all items against numpy and faiss, on one thread; recall of the approximate index."""
    import os

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before numpy loads: no other way holds for every BLAS
    import torch

    from npu_gr.bench.match import lines

    torch.set_num_threads(1)
    _show(lines(items, seed, seconds), "cpu", seed, as_json)


@bench.command("match-train")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--edges", default=1_000_000, show_default=True, type=click.IntRange(1000), help="Of both domains.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(2), help="Of each stage that are timed.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
def bench_match_train(as_json: bool, edges: int, steps: int, threads: int, seed: int) -> None:
    """What training on so many edges costs: CPU minutes and memory."""
    import torch

    from npu_gr.bench.match_train import lines

    torch.set_num_threads(threads)
    _show(lines(edges, steps, seed), "cpu", seed, as_json)


def _show(lines: Iterable[Line], device: str, seed: int, as_json: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from npu_gr.bench.line import environment

    about, found = environment(device, seed), list(lines) if not as_json else lines
    if as_json:
        click.echo(json.dumps(about))
        for line in found:
            click.echo(json.dumps(line.as_dict()))
        return
    columns = ("baseline", "ours", "ratio", "floor", "of it", "ok")
    numbers = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table(Column("case", overflow="fold"), *numbers, box=box.SIMPLE)
    for line in found:
        table.title = f"bench {line.bench}"
        table.add_row(
            line.case,
            f"{line.baseline_value:.3g} {line.unit}",
            f"{line.ours:.3g} {line.unit}",
            f"{line.ratio:.1f}x",
            "" if line.floor is None else f"{line.floor:.1f}x",
            "" if line.of_floor is None else f"{line.of_floor:.0%}",
            "" if line.ok is None else "yes" if line.ok else "no",
        )
    table.caption = f"baseline: {line.baseline}; {about['environment']['machine']}"
    Console(width=max(100, Console().width)).print(table)
