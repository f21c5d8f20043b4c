"""The kinds as models of the Open Inference Protocol (OIP).

The fields of a kind's body are the inputs, those of its answer the outputs:

    column of a body                its datatype, e.g. INT64 [-1]
    single value                    its datatype [1], or a parameter of the request
    list of texts                   BYTES [-1]
    anything else                   BYTES [1] with the JSON of /v1, or a parameter with it

    column of an answer             its datatype [-1]; a map of columns is one output per key, such
                                    as `scores.click`
    column of items                 also a BYTES output with their names: `items.names`
    list of texts                   BYTES [-1]
    single value, or anything else  a parameter of the answer

Nested fields are named by their path, as in errors: `history.items`. Everything is derived from the
codec's Structs, so a new kind needs no code here. In binary form an element of BYTES is its length
(4 bytes, little-endian) and its bytes; the elements of other datatypes are contiguous and
little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import inspect

from npu_gr.core.arrays import I64
from npu_gr.core.errors import BadRequest, TooLarge, Unprocessable
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.core.text_format import cut, near, quoted
from npu_gr.server.access_log import ServerCall
from npu_gr.server.config import ServerConfig
from npu_gr.server.http import BUDGET_HEADERS
from npu_gr.server.schemas import CODECS
from npu_gr.server.schemas.bulk import LOOSE_BYTES, count_elements, parts
from npu_gr.server.schemas.fields import MOST_NAMES, Codec, ResponseFields
from npu_gr.server.schemas.media import MSGPACK, convert

Parameter = bool | int | float | str
TIMEOUT = "timeout"  # parameter of a request: time limit in microseconds, as Triton's clients send
NAMES = ".names"  # suffix of the output with the names of a column of items
MOST_TENSORS = 64  # inputs of a request
BYTES = "BYTES"
DTYPES = {  # datatype -> NumPy dtype; BYTES has none
    "BOOL": np.dtype("?"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_ITEMS = "INT64"  # datatype of a column of items
_VERSIONS = ("model_version", "vectors_version")  # fields of bodies and answers with a version
_WIDTHS = {"sids": "num_levels"}  # column of rows -> field with the width of a row
_LENGTH = struct.Struct("<I")


# ---- tensors


class Tensor(NamedTuple):
    """An input as it was received, or an output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    # Output: raw bytes, or a list of str for BYTES. Input: raw bytes, `msgspec.Raw` with a JSON
    # list, or a repeated protobuf field (of bytes for BYTES).
    values: Any

    def texts(self, num: int) -> list[str]:
        """Read the `num` elements of a BYTES tensor as UTF-8.

        Raises:
            Unprocessable: There are more or fewer elements, or one is not UTF-8.
            BadRequest: The JSON cannot be parsed.
        """
        values = self._listed(num) if isinstance(self.values, msgspec.Raw) else self.values
        if isinstance(values, bytes):
            values = self._split(num)
        self._check_count(len(values), num)
        return [
            one if isinstance(one, str) else self._text(index, one)
            for index, one in enumerate(values)
        ]

    def raw(self, num: int) -> bytes:
        """Read the `num` elements of a datatype in `DTYPES` as raw bytes.

        Raises:
            Unprocessable: There are more or fewer elements, or one is out of range.
            BadRequest: The JSON cannot be parsed.
        """
        dtype = DTYPES[self.datatype]
        if isinstance(self.values, bytes):
            if len(self.values) != num * dtype.itemsize:
                expected = f"{num} elements of {self.datatype} have {num * dtype.itemsize}"
                raise Unprocessable(f"{self.name}: {len(self.values)} bytes, {expected}")
            return self.values
        values = self._listed(num) if isinstance(self.values, msgspec.Raw) else self.values
        self._check_count(len(values), num)
        try:
            return np.fromiter(values, dtype, num).tobytes()
        except OverflowError:
            raise Unprocessable(
                f"{self.name}: a number is outside of the range of {self.datatype}"
            ) from None

    def one(self) -> Parameter:
        """Read the only element.

        Raises as `texts` and `raw` do, and Unprocessable where a number is not finite.
        """
        if self.datatype == BYTES:
            return self.texts(1)[0]
        value: bool | int | float = np.frombuffer(self.raw(1), DTYPES[self.datatype])[0].item()
        if isinstance(value, float) and not math.isfinite(value):
            raise Unprocessable(f"{self.name}: {value} is not a finite number")
        return value

    def _check_count(self, count: int, num: int) -> None:
        if count != num:
            raise Unprocessable(f"{self.name}: {count} elements, but its shape has {num}")

    def _text(self, index: int, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise Unprocessable(f"{self.name}: element {index} is not UTF-8") from None

    def _listed(self, num: int) -> list[Any]:
        """Read a JSON list after a check of its length, before objects are made of its elements."""
        raw = bytes(self.values)
        most = count_elements(raw, 1, num)
        if most is not None and most > max(num, 1):
            raise Unprocessable(f"{self.name}: {most} elements, but its shape has {num}")
        lists: dict[str, Any] = {
            BYTES: list[str],
            "BOOL": list[bool],
            "FP32": list[float],
            "FP64": list[float],
        }
        try:
            values: list[Any] = msgspec.json.decode(raw, type=lists.get(self.datatype, list[int]))
        except msgspec.ValidationError as error:
            raise Unprocessable(f"{self.name}: data: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BadRequest(f"{self.name}: data: cannot be parsed") from None
        return values

    def _split(self, num: int) -> list[bytes]:
        """Split the binary form of a BYTES tensor into its elements."""
        raw: bytes = self.values
        elements = []
        at = 0
        for index in range(num):
            begin = at + _LENGTH.size
            if begin > len(raw):
                raise Unprocessable(f"{self.name}: its bytes end before element {index} of {num}")
            (length,) = _LENGTH.unpack_from(raw, at)
            at = begin + length
            if at > len(raw):
                left = f"{len(raw) - begin} are left"
                raise Unprocessable(f"{self.name}: element {index} has {length} bytes, and {left}")
            elements.append(raw[begin:at])
        if at != len(raw):
            raise Unprocessable(f"{self.name}: {len(raw) - at} bytes after its {num} elements")
        return elements


def pack(texts: list[str]) -> bytes:
    """Return the binary form of a BYTES tensor."""
    raws = [text.encode() for text in texts]
    return b"".join(part for raw in raws for part in (_LENGTH.pack(len(raw)), raw))


# ---- models


class Form(Enum):
    """The form of an input's value."""

    COLUMN = auto()
    ONE = auto()
    TEXTS = auto()
    JSON = auto()


class Input(NamedTuple):
    """A field of the body."""

    name: str  # path of the field
    form: Form
    datatypes: tuple[str, ...]  # accepted datatypes; the model's metadata has the first
    limit: str | int  # largest number of elements, or the setting of section `server` with it
    is_needed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model's metadata; -1 = any number."""
        return (1,) if self.form in (Form.ONE, Form.JSON) else (-1,)

    def value(self, tensor: Tensor, config: ServerConfig) -> Any:
        """Convert a tensor to the value of the field.

        Raises Unprocessable, TooLarge or BadRequest; the message has the name of the input.
        """
        if tensor.datatype not in self.datatypes:
            takes = " or ".join(self.datatypes)
            raise Unprocessable(f"{self.name}: datatype {cut(tensor.datatype)}; takes {takes}")
        shape = tensor.shape
        if len(shape) != 1 or shape[0] < 0 or (self.shape == (1,) != shape):
            raise Unprocessable(
                f"{self.name}: shape {quoted(list(shape))}; takes {list(self.shape)}"
            )
        limit = self.limit if isinstance(self.limit, int) else getattr(config, self.limit)
        if shape[0] > limit:
            raise TooLarge(f"{self.name}: {shape[0]} entries, the limit is {limit}")
        if self.form is Form.ONE:
            return tensor.one()
        if self.form is Form.JSON:
            return _json(self.name, tensor.one())
        return tensor.texts(shape[0]) if tensor.datatype == BYTES else tensor.raw(shape[0])


class Output(NamedTuple):
    """An output in the model's metadata."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class InferRequest(NamedTuple):
    """An inference request, over HTTP or gRPC."""

    id: str
    inputs: list[Tensor]
    parameters: dict[str, Parameter]
    outputs: Mapping[str, bool]  # requested output -> whether as raw bytes; {} = all outputs
    is_raw: bool = True  # whether outputs that are not named are sent as raw bytes

    def waits_until(self, call: ServerCall, max_s: float) -> float:
        """Return the instant at which the client stops waiting.

        The parameter `timeout` (microseconds, 0 = none) replaces the default time limit; if a
        header names one too, the earlier one counts.

        Args:
            call: Call of the request.
            max_s: Largest time limit in seconds, counted from the arrival.

        Raises:
            Unprocessable: The parameter is not a whole number of microseconds.
        """
        value = self.parameters.get(TIMEOUT, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Unprocessable(f"parameter {TIMEOUT}: {quoted(value)}; takes whole microseconds")
        if not value:
            return call.until_at
        own_at = call.arrived_at + min(value * 1e-6, max_s)
        is_named = call.has_deadline or any(name in call.headers for name in BUDGET_HEADERS)
        return min(own_at, call.until_at) if is_named else own_at


class InferAnswer(NamedTuple):
    """The answer to an inference request."""

    version: str
    parameters: dict[str, Parameter]
    outputs: list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A kind as a model."""

    kind: Kind[Any, Any]
    codec: Codec[Any, Any, Any]
    inputs: Mapping[str, Input]
    version_field: str | None  # field of the body that names a version

    def outputs(self, tasks: tuple[str, ...]) -> list[Output]:
        """List the outputs that an answer may have, given the tasks of the ranker."""
        listed: list[Output] = []
        for field in msgspec.structs.fields(self.codec.answer):  # type: ignore[arg-type]
            datatype, is_map = _output_type(field.type)
            if datatype is None:
                continue
            shape = (-1, -1) if field.name in _WIDTHS else (-1,)
            names = [f"{field.name}.{task}" for task in tasks] if is_map else [field.name]
            listed += [Output(name, datatype, shape) for name in names]
            if datatype == _ITEMS:
                listed.append(Output(field.name + NAMES, BYTES, (-1,)))
        return listed

    def check_outputs(self, wanted: Iterable[str], tasks: tuple[str, ...]) -> None:
        """Raise Unprocessable if one of the requested outputs does not exist."""
        names = [one.name for one in self.outputs(tasks)]
        for name in wanted:
            if name not in names:
                raise Unprocessable(f"outputs: unknown output {cut(name)}{near(name, names)}")

    def body(self, infer: InferRequest, version: str | None, config: ServerConfig) -> Any:
        """Convert an inference request to the kind's body.

        Args:
            infer: The request.
            version: Version in the URL or message; None = none is named.
            config: Bounds the columns.

        Raises:
            Unprocessable, TooLarge, BadRequest: The message names the input or the parameter.
        """
        table: dict[str, Any] = {}
        for tensor in infer.inputs:
            one = self._input(tensor.name, "input")
            _put(table, tensor.name, "input", one.value(tensor, config))
        for name, value in infer.parameters.items():
            if name == TIMEOUT:
                continue
            one = self._input(name, "parameter")
            if one.form is Form.COLUMN:
                raise Unprocessable(f"parameter {name}: must be sent as an input")
            _put(table, name, "parameter", value if one.form is Form.ONE else _json(name, value))
        if version is not None and self.version_field is not None:
            if table.get(self.version_field, version) != version:
                raise Unprocessable(
                    f"{self.version_field}: differs from the version of the address, "
                    f"{quoted(version)}"
                )
            table[self.version_field] = version
        assert self.codec.body is not None
        return convert(table, self.codec.body)

    def _input(self, name: str, what: str) -> Input:
        one = self.inputs.get(name)
        if one is None:
            raise Unprocessable(f"unknown {what} {cut(name)}{near(name, self.inputs)}")
        return one

    def answer(
        self, answer: Any, request_id: str, response_fields: ResponseFields, wanted: Collection[str]
    ) -> InferAnswer:
        """Convert a kind's answer to tensors.

        Args:
            answer: Answer of the service.
            request_id: Id of the request in the log.
            response_fields: Item fields that the response includes.
            wanted: Requested outputs; empty = all.

        Raises:
            Unprocessable: The answer lacks a requested output.
        """
        rendered = self.codec.render(answer, request_id, MSGPACK, response_fields)
        made: dict[str, Tensor] = {}
        parameters: dict[str, Parameter] = {}
        for field in msgspec.structs.fields(type(rendered)):  # type: ignore[arg-type]
            value = getattr(rendered, field.name)
            if value is None or value is msgspec.UNSET:
                continue
            datatype, is_map = _output_type(field.type)
            if datatype is None:
                _add_parameters(parameters, field.name, value)
                continue
            width = getattr(rendered, _WIDTHS[field.name]) if field.name in _WIDTHS else None
            columns = (
                {f"{field.name}.{key}": one for key, one in value.items()}
                if is_map
                else {field.name: value}
            )
            made |= {
                name: _tensor(name, datatype, column, width) for name, column in columns.items()
            }
            if datatype == _ITEMS and (not wanted or field.name + NAMES in wanted):
                ids: I64 = np.frombuffer(made[field.name].values, np.int64)
                names = [str(one) for one in response_fields.names.items(ids)]
                made[field.name + NAMES] = Tensor(field.name + NAMES, BYTES, (len(names),), names)
        for name in wanted:
            if name not in made:
                raise Unprocessable(f"outputs: {name}: the answer to this request lacks it")
        version = next((parameters[name] for name in _VERSIONS if name in parameters), "")
        return InferAnswer(str(version), parameters, [made[name] for name in wanted or made])


def _put(table: dict[str, Any], name: str, what: str, value: Any) -> None:
    *folders, field = name.split(".")
    for folder in folders:
        table = table.setdefault(folder, {})
    if field in table:
        raise Unprocessable(f"{what} {name}: given twice")
    table[field] = value


def _json(name: str, value: Parameter) -> Any:
    """Decode a JSON text."""
    if not isinstance(value, str) or len(value) > LOOSE_BYTES:
        raise Unprocessable(f"{name}: takes a JSON text of at most {LOOSE_BYTES} characters")
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        raise Unprocessable(f"{name}: is not JSON") from None


def _tensor(name: str, datatype: str, column: Any, width: int | None) -> Tensor:
    if datatype == BYTES:
        texts = ["" if one is None else one for one in column]
        return Tensor(name, BYTES, (len(texts),), texts)
    dtype = DTYPES[datatype]
    raw = column if isinstance(column, bytes) else np.array(column, dtype).tobytes()
    num = len(raw) // dtype.itemsize
    return Tensor(name, datatype, (num,) if width is None else (num // max(width, 1), width), raw)


def _add_parameters(parameters: dict[str, Parameter], name: str, value: Any) -> None:
    if isinstance(value, msgspec.Struct):
        value = {field.name: getattr(value, field.name) for field in msgspec.structs.fields(value)}
    if isinstance(value, dict):
        for key, one in value.items():
            _add_parameters(parameters, f"{name}.{key}", one)
    elif value is not None and value is not msgspec.UNSET:
        parameters[name] = (
            value if isinstance(value, Parameter) else msgspec.json.encode(value).decode()
        )


# ---- derived from the Structs


def _inputs(about: inspect.StructType, prefix: str = "", *, is_needed: bool = True) -> list[Input]:
    found: list[Input] = []
    for field in about.fields:
        name = prefix + field.encode_name
        needed = is_needed and field.required
        extra, kinds = parts(field.type)
        nested = next((kind for kind in kinds if isinstance(kind, inspect.StructType)), None)
        if nested is not None:
            found += _inputs(nested, f"{name}.", is_needed=needed)
        elif "limit" in extra and "most_entries" not in extra:  # a map of columns is no column
            found.append(
                Input(name, Form.COLUMN, _column_types(extra, kinds), extra["limit"], needed)
            )
        else:
            form, datatypes = _plain_form(kinds)
            limit = MOST_NAMES if form is Form.TEXTS else 1
            found.append(Input(name, form, datatypes, limit, needed))
    return found


def _column_types(extra: Mapping[str, Any], kinds: list[inspect.Type]) -> tuple[str, ...]:
    """Return the datatypes of a column: raw elements, and BYTES where it may hold names.

    The preferred one comes first: ids for items, names for actions.
    """
    raw = {8: "INT64", 2: "INT16"}[extra["element_bytes"]]
    listed = next((kind for kind in kinds if isinstance(kind, inspect.ListType)), None)
    if listed is None or not any(
        isinstance(kind, inspect.StrType) for kind in parts(listed.item_type)[1]
    ):
        return (raw,)
    return (raw, BYTES) if raw == _ITEMS else (BYTES, raw)


_PLAIN: dict[type[inspect.Type], tuple[str, ...]] = {
    inspect.StrType: (BYTES,),
    inspect.LiteralType: (BYTES,),
    inspect.EnumType: (BYTES,),
    inspect.IntType: ("INT64",),
    inspect.FloatType: ("FP64", "FP32"),
    inspect.BoolType: ("BOOL",),
}


def _plain_form(kinds: list[inspect.Type]) -> tuple[Form, tuple[str, ...]]:
    others = [kind for kind in kinds if not isinstance(kind, inspect.NoneType)]
    if all(type(kind) in _PLAIN for kind in others):
        return Form.ONE, tuple(
            dict.fromkeys(name for kind in others for name in _PLAIN[type(kind)])
        )
    if len(others) == 1 and isinstance(others[0], inspect.ListType):
        inner = parts(others[0].item_type)[1]
        if all(_PLAIN.get(type(kind)) == (BYTES,) for kind in inner):
            return Form.TEXTS, (BYTES,)
    return Form.JSON, (BYTES,)


_ELEMENTS: dict[frozenset[type[inspect.Type]], str] = {
    frozenset({inspect.StrType, inspect.IntType}): _ITEMS,
    frozenset({inspect.IntType}): "INT32",
    frozenset({inspect.FloatType}): "FP32",
    frozenset({inspect.StrType}): BYTES,
}


@cache
def _output_type(annotation: Any) -> tuple[str | None, bool]:
    """Return the datatype of an answer's field, and whether it is a map of columns.

    Datatype None = the field is a parameter of the answer.
    """
    _, kinds = parts(inspect.type_info(annotation))
    mapped = next((kind for kind in kinds if isinstance(kind, inspect.DictType)), None)
    if mapped is not None:
        kinds = parts(mapped.value_type)[1]
    listed = next((kind for kind in kinds if isinstance(kind, inspect.ListType)), None)
    if listed is None:
        return None, mapped is not None
    elements = {type(kind) for kind in parts(listed.item_type)[1]} - {inspect.NoneType}
    return _ELEMENTS.get(frozenset(elements)), mapped is not None


def _model(kind: Kind[Any, Any]) -> Model:
    codec = CODECS[kind.name]
    about = inspect.type_info(codec.body)
    assert isinstance(about, inspect.StructType), f"{kind.name}: a model has a body"
    inputs = {one.name: one for one in _inputs(about)}
    version_field = next((name for name in _VERSIONS if name in inputs), None)
    return Model(kind=kind, codec=codec, inputs=inputs, version_field=version_field)


MODELS: dict[str, Model] = {kind.name: _model(kind) for kind in KINDS.values() if kind.is_model}
