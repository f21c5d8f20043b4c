"""An infer over HTTP: JSON, and behind it the raw bytes of tensors (the binary tensor data extension).

The JSON is skimmed first: of a tensor's `data` no object is made before the model has said how much it may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from npu_gr.core.errors import BadRequest, TooLarge, Unprocessable
from npu_gr.core.words import cut
from npu_gr.server.codec.bulk import LOOSE_BYTES
from npu_gr.server.codec.media import JSON, decode, encode
from npu_gr.server.oip.models import InferAnswer, InferRequest, Parameter
from npu_gr.server.oip.tensors import BYTES, DTYPES, Tensor, pack

HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of JSON in front of the raw ones
MOST_TENSORS = 64  # of a request
MOST_DIGITS = 15  # of the header
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Parameters = dict[str, Parameter]


class InputParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may stand beside an input."""

    binary_data_size: _Size | None = None  # of the raw bytes that it has; None = `data` holds it


class InputIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input."""

    name: str
    datatype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=-1, le=2**40)]], msgspec.Meta(max_length=8)]
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw = msgspec.Raw()


class OutputParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may stand beside a wanted output."""

    binary_data: bool | None = None  # raw bytes; None = as `binary_data_output` of the request says


class OutputIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An output that is wanted."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of an infer."""

    inputs: msgspec.Raw
    id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    parameters: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()


class HttpInfer(NamedTuple):
    """An infer as it was read, and which of its outputs are wanted as raw bytes."""

    infer: InferRequest
    raw_outputs: frozenset[str]
    is_raw: bool  # the others are


BINARY_OUTPUT = "binary_data_output"  # a parameter: every output whose own parameters do not say otherwise


def read(body: bytes, header_length: str | None) -> HttpInfer:
    """Read the body of an infer; `data` stays as it came.

    Args:
        body: whole.
        header_length: the header `HEADER_LENGTH`; None = the body is JSON alone.

    Raises:
        BadRequest: it cannot be parsed, or the lengths do not fit. Unprocessable: a field is not as it should be.
        TooLarge: too many tensors, or too many bytes beside their data.
    """
    num_json = _json_bytes(body, header_length)
    skimmed = decode(body[:num_json], JSON, InferIn)
    inputs_raw = bytes(skimmed.inputs)
    if (num := inputs_raw.count(b'"datatype"')) > MOST_TENSORS:
        raise TooLarge(f"inputs: {num} tensors, the limit is {MOST_TENSORS}")
    if num_json - len(inputs_raw) > LOOSE_BYTES:
        raise TooLarge(f"body: {num_json - len(inputs_raw)} bytes beside its inputs, the limit is {LOOSE_BYTES}")
    inputs: list[InputIn] = _part(inputs_raw, "inputs", list[InputIn])
    loose_bytes = len(inputs_raw) - sum(len(bytes(one.data)) for one in inputs)
    if loose_bytes > LOOSE_BYTES:
        raise TooLarge(f"inputs: {loose_bytes} bytes beside their data, the limit is {LOOSE_BYTES}")
    parameters = _part(bytes(skimmed.parameters) or b"{}", "parameters", _Parameters)
    outputs: list[OutputIn] = _part(bytes(skimmed.outputs) or b"[]", "outputs", list[OutputIn])
    if len(outputs) > MOST_TENSORS:
        raise TooLarge(f"outputs: {len(outputs)}, the limit is {MOST_TENSORS}")
    is_raw = parameters.pop(BINARY_OUTPUT, False)
    if not isinstance(is_raw, bool):
        raise Unprocessable(f"parameters: {BINARY_OUTPUT}: takes true or false")
    chosen = {one.name: one.parameters.binary_data for one in outputs}
    return HttpInfer(
        InferRequest(skimmed.id, _tensors(inputs, body, num_json), parameters, tuple(chosen)),
        frozenset(name for name, choice in chosen.items() if (is_raw if choice is None else choice)),
        is_raw,
    )


def _json_bytes(body: bytes, header_length: str | None) -> int:
    """How many bytes of the body are JSON."""
    if header_length is None:
        return len(body)
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) <= MOST_DIGITS):
        raise BadRequest(f"{HEADER_LENGTH}: expected up to {MOST_DIGITS} digits")
    if int(header_length) > len(body):
        raise BadRequest(f"{HEADER_LENGTH}: {int(header_length)}, and the body has {len(body)} bytes")
    return int(header_length)


def _part(raw: bytes, name: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise Unprocessable(f"{name}{path.rstrip('`')}: {cut(text, 100)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{name}: cannot be parsed") from error


def _tensors(inputs: Iterable[InputIn], body: bytes, at: int) -> list[Tensor]:
    """Give each input its bytes: those in `data`, or the next ones behind the JSON."""
    tensors = []
    for one in inputs:
        size = one.parameters.binary_data_size
        values: Any = one.data
        if size is not None:
            if bytes(one.data):
                raise Unprocessable(f"{cut(one.name)}: has data, and binary_data_size too")
            if at + size > len(body):
                raise BadRequest(f"{cut(one.name)}: binary_data_size {size}, and {len(body) - at} bytes are left")
            values = body[at : at + size]
            at += size
        elif not bytes(one.data):
            raise Unprocessable(f"{cut(one.name)}: has neither data nor binary_data_size")
        tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), values))
    if at != len(body):
        raise BadRequest(f"body: {len(body) - at} bytes behind its tensors")
    return tensors


# ---- answers


class OutputOutParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stands beside an output."""

    binary_data_size: int | None = None


class OutputOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output: its elements in row-major order, or how many raw bytes it has. null: not a number."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: OutputOutParameters = OutputOutParameters()
    data: list[Any] | None = None


class InferOut(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of an answer."""

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Parameter]
    outputs: list[OutputOut]


def write(name: str, asked: HttpInfer, answer: InferAnswer) -> tuple[bytes, int | None]:
    """Write the answer of an infer.

    Args:
        name: of the model.
        asked: what it answers.
        answer: of the model.

    Returns:
        The body, and how many bytes of it are JSON; None = all are.
    """
    outputs: list[OutputOut] = []
    behind: list[bytes] = []
    for tensor in answer.outputs:
        is_raw = tensor.name in asked.raw_outputs if asked.infer.outputs else asked.is_raw
        if is_raw:
            raw = pack(tensor.values) if tensor.datatype == BYTES else tensor.values
            behind.append(raw)
            sized = OutputOutParameters(binary_data_size=len(raw))
            outputs.append(OutputOut(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, parameters=sized))
        else:
            listed = tensor.values
            if tensor.datatype != BYTES:
                listed = np.frombuffer(tensor.values, DTYPES[tensor.datatype]).tolist()
            outputs.append(OutputOut(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, data=listed))
    out = InferOut(
        model_name=name,
        model_version=answer.version,
        id=asked.infer.id,
        parameters=answer.parameters,
        outputs=outputs,
    )
    head = encode(out, JSON)
    return (b"".join((head, *behind)), len(head)) if behind else (head, None)
