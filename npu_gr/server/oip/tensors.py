"""Tensors of the Open Inference Protocol v2: what they hold, and their binary form.

    BYTES             every element: four bytes of its length, little-endian, then the element
    everything else   little-endian elements, one after the other

Values are read against what the model takes: how many there may be is checked before an object is made of any.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np

from npu_gr.core.errors import BadRequest, TooLarge, Unprocessable
from npu_gr.core.words import quoted
from npu_gr.server.codec.bulk import count_elements

BYTES = "BYTES"
DTYPES = {  # of the datatypes that a model here takes or gives; BYTES has none
    "BOOL": np.dtype("?"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_LISTS: dict[str, Any] = {  # what JSON has of each
    BYTES: list[str],
    "BOOL": list[bool],
    "FP32": list[float],
    "FP64": list[float],
}
_LENGTH = struct.Struct("<I")


class Tensor(NamedTuple):
    """An input as it came, or an output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    # raw bytes, or of BYTES a list of str; of an input also what is not read yet: `msgspec.Raw` with a list in JSON, or
    # a field of protobuf, where BYTES has bytes
    values: Any


def check_shape(tensor: Tensor, limit: int, *, is_one: bool) -> int:
    """Count the elements that a shape has room for.

    Args:
        tensor: an input.
        limit: elements at most.
        is_one: it must have exactly one.

    Raises:
        Unprocessable: the shape is not the model's. TooLarge: it is over the limit.
    """
    wanted = "[1]" if is_one else "[-1]"
    if len(tensor.shape) != 1 or tensor.shape[0] < 0 or (is_one and tensor.shape != (1,)):
        raise Unprocessable(f"{tensor.name}: shape {quoted(list(tensor.shape))}; takes {wanted}")
    if tensor.shape[0] > limit:
        raise TooLarge(f"{tensor.name}: {tensor.shape[0]} entries, the limit is {limit}")
    return tensor.shape[0]


def texts_of(tensor: Tensor, num: int) -> list[str]:
    """Read the elements of a BYTES tensor, which are UTF-8.

    Args:
        tensor: of BYTES.
        num: elements that its shape has.

    Raises:
        Unprocessable: they are not so many, or one is not UTF-8. BadRequest: JSON that cannot be parsed.
    """
    if isinstance(tensor.values, list):
        texts: list[str] = tensor.values
    elif isinstance(tensor.values, msgspec.Raw):
        texts = _from_json(tensor, num)
    elif isinstance(tensor.values, bytes):
        texts = _split(tensor, num)
    else:
        _check_count(tensor, len(tensor.values), num)
        texts = [_text(tensor, index, raw) for index, raw in enumerate(tensor.values)]
    _check_count(tensor, len(texts), num)
    return texts


def raw_of(tensor: Tensor, num: int) -> bytes:
    """Read the elements of a tensor of numbers as raw little-endian bytes.

    Args:
        tensor: of a datatype of `DTYPES`.
        num: elements that its shape has.

    Raises:
        Unprocessable: they are not so many, or one is out of range. BadRequest: JSON that cannot be parsed.
    """
    dtype = DTYPES[tensor.datatype]
    if isinstance(tensor.values, bytes):
        raw = tensor.values
    else:
        listed = _from_json(tensor, num) if isinstance(tensor.values, msgspec.Raw) else tensor.values
        _check_count(tensor, len(listed), num)
        try:
            raw = np.fromiter(listed, dtype, num).tobytes()
        except OverflowError:
            raise Unprocessable(f"{tensor.name}: a number is out of the range of {tensor.datatype}") from None
    if len(raw) != num * dtype.itemsize:
        raise Unprocessable(
            f"{tensor.name}: {len(raw)} bytes, {num} elements of {tensor.datatype} have {num * dtype.itemsize}"
        )
    return raw


def one_of(tensor: Tensor) -> bool | int | float | str:
    """Read the only element. Raises as `texts_of` and `raw_of`; Unprocessable also for a number that is not finite."""
    if tensor.datatype == BYTES:
        return texts_of(tensor, 1)[0]
    value: bool | int | float = np.frombuffer(raw_of(tensor, 1), DTYPES[tensor.datatype])[0].item()
    if isinstance(value, float) and not math.isfinite(value):
        raise Unprocessable(f"{tensor.name}: {value} is not a finite number")
    return value


def pack(texts: list[str]) -> bytes:
    """Write the binary form of a BYTES tensor."""
    parts: list[bytes] = []
    for text in texts:
        raw = text.encode()
        parts += (_LENGTH.pack(len(raw)), raw)
    return b"".join(parts)


def _check_count(tensor: Tensor, count: int, num: int) -> None:
    if count != num:
        raise Unprocessable(f"{tensor.name}: {count} elements, its shape has {num}")


def _text(tensor: Tensor, index: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Unprocessable(f"{tensor.name}: element {index} is not UTF-8") from None


def _from_json(tensor: Tensor, num: int) -> list[Any]:
    raw = bytes(tensor.values)
    if (most := count_elements(raw, 1, num)) is not None and most > max(num, 1):
        raise Unprocessable(f"{tensor.name}: {most} elements, its shape has {num}")
    try:
        listed: list[Any] = msgspec.json.decode(raw, type=_LISTS.get(tensor.datatype, list[int]))
    except msgspec.ValidationError as error:
        raise Unprocessable(f"{tensor.name}: data: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"{tensor.name}: data: cannot be parsed") from None
    return listed


def _split(tensor: Tensor, num: int) -> list[str]:
    """Cut the binary form of a BYTES tensor into its elements."""
    raw: bytes = tensor.values
    texts = []
    at = 0
    for index in range(num):
        end = at + _LENGTH.size
        if end > len(raw):
            raise Unprocessable(f"{tensor.name}: its bytes end before element {index} of {num}")
        (length,) = _LENGTH.unpack_from(raw, at)
        at = end + length
        if at > len(raw):
            raise Unprocessable(f"{tensor.name}: element {index} has {length} bytes, and {len(raw) - end} are left")
        texts.append(_text(tensor, index, raw[end:at]))
    if at != len(raw):
        raise Unprocessable(f"{tensor.name}: {len(raw) - at} bytes behind its {num} elements")
    return texts
