"""`npu-gr proto`: npu_gr.proto, made of the table of kinds, and the compiled form of all .proto files.

The numbers of fields are those of the compiled form that is there: a field keeps its number for ever, a new one gets
the next, and the number of one that is gone is reserved. protoc is that of `grpcio-tools`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.server.codec import CODECS
from npu_gr.server.rpc.messages import COMPILED, OURS, compiled
from npu_gr.server.rpc.shapes import FIXED, FieldShape, message_name, shapes_of, structs_within

FOLDER = Path(__file__).parent.parent / "server" / "rpc" / "protos"
FILES = ("health.proto", "inference.proto", "npu_gr.proto")
PACKAGE, SERVICE = OURS.rsplit(".", 1)
_HEAD = f"""\
// The kinds of requests of npu_gr as gRPC calls. Made by `npu-gr proto` of the table of kinds: do not edit.
// Every call is the request of the same name under /v1, with the same limits; docs/http.md has what its fields mean.
syntax = "proto3";

package {PACKAGE};
"""
_ERASE = """\
message EraseRequest {
  string user_id = 1;
  string tenant = 2;
}
"""
_STREAM = """\
// The answer of one signal of a stream.
message SignalVerdict {
  oneof verdict {
    SignalAnswer answer = 1;
    Problem problem = 2; // the stream goes on
  }
}

// Why a signal of a stream was not answered, as the problem details of a call under /v1 say it.
message Problem {
  int32 status = 1; // of HTTP
  string title = 2;
  string detail = 3;
  string request_id = 4;
}
"""


def text(known: bytes | None = None) -> str:
    """Write npu_gr.proto.

    Args:
        known: a compiled form that has the numbers of fields; None = the one that is shipped.
    """
    numbers = _Numbers(compiled() if known is None else known)
    blocks = [_HEAD, _service()]
    seen: set[str] = set()
    for kind in KINDS.values():
        for struct, name in _structs(kind):
            if name not in seen:
                seen.add(name)
                blocks.append(_message(struct, name, numbers))
        if CODECS[kind.name].body is None:
            blocks.append(_ERASE)
    return "\n".join([*blocks, _STREAM, FIXED])


def compile_all(ours: str) -> bytes:
    """Compile the .proto files as they are here, with another text of npu_gr.proto.

    Raises:
        ConfigError: `grpcio-tools` is not installed, or protoc refuses a file.
    """
    try:
        from grpc_tools import protoc
    except ImportError as error:
        raise ConfigError(f"npu-gr proto: needs grpcio-tools: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            (Path(folder) / name).write_text(ours if name == FILES[-1] else (FOLDER / name).read_text())
        made = Path(folder) / COMPILED
        if protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={made}", *FILES]):
            raise ConfigError("npu-gr proto: protoc refused a file; its message is above")
        return made.read_bytes()


def write() -> list[Path]:
    """Write npu_gr.proto and the compiled form. Returns the files that changed. Raises as `compile_all`."""
    ours = text()
    made = {FOLDER / FILES[-1]: ours.encode(), FOLDER / COMPILED: compile_all(ours)}
    changed = [path for path, content in made.items() if not path.exists() or path.read_bytes() != content]
    for path in changed:
        path.write_bytes(made[path])
    return changed


def shipped(name: str) -> str:
    """Return the text of one of `FILES`, for generators of clients."""
    return resources.files("npu_gr.server.rpc").joinpath("protos", name).read_text()


class _Numbers:
    """The numbers of fields."""

    def __init__(self, known: bytes) -> None:
        from google.protobuf import descriptor_pb2

        files = descriptor_pb2.FileDescriptorSet.FromString(known).file
        self._messages = {one.name: one for file in files if file.package == PACKAGE for one in file.message_type}

    def of(self, message: str, names: list[str]) -> tuple[dict[str, int], list[int]]:
        """Number the fields of a message; also the numbers that are reserved."""
        old: dict[str, int] = {}
        gone: set[int] = set()
        if (one := self._messages.get(message)) is not None:
            old = {field.name: field.number for field in one.field}
            gone = {number for part in one.reserved_range for number in range(part.start, part.end)}
            gone |= {number for name, number in old.items() if name not in names}
        following = max([0, *old.values(), *gone])
        numbers = {}
        for name in names:
            if name not in old:
                following += 1
            numbers[name] = old.get(name, following)
        return numbers, sorted(gone)


def _structs(kind: Kind[Any, Any]) -> Iterator[tuple[Any, str]]:
    """Name the messages of a kind, the inner ones first."""
    codec = CODECS[kind.name]
    title = kind.name.title()
    for struct, name in ((codec.body, f"{title}Request"), (codec.answer or codec.begun, f"{title}Answer")):
        if struct is not None:
            yield from ((inner, message_name(inner)) for inner in structs_within(struct))
            yield struct, name


def _service() -> str:
    calls = []
    for kind in KINDS.values():
        title = kind.name.title()
        calls.append(f"  rpc {title}({title}Request) returns ({title}Answer); // {kind.summary}")
    calls.append(
        "  rpc Signals(stream SignalRequest) returns (stream SignalVerdict); // one verdict a signal, in order"
    )
    return "\n".join([f"service {SERVICE} {{", *calls, "}\n"])


def _message(struct: Any, name: str, numbers: _Numbers) -> str:
    shapes = shapes_of(struct)
    numbered, reserved = numbers.of(name, [shape.name for shape in shapes])
    comment = [f"// {line}".rstrip() for line in (struct.__doc__ or "").strip().splitlines() if line.strip()]
    lines = [*(line.replace("//     ", "// ") for line in comment), f"message {name} {{"]
    lines += [f"  reserved {', '.join(map(str, reserved))};"] if reserved else []
    lines += [_field(shape, numbered[shape.name]) for shape in shapes]
    return "\n".join([*lines, "}\n"])


def _field(shape: FieldShape, number: int) -> str:
    label = f"{shape.label} " if shape.label else ""
    return f"  {label}{shape.type} {shape.name} = {number};"
