"""How a request or an answer of `core/request.py` goes into a frame, and comes out of it: derived from its annotations.

    array of numpy                bytes, in the order of this machine; [columns, bytes] where it has two dimensions
    one of several classes        an array that begins with the name of the class
    error of `core/errors.py`     its class, its text, and what else a caller is told
    everything else               as msgpack has it: a Struct or NamedTuple is an array of its fields, in order

So a request is itself what msgspec reads and writes, without a line of Python but for its arrays, unless it holds an
error. An array is copied into the frame, and out of it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import inspect

from npu_gr.core import errors
from npu_gr.core.errors import NpuGrError, Overloaded, Refusal, StoreFailed, StoreFault
from npu_gr.core.secret import Secret


class Wire(NamedTuple):
    """One type on the wire."""

    type: Any  # what msgspec encodes and decodes
    pack: Callable[[Any], Any] | None = None  # makes it of a value; None = the value itself
    unpack: Callable[[Any], Any] | None = None  # makes the value of it


class ErrorOut(msgspec.Struct, frozen=True, array_like=True, tag="error", gc=False):
    """An error of `core/errors.py`, or one that is none of ours (`name` is empty)."""

    name: str  # of its class
    text: str
    retry_after_s: float | None = None
    reason: str = ""  # `Refusal` of an Overloaded, `StoreFault` of a StoreFailed
    cause: str = ""  # class and text of the error behind it, for the log


class CauseElsewhere(Exception):
    """The error behind an error, in the process where it was raised."""


class FailedElsewhere(Exception):
    """The engine failed in a way that it was not made for; its log has the traceback."""


_ERRORS = {name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, NpuGrError)}


def pack_error(error: BaseException) -> ErrorOut:
    """Make an error ready for a frame."""
    if not isinstance(error, NpuGrError):
        return ErrorOut("", f"{type(error).__name__} in the engine")
    reason = ""
    if isinstance(error, Overloaded):
        reason = error.reason.value
    elif isinstance(error, StoreFailed):
        reason = error.fault.value
    cause = error.__cause__
    told = "" if cause is None else f"{type(cause).__name__}: {cause}"
    name = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS)
    return ErrorOut(name, str(error), error.retry_after_s, reason, told)


def unpack_error(out: ErrorOut) -> Exception:
    """Make the error again."""
    cls = _ERRORS.get(out.name)
    if cls is None:
        return FailedElsewhere(out.text)
    error: NpuGrError
    if issubclass(cls, Overloaded):
        error = cls(out.text, out.retry_after_s or 1.0, Refusal(out.reason))
    elif issubclass(cls, StoreFailed):
        error = cls(out.text, StoreFault(out.reason))
    else:
        error = cls(out.text)
        error.retry_after_s = out.retry_after_s
    if out.cause:
        error.__cause__ = CauseElsewhere(out.cause)
    return error


_DTYPES: dict[Any, np.dtype[Any]] = {}  # of the annotations of arrays that `wire_of` has seen


def encoder() -> msgspec.msgpack.Encoder:
    """Make an encoder of what `Wire.pack` made."""
    return msgspec.msgpack.Encoder(enc_hook=_plain)


def decoder(of: Any) -> msgspec.msgpack.Decoder[Any]:
    """Make a decoder of a `Wire.type`, or of several. It copies arrays out of what it reads."""
    return msgspec.msgpack.Decoder(of, dec_hook=_special)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
        data = native.data if native.flags.c_contiguous else native.tobytes()
        return data if value.ndim == 1 else (value.shape[1], data)
    if isinstance(value, Secret):  # the connection is between two processes of one user
        return value.reveal()
    raise NotImplementedError(f"{type(value).__name__} has no form on the wire")


def _special(of: Any, value: Any) -> Any:
    dtype = _DTYPES.get(of)
    if dtype is not None:
        if type(value) is bytes and not len(value) % dtype.itemsize:
            return np.frombuffer(value, dtype)
        return _rows(dtype, value)
    if issubclass(of, Secret):
        return of(value)
    raise NotImplementedError(f"{of.__name__} has no form on the wire")


def _rows(dtype: np.dtype[Any], value: Any) -> Any:
    match value:
        case bytes():
            raise ValueError(f"{len(value)} bytes are no array of {dtype.name}")
        case [int(columns), bytes(data)] if columns > 0 and not len(data) % (dtype.itemsize * columns):
            return np.frombuffer(data, dtype).reshape(-1, columns)
    raise ValueError(f"neither bytes nor rows of {dtype.name}")


def wire_of(annotation: Any) -> Wire:
    """Derive how values of a type go over the wire.

    Args:
        annotation: a class, or a type as annotations write it.

    Raises:
        TypeError: it holds something that has no form on the wire.
    """
    origin = get_origin(annotation)
    if origin is np.ndarray:
        _DTYPES[annotation] = np.dtype(get_args(get_args(annotation)[1])[0])
        return Wire(annotation)
    if origin in (Union, types.UnionType):
        return _union(get_args(annotation))
    if origin is tuple and get_args(annotation)[-1] is ...:
        return _each(wire_of(get_args(annotation)[0]), annotation)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _values(wire_of(get_args(annotation)[1]), annotation)
    if isinstance(annotation, type):
        if issubclass(annotation, NpuGrError):
            return Wire(ErrorOut, pack_error, unpack_error)
        if (names := _names(annotation)) is not None:
            return _record(annotation, names)
    if isinstance(inspect.type_info(annotation), inspect.CustomType):
        raise TypeError(f"{annotation} has no form on the wire")
    return Wire(annotation)


def _names(annotation: Any) -> Sequence[str] | None:
    """The fields of a class that has such; None = it has none."""
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, msgspec.Struct):
        return annotation.__struct_fields__
    if dataclasses.is_dataclass(annotation):
        return [one.name for one in dataclasses.fields(annotation)]
    return getattr(annotation, "_fields", None) if issubclass(annotation, tuple) else None


def _union(members: tuple[Any, ...]) -> Wire:
    """Of None and one other type, of plain types, or of several classes, which are told apart by their names."""
    others = [one for one in members if one is not type(None)]
    if len(others) == 1:
        inner = wire_of(others[0])
        optional: Any = Union[inner.type, None]  # noqa: UP007  (made at run time)
        return Wire(optional, _unless_none(inner.pack), _unless_none(inner.unpack))
    wires = [(one, wire_of(one)) for one in others]
    if all(wire.pack is None and _names(one) is None for one, wire in wires):
        return Wire(Union[members])  # noqa: UP007  (a type that is made at run time)
    tagged = {
        one: wire if wire.type is ErrorOut else _record(one, _names(one) or (), tag=one.__name__) for one, wire in wires
    }
    of_struct = {wire.type: wire.unpack for wire in tagged.values()}

    def pack(value: Any) -> Any:
        wire = next(wire for one, wire in tagged.items() if isinstance(value, one))
        return None if wire.pack is None else wire.pack(value)

    def unpack(out: Any) -> Any:
        make = of_struct[type(out)]
        return None if make is None else make(out)

    return Wire(Union[tuple(of_struct)], pack, unpack)  # noqa: UP007


def _unless_none(function: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if function is None else lambda value: None if value is None else function(value)


def _each(inner: Wire, annotation: Any) -> Wire:
    pack, unpack = inner.pack, inner.unpack
    if pack is None or unpack is None:
        return Wire(annotation)
    return Wire(list[inner.type], lambda values: list(map(pack, values)), lambda out: tuple(map(unpack, out)))  # type: ignore[name-defined]


def _values(inner: Wire, annotation: Any) -> Wire:
    pack, unpack = inner.pack, inner.unpack
    if pack is None or unpack is None:
        return Wire(annotation)
    return Wire(
        dict[str, inner.type],  # type: ignore[name-defined]
        lambda values: {name: pack(value) for name, value in values.items()} if values else {},
        lambda out: {name: unpack(value) for name, value in out.items()} if out else {},
    )


def _record(cls: type[Any], names: Sequence[str], tag: str | None = None) -> Wire:
    """Of a class with fields: itself, or where msgspec cannot tell what it holds, a Struct with the same fields."""
    hints = get_type_hints(cls, include_extras=True)
    wires = [wire_of(hints[name]) for name in names]
    if tag is None and all(wire.pack is None for wire in wires):
        return Wire(cls)
    struct = msgspec.defstruct(
        f"{cls.__name__}Out",
        [(name, wire.type) for name, wire in zip(names, wires, strict=True)],
        frozen=True,
        array_like=True,
        tag=tag,
        gc=False,
    )
    read = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    read_out: Callable[[Any], tuple[Any, ...]] = read
    packs = [(index, wire.pack) for index, wire in enumerate(wires) if wire.pack is not None]
    unpacks = [(index, wire.unpack) for index, wire in enumerate(wires) if wire.unpack is not None]
    is_tuple = issubclass(cls, tuple)

    def pack(value: Any) -> Any:
        values = list(read(value))
        for index, function in packs:
            if values[index] is not None:
                values[index] = function(values[index])
        return struct(*values)

    def unpack(out: Any) -> Any:
        values = list(read_out(out))
        for index, function in unpacks:
            if values[index] is not None:
                values[index] = function(values[index])
        return cls(*values) if is_tuple else cls(**dict(zip(names, values, strict=True)))

    return Wire(struct, pack, unpack)
