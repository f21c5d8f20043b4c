"""Bounds the cost of decoding a long body, by skimming it without making its objects.

Decoding is one uninterruptible call that blocks the event loop; a thread would not help, since the
call holds the GIL. An element of a list costs 20 ns, an entry of a map over a microsecond, so 8 MB
of names would block the loop for a second before the limit of the map is checked.

Therefore each column is bounded in elements, and the rest of the body in bytes, before any object
is made. Skimming costs up to 5 ns a byte, and another 5 for lists of texts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import inspect

from npu_gr.core.errors import TooLarge
from npu_gr.server.config import ServerConfig

# Largest part of a body outside of its columns; it takes 10 ms to decode if it is all maps.
LOOSE_BYTES = 65_536


class _Column(NamedTuple):
    """A column of a body."""

    path: tuple[str, ...]
    limit: str  # setting of section `server` with the largest number of elements
    element_bytes: int  # bytes of an element in raw form
    # largest number of columns of a map, whose elements count together; 0 = it is one column
    most_entries: int = 0


class Skimmer(NamedTuple):
    """How to skim bodies of a Struct."""

    struct: type[msgspec.Struct]  # the same fields, with raw undecoded values
    columns: tuple[_Column, ...]


@cache
def skimmer(cls: Any) -> Skimmer:
    """Derive the skimmer of a Struct."""
    about = inspect.type_info(cls)
    assert isinstance(about, inspect.StructType)
    fields: list[tuple[str, Any, Any]] = []
    columns: list[_Column] = []
    for field in about.fields:
        extra, kinds = parts(field.type)
        nested = next((kind for kind in kinds if isinstance(kind, inspect.StructType)), None)
        if nested is not None:
            inner = skimmer(nested.cls)
            fields.append((field.encode_name, inner.struct | None, None))
            columns += [
                column._replace(path=(field.encode_name, *column.path)) for column in inner.columns
            ]
        else:
            fields.append((field.encode_name, msgspec.Raw, msgspec.Raw()))
        if "limit" in extra:
            most = extra.get("most_entries", 0)
            columns.append(
                _Column((field.encode_name,), extra["limit"], extra["element_bytes"], most)
            )
    struct = msgspec.defstruct(
        about.cls.__name__, fields, kw_only=True, forbid_unknown_fields=True, gc=False
    )
    return Skimmer(struct, tuple(columns))


def check(
    skimmed: msgspec.Struct, num_bytes: int, cls: Any, config: ServerConfig, most: int
) -> None:
    """Check the length of each column, and the number of bytes outside of the columns.

    Args:
        skimmed: Instance of `skimmer(cls).struct`.
        num_bytes: Length of the body.
        cls: Struct of the body.
        config: Bounds the columns.
        most: Largest number of bytes outside of the columns.

    Raises:
        TooLarge: The message names the column and its limit.
    """
    loose_bytes = num_bytes
    for column in skimmer(cls).columns:
        value: Any = skimmed
        for name in column.path:
            value = None if value is None else getattr(value, name)
        raw = bytes(value) if value else b""
        limit: int = getattr(config, column.limit)
        name = ".".join(column.path)
        if column.most_entries:
            count = _count_map(raw, column, limit, name)
        else:
            count = count_elements(raw, column.element_bytes, limit)
        if count is None:
            continue
        if count > limit:
            raise TooLarge(f"{name}: {count} entries, the limit is {limit}")
        loose_bytes -= len(raw)
    if loose_bytes > most:
        raise TooLarge(f"body: {loose_bytes} bytes outside of its columns, the limit is {most}")


def count_elements(raw: bytes, element_bytes: int, limit: int) -> int | None:
    """Count the elements of an undecoded column, or return an upper bound within the limit.

    None = the value is not a column.
    """
    if not raw:
        return None
    first = raw[0]
    if first == 0x5B:  # [ of JSON
        most = raw.count(b",") + 1
        return most if most <= limit or b'"' not in raw else _count_texts(raw)
    if first == 0x22:  # " of JSON: base64
        return _decoded_bytes(raw) // element_bytes
    if 0x90 <= first <= 0x9F:  # fixarray of msgpack
        return first & 0x0F
    if first in _LENGTH_BYTES:
        is_list, width = _LENGTH_BYTES[first]
        num = int.from_bytes(raw[1 : 1 + width], "big")
        return num if is_list else num // element_bytes
    return None


def _count_map(raw: bytes, column: _Column, limit: int, name: str) -> int | None:
    """Count the elements of all columns of a map together, those of nested lists included.

    None = the value is not a map.

    Raises:
        TooLarge: The map has too many columns.
    """
    if not raw or (raw[0] != ord("{") and raw[0] not in _MAPS and not 0x80 <= raw[0] <= 0x8F):
        return None
    is_json = raw[0] == ord("{")
    if is_json:
        num_columns = raw.count(b":")
        if num_columns > column.most_entries:
            num_columns = _count_outside(raw, ord(":"))
    else:
        width = _MAPS.get(raw[0], 0)
        num_columns = int.from_bytes(raw[1 : 1 + width], "big") if width else raw[0] & 0x0F
    if num_columns > column.most_entries:
        raise TooLarge(f"{name}: {num_columns} columns, the limit is {column.most_entries}")
    decode = _JSON_MAP.decode if is_json else _MSGPACK_MAP.decode
    total = 0
    try:
        for value in decode(raw).values():
            part = bytes(value)
            count = count_elements(part, column.element_bytes, limit) or 0
            if not is_json and part and _is_list(part[0]) and count <= limit < len(part):
                count += sum(
                    count_elements(bytes(one), 1, limit) or 0 for one in _MSGPACK_LIST.decode(part)
                )
            total += count
            if total > limit:
                break
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # decoding will raise the error
    return total


def _is_list(marker: int) -> bool:
    return 0x90 <= marker <= 0x9F or marker in (0xDC, 0xDD)


def _decoded_bytes(raw: bytes) -> int:
    """Return the decoded length of a base64 JSON text, whose slash or padding may be escaped."""
    num_chars = len(raw) - 2 - raw.count(b"\\/") - 5 * raw.count(b"\\u")
    end = raw[-13:-1].replace(b"\\u003d", b"=").replace(b"\\u003D", b"=")
    return num_chars * 3 // 4 - (len(end) - len(end.rstrip(b"=")))


def _count_texts(raw: bytes) -> int:
    """Count the elements of a JSON list of texts and numbers; commas within texts do not count."""
    return _count_outside(raw, ord(",")) + 1


def _count_outside(raw: bytes, sign: int) -> int:
    """Count a character of JSON outside of its texts."""
    # Without escapes every quotation mark begins or ends a text. First the pairs of backslashes
    # are removed, from left to right as a parser reads them.
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    signs = np.frombuffer(raw, np.uint8)
    is_between = ~np.logical_xor.accumulate(signs == ord('"'))
    return int(np.count_nonzero(is_between & (signs == sign)))


_JSON_MAP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MSGPACK_MAP = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_MSGPACK_LIST = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MAPS = {0xDE: 2, 0xDF: 4}  # msgpack: marker of a map -> bytes of its length
_LENGTH_BYTES = {  # msgpack: marker -> (whether it is an array, bytes of its length)
    0xDC: (True, 2),
    0xDD: (True, 4),
    0xC4: (False, 1),
    0xC5: (False, 2),
    0xC6: (False, 4),
}


def parts(kind: inspect.Type) -> tuple[dict[str, Any], list[inspect.Type]]:
    """Return the merged `extra` of a type's Meta, and the members of the union (or the type)."""
    if isinstance(kind, inspect.Metadata):
        extra, kinds = parts(kind.type)
        return {**extra, **(kind.extra or {})}, kinds
    if isinstance(kind, inspect.UnionType):
        each = [parts(one) for one in kind.types]
        extras = {key: value for extra, _ in each for key, value in extra.items()}
        return extras, [one for _, kinds in each for one in kinds]
    return {}, [kind]
