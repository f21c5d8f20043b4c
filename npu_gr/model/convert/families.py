"""The projects whose HSTU checkpoints convert: one table, by the name that `npu-gr import --from` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from npu_gr.core.errors import CheckpointError
from npu_gr.model.convert import recsys_examples, torcheasyrec
from npu_gr.model.convert.research import convert_dlrm_v3, convert_research
from npu_gr.model.convert.source import (
    Converted,
    ForeignCheckpoint,
    GivenNames,
    read_gin,
    read_tensors,
)
from npu_gr.model.convert.torcheasyrec_files import read_pipeline, weights_folder

FAMILIES: dict[str, Callable[[ForeignCheckpoint, GivenNames], Converted]] = {
    "generative-recommenders": convert_research,
    "dlrmv3": convert_dlrm_v3,
    "recsys-examples": recsys_examples.convert,
    "torcheasyrec": torcheasyrec.convert,
}


def convert(
    family: str,
    folder: Path,
    names: GivenNames,
    settings: Mapping[str, Any] | None = None,
    *,
    is_trusted: bool = False,
) -> Converted:
    """Convert a folder of another project.

    Args:
        family: of `FAMILIES`.
        folder: with one checkpoint, and the configuration that it was trained with.
        names: what the folder does not say.
        settings: replace those of the folder, or add to them.
        is_trusted: as of `read_tensors`.

    Raises:
        CheckpointError: the folder cannot be read, or does not convert; everything that does not is
            named.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    is_pipeline = family == "torcheasyrec"
    found = read_pipeline(folder) if is_pipeline else read_gin(folder)
    tensors = read_tensors(weights_folder(folder) if is_pipeline else folder, is_trusted=is_trusted)
    source = ForeignCheckpoint(str(folder), tensors, found | dict(settings or {}))
    try:
        return FAMILIES[family](source, names)
    except (
        ValueError,
        TypeError,
    ) as error:  # of a setting that is no number, or a size that no model has
        raise CheckpointError(f"{folder} does not convert: {error}") from error
