"""npu-gr delta: what changed from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from npu_gr.cli.options import FILE

if TYPE_CHECKING:
    from npu_gr.core.arrays import I64
    from npu_gr.core.served import ItemChange
    from npu_gr.model.delta import Delta


@click.command(short_help="Write what changed between two checkpoints.")
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@click.option(
    "--out",
    type=FILE,
    required=True,
    metavar="FOLDER",
    help="Folder of deltas: what instances follow (models.deltas_from), or any other.",
)
@click.option(
    "--items",
    type=FILE,
    metavar="FILE",
    help="Changes of the catalogue: bodies of POST /v1/catalog/items, one a line, in order.",
)
def delta(old: Path, new: Path, out: Path, items: Path | None) -> None:
    """Write the changed rows and tensors of NEW against OLD, as the next delta of a folder.

    Both are checkpoints of rankers of one shape, with the same items, actions, features and names.
    The first delta of a folder has the number 1. An instance that does not follow the folder takes
    the file by POST /v1/models/delta. With --items OLD may be NEW.
    """
    from npu_gr.catalogue.names import EMPTY, ItemNames
    from npu_gr.core.errors import DeltaError
    from npu_gr.core.names import key_fingerprint
    from npu_gr.model.delta_log import write_next
    from npu_gr.model.weights import order_digest

    was, now = ((ItemNames.load(folder) or EMPTY).key for folder in (old, new))
    if was != now:
        raise DeltaError(
            f"item_key: the names of {old} have the key {key_fingerprint(was)}, those of {new} "
            f"{key_fingerprint(now)}; one name would be two items"
        )
    changes = () if items is None else _changes(items, now)
    path, made = write_next(out, old, new, now, changes)
    if order_digest(old) != order_digest(new):
        click.echo(
            "the score blend (order.safetensors) differs too: the delta leaves that of the served "
            "checkpoint in place, and a reload brings the new one",
            err=True,
        )
    click.echo(in_words(path, made))


def in_words(path: Path, made: Delta) -> str:
    """Say what a delta changes, in a line."""
    from npu_gr.core.memory import size_text

    return (
        f"{path}: {made.num_rows} rows of {len(made.changes)} tensors, "
        f"{size_text(made.num_bytes)}, {made.manifest.base} to {made.manifest.result}"
    )


class _Key(NamedTuple):
    key: bytes

    def item_ids(self, names: Sequence[str | int]) -> I64:
        from npu_gr.core.names import item_ids

        return item_ids(names, self.key)


def _changes(path: Path, key: bytes) -> list[ItemChange]:
    import msgspec

    from npu_gr.core.errors import DataError, TooLarge, Unprocessable
    from npu_gr.core.served import ItemChange
    from npu_gr.server.config import ServerConfig
    from npu_gr.server.schemas.admin import CatalogueItemsBody, parse_catalogue_change

    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            body = msgspec.json.decode(line, type=CatalogueItemsBody)
            found.append(ItemChange.of(parse_catalogue_change(body, ServerConfig(), _Key(key))))
        except (msgspec.MsgspecError, Unprocessable, TooLarge) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    return found
