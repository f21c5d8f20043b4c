"""Write a trained ranker as a folder that the service starts from: checkpoint, names of the items, configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_gr.catalogue.names import ItemNames
from npu_gr.model.weights import Checkpoint, save
from npu_gr.train.next_command import write_configuration


def publish(checkpoint: Checkpoint, names: ItemNames, folder: Path) -> str:
    """Write the folder. The names come first, so that nobody reads a checkpoint whose items have none.

    Returns:
        The version of the checkpoint.

    Raises:
        DataError: the folder cannot be written.
        CheckpointError: the same.
    """
    names.save(folder)
    version = save(checkpoint, folder)
    write_configuration(configuration(folder), folder)
    return version


def configuration(folder: Path) -> dict[str, Any]:
    """Make the configuration of an instance that ranks."""
    return {"checkpoint": str(folder), "features": {"path": str(folder / "history.db")}}
