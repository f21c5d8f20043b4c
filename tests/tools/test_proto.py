"""npu_gr.proto is what the table of kinds gives, and its compiled form is that of the files."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2

from npu_gr.core.kinds import KINDS
from npu_gr.server.codec import CODECS
from npu_gr.server.codec.base import Codec
from npu_gr.server.codec.rank import RankBody
from npu_gr.server.rpc.messages import compiled, message
from npu_gr.server.rpc.shapes import shapes_of
from npu_gr.tools import proto


def parsed(data: bytes) -> dict[str, Any]:
    return {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(data).file}


def test_the_file_is_what_the_table_gives() -> None:
    """Else run `npu-gr proto --write`, and commit both files."""
    assert proto.text() == proto.shipped("npu_gr.proto")
    assert parsed(compiled()) == parsed(proto.compile_all(proto.text()))


def test_every_kind_is_a_call() -> None:
    text = proto.shipped("npu_gr.proto")
    for kind in KINDS.values():
        title = kind.name.title()
        assert f"rpc {title}({title}Request) returns ({title}Answer);" in text
        assert message(f"npu_gr.v1.{title}Request").DESCRIPTOR.fields_by_name or kind.name == "erase"


class _Later(RankBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that has more than it had."""

    more: dict[str, Annotated[list[float], msgspec.Meta(max_length=4)]] = msgspec.field(default_factory=dict)
    score: float | None = None


def test_numbers_of_fields_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that comes gets the next number, wherever it stands; the number of one that goes is reserved."""
    before = parsed(compiled())["npu_gr.proto"]
    old = {field.name: field.number for one in before.message_type if one.name == "RankRequest" for field in one.field}

    def with_body(body: Any) -> str:
        monkeypatch.setitem(CODECS, "rank", _replaced(CODECS["rank"], body))
        return proto.text()

    fields = [(one.encode_name, one.type, one.default) for one in msgspec.structs.fields(RankBody)]
    later = with_body(_Later)
    numbers = dict(re.findall(r"(\w+) = (\d+);", block(later, "RankRequest")))
    assert {name: int(numbers[name]) for name in old} == old
    assert {int(numbers["more"]), int(numbers["score"])} == {max(old.values()) + 1, max(old.values()) + 2}
    known = proto.compile_all(later)
    without = msgspec.defstruct(
        "RankBody", [(name, kind) for name, kind, _ in fields if name not in ("top_k", "fields")], kw_only=True
    )
    monkeypatch.setitem(CODECS, "rank", _replaced(CODECS["rank"], without))
    gone = block(proto.text(known), "RankRequest")
    reserved = sorted([old["top_k"], old["fields"], int(numbers["more"]), int(numbers["score"])])
    assert f"reserved {', '.join(map(str, reserved))};" in gone
    monkeypatch.setitem(CODECS, "rank", _replaced(CODECS["rank"], RankBody))
    again = dict(re.findall(r"(\w+) = (\d+);", block(proto.text(proto.compile_all(proto.text(known))), "RankRequest")))
    assert not {int(number) for number in again.values()} & set(reserved) - set(old.values())


def block(text: str, name: str) -> str:
    return text.split(f"message {name} {{")[1].split("\n}")[0]


def _replaced(codec: Codec[Any, Any, Any], body: Any) -> Codec[Any, Any, Any]:
    return Codec(body=body, answer=codec.answer, parse=codec.parse, render=codec.render)


def test_a_message_has_what_its_struct_has() -> None:
    """Every message has the fields of its Struct."""
    for kind in KINDS.values():
        codec = CODECS[kind.name]
        answer = codec.answer or codec.begun
        names = {shape.name for shape in shapes_of(answer)}
        assert names == set(message(f"npu_gr.v1.{kind.name.title()}Answer").DESCRIPTOR.fields_by_name)
