"""npu-gr load: interaction logs into the history store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from npu_gr.cli.options import CONFIG, FILE, SET, VALUE_COLUMN, load_config


@click.command()
@CONFIG
@SET
@click.argument("log", type=FILE)
@click.option("--tenant", default="", show_default=True, help="Of all users in the log.")
@VALUE_COLUMN
def load(config_path: Path, overrides: tuple[str, ...], log: Path, tenant: str, value_column: str) -> None:
    """Bulk-load an interaction LOG (.inter or .jsonl) into the history store.

    The checkpoint that the configuration names says which action each value is.
    """
    from npu_gr.dataset.log import read_log
    from npu_gr.features.load import load_interactions
    from npu_gr.features.store import open_store
    from npu_gr.model.weights import load as load_checkpoint

    config = load_config(config_path, overrides)
    if config.checkpoint is None:
        raise click.UsageError("checkpoint: the configuration names none, so the actions have no values")
    values = load_checkpoint(Path(config.checkpoint)).action_values
    interactions = read_log(log, value_column=value_column)
    action_ids = {value: index for index, value in enumerate(values)}

    async def work() -> int:
        store = await open_store(config.features)
        if store is None:
            raise click.UsageError("features.kind is none: there is no store to load into")
        try:
            return await load_interactions(store, interactions, action_ids, tenant)
        finally:
            await store.close()

    click.echo(f"{asyncio.run(work())} events loaded")
