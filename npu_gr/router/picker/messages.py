"""The picker's messages to a gateway, as bytes: most of them are the same again and again, and are written once.

Source: the Gateway API inference extension's endpoint picker protocol (proposal 004): the chosen endpoint stands in a
header and in dynamic metadata, both with the same value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from google.protobuf.struct_pb2 import Struct

from npu_gr.router.picker import external_processor_pb2 as pb

DESTINATION = "x-gateway-destination-endpoint"  # "ip:port", or several in the order in which they are to be tried
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
DESTINATION_SPACE = "envoy.lb"  # of the metadata of `DESTINATION` and `SERVED`
SUBSET_SPACE = "envoy.lb.subset_hint"
CHUNK_BYTES = 62_000  # of a body that is passed on: what gateways take at once

GO_ON = pb.ProcessingResponse(request_headers=pb.HeadersResponse()).SerializeToString()
BODY_AS_IT_WAS = pb.ProcessingResponse(request_body=pb.BodyResponse()).SerializeToString()
ANSWER_BODY_AS_IT_WAS = pb.ProcessingResponse(response_body=pb.BodyResponse()).SerializeToString()
TRAILERS_AS_THEY_WERE = pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString()
ANSWER_TRAILERS_AS_THEY_WERE = pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString()
_EVERY_MODE = (pb.NONE, pb.STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL, pb.FULL_DUPLEX_STREAMED)
_MODES = {
    pb.ProtocolConfiguration(request_body_mode=one, response_body_mode=other).SerializeToString(): (one, other)
    for one in _EVERY_MODE
    for other in _EVERY_MODE
}


@lru_cache(maxsize=8192)
def picked(endpoints: str, is_in_body: bool, skips_body: bool) -> bytes:
    """Write the choice.

    Args:
        endpoints: value of `DESTINATION`.
        is_in_body: it answers a buffered body, not the headers.
        skips_body: let the gateway keep the body, which nobody here needs, where it allows that.
    """
    common = pb.CommonResponse(header_mutation=_headers({DESTINATION: endpoints}), clear_route_cache=True)
    response = pb.ProcessingResponse()
    if is_in_body:
        response.request_body.response.CopyFrom(common)
    else:
        response.request_headers.response.CopyFrom(common)
    response.dynamic_metadata.update({DESTINATION_SPACE: {DESTINATION: endpoints}})
    if skips_body:
        response.mode_override.SetInParent()  # a mode of 0 is NONE
    return response.SerializeToString()


@lru_cache(maxsize=8192)
def answered(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Write the headers that are added to an instance's answer."""
    response = pb.ProcessingResponse()
    response.response_headers.response.header_mutation.CopyFrom(_headers(dict(headers)))
    return response.SerializeToString()


def immediate(status: int, lines: Iterable[bytes], body: bytes) -> bytes:
    """Write an answer to the client that no instance gives; `lines` are headers, each `Name: value`."""
    headers = dict(line.decode("latin-1").split(": ", 1) for line in lines)
    answer = pb.ImmediateResponse(
        status=pb.HttpStatus(code=status), headers=_headers(headers), body=body, details="picker"
    )
    return pb.ProcessingResponse(immediate_response=answer).SerializeToString()


def streamed(chunk: bytes, is_last: bool, is_answer: bool) -> Iterable[bytes]:
    """Write a piece of a body as it is passed on in full duplex, in as many messages as it takes."""
    starts = range(0, len(chunk), CHUNK_BYTES) or (0,)
    for start in starts:
        piece = pb.StreamedBodyResponse(
            body=chunk[start : start + CHUNK_BYTES], end_of_stream=is_last and start == starts[-1]
        )
        body = pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece)))
        response = pb.ProcessingResponse(response_body=body) if is_answer else pb.ProcessingResponse(request_body=body)
        yield response.SerializeToString()


def modes(config: bytes) -> tuple[pb.BodySendMode, pb.BodySendMode]:
    """Return how a ProtocolConfiguration says that bodies are sent: the request's, and the answer's.

    Raises:
        DecodeError: it is none.
    """
    known = _MODES.get(config)
    if known is None:
        read = pb.ProtocolConfiguration.FromString(config)
        return read.request_body_mode, read.response_body_mode
    return known


def subset(metadata: bytes) -> set[str] | None:
    """Return the endpoints from which a Metadata lets the picker choose; None: all of them.

    Raises:
        DecodeError: it is none.
    """
    value = _entry(metadata, SUBSET_SPACE, SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        return {one.string_value for one in value.list_value.values}
    return {part.strip() for part in value.string_value.split(",")} - {""}


def served(metadata: bytes) -> str:
    """Return the endpoint that answered, as a Metadata says; empty: it does not say.

    Raises:
        DecodeError: it is none.
    """
    value = _entry(metadata, DESTINATION_SPACE, SERVED)
    return value.string_value if value is not None else ""


def _entry(metadata: bytes, space: str, name: str):  # type: ignore[no-untyped-def]  # Value of the same module
    spaces = pb.Metadata.FromString(metadata).filter_metadata
    if space not in spaces:  # looking it up would add it
        return None
    found: Struct = spaces[space]
    return found.fields.get(name)


def _headers(given: Mapping[str, str]) -> pb.HeaderMutation:
    """Write headers that replace those of the same name."""
    action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=action)
            for name, value in given.items()
        ]
    )
