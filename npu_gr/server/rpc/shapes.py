"""How the fields of a body or an answer look in a message of protobuf: derived from the Structs of the codecs.

    column of items         message Items: ids, or names, or raw ids
    column of actions       message Actions: names, or indices, or raw indices
    column of times         message Times: seconds, or raw ones
    other columns           repeated numbers
    single value            its type; `optional` where the body need not have it
    map of plain values     map<string, Value>, or of lists of them map<string, Values>: one value, or several
    columns of features     map<string, FeatureColumn>
    map of columns          map<string, Numbers>
    Struct                  a message of its own, named as the Struct
    anything else           string that holds the JSON of /v1

What a list or a map may hold at most is checked before its elements are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import inspect

from npu_gr.core.errors import TooLarge, Unprocessable
from npu_gr.server.codec.bulk import LOOSE_BYTES, parts
from npu_gr.server.codec.fields import MOST_NAMES
from npu_gr.server.config import ServerConfig

ITEMS = "Items"
ACTIONS = "Actions"
TIMES = "Times"
VALUE = "Value"
VALUES = "Values"
NUMBERS = "Numbers"
FEATURE = "FeatureColumn"
# messages that no Struct has, in the words of a .proto; their numbers never change
FIXED = """\
// Items: the field that is set has them.
message Items {
  repeated int64 ids = 1; // of a request: numbers; of an answer: the ids, also of items that have names
  repeated string names = 2; // of an answer: beside the ids
  bytes raw = 3; // ids as little-endian int64: the cheapest; never in an answer
}

// Actions: the field that is set has them.
message Actions {
  repeated string names = 1;
  repeated int32 indices = 2; // in the model's list of actions
  bytes raw = 3; // indices as little-endian int16
}

// Instants: the field that is set has them.
message Times {
  repeated int64 seconds = 1; // unix time
  bytes raw = 2; // the same as little-endian int64
}

// One plain value.
message Value {
  oneof kind {
    bool bool_value = 1;
    int64 int_value = 2;
    double number_value = 3;
    string text_value = 4;
  }
}

// Several plain values.
message Values {
  repeated Value values = 1;
}

// A feature of candidates or events, a value a row: the field that is set has them.
message FeatureColumn {
  repeated float numbers = 1; // NaN: missing
  repeated string names = 2; // empty: missing
  bytes raw = 3; // as under /v1: little-endian float32, or uint64 hashes of names
}

// A column of scores; NaN: none.
message Numbers {
  repeated float values = 1;
}
"""


class FieldShape(NamedTuple):
    """One field."""

    name: str
    type: str  # in the words of a .proto, without its label
    label: str  # "", "optional" or "repeated"
    read: Callable[[Any, str, ServerConfig], Any]  # value of the message, path, limits -> what `convert` takes
    write: Callable[[Any], Any]  # value of the Struct -> value of the message
    struct: Any = None  # that the message is made of; None = it is none

    @property
    def has_presence(self) -> bool:
        """Whether a message says if the field is set."""
        return self.label == "optional" or (self.label == "" and self.type[:1].isupper())


def message_name(struct: type[Any]) -> str:
    """Return the name of the message of a Struct that is within another one."""
    return str(struct.__name__)


def shapes_of(struct: Any) -> list[FieldShape]:
    """Derive the fields of a Struct, in its order."""
    about = inspect.type_info(struct)
    assert isinstance(about, inspect.StructType)
    return [_shape(field) for field in about.fields]


def table_of(message: Any, shapes: list[FieldShape], path: str, config: ServerConfig) -> dict[str, Any]:
    """Read a message into what `codec.media.convert` takes.

    Args:
        message: of protobuf.
        shapes: of its Struct.
        path: in front of the names of fields in errors: "" or "history.".
        config: bounds the columns.

    Raises:
        TooLarge: a column or a map is over its limit. Unprocessable: a field holds two forms of the same.
    """
    table = {}
    for shape in shapes:
        if shape.has_presence and not message.HasField(shape.name):
            continue
        value = getattr(message, shape.name)
        if (shape.label == "repeated" or shape.type.startswith("map<")) and not len(value):
            continue
        table[shape.name] = shape.read(value, path + shape.name, config)
    return table


def fields_of(struct: Any, shapes: list[FieldShape]) -> dict[str, Any]:
    """Write a Struct into the fields that a message is made with."""
    made = {}
    for shape in shapes:
        value = getattr(struct, shape.name)
        if value is not None and value is not msgspec.UNSET:
            made[shape.name] = shape.write(value)
    return made


def structs_within(struct: Any) -> Iterator[Any]:
    """List the Structs within a Struct, the innermost first."""
    for shape in shapes_of(struct):
        if shape.struct is not None:
            yield from structs_within(shape.struct)
            yield shape.struct


# ---- one field


def _shape(field: inspect.Field) -> FieldShape:
    extra, kinds = parts(field.type)
    others = [kind for kind in kinds if not isinstance(kind, inspect.NoneType)]
    listed = next((kind for kind in others if isinstance(kind, inspect.ListType)), None)
    name = field.encode_name
    optional = "" if field.required and len(others) == len(kinds) else "optional"
    for kind in others:
        if isinstance(kind, inspect.StructType):
            return _nested(name, kind.cls, "")
        if isinstance(kind, inspect.DictType):
            return _feature_columns(name, extra["limit"]) if "limit" in extra else _map(name, kind, optional)
    if "limit" in extra:
        return _column(name, extra, listed)
    if listed is not None:
        is_raw = any(isinstance(kind, inspect.BytesType) for kind in others)
        return _listed(name, listed, optional, is_raw=is_raw)
    types = {type(kind) for kind in others}
    if types <= _TEXTS or types == {inspect.StrType, inspect.IntType}:  # the user's id: a number is its text
        return FieldShape(name, "string", optional, _as_is, str)
    if len(types) == 1 and (scalar := _SCALARS.get(types.pop())) is not None:
        return FieldShape(name, scalar, optional, _as_is, lambda value: value)
    return _json(name, optional)


_TEXTS = {inspect.StrType, inspect.LiteralType, inspect.EnumType}
_SCALARS = {inspect.IntType: "int64", inspect.FloatType: "double", inspect.BoolType: "bool"}


def _as_is(value: Any, _path: str, _config: ServerConfig) -> Any:
    return value


def _json(name: str, optional: str) -> FieldShape:
    def read(value: str, path: str, _: ServerConfig) -> Any:
        if len(value) > LOOSE_BYTES:
            raise TooLarge(f"{path}: {len(value)} characters, the limit is {LOOSE_BYTES}")
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise Unprocessable(f"{path}: is not JSON") from None

    return FieldShape(name, "string", optional, read, lambda value: msgspec.json.encode(value).decode())


def _nested(name: str, struct: Any, label: str) -> FieldShape:
    shapes = shapes_of(struct)

    def read(value: Any, path: str, config: ServerConfig) -> Any:
        return table_of(value, shapes, f"{path}.", config)

    return FieldShape(name, message_name(struct), label, read, lambda value: fields_of(value, shapes), struct)


def _listed(name: str, kind: inspect.ListType, optional: str, *, is_raw: bool) -> FieldShape:
    inner = [one for one in parts(kind.item_type)[1] if not isinstance(one, inspect.NoneType)]
    most = MOST_NAMES if kind.max_length is None else kind.max_length
    elements = frozenset(type(one) for one in inner)
    if elements == {inspect.StructType}:
        one = inner[0]
        assert isinstance(one, inspect.StructType)
        nested = _nested(name, one.cls, "repeated")

        def read_each(value: Any, path: str, config: ServerConfig) -> Any:
            _check(len(value), path, most)
            return [nested.read(item, f"{path}[{index}]", config) for index, item in enumerate(value)]

        return nested._replace(read=read_each, write=lambda value: [nested.write(item) for item in value])
    if elements == {inspect.StrType, inspect.IntType}:  # of an answer
        return FieldShape(name, ITEMS, "", _unread, _items)
    if is_raw and elements in _RAW:
        scalar, dtype = _RAW[elements]
        return FieldShape(name, scalar, "repeated", _unread, lambda value: np.frombuffer(value, dtype).tolist())
    scalar = "string" if elements <= _TEXTS else _SCALARS.get(next(iter(elements)), "") if len(elements) == 1 else ""
    if not scalar:
        return _json(name, optional)

    def read(value: Any, path: str, _: ServerConfig) -> Any:
        _check(len(value), path, most)
        return list(value)

    return FieldShape(name, scalar, "repeated", read, lambda value: ["" if one is None else one for one in value])


_RAW = {  # columns of answers: their elements -> type, and what the codec packs them as
    frozenset({inspect.IntType}): ("int32", np.dtype("<i4")),
    frozenset({inspect.FloatType}): ("float", np.dtype("<f4")),
}


def _unread(_value: Any, path: str, _config: ServerConfig) -> Any:
    raise AssertionError(f"{path} is of answers alone")


def _items(value: Any) -> Any:
    """Items of an answer; `npu_gr.server.rpc.kinds` adds their names."""
    ids = np.frombuffer(value, np.dtype("<i8")).tolist() if isinstance(value, bytes) else value
    return {"ids": ids}


def _map(name: str, kind: inspect.DictType, optional: str) -> FieldShape:
    most = MOST_NAMES if kind.max_length is None else kind.max_length
    inner = [one for one in parts(kind.value_type)[1] if not isinstance(one, inspect.NoneType)]
    elements = frozenset(type(one) for one in inner)
    if elements == {inspect.FloatType}:

        def read_numbers(value: Any, path: str, _: ServerConfig) -> Any:
            _check(len(value), path, most)
            return dict(value)

        return FieldShape(name, "map<string, double>", "", read_numbers, dict)
    listed = next((one for one in inner if isinstance(one, inspect.ListType)), None)
    if listed is not None and any(isinstance(one, inspect.BytesType) for one in inner):
        return FieldShape(name, f"map<string, {NUMBERS}>", "", _unread, _columns)
    others = [one for one in inner if one is not listed]
    if listed is not None and others and _is_plain(others):  # a value, or several

        def read_cells(value: Any, path: str, _: ServerConfig) -> Any:
            _check(len(value), path, most)
            cells = {}
            for key, one in value.items():
                _check(len(one.values), f"{path}.{key[:64]}", MOST_NAMES)
                several = [_plain(each) for each in one.values]
                cells[key] = several[0] if len(several) == 1 else several or None
            return cells

        return FieldShape(name, f"map<string, {VALUES}>", "", read_cells, _unwritten)
    if listed is not None and _is_plain(parts(listed.item_type)[1]):
        longest = MOST_NAMES if listed.max_length is None else listed.max_length

        def read_lists(value: Any, path: str, _: ServerConfig) -> Any:
            _check(len(value), path, most)
            for key, one in value.items():
                _check(len(one.values), f"{path}.{key[:64]}", longest)
            return {key: [_plain(each) for each in one.values] for key, one in value.items()}

        return FieldShape(name, f"map<string, {VALUES}>", "", read_lists, _unwritten)
    if _is_plain(inner):

        def read_values(value: Any, path: str, _: ServerConfig) -> Any:
            _check(len(value), path, most)
            return {key: _plain(one) for key, one in value.items()}

        return FieldShape(name, f"map<string, {VALUE}>", "", read_values, _unwritten)
    return _json(name, optional)


def _feature_columns(name: str, limit: str) -> FieldShape:
    """Columns of features of a request, by their names."""

    def read(value: Any, path: str, config: ServerConfig) -> Any:
        _check(len(value), path, MOST_NAMES)
        most: int = getattr(config, limit)
        columns: dict[str, Any] = {}
        for key, one in value.items():
            if sum(bool(form) for form in (one.numbers, one.names, one.raw)) > 1:
                raise Unprocessable(f"{path}.{key[:64]}: holds numbers, names or raw ones in two fields; set one")
            most -= max(len(one.numbers), len(one.names), len(one.raw) // 4)
            if most < 0:
                raise TooLarge(f"{path}: over {getattr(config, limit)} values, the limit")
            if len(one.names):
                columns[key] = [name or None for name in one.names]
            else:
                columns[key] = one.raw or np.fromiter(one.numbers, np.float32, len(one.numbers)).tobytes()
        return columns

    return FieldShape(name, f"map<string, {FEATURE}>", "", read, _unwritten)


def _columns(value: Mapping[str, bytes]) -> Any:
    return {key: {"values": np.frombuffer(one, np.dtype("<f4")).tolist()} for key, one in value.items()}


def _unwritten(_value: Any) -> Any:
    raise AssertionError("this is of requests alone")


_PLAIN_TYPES = {inspect.BoolType, inspect.IntType, inspect.FloatType, inspect.StrType}


def _is_plain(kinds: list[inspect.Type]) -> bool:
    return {type(kind) for kind in kinds} <= _PLAIN_TYPES


def _plain(value: Any) -> Any:
    which = value.WhichOneof("kind")
    return None if which is None else getattr(value, which)


def _column(name: str, extra: Mapping[str, Any], listed: inspect.ListType | None) -> FieldShape:
    """A column of a request."""
    assert listed is not None
    limit: str = extra["limit"]
    width: int = extra["element_bytes"]
    is_named = any(isinstance(kind, inspect.StrType) for kind in parts(listed.item_type)[1])
    kind, numbers = (ACTIONS, "indices") if width == 2 else (ITEMS, "ids") if is_named else (TIMES, "seconds")
    dtype = np.dtype(f"<i{width}")

    def read(value: Any, path: str, config: ServerConfig) -> Any:
        names = value.names if is_named else ()
        given = [form for form in (getattr(value, numbers), names, value.raw) if len(form)]
        if len(given) > 1:
            raise Unprocessable(f"{path}: holds {numbers}, names or raw ones in two fields; set one")
        most: int = getattr(config, limit)
        if len(value.raw):
            return value.raw
        _check(max(len(getattr(value, numbers)), len(names)), path, most)
        if len(names):
            return list(names)
        array = np.fromiter(getattr(value, numbers), np.int64, len(getattr(value, numbers)))
        if width == 2 and len(array) and not 0 <= int(array.min()) <= int(array.max()) < 2**15:
            raise Unprocessable(f"{path}: an index is out of range: 0 to {2**15 - 1}")
        return array.astype(dtype).tobytes()

    return FieldShape(name, kind, "", read, _unwritten)


def _check(num: int, path: str, most: int) -> None:
    if num > most:
        raise TooLarge(f"{path}: {num} entries, the limit is {most}")
