"""Datasets: what `npu-gr prepare` makes of a company's log, and what training and loading read.

    from npu_gr.dataset import PrepareOptions, prepare, read_dataset

Each name is imported when it is first used: pyarrow (extra `parquet`) is needed only by whoever uses a dataset.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_gr.dataset.build import PreparedDataset, prepare
    from npu_gr.dataset.files import Dataset, read_dataset
    from npu_gr.dataset.log import read_log
    from npu_gr.dataset.options import PrepareOptions

__all__ = ["Dataset", "PrepareOptions", "PreparedDataset", "prepare", "read_dataset", "read_log"]

_HOMES = {"Dataset": "files", "read_dataset": "files", "read_log": "log", "PrepareOptions": "options"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'build')}"), name)
