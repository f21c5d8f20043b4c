"""The list of popular items: names as the company writes them, one a line, best first."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.names import item_id


def read_popular(path: str | None) -> I64:
    """Read the items that a file names, each once; no path gives no items.

    Raises:
        ConfigError: the file cannot be read, a line is no name of an item, or there is none.
    """
    if path is None:
        return np.empty(0, np.int64)
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
        items = [_named(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"recommend.popular: {path}: {error}") from error
    if not items:
        raise ConfigError(f"recommend.popular: {path} holds no item")
    return np.array(list(dict.fromkeys(items)), np.int64)


def _named(line: str, number: int) -> int:
    try:
        return item_id(line.strip())
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
