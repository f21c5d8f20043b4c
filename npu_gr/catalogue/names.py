"""Tables of names, as files in the folder of a checkpoint.

`ItemNames` has the name of each item in the operator's systems, and its title for people. An id
below 2^62 is its own name (`core/names.py`), so only hashed ids and titles need an entry. The file
also has the key of the ids, in the metadata `item_key`.

`load_actions` reads the names of a generator's actions, for which a Hugging Face folder has no
place. The checkpoint of a ranker contains them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import (
    FIRST_HASHED,
    ActionNames,
    is_hashed,
    item_ids,
    key_fingerprint,
    names_of_numbers,
)

FILE = "names.safetensors"
ACTIONS_FILE = "actions.json"  # a list of texts: the name of each index
_BLOCK = 65_536  # texts to check at a time
_KEY = "item_key"  # in the metadata of `FILE`: the key, hexadecimal


class _Texts:
    """Texts in one array, since ten million Python strings would take much more memory."""

    __slots__ = ("_ends", "_raw")

    def __init__(self, raw: npt.NDArray[np.uint8], ends: I64) -> None:
        self._raw = raw  # UTF-8 of all texts
        self._ends = ends  # [n + 1] text i is raw[ends[i] : ends[i + 1]]

    @classmethod
    def of(cls, texts: Sequence[str]) -> _Texts:
        raw = [text.encode() for text in texts]
        ends = np.cumsum([0, *map(len, raw)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(raw), np.uint8), ends)

    def take(self, places: I64) -> list[str]:
        raw = self._raw.data
        spans = zip(self._ends[places].tolist(), self._ends[places + 1].tolist(), strict=True)
        return [str(raw[start:end], "utf-8") for start, end in spans]

    @property
    def num_bytes(self) -> int:
        return self._raw.nbytes + self._ends.nbytes

    def tensors(self, what: str) -> dict[str, npt.NDArray[np.generic]]:
        return {f"{what}s": self._raw, f"{what}_ends": self._ends}

    @classmethod
    def read(cls, tensors: dict[str, npt.NDArray[np.generic]], what: str, count: int) -> _Texts:
        raw, ends = tensors[f"{what}s"], tensors[f"{what}_ends"]
        if (
            raw.ndim != 1
            or ends.shape != (count + 1,)
            or raw.dtype != np.uint8
            or ends.dtype != np.int64
        ):
            raise ValueError(f"{what}s do not fit the ids")
        if ends[0] != 0 or ends[-1] != len(raw) or (np.diff(ends) < 0).any():
            raise ValueError(f"{what}_ends must ascend from 0 to the end")
        texts = cls(raw.astype(np.uint8, copy=False), ends.astype(np.int64, copy=False))
        texts._check(what)
        return texts

    def _check(self, what: str) -> None:
        """Check that every text is UTF-8. Raises ValueError."""
        raw, ends = self._raw, self._ends
        if (raw[ends[ends < len(raw)]] >> 6 == 0b10).any():
            raise ValueError(f"{what}_ends: one is within a character")
        blocks = [*range(0, len(ends) - 1, _BLOCK), len(ends) - 1]
        for start, stop in pairwise(ends[blocks].tolist()):
            try:
                str(raw.data[start:stop], "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{what}s: {error}") from error


class ItemNames:
    """Names and titles of items by id. Immutable. n = items."""

    __slots__ = ("__weakref__", "_names", "_titles", "ids", "key")

    def __init__(self, ids: I64, names: _Texts, titles: _Texts, key: bytes = b"") -> None:
        """Take n ids, ascending and distinct, and their texts, as `make` and `load` check."""
        self.key = key  # of the dataset whose ids these are; empty = it has none
        self.ids = ids
        self._names = names
        self._titles = titles

    @classmethod
    def make(
        cls,
        names: Sequence[str],
        titles: Sequence[str] = (),
        key: bytes = b"",
        ids: I64 | None = None,
    ) -> ItemNames:
        """Make the table.

        Args:
            names: Name of each item, without repeats.
            titles: Title of each item, "" = none; empty = no item has a title.
            key: Key of the dataset; empty = it has none.
            ids: Their ids, if the caller has them.

        Raises:
            DataError: a name is invalid, occurs twice, or has the same id as another one.
        """
        try:
            ids = item_ids(names, key) if ids is None else ids
        except ValueError as error:
            raise DataError(f"item names: {error}") from error
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if twice := np.flatnonzero(np.diff(ids) == 0).tolist():
            first, second = names[order[twice[0]]], names[order[twice[0] + 1]]
            if first == second:
                raise DataError(f"item names: {first!r} occurs twice")
            raise DataError(
                f"item names: {first!r} and {second!r} have the same id; rename one of them"
            )
        titles = titles or [""] * len(names)
        return cls(
            ids,
            _Texts.of([names[place] for place in order]),
            _Texts.of([titles[place] for place in order]),
            key,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def names(self, ids: I64) -> list[str | int]:
        """Return the name of each id: [n] -> n names; an id without an entry is its own name."""
        return names_of([self], ids)

    def titles(self, ids: I64) -> list[str | None]:
        """Return the title of each id: [n] -> n texts, None where it has none."""
        return titles_of([self], ids)

    @property
    def has_hashed(self) -> bool:
        """Whether an item has a hashed id."""
        return bool(len(self.ids)) and bool(self.ids[-1] >= FIRST_HASHED)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.ids.nbytes + self._names.num_bytes + self._titles.num_bytes

    def find(self, ids: I64) -> I64:
        """Find the entry of each id, or -1: [n] -> [n]."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        at = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[at] == ids, at, -1)

    def names_at(self, entries: I64) -> list[str]:
        """Return the names of entries, which are results of `find`."""
        return self._names.take(entries)

    def titles_at(self, entries: I64) -> list[str]:
        """Return the titles of entries, which are results of `find`; "" = no title."""
        return self._titles.take(entries)

    def save(self, folder: Path) -> None:
        """Write `FILE` into a folder.

        Raises:
            DataError: it cannot be written.
        """
        tensors = {"ids": self.ids, **self._names.tensors("name"), **self._titles.tensors("title")}
        temporary = folder / f"{FILE}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(save(tensors, {_KEY: self.key.hex()} if self.key else None))
            os.replace(temporary, folder / FILE)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{folder / FILE}: cannot be written: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> ItemNames | None:
        """Read `FILE` of a folder; None = there is none. Equal tables share their memory.

        Raises:
            DataError: the file is damaged.
        """
        path = folder / FILE
        try:
            raw = path.read_bytes()
            digest = xxhash.xxh3_128_hexdigest(raw)
            if (known := _in_memory.get(digest)) is not None:
                return known
            tensors = load(raw)
            ids = tensors["ids"]
            if (
                ids.dtype != np.int64
                or ids.ndim != 1
                or (np.diff(ids) <= 0).any()
                or (ids < 0).any()
            ):
                raise ValueError("ids must be int64, ascending and not negative")
            names, titles = (_Texts.read(tensors, what, len(ids)) for what in ("name", "title"))
            found = cls(ids, names, titles, bytes.fromhex(_metadata(raw).get(_KEY, "")))
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise DataError(f"{path}: {error}") from error
        _in_memory[digest] = found
        return found


def _metadata(raw: bytes) -> dict[str, str]:
    """Read the metadata of a safetensors file, which `safetensors.numpy.load` leaves out."""
    header = msgspec.json.decode(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    found: dict[str, str] = header.get("__metadata__") or {}
    return found


def key_of(tables: Mapping[str, ItemNames]) -> bytes:
    """Return the key of the hashed ids of all tables; empty = they have none.

    Args:
        tables: Tables by the setting that they come from. Tables without hashed ids agree with all.

    Raises:
        ConfigError: two have different keys, so that one name would be two items.
    """
    hashed = {of: table for of, table in tables.items() if table.key or table.has_hashed}
    first = next(iter(hashed), "")
    for of, table in hashed.items():
        if table.key != hashed[first].key:
            raise ConfigError(
                f"{of}: its items have {_key_in_words(table)}, and those of {first} have "
                f"{_key_in_words(hashed[first])}; train both on one dataset, or prepare the newer "
                "one with --like the older"
            )
    return hashed[first].key if hashed else b""


def _key_in_words(table: ItemNames) -> str:
    return f"ids of the key {key_fingerprint(table.key)}" if table.key else "ids without a key"


def names_of(tables: Sequence[ItemNames], ids: I64) -> list[str | int]:
    """Return the name of each id by the first table that has it: [n] -> n names.

    An id that no table has is its own name.
    """
    names = names_of_numbers(ids)
    # An id that is not hashed is its own name, whatever the tables have.
    left = np.flatnonzero(is_hashed(ids))
    for table in tables:
        entries = table.find(ids[left])
        known = entries >= 0
        for place, name in zip(left[known].tolist(), table.names_at(entries[known]), strict=True):
            names[place] = name
        left = left[~known]
    return names


def collisions(names: Sequence[str], ids: I64, tables: Sequence[ItemNames]) -> dict[str, str]:
    """Return the names whose id is that of another name, and that name.

    Args:
        names: Names to check; "" = the id is the name.
        ids: Their ids.
        tables: Names that count as earlier than those to check.
    """
    owners: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, item, known in zip(names, ids.tolist(), names_of(tables, ids), strict=True):
        owner = known if isinstance(known, str) else owners.setdefault(item, name)
        if owner != name:
            found[name] = owner
    return found


def titles_of(tables: Sequence[ItemNames], ids: I64) -> list[str | None]:
    """Return the title of each id by the first table that has one, or None: [n] -> n titles."""
    titles: list[str | None] = [None] * len(ids)
    left = np.arange(len(ids))
    for table in tables:
        entries = table.find(ids[left])
        known = np.flatnonzero(entries >= 0)
        for place, title in zip(left[known].tolist(), table.titles_at(entries[known]), strict=True):
            titles[place] = title or None
        left = left[[titles[place] is None for place in left.tolist()]]
    return titles


_in_memory: WeakValueDictionary[str, ItemNames] = WeakValueDictionary()
"""Tables by the digest of their files: ranker, generator and vectors of a site have equal files."""

EMPTY = ItemNames.make([])
"""A table without entries: every id is its own name."""


def load_actions(folder: Path) -> ActionNames | None:
    """Read `ACTIONS_FILE` of a folder; None = there is none.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / ACTIONS_FILE
    try:
        names = msgspec.json.decode(path.read_bytes(), type=list[str])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
    if len(set(names)) != len(names):
        raise DataError(f"{path}: a name occurs twice")
    return ActionNames(names)
