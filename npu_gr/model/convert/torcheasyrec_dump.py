"""Rows of a TorchEasyRec training that its `delta_embedding_dump_config` wrote after a checkpoint.

    FOLDER/PREFIX_step_40.parquet                      of one process
    FOLDER/step_40/PREFIX_step_40_rank_0_of_2.parquet  of each of several

A row of a file is the newest embedding of one id: `table_fqn` is the name of the table's module,
`key_id` the row over all ranks, `embedding` its numbers. `global_step`, `rank` and `world_size` say
who wrote it when. Dense weights are in no dump: they stay those of the checkpoint.

Source: its public code, `DeltaEmbeddingDumper`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.errors import CheckpointError, ConfigError
from npu_gr.model.convert.source import unwrapped

_NAME = re.compile(r".*_step_(?P<step>\d+)(_rank_(?P<rank>\d+)_of_(?P<ranks>\d+))?\.parquet")
_COLUMNS = ("table_fqn", "key_id", "embedding")


class _File(NamedTuple):
    step: int
    rank: int
    ranks: int
    path: Path


def with_dumped_rows(
    tensors: dict[str, Tensor], folder: Path, after_step: int
) -> tuple[dict[str, Tensor], str]:
    """Write dumped rows into a checkpoint's tables, step by step.

    Args:
        tensors: Tensors of the checkpoint by name; they are not changed.
        folder: Folder of the dumps.
        after_step: Step of the checkpoint; dumps up to it are older, and left out.

    Returns:
        The tensors, and a note on what was written.

    Raises:
        CheckpointError: A file is missing or cannot be read, or does not fit a table.
        ConfigError: pyarrow is missing.
    """
    files = [file for file in _files(folder) if file.step > after_step]
    made = dict(tensors)
    num_rows = 0
    for file in files:
        for table, rows, values in _rows(file.path):
            name = next(iter(unwrapped({f"{table}.weight": values})))
            if name not in made:
                raise CheckpointError(f"{file.path}: the checkpoint has no table {name}")
            into = made[name]
            if values.shape[1:] != into.shape[1:]:
                raise CheckpointError(
                    f"{file.path}: {name}: {values.shape[1]} numbers a row, the table has "
                    f"{into.shape[1]}"
                )
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(into):
                raise CheckpointError(f"{file.path}: {name}: key_id must be below {len(into)}")
            if into is tensors[name]:
                into = made[name] = into.clone()
            into[rows] = values.to(into.dtype)
            num_rows += len(rows)
    steps = f"steps {files[0].step} to {files[-1].step}" if files else "no step"
    return made, f"{num_rows} rows of {steps} of {folder}; dense weights are of step {after_step}"


def _files(folder: Path) -> list[_File]:
    found = []
    for path in [*folder.glob("*.parquet"), *folder.glob("step_*/*.parquet")]:
        if name := _NAME.fullmatch(path.name):
            rank, ranks = int(name["rank"] or 0), int(name["ranks"] or 1)
            found.append(_File(int(name["step"]), rank, ranks, path))
    if not found:
        raise CheckpointError(f"{folder}: no file *_step_N.parquet of a delta_embedding_dump")
    for step in {file.step for file in found}:
        own = [file for file in found if file.step == step]
        if sorted(file.rank for file in own) != [*range(own[0].ranks)]:
            raise CheckpointError(
                f"{folder}: step {step} has the files of ranks "
                f"{sorted(file.rank for file in own)} of {own[0].ranks}"
            )
    return sorted(found)


def _rows(path: Path) -> list[tuple[str, Tensor, Tensor]]:
    """Read a file: of each table its name, int64 rows, and values."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("--dump needs pip install 'npu_gr[parquet]'") from error
    try:
        table: Any = pq.read_table(path, columns=[*_COLUMNS])
        names = np.array(table["table_fqn"].to_pylist(), object)
        rows = torch.from_numpy(table["key_id"].to_numpy().astype(np.int64))
        lists = table["embedding"].combine_chunks()
        if not len(names):
            return []
        found = []
        for name in dict.fromkeys(names.tolist()):
            own = np.flatnonzero(names == name)
            values = np.stack(lists.take(pa.array(own)).to_numpy(zero_copy_only=False))
            found.append((str(name), rows[own], torch.from_numpy(values.astype(np.float32))))
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if any(not bool(values.isfinite().all()) for _, _, values in found):
        raise CheckpointError(f"{path}: a value is not finite")
    return found
