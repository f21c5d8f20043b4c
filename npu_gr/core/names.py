"""Names of items and actions, and their ids.

The int64 id of an item is a function of its name:

    "SKU-0042-C"   2^62 + the lower 62 bits of a hash of the UTF-8 text
    42, "42"       42: a whole number below 2^62 is its own id; a larger one counts as its text

The hash is BLAKE2b with the key of the dataset, so who may choose a name but does not know the key
cannot make it share the id of another. Datasets of older versions have no key, and the hash is
xxh3-64. The key goes with the names of a checkpoint (`catalogue/names.py`), so a retrained model
finds the histories of its predecessor.

Blanks around a name do not count. No process needs a table to read names. Only answers need one,
since a hash cannot be inverted. With ten million names the probability that two share an id by
accident is 1 in 100,000; `prepare` and a change of the catalogue reject the later one.

Models and stores hold the index of an action in the model's list of action names.
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I16, I64, largest
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.feature_schema.values import BLANKS
from npu_gr.core.history import OnUnsorted
from npu_gr.core.text_format import cut

FIRST_HASHED = 2**62  # smaller ids are numbers
# Larger numbers are answered as texts: JavaScript and many JSON parsers would round them, and so
# name another item.
MAX_JSON_NUMBER = 2**53 - 1
MAX_NAME_BYTES = 512  # of an item name in UTF-8
KEY_BYTES = 16  # of the key of a dataset
_REMEMBERED = 1 << 16  # names of a key: about 10 MB, 50 MB at most
_NUMBER = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)


def item_id(name: str | int, key: bytes = b"") -> int:
    """Return the id of one name.

    Args:
        name: The name.
        key: Key of the dataset; empty = it has none.

    Raises:
        ValueError: the name is empty or too long, or a negative number.
    """
    if isinstance(name, int) and name < 0:
        raise ValueError(f"{name} is not an item id: a number must not be negative")
    name = str(name).strip(BLANKS)
    if _NUMBER.fullmatch(name) and (number := int(name)) < FIRST_HASHED:
        return number
    raw = name.encode()
    if not 0 < len(raw) <= MAX_NAME_BYTES:
        raise ValueError(
            f"a name of {len(raw)} bytes is not an item name: it must have 1 to {MAX_NAME_BYTES}"
        )
    return FIRST_HASHED | (_hashes([raw], key)[0] & (FIRST_HASHED - 1))


def item_ids(names: Sequence[str | int], key: bytes = b"") -> I64:
    """Return the ids of names: [n] -> int64 [n]; numbers only are as fast as `np.array`.

    Raises:
        ValueError: as `item_id`, with the index of the name.
    """
    try:
        return _of_numbers(names)
    except (TypeError, OverflowError, ValueError):  # not only numbers that are their own ids
        pass
    try:
        if set(map(type, names)) == {str}:
            return _of_texts(names, key)
        names = [
            str(name) if isinstance(name, int) and name >= FIRST_HASHED else name for name in names
        ]
        is_text = np.fromiter((isinstance(name, str) for name in names), np.bool_, len(names))
        ids = np.empty(len(names), np.int64)
        ids[is_text] = _of_texts([name for name in names if isinstance(name, str)], key)
        ids[~is_text] = _of_numbers([name for name in names if not isinstance(name, str)])
    except (OverflowError, ValueError):
        _raise_first(names)
    return ids


def answered_ids(names: Sequence[str | int], key: bytes = b"") -> I64:
    """Return the ids of items in an answer: as `item_ids`, but numbers may be hashed ids."""
    ids = np.fromiter(
        (name if isinstance(name, int) else 0 for name in names), np.int64, len(names)
    )
    texts = [place for place, name in enumerate(names) if isinstance(name, str)]
    ids[texts] = _of_texts([str(names[place]) for place in texts], key)
    return ids


def key_fingerprint(key: bytes) -> str:
    """Return 16 hex digits that tell keys apart but do not reveal them; "" = no key."""
    return hashlib.blake2b(key, digest_size=8, person=b"npu_gr.items").hexdigest() if key else ""


def _of_numbers(names: Sequence[Any]) -> I64:
    ids = np.frombuffer(array("q", names), np.int64)
    # unsigned, so that negative numbers are too large as well
    if len(ids) and largest(ids.view(np.uint64)) >= FIRST_HASHED:
        raise ValueError("a number is out of range")
    return ids


def _of_texts(names: Sequence[Any], key: bytes) -> I64:
    """Compute `item_id` of many texts, fast, since it runs on the event loop."""
    if not key or len(names) > _REMEMBERED:
        return _computed(names, key)
    known = _known(key)
    found = list(map(known.get, names))
    if None in found:
        new = [name for name, one in zip(names, found, strict=True) if one is None]
        ids = _computed(new, key).tolist()
        if len(known) + len(new) > _REMEMBERED:
            known.clear()
        known.update(zip(new, ids, strict=True))
        rest = iter(ids)
        found = [next(rest) if one is None else one for one in found]
    return np.fromiter(found, np.int64, len(found))


@lru_cache(maxsize=8)
def _known(key: bytes) -> dict[str, int]:
    """Return the ids of the latest names by a key: BLAKE2b costs several times a look-up."""
    assert key
    return {}


def _computed(names: Sequence[Any], key: bytes) -> I64:
    names = [name.strip(BLANKS) for name in names]
    raw = list(map(str.encode, names))
    lengths = list(map(len, raw))
    if not 0 < min(lengths, default=1) <= max(lengths, default=1) <= MAX_NAME_BYTES:
        raise ValueError("a name is empty or too long")
    digests = np.fromiter(_hashes(raw, key), np.uint64, len(raw))
    ids = ((digests & np.uint64(FIRST_HASHED - 1)) | np.uint64(FIRST_HASHED)).astype(np.int64)
    for place in np.flatnonzero(np.fromiter(map(bytes.isdigit, raw), np.bool_, len(raw))).tolist():
        if _NUMBER.fullmatch(names[place]) and (number := int(raw[place])) < FIRST_HASHED:
            ids[place] = number
    return ids


def _hashes(raw: Sequence[bytes], key: bytes) -> Sequence[int]:
    """Return the 64-bit hash of each name."""
    if not key:
        return list(map(xxhash.xxh3_64_intdigest, raw))
    begun = hashlib.blake2b(key=key, digest_size=8)

    def keyed(name: bytes) -> bytes:
        digest = begun.copy()
        digest.update(name)
        return digest.digest()

    hashes: list[int] = np.frombuffer(b"".join(map(keyed, raw)), "<u8").tolist()
    return hashes


def _raise_first(names: Sequence[str | int]) -> NoReturn:
    """Raise the error of the first invalid name."""
    for place, name in enumerate(names):
        try:
            item_id(name)
        except ValueError as error:
            raise ValueError(f"index {place}: {error}") from None
    raise AssertionError("one of the names is invalid")


def repeated(ids: I64) -> list[int]:
    """List the places whose id an earlier place has, ascending."""
    is_again = np.ones(len(ids), np.bool_)
    is_again[np.unique(ids, return_index=True)[1]] = False
    places: list[int] = np.flatnonzero(is_again).tolist()
    return places


def names_of_numbers(ids: I64) -> list[str | int]:
    """Return each id as the name of its item: [n] -> n numbers, or texts over `MAX_JSON_NUMBER`.

    A hashed id stays a number, since it is no name.
    """
    names: list[str | int] = ids.tolist()
    if len(ids) and largest(ids) > MAX_JSON_NUMBER:
        for place in np.flatnonzero((ids > MAX_JSON_NUMBER) & ~is_hashed(ids)).tolist():
            names[place] = str(names[place])
    return names


def is_hashed(ids: I64) -> npt.NDArray[np.bool_]:
    """Whether each id is a hash of a name: int64 [n] -> bool [n]."""
    hashed: npt.NDArray[np.bool_] = ids >= FIRST_HASHED
    return hashed


def value_name(value: float) -> str:
    """Return the name of a numeric action, unique per number: 5.0 -> "5", 4.5 -> "4.5"."""
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) <= _MOST_WHOLE else repr(number)


_MOST_WHOLE = 2**53  # larger floats cannot represent every whole number


class ActionNames:
    """The actions of a model by name; a number equals its decimal text (5 and "5")."""

    __slots__ = ("_indices", "names")

    def __init__(self, names: Sequence[str]) -> None:
        """Store the distinct names, in the order of the model's actions."""
        self.names = tuple(names)
        self._indices: dict[str | float, int] = {name: index for index, name in enumerate(names)}
        for index, name in enumerate(names):
            if (number := _number(name)) is not None:
                self._indices[number] = index

    def indices(self, names: Sequence[str | float]) -> I16:
        """Return the index of each action: [n] -> int16 [n].

        Raises:
            ValueError: an action is unknown; the message has its index and the known names.
        """
        try:
            return np.fromiter(map(self._indices.__getitem__, names), np.int16, len(names))
        except KeyError as error:
            lacking = error.args[0]
            there_are = cut(", ".join(self.names), _MOST_LISTED)
            shown = f'"{cut(lacking)}"' if isinstance(lacking, str) else str(lacking)
            at = list(names).index(lacking)
            raise ValueError(
                f"{shown} at index {at} is not an action of the model; it has {there_are}"
            ) from None


_MOST_LISTED = 200  # characters of the list of actions in an error


def _number(name: str) -> float | None:
    """Return the number whose `value_name` is the name, if any."""
    try:
        number = float(name)
    except ValueError:
        return None
    return number if math.isfinite(number) and value_name(number) == name else None


def difference(stored: Sequence[str], names: Sequence[str]) -> str:
    """Describe where `names` do not begin with the stored names; "" if they do."""
    for number, name in enumerate(stored):
        if number >= len(names):
            return f"action {number} is {cut(name)!r} there, and here there are only {len(names)}"
        if names[number] != name:
            return f"action {number} is {cut(name)!r} there, and {cut(names[number])!r} here"
    return ""


class ItemIds(Protocol):
    """Ids of items by one key."""

    def item_ids(self, names: Sequence[str | int]) -> I64:
        """Return the ids of names by the key of the served models: [n] -> int64 [n].

        Raises:
            ValueError: as `item_ids`.
        """
        ...


class Names(ItemIds, Protocol):
    """Names of actions, features and items in the served versions."""

    @property
    def unsorted_history(self) -> OnUnsorted:
        """Policy for a history that is out of time order."""
        ...

    def actions(self, version: str | None) -> ActionNames | None:
        """Return the actions of a version of the ranker; None if actions have no names.

        Args:
            version: Version of the ranker; None for the current one.

        Raises:
            NotFound: the version is not served.
        """
        ...

    def features(self, version: str | None) -> ModelFeatures:
        """Return the features of a version of the ranker; none without a ranker.

        Raises:
            NotFound: the version is not served.
        """
        ...

    def items(self, ids: I64) -> list[str | int]:
        """Return the name of each item: [n] -> n names; the id if the name is unknown."""
        ...

    def titles(self, ids: I64) -> list[str | None]:
        """Return the title of each item: [n] -> n titles, None if it has none."""
        ...


def served_id(names: ItemIds, name: str | int) -> int:
    """Return the id of one name by the key of the served models.

    Raises:
        ValueError: as `item_id`.
    """
    try:
        return int(names.item_ids([name])[0])
    except ValueError as error:
        raise ValueError(str(error).removeprefix("index 0: ")) from None
