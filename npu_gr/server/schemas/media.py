"""Reading and writing bodies: JSON and msgpack by the same Structs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from npu_gr.core.errors import BadRequest, Unprocessable, UnsupportedMedia
from npu_gr.core.text_format import cut, near, quoted
from npu_gr.server.schemas.bulk import parts, skimmer

S = TypeVar("S")

JSON = "application/json"
MSGPACK = "application/msgpack"
_DECODERS: dict[str, Any] = {JSON: msgspec.json.Decoder, MSGPACK: msgspec.msgpack.Decoder}
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder().encode,
    MSGPACK: msgspec.msgpack.Encoder().encode,
}


def decode(body: bytes, content_type: str, cls: type[S]) -> S:
    """Parse and validate a body.

    Args:
        body: as it was received.
        content_type: its media type, without parameters.
        cls: the Struct to read.

    Raises:
        UnsupportedMedia: neither JSON nor msgpack. BadRequest: it cannot be parsed. Unprocessable:
            a field is unknown, missing, of the wrong type or out of range; the message has its
            path.
    """
    decoded: S = _decode(body, content_type, cls, cls)
    return decoded


def skim(body: bytes, content_type: str, cls: Any) -> msgspec.Struct:
    """Find the fields of a body without reading their values: the Struct of `skimmer(cls)`.

    Raises as `decode` does.
    """
    skimmed: msgspec.Struct = _decode(body, content_type, skimmer(cls).struct, cls)
    return skimmed


def check_type(content_type: str) -> None:
    """Check the media type of a body, without parameters.

    Raises:
        UnsupportedMedia: it is neither JSON nor msgpack.
    """
    if content_type not in _DECODERS:
        raise UnsupportedMedia(
            f"Content-Type: {quoted(content_type)} is neither {JSON} nor {MSGPACK}"
        )


def convert(table: dict[str, Any], cls: type[S]) -> S:
    """Make a Struct of a table whose values were read already.

    Raises:
        Unprocessable: as `decode`.
    """
    try:
        return msgspec.convert(table, cls)
    except msgspec.ValidationError as error:
        raise Unprocessable(_explain(str(error), cls)) from error


def _decode(body: bytes, content_type: str, cls: Any, meant: Any) -> Any:
    check_type(content_type)
    try:
        return _decoder(content_type, cls).decode(body)
    except msgspec.ValidationError as error:
        raise Unprocessable(_explain(str(error), meant)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {_reason(error)}") from error


def encode(answer: msgspec.Struct, media: str) -> bytes:
    """Write an answer as JSON or msgpack."""
    return _ENCODERS[media](answer)


@cache
def _decoder(media: str, cls: Any) -> Any:
    """Compile the checks of a Struct once: that takes far longer than one use of them."""
    return _DECODERS[media](cls)


def _reason(error: Exception) -> str:
    """Say why bytes are no text, without the bytes, which are a part of that error."""
    return (
        (f"{error.reason} at byte {error.start}")
        if isinstance(error, UnicodeDecodeError)
        else cut(str(error), 100)
    )


def _explain(message: str, cls: Any) -> str:
    """Put the path in front of msgspec's message, and suggest the nearest name for an unknown field."""
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        names = _fields_at(cls, re.sub(r"\[.*?\]", "[]", path))
        name = cut(unknown[1])
        full = f"{path}.{name}" if path else name
        return f"unknown field {full}{near(unknown[1], names)}"
    text = cut(text, 100)  # a choice that does not exist is quoted in it
    return f"{path}: {text}" if path else text


@cache
def _fields_at(cls: Any, path: str) -> list[str]:
    """Name the fields of the Struct at a path, `users[].events`.

    There are as many paths as fields.
    """
    kinds = [inspect.type_info(cls)]
    for step in re.findall(r"\[\]|[^.\[]+", path):
        kinds = [inner for kind in kinds for inner in _within(kind, step)]
    return [
        field.encode_name
        for kind in kinds
        if isinstance(kind, inspect.StructType)
        for field in kind.fields
    ]


def _within(kind: inspect.Type, step: str) -> list[inspect.Type]:
    """Return what a value of a type holds at one step of a path."""
    if isinstance(kind, inspect.StructType):
        return [
            one
            for field in kind.fields
            if field.encode_name == step
            for one in parts(field.type)[1]
        ]
    if isinstance(kind, inspect.ListType):
        return parts(kind.item_type)[1]
    return parts(kind.value_type)[1] if isinstance(kind, inspect.DictType) else []
