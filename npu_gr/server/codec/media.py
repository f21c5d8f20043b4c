"""Reading and writing bodies: JSON and msgpack by the same Structs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from npu_gr.core.errors import BadRequest, Unprocessable, UnsupportedMedia
from npu_gr.server.codec.fields import History

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
        UnsupportedMedia: neither JSON nor msgpack. BadRequest: it cannot be parsed. Unprocessable: a field is
            unknown, missing, of the wrong type or out of range; the message has its path.
    """
    check_type(content_type)
    try:
        decoded: S = _decoder(content_type, cast("Hashable", cls)).decode(body)
    except msgspec.ValidationError as error:
        raise Unprocessable(_explain(str(error), cls)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from error
    return decoded


def check_type(content_type: str) -> None:
    """Check the media type of a body, without parameters.

    Raises:
        UnsupportedMedia: it is neither JSON nor msgpack.
    """
    if content_type not in _DECODERS:
        raise UnsupportedMedia(f"Content-Type: {content_type[:64]!r} is neither {JSON} nor {MSGPACK}")


def encode(answer: msgspec.Struct, media: str) -> bytes:
    """Write an answer as JSON or msgpack."""
    return _ENCODERS[media](answer)


@cache
def _decoder(media: str, cls: Hashable) -> Any:
    """Compile the checks of a Struct once: that takes far longer than one use of them."""
    return _DECODERS[media](cls)


def _explain(message: str, cls: type[Any]) -> str:
    """Put the path in front of msgspec's message, and suggest the nearest name for an unknown field."""
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        names = [field.encode_name for field in msgspec.structs.fields(History if path else cls)]
        near = difflib.get_close_matches(unknown[1], names, n=1)
        full = f"{path}.{unknown[1]}" if path else unknown[1]
        return f"unknown field {full}" + (f"; did you mean {near[0]}?" if near else "")
    return f"{path}: {text}" if path else text
