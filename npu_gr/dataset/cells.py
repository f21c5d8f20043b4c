"""Cells of a column that becomes a feature: what they hold, and the values in them."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import orjson

from npu_gr.dataset.arrow import as_text, is_text, pa, pc
from npu_gr.dataset.columns import CellKind, kind_of
from npu_gr.dataset.names import MISSING
from npu_gr.dataset.source import Source

Cells = Literal["list", "blanks", "bars", "number", "text"]


def cells_of(name: str, array: Any, source: Source) -> Cells:
    """Find out how the first cells of a column hold values: one of `Cells`."""
    declared = source.types.get(name, "")
    if declared == "token_seq":
        return "blanks"
    if declared == "token":
        return "text"
    if pa.types.is_list(array.type):
        return "list"
    kind = kind_of(array)
    if kind in (CellKind.NUMBER, CellKind.INTEGER) and not name.lower().endswith("id"):
        return "number"
    if is_text(array) and pc.any(pc.match_substring(array, "|")).as_py():
        return "bars"
    return "text"


def number_of(cell: Any) -> float | None:
    """Read a cell as a finite number; None = it is none."""
    try:
        number = float(cell)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None


def values_of(cell: Any, cells: Cells) -> list[str]:
    """List the texts in a cell, each once; none where it is empty."""
    if cell is None:
        return []
    if isinstance(cell, list):
        parts = [plain_text(part) for part in cell]
    elif cells == "blanks":
        parts = plain_text(cell).split(" ")
    elif cells == "bars":
        parts = [part.strip() for part in plain_text(cell).split("|")]
    else:
        parts = [plain_text(cell)]
    return list(dict.fromkeys(part for part in parts if part not in MISSING))


def plain_text(cell: Any) -> str:
    """Write a cell of any type as text."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        return " ".join(map(plain_text, cell))
    if isinstance(cell, bool | int | float | Decimal | date):
        text: str = as_text(pa.array([cell]))[0].as_py() or ""
        return text
    return orjson.dumps(cell, default=str).decode()
