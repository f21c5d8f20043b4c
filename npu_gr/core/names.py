"""Names of items: the int64 id of what a company calls `"SKU-0042-C"`, or 42.

    "SKU-0042-C"   2^62 + the lower 62 bits of xxh3-64 of the UTF-8 text
    42, "42"       42: a whole number in its plain spelling is its own id

The id is a function of the name alone. So no process keeps a table to read names, a model that was trained anew finds
the histories of its predecessor, and two models of different data agree. Only answers need a table
(`catalogue/item_names.py`), for a hash cannot be read backwards. Two of ten million names share an id with a chance of
1 to 100,000; whoever makes a table refuses such a pair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.request import I64

FIRST_HASHED = 2**62  # ids below are the numbers that names are
MAX_NAME_BYTES = 512  # of a name of an item, as UTF-8
_NUMBER = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)


def item_id(name: str | int) -> int:
    """Return the id of one name.

    Raises:
        ValueError: the name is empty or too long, or a number that is negative or over 2^62 - 1.
    """
    if isinstance(name, int) or _NUMBER.fullmatch(name):
        number = int(name)
        if 0 <= number < FIRST_HASHED:
            return number
        if isinstance(name, int):
            raise ValueError(f"{name} is no item: a number is 0 to 2^62 - 1")
    raw = name.encode()
    if not 0 < len(raw) <= MAX_NAME_BYTES:
        raise ValueError(f"a name of {len(raw)} bytes is no item: it has 1 to {MAX_NAME_BYTES}")
    return FIRST_HASHED | (xxhash.xxh3_64_intdigest(raw) & (FIRST_HASHED - 1))


def item_ids(names: Sequence[str | int]) -> I64:
    """Return the ids of names: [n] -> int64 [n].

    Raises:
        ValueError: as `item_id`, with the place of the name.
    """
    ids = np.empty(len(names), np.int64)
    for place, name in enumerate(names):
        try:
            ids[place] = item_id(name)
        except ValueError as error:
            raise ValueError(f"index {place}: {error}") from None
    return ids


def is_hashed(ids: I64) -> npt.NDArray[np.bool_]:
    """Whether only a table knows the name of each id: int64 [n] -> bool [n]."""
    hashed: npt.NDArray[np.bool_] = ids >= FIRST_HASHED
    return hashed
