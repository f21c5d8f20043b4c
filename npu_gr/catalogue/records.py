"""Reads files of items and their semantic IDs (SIDs). A file with a bad record is rejected.

The suffix gives the format:

    .jsonl, .jsonl.gz, .jsonl.zst
        one item a line, blank lines are skipped:
        {"item_id": 1, "sid": [3, 7, 1], "order": 0.5, "attributes": {"stock": true}}
        `order` and `attributes` are optional; an unknown key is an error
    .parquet
        columns `item_id`, `sid` (a list of integers) and optionally `order`; each other column is
        an attribute. Needs npu_gr[parquet]
    .bin
        xLLM: {int64 item; int32 t0, t1, t2}, little endian, 20 bytes a record

A line of JSONL may also have `features`, for each name a value or a list of values, from which a
ranker scores an item that it was not trained with. Items may have different features.

Every record must have as many codes as the first, an order score if and only if the first has one,
and the same attributes, each of one type (boolean, number, text), since a filter could not guess
missing values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.catalogue.trie import I32, Mask
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.feature_schema.values import FeatureValue
from npu_gr.core.lines import read_lines
from npu_gr.core.names import item_ids
from npu_gr.core.text_format import quoted

# bool, int64, float64 or str; each text takes 4 bytes a letter of the longest one
Column = npt.NDArray[Any]
Features = Mapping[str, FeatureValue | list[FeatureValue]]  # features of one item, by name
Place = Callable[[int], str]  # row -> "<file>, line <n>" or similar, for a message

_XLLM = np.dtype([("item_id", "<i8"), ("sid", "<i4", (3,))])
_MAX_CODE = 2**31 - 1
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The records of a catalogue, in the order of the file. N = items, L = codes of a SID."""

    item_ids: I64  # [N] not negative; `build_trie` rejects repeated ones
    # [N, L] not negative; L = 0 if there are no items
    sids: I32
    order: F32 | None  # [N] finite
    attributes: dict[str, Column]  # by name, [N] each
    # by item id; items without features have no entry
    features: dict[int, Features] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.item_ids)


class Record(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One item, as in a line of JSONL."""

    item_id: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT64)]
    sid: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_CODE)]], msgspec.Meta(min_length=1)
    ]
    order: float | None = None
    attributes: dict[str, bool | int | float | str] = {}
    features: dict[str, FeatureValue | list[FeatureValue]] = {}


def read_items(path: Path) -> Items:
    """Read a catalogue file.

    Raises:
        DataError: names the file, the line (JSONL) or the record, counted from 1, and the reason.
    """
    if ".jsonl" in path.suffixes:
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".bin":
        return _read_xllm(path)
    raise DataError(f"{path}: a catalogue is .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .bin")


def _read_jsonl(path: Path) -> Items:
    decoder = msgspec.json.Decoder(Record)
    numbers: list[int] = []
    records: list[Record] = []

    def place(row: int) -> str:
        return f"{path}, line {numbers[row]}"

    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        numbers.append(number)
        records.append(record)
    return as_items(records, place)


def as_items(records: Sequence[Record], place: Place) -> Items:
    """Convert records to columns.

    Args:
        records: Records, may be empty.
        place: Function that describes a row, for a message.

    Raises:
        DataError: names the first record that differs in form from record 1, and the difference.
    """
    if not records:
        return Items(np.empty(0, np.int64), np.empty((0, 0), np.int32), None, {})
    for row, record in enumerate(records):
        if difference := _difference(record, records[0]):
            raise DataError(f"{place(row)}: {difference}")
    has_blend = records[0].order is not None
    return Items(
        np.array([record.item_id for record in records], np.int64),
        np.array([record.sid for record in records], np.int32),
        _order(np.array([record.order for record in records], np.float64), place)
        if has_blend
        else None,
        {
            name: _json_column(name, [record.attributes[name] for record in records], place)
            for name in records[0].attributes
        },
        {record.item_id: record.features for record in records if record.features},
    )


def _difference(record: Record, first: Record) -> str:
    """Describe how the form of a record differs from that of the first one; "" if it does not."""
    if len(record.sid) != len(first.sid):
        return f"a SID of {len(record.sid)} codes, the first record has {len(first.sid)}"
    if (record.order is None) != (first.order is None):
        return (
            ("an order score, the first record has none")
            if first.order is None
            else "no order score"
        )
    if record.attributes.keys() != first.attributes.keys():
        name = min(record.attributes.keys() ^ first.attributes.keys())
        has = "no" if name in first.attributes else "an"
        return f"{has} attribute {quoted(name)}, unlike the first record"
    return ""


def _json_column(name: str, values: list[bool | int | float | str], place: Place) -> Column:
    types = {type(value) for value in values}
    if types == {int, float}:
        types = {float}
    if len(types) > 1:
        numbers = (int, float)
        kind = numbers if type(values[0]) in numbers else (type(values[0]),)
        row = next(row for row, value in enumerate(values) if type(value) not in kind)
        raise DataError(
            f"{place(row)}: attribute {quoted(name)} is {quoted(values[row])}, the first record "
            f"has {quoted(values[0])}"
        )
    try:
        return np.array(
            values, {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}[types.pop()]
        )
    except OverflowError as error:
        row = next(row for row, value in enumerate(values) if abs(int(value)) > _MAX_INT64)
        raise DataError(
            f"{place(row)}: attribute {quoted(name)} is {quoted(values[row])}, too large"
        ) from error


def _read_xllm(path: Path) -> Items:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error}") from error
    num_records, rest = divmod(len(data), _XLLM.itemsize)
    if rest:
        raise DataError(
            f"{path}, record {num_records + 1}: cut short, {rest} of {_XLLM.itemsize} bytes"
        )
    records = np.frombuffer(data, _XLLM)
    place = _by_record(path)
    return Items(_item_ids(records["item_id"], place), _codes(records["sid"], place), None, {})


def _read_parquet(path: Path) -> Items:
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs pip install 'npu_gr[parquet]'") from error
    try:
        # not read_table, which would turn folders such as day=1 into columns
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: {error}") from error
    place = _by_record(path)
    names = table.column_names
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}: several columns {name!r}")
    for name in ("item_id", "sid"):
        if name not in names:
            raise DataError(f"{path}: no column {name!r}; there are {', '.join(names)}")

    def values(name: str, column: Any, per_record: int = 1) -> Column:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy())) // per_record
            raise DataError(f"{place(row)}: no value in column {name!r}")
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return column.to_numpy().astype(np.str_)  # type: ignore[no-any-return]
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return column.to_numpy()  # type: ignore[no-any-return]
        raise DataError(
            f"{path}: column {name!r} holds {kind}, want integers, numbers, text, or true and false"
        )

    def integers(name: str, column: Any, per_record: int = 1) -> Column:
        if not pa.types.is_integer(column.type):
            raise DataError(f"{path}: column {name!r} holds {column.type}, want integers")
        return values(name, column, per_record)

    def sids(column: Any) -> I32:
        kind = column.type
        if not (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            raise DataError(f"{path}: column 'sid' holds {kind}, want lists of integers")
        lengths = values("sid", pc.list_value_length(column))
        if not len(lengths):
            return np.empty((0, 0), np.int32)
        num_levels = int(lengths[0])
        if not num_levels:
            raise DataError(f"{place(0)}: a SID without codes")
        if (lengths != num_levels).any():
            row = int(np.argmax(lengths != num_levels))
            raise DataError(
                f"{place(row)}: a SID of {lengths[row]} codes, the first record has {num_levels}"
            )
        return _codes(
            integers("sid", pc.list_flatten(column), num_levels).reshape(-1, num_levels), place
        )

    order = None
    if "order" in names:
        scores = values("order", table["order"])
        if scores.dtype.kind not in "iuf":
            raise DataError(f"{path}: column 'order' holds {table['order'].type}, want numbers")
        order = _order(scores.astype(np.float64), place)
    extra = [name for name in names if name not in ("item_id", "sid", "order")]
    attributes = {name: _widened(name, values(name, table[name]), place) for name in extra}
    return Items(
        _item_ids(integers("item_id", table["item_id"]), place),
        sids(table["sid"]),
        order,
        attributes,
    )


def _by_record(path: Path) -> Place:
    return lambda row: f"{path}, record {row + 1}"


def _item_ids(found: Column, place: Place) -> I64:
    _reject(
        (found < 0) | (found > _MAX_INT64),
        lambda row: f"{place(row)}: item id {found[row]} is out of range",
    )
    return found.astype(np.int64)


def _codes(found: Column, place: Place) -> I32:
    bad: Mask = (found < 0) | (found > _MAX_CODE)
    _reject(
        np.logical_or.reduce(bad, axis=1),
        lambda row: f"{place(row)}: code {found[row][bad[row]][0]} is out of range",
    )
    return found.astype(np.int32)


def _order(found: npt.NDArray[np.float64], place: Place) -> F32:
    # A score over the range of float32 becomes infinite, and is rejected below.
    with np.errstate(over="ignore"):
        order = found.astype(np.float32)
    _reject(
        ~np.isfinite(order), lambda row: f"{place(row)}: order score {found[row]} is out of range"
    )
    return order


def _widened(name: str, found: Column, place: Place) -> Column:
    """Convert a column of any integer or float type to int64 or float64; others stay."""
    if found.dtype.kind in "iu":
        _reject(
            found > _MAX_INT64,
            lambda row: f"{place(row)}: attribute {name!r} is {found[row]}, too large",
        )
        return found.astype(np.int64)
    return found.astype(np.float64) if found.dtype.kind == "f" else found


def _reject(bad: Mask, message: Place) -> None:
    if bad.any():
        raise DataError(message(int(np.argmax(bad))))


def read_popular(path: str | None, ids_of: Callable[[list[str]], I64] = item_ids) -> I64:
    """Read the list of popular items: one name a line, best first. Without a path it is empty.

    Args:
        path: The file, or None.
        ids_of: Returns the ids of names.

    Raises:
        ConfigError: the file cannot be read, a line is no name of an item, or it has no items.
    """
    if path is None:
        return np.empty(0, np.int64)
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
        items = [
            _named(line, number, ids_of) for number, line in enumerate(lines, 1) if line.strip()
        ]
    except (OSError, ValueError) as error:
        raise ConfigError(f"recommend.popular: {path}: {error}") from error
    if not items:
        raise ConfigError(f"recommend.popular: {path} holds no item")
    return np.array(list(dict.fromkeys(items)), np.int64)


def _named(line: str, number: int, ids_of: Callable[[list[str]], I64]) -> int:
    try:
        return int(ids_of([line.strip()])[0])
    except ValueError as error:
        reason = str(error).removeprefix("index 0: ")
        raise ValueError(f"line {number}: {reason}") from None
