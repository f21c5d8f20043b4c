"""Datasets: `npu-gr prepare` makes one from a company's log; training and `npu-gr load` read it.

    from npu_gr.dataset import PrepareOptions, prepare, read_dataset

Names are imported on first use, so DuckDB and pyarrow (extra `parquet`) are needed only where a
dataset is read or made.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_gr.dataset.build import PreparedDataset, add, prepare
    from npu_gr.dataset.files import Dataset, read_dataset
    from npu_gr.dataset.merged import merge
    from npu_gr.dataset.options import PrepareOptions
    from npu_gr.history_store.interactions import Interactions

__all__ = [
    "Dataset",
    "PrepareOptions",
    "PreparedDataset",
    "add",
    "merge",
    "prepare",
    "read_dataset",
    "read_log",
]

_HOMES = {"Dataset": "files", "read_dataset": "files", "PrepareOptions": "options"}
_HOMES |= {"merge": "merged"}
_PREPARED = (".csv", ".tsv", ".parquet", ".pq", ".ndjson")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'build')}"), name)


def read_log(path: Path, *, value_column: str = "rating") -> Interactions:
    """Read all events, in time order, of a dataset or of a file that needs no preparation.

    Args:
        path: Folder of a dataset, or a file in a format of `read_interactions`.
        value_column: Column of a file that holds the value; unused for a dataset.

    Raises:
        DataError: the log cannot be read; the message names the file, the line and the reason.
    """
    from npu_gr.core.errors import DataError
    from npu_gr.history_store.interactions import read_interactions

    if path.is_dir():
        from npu_gr.dataset.files import read_dataset

        return read_dataset(path).interactions()
    if any(suffix in _PREPARED for suffix in path.suffixes):
        raise DataError(
            f"{path}: prepare it first: npu-gr prepare {path} --out site/data; then "
            "give that folder"
        )
    return read_interactions(path, value_column=value_column)
