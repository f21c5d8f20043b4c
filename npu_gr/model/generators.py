"""Load the generator of a Hugging Face folder, by `model_type` of its `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from npu_gr.core.errors import CheckpointError
from npu_gr.model import hf, hf_files, hf_t5
from npu_gr.model.decoder import Decoder
from npu_gr.model.generative import KVShape
from npu_gr.model.t5 import T5


class Examined(NamedTuple):
    """Properties of a checkpoint, read without loading it."""

    vocab_size: int
    is_divisible: bool  # see `GenerativeModel`
    kv_shape: KVShape


def load(folder: Path, dtype: torch.dtype) -> Decoder | T5:
    """Read a generator's checkpoint in `dtype`, onto the CPU; see `hf_files.load`."""
    return hf_t5.load(folder, dtype) if _is_t5(folder) else hf.load(folder, dtype)


def examine(folder: Path) -> Examined:
    """Check a generator's checkpoint without loading it; see `hf_files.examine`."""
    if _is_t5(folder):
        t5 = hf_files.examine(folder, hf_t5.FORMAT)
        return Examined(t5.vocab_size, T5.is_divisible, t5.kv_shape)
    decoder = hf_files.examine(folder, hf.FORMAT)
    return Examined(decoder.vocab_size, Decoder.is_divisible, decoder.kv_shape)


def _is_t5(folder: Path) -> bool:
    try:
        keys = msgspec.json.decode((folder / hf_files.CONFIG).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder}: {error.strerror}: {hf_files.CONFIG}"
        ) from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"checkpoint {folder}: {hf_files.CONFIG}: {error}") from error
    return bool(keys.get("model_type") == "t5")
