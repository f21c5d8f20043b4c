"""npu-gr init and build-ops: what an installation needs before it serves."""

from __future__ import annotations

from pathlib import Path

import click

from npu_gr.cli.options import FILE


@click.command(short_help="Write a configuration to start from.")
@click.argument("folder", type=FILE)
@click.argument("models", nargs=-1, type=FILE)
@click.option("--force", is_flag=True, help="Replace a serve.yaml and README.md that are there.")
def init(folder: Path, models: tuple[Path, ...], force: bool) -> None:
    """Write FOLDER/serve.yaml, and a README with the next commands.

    With the folders of trained MODELS (a ranker, a generator, vectors: known by their files) it serves them; without,
    it has every key, each with its meaning.
    """
    from npu_gr.tools.init import init as work

    for path in work(folder, models, replace=force):
        click.echo(path)


@click.command("build-ops", short_help="Build the native kernels of a CPU or an Ascend NPU.")
@click.option("--cpu", "device", flag_value="cpu", help="With g++ or clang++, where pip install found no compiler.")
@click.option("--ascend", "device", flag_value="ascend", help="On a machine with CANN.")
@click.option("--soc", help="The chip, e.g. ascend910b1; also from SOC_VERSION. npu-smi info names it.")
@click.option("--out", type=FILE, help="Folder of the library; by default where the backend looks for it.")
def build_ops(device: str | None, soc: str | None, out: Path | None) -> None:
    """Build the kernels from the sources that ship with this installation. --cpu or --ascend says for what."""
    from npu_gr.tools.build_ops import build_ascend, build_cpu

    if device is None:
        raise click.UsageError("say --cpu or --ascend")
    click.echo(build_cpu(out) if device == "cpu" else build_ascend(out, soc))
