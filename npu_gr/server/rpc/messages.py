"""The messages and services of the .proto files beside this module, without generated code.

`compiled.binpb` is what protoc makes of the three files (`npu-gr proto`). It is read into a pool of descriptors of its
own: in the process of an application that has other copies of the public protocols, the two do not meet.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

COMPILED = "compiled.binpb"
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


def methods(service: str) -> list[Any]:
    """Return the descriptors of a service's methods."""
    return list(_pool().FindServiceByName(service).methods)
