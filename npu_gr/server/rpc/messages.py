"""The messages and services of the .proto files beside this module, without generated code.

`compiled.binpb` is what protoc makes of the three files (`npu-gr proto`). It is read into a pool of descriptors of its
own: in the process of an application that has other copies of the public protocols, the two do not meet.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from npu_gr.core.errors import BadRequest, TooLarge

COMPILED = "compiled.binpb"
MOST_FIELDS = 2048  # of a long message, not counting those within another: what is good has fewer
INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
OURS = "npu_gr.v1.Recommender"


def compiled() -> bytes:
    """Return the serialized FileDescriptorSet."""
    return resources.files("npu_gr.server.rpc").joinpath("protos", COMPILED).read_bytes()


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled()).file:
        pool.Add(file)
    return pool


@cache
def message(name: str) -> Any:
    """Return the class of a message by its full name. Raises KeyError where there is none."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))


def check_fields(body: bytes, most: int = MOST_FIELDS) -> None:
    """Count the fields of a message without making their objects, which take a hundred times longer.

    Args:
        body: as it came.
        most: fields.

    Raises:
        TooLarge: it has more. BadRequest: it is no message.
    """
    at = 0
    for _ in range(most):
        if at == len(body):
            return
        tag, at = _varint(body, at)
        match tag & 7:
            case 0:
                _, at = _varint(body, at)
            case 1:
                at += 8
            case 2:
                length, at = _varint(body, at)
                at += length
            case 5:
                at += 4
            case _:
                raise BadRequest("the message cannot be parsed")
        if at > len(body):
            raise BadRequest("the message cannot be parsed")
    if at != len(body):
        raise TooLarge(f"message: over {most} fields")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(body):
            break
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise BadRequest("the message cannot be parsed")


def methods(service: str) -> list[Any]:
    """Return the descriptors of a service's methods."""
    return list(_pool().FindServiceByName(service).methods)
