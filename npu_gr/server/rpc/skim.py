"""Is a long message worth decoding? Found by walking through its bytes, without making its objects.

Protobuf decodes a message in one call that nothing interrupts and that holds the interpreter's lock, so a thread would
not help: 4 MB of empty names are two million objects. So what a message has beside its columns is bounded in bytes and
the columns in elements, as HTTP's bodies are (`codec/bulk.py`), before an object is made. Numbers in a row are counted
at once, everything else one by one, and the caller lets others have the event loop in between. Repeated numbers that
come one by one, as nobody has written them since the first version of protobuf, count as bytes beside the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from npu_gr.core.errors import BadRequest, TooLarge
from npu_gr.server.codec.bulk import LOOSE_BYTES
from npu_gr.server.config import ServerConfig

PIECE = 4096  # fields: under a millisecond
_VARINT = 0  # wire types
_FIXED64 = 1
_LENGTH = 2
_FIXED32 = 5


class _Is(Enum):
    """What a field is to whoever bounds its message."""

    LOOSE = auto()  # all of its bytes count
    BLOB = auto()  # its content costs nothing: it is copied as it is
    ELEMENT = auto()  # an element of a column: a text, or bytes
    NUMBERS = auto()  # a column of numbers, in a row
    MESSAGE = auto()


class _Field(NamedTuple):
    name: str
    is_: _Is
    number_bytes: int = 0  # of a number in a row; 0 = as many as it takes
    within: Any = None  # descriptor of a message


def most_elements(config: ServerConfig) -> int:
    """Return how many elements the longest message has: a history's three columns, candidates, and features."""
    return 3 * config.max_history_events + config.max_candidates + config.max_feature_values


def skim(body: bytes, kind: Any, most_elements: int, most_bytes: int = LOOSE_BYTES) -> Iterator[None]:
    """Walk through a message, and stop after some `PIECE` fields each time.

    Args:
        body: as it came.
        kind: its descriptor.
        most_elements: of all columns together.
        most_bytes: beside the columns.

    Raises:
        TooLarge: it has more of either. BadRequest: it is no message.
    """
    num_elements = loose_bytes = num_fields = 0
    levels = [(kind, 0, len(body))]
    while levels:
        level, at, end = levels.pop()
        fields = _fields(level)
        while at < end:
            began = at
            tag, at = _varint(body, at, end)
            field = fields.get(tag >> 3, _UNKNOWN)
            wire = tag & 7
            begins = at  # the content
            if wire == _LENGTH:
                num_bytes, begins = _varint(body, at, end)
                at = begins + num_bytes
            elif wire == _VARINT:
                _, at = _varint(body, at, end)
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
            else:
                raise _broken()
            if at > end:
                raise _broken()
            num_fields += 1
            if field.is_ is _Is.ELEMENT and wire == _LENGTH:
                num, at = _row(body, began, at, end)
                num_elements += num
                num_fields += num
            elif field.is_ is _Is.NUMBERS and wire == _LENGTH:
                num_elements += _count(body[begins:at], field.number_bytes)
            elif wire == _LENGTH and field.is_ in (_Is.MESSAGE, _Is.BLOB):
                loose_bytes += begins - began
                if field.is_ is _Is.MESSAGE and begins < at:
                    levels.append((field.within, begins, at))
            else:
                loose_bytes += at - began
            if num_elements > most_elements:
                raise TooLarge(f"{field.name}: the message has over {most_elements} elements, the limit")
            if loose_bytes > most_bytes:
                raise TooLarge(f"message: over {most_bytes} bytes beside its columns, the limit")
            if num_fields >= PIECE:
                num_fields = 0
                yield


@cache
def _fields(kind: Any) -> dict[int, _Field]:
    return {one.number: _field(one) for one in kind.fields}


def _field(one: Any) -> _Field:
    if one.type in (one.TYPE_MESSAGE, one.TYPE_GROUP):
        return _Field(one.name, _Is.MESSAGE, within=one.message_type)
    if one.type in (one.TYPE_STRING, one.TYPE_BYTES):
        if one.is_repeated:
            return _Field(one.name, _Is.ELEMENT)
        return _Field(one.name, _Is.BLOB if one.type == one.TYPE_BYTES else _Is.LOOSE)
    if not one.is_repeated:
        return _Field(one.name, _Is.LOOSE)
    fixed = {
        8: (one.TYPE_DOUBLE, one.TYPE_FIXED64, one.TYPE_SFIXED64),
        4: (one.TYPE_FLOAT, one.TYPE_FIXED32, one.TYPE_SFIXED32),
    }
    number_bytes = next((size for size, types in fixed.items() if one.type in types), 0)
    return _Field(one.name, _Is.NUMBERS, number_bytes)


_UNKNOWN = _Field("", _Is.LOOSE)


def _row(body: bytes, began: int, at: int, end: int) -> tuple[int, int]:
    """Count short elements of a column that follow each other, at most `PIECE`: a tenth of the time of one by one.

    Args:
        body: the message.
        began, at: the first element.
        end: of the message that has the column.

    Returns:
        How many, and where they end.
    """
    tag = body[began]
    num = 1
    if tag < 0x80:
        while at + 1 < end and body[at] == tag and body[at + 1] < 0x80 and num < PIECE:
            at += 2 + body[at + 1]
            num += 1
        if at > end:
            raise _broken()
    return num, at


def _count(row: bytes, number_bytes: int) -> int:
    """Count the numbers in a row."""
    if number_bytes:
        return len(row) // number_bytes
    return int(np.count_nonzero(np.frombuffer(row, np.uint8) < 0x80))  # each ends with a byte without the high bit


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = body[at]
        at += 1
        if byte < 0x80:
            return value | byte << shift, at
        value |= (byte & 0x7F) << shift
    raise _broken()


def _broken() -> BadRequest:
    return BadRequest("the message cannot be parsed")
