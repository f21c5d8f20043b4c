"""pyarrow, or the command that installs it; and how cells of every type become text."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from npu_gr.core.errors import DataError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq
except ImportError as error:
    raise DataError("datasets need pip install 'npu_gr[parquet]'") from error

__all__ = [
    "NUMBER",
    "as_numbers",
    "as_text",
    "is_instant",
    "is_text",
    "pa",
    "pa_csv",
    "pc",
    "plain",
    "pq",
    "without_point",
]

NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_OTHER_LISTS = (
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_WHOLE = 2**53  # floats beyond it are no longer exact as whole numbers


def plain(array: Any) -> Any:
    """Give cells one of few types: strings, numbers, booleans, timestamps, dates, and lists of these.

    Texts of other types (views, categories, bytes, UUIDs) become strings; bytes that are not UTF-8 become null.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pc.take(plain(array.dictionary), array.indices)
    if isinstance(kind, pa.BaseExtensionType):
        return plain(array.storage)
    if pa.types.is_fixed_size_binary(kind) and kind.byte_width == 16:
        return _strings(array, lambda raw: str(uuid.UUID(bytes=raw)))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return _strings(array, _decoded)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pc.cast(array, pa.string())
    if pa.types.is_list(kind) or any(is_list(kind) for is_list in _OTHER_LISTS):
        value = kind.value_type
        is_string = pa.types.is_large_string(value) or pa.types.is_string_view(value) or pa.types.is_dictionary(value)
        return pa.array(array.to_pylist(), pa.list_(pa.string() if is_string else value))
    return array


def _strings(array: Any, text: Callable[[bytes], str | None]) -> Any:
    return pa.array([None if raw is None else text(raw) for raw in array.to_pylist()], pa.string())


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def is_text(array: Any) -> bool:
    """Whether the cells are texts: they may hold numbers and times all the same."""
    return bool(pa.types.is_string(array.type))


def is_instant(array: Any) -> bool:
    """Whether the cells are timestamps or dates by their type."""
    return bool(pa.types.is_timestamp(array.type) or pa.types.is_date(array.type))


def as_text(array: Any) -> Any:
    """Write cells as texts: a plain array of any type but lists -> an array of strings.

    A float that is a whole number loses its point: 42.0 is what a tool writes whose column of integers had gaps.
    """
    if pa.types.is_floating(array.type):
        wide = pc.cast(array, pa.float64())
        wide = pc.if_else(pc.is_nan(wide), None, wide)
        is_whole = pc.and_(pc.equal(pc.floor(wide), wide), pc.less(pc.abs(wide), _WHOLE))
        whole = pc.cast(pc.if_else(is_whole, wide, None), pa.int64())
        return pc.coalesce(pc.cast(whole, pa.string()), pc.cast(wide, pa.string()))
    return array if is_text(array) else pc.cast(array, pa.string())


def without_point(array: Any) -> Any:
    """Take `.0` from texts that are whole numbers."""
    return pc.replace_substring_regex(array, r"^(-?\d+)\.0*$", r"\1")


def as_numbers(array: Any) -> Any:
    """Read cells as float64, null where they are no finite numbers."""
    kind = array.type
    if is_text(array):
        text = pc.if_else(pc.match_substring_regex(array, NUMBER), pc.utf8_trim_whitespace(array), None)
        found = pc.cast(pc.replace_substring_regex(text, r"^\+", ""), pa.float64())
    elif pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        found = pc.cast(array, pa.float64(), safe=False)
    else:
        found = pa.nulls(len(array), pa.float64())
    return pc.if_else(pc.is_finite(found), found, None)
