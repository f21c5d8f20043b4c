"""Whatever a body can say, the client can say: each field is a parameter, and is sent."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from npu_gr.client import AsyncClient, Behaviours, Features
from npu_gr.core.errors import BadAnswer
from npu_gr.core.item_rules import Diversity, OrderRules
from npu_gr.server.schemas import CODECS
from tests.client.scripted import answer, scripted

SEEN = Behaviours(["a"], ["view"], [1_700_000_000])
# other forms of what the client sends and reads in columns
FORMS = {name: {"format", "explain"} for name in ("generate", "match", "recommend")}
FORMS["events"] = {"item_id", "event", "timestamp"}
FIELDS = {
    kind: set(codec.body.__struct_fields__) - FORMS.get(kind, set())
    for kind, codec in CODECS.items()
    if codec.body is not None
}
GIVEN: dict[str, Any] = {
    "history": SEEN,
    "candidates": ["a"],
    "allow_items": ["a"],
    "deny_items": ["a"],
    "shown_items": ["a"],
    "rules": OrderRules(diversity=(Diversity(by="brand", most=1),)),
    "fields": ["title"],
    "attributes": {"brand": ["x"]},
    "context": {"page": 1},
    "features": Features(user={"age": 3}),
    "mode": "merge",
    "normalise": "valid",
    "unknown_items": "drop",
    "exclude_seen": False,
}
NUMBERS = {"num_items", "num_candidates", "beam_width", "top_k", "timestamp", "temperature"}


@pytest.mark.parametrize("kind", FIELDS)
async def test_every_field_is_a_parameter_and_is_sent(kind: str) -> None:
    fields = FIELDS[kind]
    async with scripted(answer({})) as service, AsyncClient(service.url, timeout_s=30.0) as client:
        method = getattr(client, kind)
        names = {"user_id": "user", "users": "events"}  # ingest: events by user
        asked = {
            names.get(field, field): GIVEN.get(field, 3 if field in NUMBERS else "x")
            for field in fields
        }
        assert asked.keys() <= inspect.signature(method).parameters.keys()
        if "events" in asked:
            asked["events"] = {"u": SEEN} if kind == "ingest" else SEEN
        with pytest.raises(BadAnswer):
            await method(**asked)
    sent = msgspec.msgpack.decode(service.asked[0].body)
    header = (
        {"idempotency_key": service.asked[0].headers.get("idempotency-key")}
        if kind == "events"
        else {}
    )
    assert (sent | header).keys() - FORMS.get(kind, set()) == fields
    assert sent.get("exclude_seen", False) is False
