"""Read what a user names as a log: a prepared dataset, or a file that needs no preparation."""

from __future__ import annotations

from pathlib import Path

from npu_gr.core.errors import DataError
from npu_gr.features.interactions import Interactions, read_interactions

_PREPARED = (".csv", ".tsv", ".parquet", ".pq", ".ndjson")


def read_log(path: Path, *, value_column: str = "rating") -> Interactions:
    """Read all events, in time order.

    Args:
        path: the folder of a dataset; or a file, as `read_interactions` has it.
        value_column: of a file; a dataset knows its actions.

    Raises:
        DataError: it cannot be read; the message names the file, the line and the reason.
    """
    if path.is_dir():
        from npu_gr.dataset.files import read_dataset

        return read_dataset(path).interactions()
    if any(suffix in _PREPARED for suffix in path.suffixes):
        raise DataError(f"{path}: prepare it first: npu-gr prepare {path} --out site/data; then give that folder")
    return read_interactions(path, value_column=value_column)
