"""Every collection and text of every body has a bound: its own, or a setting of `server`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import inspect

from npu_gr.replay.recorder import RecordOrder
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas import CODECS, bulk
from npu_gr.server.schemas.admin import CatalogueItemsBody

OF_KINDS: list[Any] = [codec.body for codec in CODECS.values() if codec.body is not None]
BODIES = [*OF_KINDS, CatalogueItemsBody, RecordOrder]
# columns by the setting that bounds them; a new one belongs here
SETTINGS = {
    "max_candidates": {"candidates", "allow_items", "deny_items", "shown_items"},
    "max_feature_values": {"features", "cross"},
    "max_history_events": {"items", "actions", "timestamps", "withdraw", "restore"},
}


def unbounded(kind: inspect.Type, at: str, limit: str | None = None) -> Iterator[str]:
    """Name every part of a type that has no bound."""
    if isinstance(kind, inspect.Metadata):
        yield from unbounded(kind.type, at, (kind.extra or {}).get("limit", limit))
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from unbounded(one, at, limit)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from unbounded(field.type, f"{at}.{field.encode_name}")
    elif isinstance(kind, inspect.DictType):
        if kind.max_length is None:
            yield at
        yield from unbounded(kind.key_type, f"{at}.key")
        yield from unbounded(kind.value_type, f"{at}.value", limit)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        if kind.max_length is None and limit is None:
            yield at
        yield from unbounded(kind.item_type, f"{at}[]")
    elif isinstance(kind, inspect.StrType | inspect.BytesType):
        if kind.max_length is None and limit is None:
            yield at
    else:
        of_choices = inspect.LiteralType | inspect.EnumType
        known = (
            inspect.IntType | inspect.FloatType | inspect.BoolType | inspect.NoneType | of_choices
        )
        assert isinstance(kind, known), f"{at}: {kind} is new here: does it have a bound?"


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_part_of_a_body_has_a_bound(body: Any) -> None:
    assert list(unbounded(inspect.type_info(body), body.__name__)) == []


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_column_is_bounded_by_the_setting_of_its_name(body: Any) -> None:
    for column in bulk.skimmer(body).columns:
        assert column.path[-1] in SETTINGS[column.limit]
        assert getattr(ServerConfig(), column.limit) > 0


class Inner(msgspec.Struct):
    names: list[str]


class Loose(msgspec.Struct):
    inner: Inner | None
    table: dict[str, int]
    fine: Annotated[list[int], msgspec.Meta(max_length=3)]
    raw: bytes = b""


def test_the_walk_finds_what_has_no_bound() -> None:
    assert list(unbounded(inspect.type_info(Loose), "B")) == [
        "B.inner.names",
        "B.inner.names[]",
        "B.table",
        "B.table.key",
        "B.raw",
    ]
