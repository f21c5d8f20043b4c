"""The messages are those of the .proto file beside them, and take the place of Envoy's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.picker import messages
from tests.sources import ROOT

PROTO = "npu_gr/router/picker/external_processor.proto"


def test_the_generated_module_is_what_protoc_makes(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, for its protoc")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={tmp_path}", PROTO]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
    module = PROTO.replace(".proto", "_pb2.py")
    assert messages_in(ROOT / module) == messages_in(tmp_path / module), "make proto"


def messages_in(module: Path) -> list[str]:
    """The part of a generated module that does not depend on which protoc wrote it."""
    return [line for line in module.read_text().splitlines() if line.startswith("DESCRIPTOR = ")]


def test_a_choice_is_bytes_that_any_implementation_of_the_protocol_reads() -> None:
    """Written out by hand from the numbers in Envoy's own files, so that a wrong number here is seen."""

    def field(number: int, payload: bytes) -> bytes:
        return bytes([number << 3 | 2, len(payload)]) + payload

    name, endpoint = b"x-gateway-destination-endpoint", b"10.0.0.1:80"
    header = field(1, field(1, field(1, name) + field(3, endpoint)) + b"\x18\x02")  # append_action = OVERWRITE...
    common = field(2, header) + b"\x28\x01"  # header_mutation, clear_route_cache
    value = field(5, field(1, field(1, name) + field(2, field(3, endpoint))))  # struct_value of one string_value
    metadata = field(1, field(1, b"envoy.lb") + field(2, value))
    assert messages.picked("10.0.0.1:80", False, False) == field(1, field(1, common)) + field(8, metadata)
    assert messages.picked("10.0.0.1:80", True, False) == field(3, field(1, common)) + field(8, metadata)
    assert messages.picked("10.0.0.1:80", False, True).endswith(field(9, b""))


@pytest.mark.parametrize("size", [0, 1, messages.CHUNK_BYTES, 3 * messages.CHUNK_BYTES + 1])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_body_is_passed_on_in_pieces_the_last_of_which_ends_it(size: int, is_last: bool) -> None:
    body = bytes(i % 251 for i in range(size))
    made = [pb.ProcessingResponse.FromString(one) for one in messages.streamed(body, is_last, is_answer=False)]
    pieces = [one.request_body.response.body_mutation.streamed_response for one in made]
    assert b"".join(one.body for one in pieces) == body
    assert [one.end_of_stream for one in pieces] == [False] * (len(pieces) - 1) + [is_last]
