"""npu-gr import: checkpoints that other projects trained."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import click

from npu_gr.cli.options import FILE
from npu_gr.core.errors import ConfigError

# of npu_gr.model.imported.families, which loads torch
FAMILIES = ("generative-recommenders", "dlrmv3", "recsys-examples", "torcheasyrec")


def _names(_context: click.Context, _option: click.Parameter, names: str | None) -> tuple[str, ...]:
    return () if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


def _settings(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals:
            raise click.BadParameter(f"{one!r}: must be KEY=VALUE")
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
        except (SyntaxError, ValueError):
            found[key.strip()] = value.strip()
    return found


@click.group("import", short_help="Convert checkpoints that other projects trained.")
def import_() -> None:
    """Convert checkpoints that other projects trained into ours."""


@import_.command(short_help="An HSTU ranker of another project.")
@click.argument("folder", type=FILE)
@click.option("--from", "family", required=True, type=click.Choice(FAMILIES), help="Whose code trained it.")
@click.option("--out", required=True, type=FILE, help="Folder of the checkpoint.")
@click.option("--name", default="", help="Of the model; else the folder's.")
@click.option("--item-ids", type=FILE, help="Ids of the items in the order of their rows, one a line; else numbers.")
@click.option("--actions", callback=_names, metavar="NAMES", help="Names of the actions, comma-separated.")
@click.option("--tasks", callback=_names, metavar="NAMES", help="Names of the tasks, comma-separated.")
@click.option(
    "--set", "settings", callback=_settings, multiple=True, metavar="KEY=VALUE", help="A setting that FOLDER lacks."
)
@click.option("--trusted", is_flag=True, help="Read a distributed checkpoint, which may run its author's code.")
def hstu(
    folder: Path,
    family: str,
    out: Path,
    name: str,
    item_ids: Path | None,
    actions: tuple[str, ...],
    tasks: tuple[str, ...],
    settings: dict[str, Any],
    trusted: bool,
) -> None:
    """Convert FOLDER, with one checkpoint and its configuration, into a checkpoint that `serve` reads.

    What does not convert is named, and nothing is written then.
    """
    import numpy as np

    from npu_gr.model.imported.converted import GivenNames
    from npu_gr.model.imported.families import convert
    from npu_gr.model.weights import Checkpoint, save

    ids = None
    if item_ids is not None:
        try:
            ids = np.array(item_ids.read_text().split(), np.int64)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"--item-ids {item_ids}: must be whole numbers, one a line: {error}") from error
        if len(np.unique(ids)) != len(ids) or (ids < 0).any():
            raise ConfigError(f"--item-ids {item_ids}: must be distinct and not negative")
    made = convert(family, folder, GivenNames(ids, actions, tasks), settings, is_trusted=trusted)
    shape = made.model.config
    checkpoint = Checkpoint(
        model=made.model, item_ids=made.item_ids, name=name or folder.resolve().name, action_names=shape.actions
    )
    version = save(checkpoint, out)
    for note in made.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{out}: {shape.num_items} items, {shape.num_layers} layers of {shape.num_heads} heads, "
        f"tasks {', '.join(shape.tasks)}, version {version}"
    )
