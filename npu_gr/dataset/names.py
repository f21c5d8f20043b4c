"""Names of users, items and events on their way through a log: text to code, each distinct text once.

Memory: about 220 bytes a user whose name has 36 characters, and 400 an item whose name has 12, until all is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.core.names import MAX_NAME_BYTES, item_id
from npu_gr.dataset.arrow import as_text, is_text, pa, pc, without_point
from npu_gr.dataset.rejects import MAX_EVENT_CHARS, MAX_USER_CHARS, RejectReason

MISSING = frozenset({"", "NULL", "null", "None", "none", "NaN", "nan", "\\N"})
"""Texts that tools write where they have none."""


def texts_of(array: Any, *, with_point: bool = False) -> tuple[Any, npt.NDArray[np.bool_]]:
    """Write cells as texts.

    Args:
        array: [n] cells of any type; a list of one cell counts as that cell.
        with_point: whole numbers are written as 42.0 and mean 42.

    Returns:
        A dictionary-encoded array of strings, null where a name is missing; and bool [n]: whether it is missing.
    """
    if pa.types.is_list(array.type):
        array = pa.array([cell[0] if cell is not None and len(cell) == 1 else None for cell in array.to_pylist()])
    text = as_text(array)
    if with_point:
        text = without_point(text)
    text = pc.if_else(pc.is_in(text, pa.array(sorted(MISSING))), None, text)
    return text.dictionary_encode(), pc.is_null(text).to_numpy(zero_copy_only=False)


def codes_of(encoded: Any, code: Callable[[str], int]) -> I64:
    """Translate names, each distinct one once: a dictionary-encoded array [n] -> int64 [n], -1 where it is null."""
    table = np.array([*(code(name) for name in encoded.dictionary.to_pylist()), -1], np.int64)
    places = pc.fill_null(encoded.indices, len(table) - 1).to_numpy(zero_copy_only=False)
    codes: I64 = table[places]
    return codes


def too_long(encoded: Any, limit: int, *, in_bytes: bool = False) -> npt.NDArray[np.bool_]:
    """Whether each name is longer than a limit, in characters or bytes of UTF-8: [n] -> bool [n]."""
    measure = pc.binary_length if in_bytes else pc.utf8_length
    return _of_rows(encoded, pc.greater(measure(encoded.dictionary), limit).to_numpy(zero_copy_only=False))


def has_point(array: Any) -> bool:
    """Whether a column of texts holds whole numbers written as 42.0: what pandas makes of integers with gaps."""
    if not is_text(array):
        return False
    texts = pc.drop_null(array)
    is_whole = pc.match_substring_regex(texts, r"^\s*(-?\d+\.0*|nan|NaN|NULL|)\s*$")
    return bool(len(texts)) and bool(pc.all(is_whole).as_py())


def is_rounded(encoded: Any) -> npt.NDArray[np.bool_]:
    """Whether a tool made a number of each name and lost its last digits, as spreadsheets do: [n] -> bool [n]."""
    found = pc.match_substring_regex(encoded.dictionary, r"^\d(\.\d+)?[eE]\+\d+$")
    return _of_rows(encoded, found.to_numpy(zero_copy_only=False))


def _of_rows(encoded: Any, of_name: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Spread what is known of each distinct name over the rows; False where there is none."""
    places = pc.fill_null(encoded.indices, len(of_name)).to_numpy(zero_copy_only=False)
    found: npt.NDArray[np.bool_] = np.append(of_name, [False])[places]
    return found


class Codes:
    """Names in the order in which they came: the place of a name is its code."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def code(self, name: str) -> int:
        """Return the code of a name; a new one gets the next."""
        return self._codes.setdefault(name, len(self._codes))

    def names(self) -> list[str]:
        """List the names by code."""
        return list(self._codes)


class LoggedItems:
    """Names of items and their ids, in the order in which they came."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, name: str) -> bool:
        return name in self._ids

    def id(self, name: str) -> int:
        """Return the id of a name of at most `MAX_NAME_BYTES`, and remember it."""
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = item_id(name)
        return found

    def names(self) -> list[str]:
        """List the names."""
        return list(self._ids)


USER_LIMIT = (RejectReason.LONG_USER, MAX_USER_CHARS, False)
ITEM_LIMIT = (RejectReason.LONG_ITEM, MAX_NAME_BYTES, True)
EVENT_LIMIT = (RejectReason.LONG_EVENT, MAX_EVENT_CHARS, False)
