"""Read the cells of a column: with Arrow for the first rows (to guess), in SQL for all rows.

A column of DuckDB is a text, a number, a time, or a list of these.
"""

from __future__ import annotations

import ast
import re
from datetime import date
from decimal import Decimal
from typing import Any, Literal

import orjson

from npu_gr.core.errors import DataError
from npu_gr.core.feature_schema import values
from npu_gr.core.feature_schema.values import BLANKS, BOOLEANS, MAX_NUMBER, MISSING, number_of

try:
    import duckdb
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError as error:
    raise DataError("datasets need pip install 'npu_gr[parquet]'") from error

__all__ = ["duckdb", "pa", "pc", "pq"]

Cells = Literal["list", "blanks", "bars", "semicolons", "commas", "json", "number", "comma", "text"]
_MARKS = {"blanks": " ", "bars": "|", "semicolons": ";", "commas": ", "}
NUMBER = rf"^\s*{values.NUMBER}\s*$"
MAX_CELL_CHARS = 4096  # the rest of a longer text is ignored; no name or value is that long
JOINT = "\x1f"  # separates the values of a list
_LONGEST_MISSING = max(map(len, MISSING))
_MISSING_PATTERN = "|".join(map(re.escape, sorted(MISSING)))
_WHOLE_WITH_POINT = r"^(-?\d+)\.0*$"
_WHOLE = 2**53  # larger floats cannot represent every whole number
_FLOATS = ("FLOAT", "DOUBLE")
_INTEGERS = tuple(
    f"{sign}{size}"
    for sign in ("", "U")
    for size in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
)


def is_text(array: Any) -> bool:
    """Whether the type is text; the texts may still be numbers or times."""
    return bool(pa.types.is_string(array.type))


def is_instant(array: Any) -> bool:
    """Whether the type is a timestamp or a date."""
    return bool(pa.types.is_timestamp(array.type) or pa.types.is_date(array.type))


def as_text(array: Any) -> Any:
    """Write cells as texts: an array of any type but lists -> an array of strings.

    A float that is a whole number loses its point: pandas writes 42.0 where a column of integers
    has missing cells.
    """
    if pa.types.is_floating(array.type):
        wide = pc.cast(array, pa.float64())
        wide = pc.if_else(pc.is_nan(wide), None, wide)
        is_whole = pc.and_(pc.equal(pc.floor(wide), wide), pc.less(pc.abs(wide), _WHOLE))
        whole = pc.cast(pc.if_else(is_whole, wide, None), pa.int64())
        return pc.coalesce(pc.cast(whole, pa.string()), pc.cast(wide, pa.string()))
    return array if is_text(array) else pc.cast(array, pa.string())


def without_point(array: Any) -> Any:
    """Remove `.0` from texts that are whole numbers."""
    return pc.replace_substring_regex(array, _WHOLE_WITH_POINT, r"\1")


def has_point(array: Any) -> bool:
    """Whether all texts are whole numbers written as 42.0, as pandas does with missing cells."""
    if not is_text(array):
        return False
    texts = pc.drop_null(array)
    is_whole = pc.match_substring_regex(texts, r"^\s*(-?\d+\.0*|nan|NaN|NULL|)\s*$")
    return bool(len(texts)) and bool(pc.all(is_whole).as_py())


def finite_number(cell: Any, *, has_comma: bool = False) -> float | None:
    """Read a cell as a number; None if it is missing, too large for float32, or not one.

    Args:
        cell: The cell.
        has_comma: Whether numbers are written as 1.234,56.
    """
    if has_comma and isinstance(cell, str):
        cell = cell.replace(".", "").replace(",", ".")
    try:
        number = number_of(cell)
    except TypeError:
        return None
    return number if abs(number) <= MAX_NUMBER else None


def values_of(cell: Any, cells: Cells) -> list[str]:
    """List the distinct texts in a cell; an empty cell has none."""
    if cell is None:
        return []
    if isinstance(cell, list):
        parts = [plain_text(part) for part in cell]
    elif cells in _MARKS:
        parts = plain_text(cell).split(_MARKS[cells])
    elif cells == "json":
        parts = [plain_text(part) for part in _listed(plain_text(cell))]
    else:
        parts = [plain_text(cell)]
    parts = [part.strip(BLANKS) for part in parts]
    return list(dict.fromkeys(part for part in parts if part not in MISSING))


def _listed(text: str) -> list[Any]:
    """Read a list that is written as JSON or by Python; a text that is neither is one value."""
    for read in (orjson.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(found, list):
            return found
    return [text]


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


def literal(text: str) -> str:
    """Quote a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Quote the name of a column as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def is_list_type(kind: str) -> bool:
    """Whether a DuckDB type is a list or an array of fixed length."""
    return kind.endswith("]")


def plain_sql(column: str, kind: str, *, has_uuids: bool = False) -> str:
    """Convert cells to one of our types: categories, bytes and UUIDs to texts, cut at a limit.

    Args:
        has_uuids: Whether bytes are UUIDs; else they are UTF-8, null where invalid.
    """
    if kind == "BLOB":
        uuid = (
            f"lower(concat_ws('-', {', '.join(f'hex({column})[{part}]' for part in _UUID_PARTS)}))"
        )
        return uuid if has_uuids else f"left(TRY(decode({column})), {MAX_CELL_CHARS})"
    if kind == "UUID" or kind.startswith("ENUM"):
        return f"CAST({column} AS VARCHAR)"
    if kind == "VARCHAR":
        return f"left({column}, {MAX_CELL_CHARS})"
    if is_list_type(kind):
        inner = kind.rpartition("[")[0]
        is_words = inner in ("VARCHAR", "UUID", "BLOB") or inner.startswith("ENUM")
        return f"CAST({column} AS {'VARCHAR' if is_words else inner}[])"
    return column


_UUID_PARTS = ("1:8", "9:12", "13:16", "17:20", "21:32")


def text_sql(column: str, kind: str) -> str:
    """Convert cells to texts, as `as_text` does; a list of one cell counts as that cell."""
    if is_list_type(kind):
        inner = text_sql(f"{column}[1]", kind.rpartition("[")[0])
        return f"CASE WHEN len({column}) = 1 THEN {inner} END"
    if kind in _FLOATS:
        is_whole = f"{column} = floor({column}) AND abs({column}) < {_WHOLE}"
        return (
            f"CASE WHEN isnan({column}) THEN NULL WHEN {is_whole} THEN CAST(CAST({column} AS "
            f"BIGINT) AS VARCHAR) ELSE CAST({column} AS VARCHAR) END"
        )
    return column if kind == "VARCHAR" else f"CAST({column} AS VARCHAR)"


def name_sql(column: str, kind: str, *, with_point: bool = False) -> str:
    """Convert names to texts without blanks around them, null where one is missing.

    Args:
        with_point: Whether whole numbers are written as 42.0.
    """
    text = _trimmed_sql(text_sql(column, kind), kind)
    if with_point:
        text = f"regexp_replace({text}, '{_WHOLE_WITH_POINT}', '\\1')"
    return (
        f"CASE WHEN length({text}) > {_LONGEST_MISSING} OR NOT {_is_missing_text(text)} THEN "
        f"{text} END"
    )


def has_blanks_sql(column: str, kind: str) -> str:
    """Whether `name_sql` removes blanks around a name."""
    text = text_sql(column, kind)
    trimmed = _trimmed_sql(text, kind)
    return "FALSE" if trimmed is text else f"coalesce({trimmed} <> {text}, FALSE)"


def _trimmed_sql(text: str, kind: str) -> str:
    has_texts = kind == "VARCHAR" or is_list_type(kind)
    return f"trim({text}, {literal(BLANKS)})" if has_texts else text


def _is_missing_text(text: str) -> str:
    """Whether a text is one of MISSING.

    Not with `IN`: DuckDB turns that into a join, which does not keep the order of rows.
    """
    return f"regexp_full_match({text}, '{_MISSING_PATTERN}')"


def number_sql(
    column: str, kind: str, *, has_booleans: bool = False, has_comma: bool = False
) -> str:
    """Convert cells to DOUBLE, null where they are not numbers that float32 can hold.

    Args:
        has_booleans: Whether booleans are 1 and 0.
        has_comma: Whether texts are written as 1.234,56.
    """
    if kind == "VARCHAR":
        if has_comma:
            column = f"replace(replace({column}, '.', ''), ',', '.')"
        text = _trimmed_sql(column, kind)
        booleans = "".join(
            f" WHEN {text} = {literal(name)} THEN {number}" for name, number in BOOLEANS.items()
        )
        number = (
            f"CASE WHEN regexp_full_match({text}, {literal(values.NUMBER)}) THEN "
            f"TRY_CAST({text} AS DOUBLE){booleans if has_booleans else ''} END"
        )
    elif (
        kind in _FLOATS
        or kind in _INTEGERS
        or kind.startswith("DECIMAL")
        or (kind == "BOOLEAN" and has_booleans)
    ):
        number = f"CAST({column} AS DOUBLE)"
    else:
        return "CAST(NULL AS DOUBLE)"
    # NaN is over every number in DuckDB
    return f"CASE WHEN abs({number}) <= {MAX_NUMBER} THEN {number} END"


def is_missing_sql(column: str, kind: str) -> str:
    """Whether cells are missing."""
    return f"({column} IS NULL OR isnan({column}))" if kind in _FLOATS else f"{column} IS NULL"


def is_integer_type(kind: str) -> bool:
    """Whether a DuckDB type is an integer."""
    return kind in _INTEGERS


def values_sql(column: str) -> str:
    """Join the distinct values of a list in their order; '' if it has none."""
    trimmed = _trimmed_sql("text", "VARCHAR")
    texts = f"list_transform(CAST({column} AS VARCHAR[]), lambda text: {trimmed})"
    is_once = f"NOT {_is_missing_text('text')} AND list_position({texts}, text) = place"
    once = f"list_filter({texts}, lambda text, place: {is_once})"
    return f"coalesce(array_to_string({once}, '{JOINT}'), '')"
