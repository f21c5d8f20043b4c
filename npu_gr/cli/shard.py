"""npu-gr shard: a checkpoint whose item rows need not fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from npu_gr.cli.options import FILE

if TYPE_CHECKING:
    from npu_gr.model.item_shards import RowDtype


@click.command(short_help="Write a checkpoint whose item rows stay on disk.")
@click.argument("checkpoint", type=FILE)
@click.option("--out", type=FILE, required=True, metavar="FOLDER", help="A new folder.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "int8"]),
    default="float32",
    show_default=True,
    help="Of the item rows; int8 has one scale a row.",
)
def shard(checkpoint: Path, out: Path, dtype: RowDtype) -> None:
    """Write the ranker CHECKPOINT for serving, with the vectors of its items in files of rows.

    Serving keeps the rows that are read most in memory (models.hot_item_bytes), and reads others
    from disk. Deltas of item rows that were made for CHECKPOINT are those of the new folder.
    """
    from npu_gr.catalogue.names import ItemNames
    from npu_gr.core.memory import size_text
    from npu_gr.model.weights import load, save_sharded

    if (out / "config.json").exists():
        raise click.BadParameter(f"{out} has a checkpoint already", param_hint="--out")
    names = ItemNames.load(checkpoint)
    version = save_sharded(load(checkpoint), out, dtype)
    if names is not None:
        names.save(out)
    num_bytes = sum(path.stat().st_size for path in out.glob("*.rows"))
    click.echo(f"{out}: version {version}, {size_text(num_bytes)} of item rows in {dtype}")
