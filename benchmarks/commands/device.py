"""Benches of what runs on a device, and of what holds its memory."""

from __future__ import annotations

from itertools import chain

import click

from benchmarks.commands.options import AS_JSON_LINES, BACKEND, SEED, THREADS
from benchmarks.commands.show import show


@click.command("rank")
@AS_JSON_LINES
@BACKEND
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@THREADS
@SEED
@click.option("--seconds", default=3.0, show_default=True, help="Time each case for so long.")
def bench_rank(as_json: bool, backend: str, dtype: str, threads: int, seed: int, seconds: float) -> None:
    """Compare cached with full inference, over lengths of history and numbers of candidates."""
    import torch

    from benchmarks.rank import lines

    torch.set_num_threads(threads)
    show(lines(backend, getattr(torch, dtype), seed, seconds), backend, seed, as_json)  # type: ignore[arg-type]


@click.command("features")
@AS_JSON_LINES
@BACKEND
@THREADS
@SEED
@click.option("--seconds", default=3.0, show_default=True, help="Time each case for so long.")
def bench_features(as_json: bool, backend: str, threads: int, seed: int, seconds: float) -> None:
    """What features cost a cached rank, and reading them."""
    import torch

    from benchmarks.features import lines

    torch.set_num_threads(threads)
    show(lines(backend, seed, seconds), backend, seed, as_json)  # type: ignore[arg-type]


@click.command("generate")
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

    from benchmarks import generate, generate_t5

    torch.set_num_threads(threads)
    lines = generate_t5.lines if model == "t5" else generate.lines
    show(lines(backend, seed, seconds, transformers), backend, seed, as_json)  # type: ignore[arg-type]


@click.command("match")
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

    from benchmarks.match import lines

    torch.set_num_threads(1)
    show(lines(items, seed, seconds), "cpu", seed, as_json)


@click.command("kernels")
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

    from benchmarks import kernels_device
    from benchmarks.kernels import PARTS, lines

    if device != "cpu":
        show(kernels_device.lines(device, seed, seconds), device, seed, as_json)  # type: ignore[arg-type]
        return
    torch.set_num_threads(1)
    parts = tuple(part for part in PARTS if only in (None, part))
    show(lines(isa, seed, seconds, parts), "cpu", seed, as_json)


@click.command("twin")
@AS_JSON_LINES
@SEED
def bench_twin(as_json: bool, seed: int) -> None:
    """Count what Ascend's masked_topk and an HSTU pass do on the CPU twin, and model their time. Not a measurement."""
    from rich.console import Console

    from benchmarks import hstu_model
    from benchmarks.twin import lines, table

    about = "CPU twin of the Ascend 910B"
    if as_json:
        show(chain(lines(seed), hstu_model.lines(seed)), about, seed, as_json)
    else:
        Console(width=max(120, Console().width)).print(table(lines(seed)))
        show(hstu_model.lines(seed), about, seed, as_json)


@click.command("store")
@AS_JSON_LINES
@SEED
def bench_store(as_json: bool, seed: int) -> None:
    """Measure what a DRAM tier of a million prefixes costs the event loop."""
    from benchmarks.store import lines

    show(lines(seed), "cpu", seed, as_json)
