"""The folder of a TorchEasyRec run: where its weights are, and what its `pipeline.config` says.

    FOLDER/pipeline.config                     protocol buffers as text
    FOLDER/model.ckpt-<step>/model/            torch's distributed checkpoint
    FOLDER/model.ckpt-<step>/{optimizer,..}    not read

Source: its public code, `latest_checkpoint` and `save_model`.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from npu_gr.core.errors import CheckpointError
from npu_gr.model.imported.text_message import TextMessage, parse_text

PIPELINE = "pipeline"  # the setting that holds the whole configuration
CONFIG = "pipeline.config"


def weights_folder(folder: Path) -> Path:
    """Return the folder that holds the weights of the newest step."""
    steps = {path: path.name.removeprefix("model.ckpt-") for path in folder.glob("model.ckpt-*") if path.is_dir()}
    numbered = [(int(step), path) for path, step in steps.items() if step.isdecimal()]
    newest = max(numbered)[1] if numbered else folder
    return newest / "model" if (newest / "model").is_dir() else newest


def read_pipeline(folder: Path) -> dict[str, Any]:
    """Read `pipeline.config` of a folder, or of the one around it where that is a step's.

    Raises:
        CheckpointError: it is missing, or no such text.
    """
    found = next((path for path in (folder / CONFIG, folder.parent / CONFIG) if path.is_file()), None)
    if found is None:
        raise CheckpointError(f"{folder}: no {CONFIG}")
    try:
        return {PIPELINE: parse_text(found.read_text())}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{found}: {error}") from error


def pipeline_of(settings: dict[str, Any]) -> TextMessage:
    """Return the configuration, with every other setting in its place: `model_config.dlrm_hstu.max_seq_len`."""
    pipeline = deepcopy(settings.get(PIPELINE, TextMessage()))
    assert isinstance(pipeline, TextMessage)
    for path, value in settings.items():
        if path != PIPELINE:
            pipeline.put(path, value)
    return pipeline
