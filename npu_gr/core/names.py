"""Names of items and of actions.

The int64 id of an item that a company calls `"SKU-0042-C"`, or 42:

    "SKU-0042-C"   2^62 + the lower 62 bits of xxh3-64 of the UTF-8 text
    42, "42"       42: a whole number in its plain spelling is its own id

The id is a function of the name alone. So no process keeps a table to read names, a model that was
trained anew finds the histories of its predecessor, and two models of different data agree. Only
answers need a table (`catalogue/names.py`), for a hash cannot be read backwards. Two of ten million
names share an id with a chance of 1 to 100,000; whoever makes a table rejects such a pair.

The index of an action, which models and stores hold, is its place among the names of the model's
actions.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I16, I64, largest
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.history import OnUnsorted
from npu_gr.core.text_format import cut

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

    A list of plain numbers costs no more than making an array of it.

    Raises:
        ValueError: as `item_id`, with the place of the name.
    """
    try:
        return _of_numbers(names)
    except TypeError:  # not numbers alone
        pass
    except (OverflowError, ValueError):
        _raise_first(names)
    try:
        if set(map(type, names)) == {str}:
            return _of_texts(names)
        is_text = np.fromiter((isinstance(name, str) for name in names), np.bool_, len(names))
        ids = np.empty(len(names), np.int64)
        ids[is_text] = _of_texts([name for name in names if isinstance(name, str)])
        ids[~is_text] = _of_numbers([name for name in names if not isinstance(name, str)])
    except (OverflowError, ValueError):
        _raise_first(names)
    return ids


def answered_ids(names: Sequence[str | int]) -> I64:
    """Return the ids of items that a service answered: as `item_ids`, but where it knew no name it answered the id."""
    ids = np.fromiter(
        (name if isinstance(name, int) else 0 for name in names), np.int64, len(names)
    )
    texts = [place for place, name in enumerate(names) if isinstance(name, str)]
    ids[texts] = _of_texts([str(names[place]) for place in texts])
    return ids


def _of_numbers(names: Sequence[Any]) -> I64:
    ids = np.frombuffer(array("q", names), np.int64)
    # unsigned, a negative one is beyond it, too
    if len(ids) and largest(ids.view(np.uint64)) >= FIRST_HASHED:
        raise ValueError("a number is out of range")
    return ids


def _of_texts(names: Sequence[Any]) -> I64:
    """Do for many names, all of them texts, what `item_id` does for one.

    The event loop waits for it.
    """
    raw = list(map(str.encode, names))
    lengths = list(map(len, raw))
    if not 0 < min(lengths, default=1) <= max(lengths, default=1) <= MAX_NAME_BYTES:
        raise ValueError("a name is empty or too long")
    digests = np.fromiter(map(xxhash.xxh3_64_intdigest, raw), np.uint64, len(raw))
    ids = ((digests & np.uint64(FIRST_HASHED - 1)) | np.uint64(FIRST_HASHED)).astype(np.int64)
    for place in np.flatnonzero(np.fromiter(map(bytes.isdigit, raw), np.bool_, len(raw))).tolist():
        if _NUMBER.fullmatch(names[place]) and (number := int(raw[place])) < FIRST_HASHED:
            ids[place] = number
    return ids


def _raise_first(names: Sequence[str | int]) -> NoReturn:
    """Raise the error of the first name that is no item."""
    for place, name in enumerate(names):
        try:
            item_id(name)
        except ValueError as error:
            raise ValueError(f"index {place}: {error}") from None
    raise AssertionError("one of them is no item")


def is_hashed(ids: I64) -> npt.NDArray[np.bool_]:
    """Whether only a table knows the name of each id: int64 [n] -> bool [n]."""
    hashed: npt.NDArray[np.bool_] = ids >= FIRST_HASHED
    return hashed


def value_name(value: float) -> str:
    """Name the action that is a number by its plain text: 5.0 -> "5", 4.5 -> "4.5".

    Two numbers never share a name.
    """
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) <= _MOST_WHOLE else repr(number)


_MOST_WHOLE = 2**53  # floats beyond it are no longer exact as whole numbers


class ActionNames:
    """The actions of a model by name.

    A number stands for the name that is its plain text: 5 for "5", 4.5 for "4.5".
    """

    __slots__ = ("_indices", "names")

    def __init__(self, names: Sequence[str]) -> None:
        """Keep the names, distinct, in the order of the model's actions."""
        self.names = tuple(names)
        self._indices: dict[str | float, int] = {name: index for index, name in enumerate(names)}
        for index, name in enumerate(names):
            if (number := _number(name)) is not None:
                self._indices[number] = index

    def indices(self, names: Sequence[str | float]) -> I16:
        """Return the index of each action: [n] -> int16 [n].

        Raises:
            ValueError: the model lacks one; the message has its place, and the names that there
                are.
        """
        try:
            return np.fromiter(map(self._indices.__getitem__, names), np.int16, len(names))
        except KeyError as error:
            lacking = error.args[0]
            there_are = cut(", ".join(self.names), _MOST_LISTED)
            said = f'"{cut(lacking)}"' if isinstance(lacking, str) else str(lacking)
            at = list(names).index(lacking)
            raise ValueError(
                f"{said} at index {at} is no action of the model; it has {there_are}"
            ) from None


_MOST_LISTED = 200  # characters of the actions that an error lists


def _number(name: str) -> float | None:
    """Return the number whose plain text a name is; None = it is none's."""
    try:
        number = float(name)
    except ValueError:
        return None
    return number if math.isfinite(number) and value_name(number) == name else None


def difference(kept: Sequence[str], names: Sequence[str]) -> str:
    """Say where `names` do not begin with those that are kept; "" = they do."""
    for number, name in enumerate(kept):
        if number >= len(names):
            return f"action {number} is {cut(name)!r} there, and here there are only {len(names)}"
        if names[number] != name:
            return f"action {number} is {cut(name)!r} there, and {cut(names[number])!r} here"
    return ""


class Names(Protocol):
    """What callers call actions and items, by the versions in service."""

    @property
    def unsorted_history(self) -> OnUnsorted:
        """What becomes of a history whose rows run backwards in time."""
        ...

    def actions(self, version: str | None) -> ActionNames | None:
        """Return the actions of a version of the ranker; None = actions have no names here.

        Args:
            version: None = the current one.

        Raises:
            NotFound: the version is not served.
        """
        ...

    def features(self, version: str | None) -> ModelFeatures:
        """Return the features of a version of the ranker; without a ranker there are none.

        Raises:
            NotFound: the version is not served.
        """
        ...

    def items(self, ids: I64) -> list[str | int]:
        """Name each item: [n] -> n names; an item that no table knows is named by its id."""
        ...

    def titles(self, ids: I64) -> list[str | None]:
        """Return the title of each item: [n] -> n titles, None where it has none."""
        ...
