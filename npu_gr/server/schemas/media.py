"""Decodes and encodes bodies, JSON and msgpack, by the same Structs."""

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
        body: The received bytes.
        content_type: Media type without parameters.
        cls: Struct to decode.

    Raises:
        UnsupportedMedia: The media type is neither JSON nor msgpack.
        BadRequest: The body cannot be parsed.
        Unprocessable: A field is unknown, missing, of the wrong type or out of range; the message
            has its path.
    """
    decoded: S = _decode(body, content_type, cls, cls)
    return decoded


def skim(body: bytes, content_type: str, cls: Any) -> msgspec.Struct:
    """Split a body into its undecoded fields, as an instance of `skimmer(cls).struct`.

    Raises as `decode` does.
    """
    skimmed: msgspec.Struct = _decode(body, content_type, skimmer(cls).struct, cls)
    return skimmed


def check_type(content_type: str) -> None:
    """Raise UnsupportedMedia if a media type (without parameters) is neither JSON nor msgpack."""
    if content_type not in _DECODERS:
        raise UnsupportedMedia(
            f"Content-Type: {quoted(content_type)} is neither {JSON} nor {MSGPACK}"
        )


def convert(table: dict[str, Any], cls: type[S]) -> S:
    """Make a Struct from decoded values. Raises Unprocessable as `decode` does."""
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
    """Encode an answer as JSON or msgpack."""
    return _ENCODERS[media](answer)


@cache
def _decoder(media: str, cls: Any) -> Any:
    """Cache the decoder of a Struct: making it takes far longer than one use."""
    return _DECODERS[media](cls)


def _reason(error: Exception) -> str:
    """Describe a decoding error without the client's bytes, which UnicodeDecodeError quotes."""
    return (
        f"{error.reason} at byte {error.start}"
        if isinstance(error, UnicodeDecodeError)
        else cut(str(error), 100)
    )


def _explain(message: str, cls: Any) -> str:
    """Put the path before msgspec's message, and suggest the nearest name of an unknown field."""
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        names = _fields_at(cls, re.sub(r"\[.*?\]", "[]", path))
        name = cut(unknown[1])
        full = f"{path}.{name}" if path else name
        return f"unknown field {full}{near(unknown[1], names)}"
    text = cut(text, 100)  # the message quotes an invalid choice at any length
    return f"{path}: {text}" if path else text


@cache
def _fields_at(cls: Any, path: str) -> list[str]:
    """List the fields of the Struct at a path such as `users[].events`.

    The cache is bounded: there are as many paths as fields.
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
    """Return the types that a value of a type may have at one step of a path."""
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
