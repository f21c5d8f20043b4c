"""The projects whose HSTU checkpoints `npu-gr import --from NAME` converts."""

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
from npu_gr.model.convert.torcheasyrec_dump import with_dumped_rows
from npu_gr.model.convert.torcheasyrec_files import read_pipeline, step_of, weights_folder

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
    dump: Path | None = None,
) -> Converted:
    """Convert a checkpoint folder of another project.

    Args:
        family: A key of `FAMILIES`.
        folder: Folder with one checkpoint and the configuration that it was trained with.
        names: Item ids, actions and tasks, which the folder does not contain.
        settings: Override or extend the settings of the folder.
        is_trusted: Allow pickles: see `read_tensors`.
        dump: Folder of rows that TorchEasyRec's training wrote after the checkpoint.

    Raises:
        CheckpointError: The folder cannot be read or converted; the message lists every problem.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    is_pipeline = family == "torcheasyrec"
    found = read_pipeline(folder) if is_pipeline else read_gin(folder)
    tensors = read_tensors(weights_folder(folder) if is_pipeline else folder, is_trusted=is_trusted)
    notes = []
    if dump is not None:
        if not is_pipeline:
            raise CheckpointError("--dump is of --from torcheasyrec alone")
        tensors, note = with_dumped_rows(tensors, dump, step_of(folder))
        notes.append(note)
    source = ForeignCheckpoint(str(folder), tensors, found | dict(settings or {}))
    source.notes.extend(notes)
    try:
        return FAMILIES[family](source, names)
    except (ValueError, TypeError) as error:  # a setting that is no number, or an impossible size
        raise CheckpointError(f"{folder} does not convert: {error}") from error
