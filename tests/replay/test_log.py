"""Records of each kind can be read back, and make valid request bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import KINDS, Scored
from npu_gr.core.request import (
    EventsRequest,
    GenerateRequest,
    MatchRequest,
    RankRequest,
    RecommendRequest,
    Request,
    SignalRequest,
)
from npu_gr.replay.files import read, write
from npu_gr.replay.log import (
    NOT_LOGGED,
    OPTIONS,
    RECORDED,
    REQUEST_FIELDS,
    SCORED,
    LoggedHistory,
    QueryRecord,
)
from npu_gr.replay.recorder import RecordedRequest, record_of
from npu_gr.replay.requests import encode, read_answer
from npu_gr.vector_search.vectors import save
from tests.models import events
from tests.server.test_recommend_over_http import section
from tests.serving import FIRST_ID, serving
from tests.vector_search.vectors import KNOWN, make_vectors

COLUMNS = LoggedHistory(items=[1, 2], actions=[0, 1], timestamps=[10, 11])
USER = UserKey("t", "ü")
ARRIVED_AT = 1_700_000_000.5


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def history(num: int = 20) -> Events:
    found = events(num)
    return Events.make(found.items + FIRST_ID, found.actions, found.timestamps)


WHOLE = HistoryRef(events=history())
# One request of each kind, every field that a log keeps set.
EXAMPLES: dict[str, Request] = {
    "signal": SignalRequest(user=USER, history=WHOLE, num_candidates=7),
    "rank": RankRequest(
        user=USER, history=WHOLE, candidates=ids(FIRST_ID, FIRST_ID + 3), timestamp=5, top_k=1
    ),
    "generate": GenerateRequest(
        user=USER,
        history=WHOLE,
        num_items=3,
        beam_width=16,
        normalise="valid",
        temperature=0.5,
        allow_items=ids(*range(FIRST_ID, FIRST_ID + 100)),
        deny_items=ids(FIRST_ID + 1),
    ),
    "match": MatchRequest(
        user=UserKey("", KNOWN),
        history=HistoryRef(events=Events.make([102, 108], [0, 0], [1, 2])),
        num_items=4,
        exclude_seen=False,
        allow_items=ids(100, 106, 112),
        deny_items=ids(100),
    ),
    "recommend": RecommendRequest(
        user=USER,
        history=WHOLE,
        num_items=4,
        num_candidates=20,
        exclude_seen=False,
        deny_items=ids(FIRST_ID + 2),
        timestamp=6,
        context={"page": "home", "slot": 3},
    ),
    "events": EventsRequest(user=USER, events=history(5)),
}


def recorded(kind: str, request: Request) -> QueryRecord:
    """The record of a request, after a trip through the line of a log."""
    over = RecordedRequest(
        kind=kind,
        arrived_at=ARRIVED_AT,
        took_s=0.01,
        budget_s=5.0,
        user=request.user,
        status=200,
        request=request,
    )
    return msgspec.json.decode(msgspec.json.encode(record_of(over, None, False)), type=QueryRecord)


def test_every_recorded_kind_has_an_example() -> None:
    assert set(EXAMPLES) == {name for name, kind in KINDS.items() if kind.is_recorded}


@pytest.mark.parametrize("kind", RECORDED)
def test_a_log_keeps_every_field_of_a_request_but_versions(kind: str) -> None:
    """Each new field of a request is either logged or listed in `NOT_LOGGED`."""
    fields = set(RECORDED[kind].request.__struct_fields__)
    options = OPTIONS[kind].__struct_fields__ if kind in OPTIONS else ()
    assert set(options) <= fields
    skipped = fields - set(options) - set(REQUEST_FIELDS[kind]) - set(NOT_LOGGED)
    assert all(name.endswith("_version") for name in skipped), skipped
    assert (kind in SCORED) == (RECORDED[kind].scored is not Scored.NOTHING)


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_have_the_defaults_of_the_request(kind: str) -> None:
    of_request = {field.name: field for field in msgspec.structs.fields(RECORDED[kind].request)}
    for option in msgspec.structs.fields(OPTIONS[kind]):
        default = of_request[option.name].default
        if default is not msgspec.NODEFAULT:
            assert option.default == default, option.name


@pytest.mark.parametrize("kind", RECORDED)
def test_a_history_is_sent_as_a_delta_where_the_kind_takes_one(kind: str) -> None:
    record = msgspec.structs.replace(recorded(kind, EXAMPLES[kind]), base="f" * 32)
    assert ("base" in msgspec.json.decode(encode(record))) == RECORDED[kind].takes_delta


async def test_what_a_route_takes_is_recorded_and_taken_again(tmp_path: Path) -> None:
    """Each request is sent to an instance that records.

    What it recorded is what was sent, and is answered again.
    """
    save(make_vectors(), tmp_path / "vectors")
    sections: dict[str, Any] = {
        **section(tmp_path),
        "match": {"vectors": str(tmp_path / "vectors")},
        "record": {
            "folder": str(tmp_path / "traffic"),
            "enabled": True,
            "suffix": ".jsonl",
            "users": "clear",
        },
    }
    sent = [recorded(kind, request) for kind, request in EXAMPLES.items()]
    async with serving(tmp_path, watched=False, **sections) as (client, _):
        for record in sent:
            kind = RECORDED[record.kind]
            headers = {"Content-Type": "application/json", "X-Request-Timeout-Ms": "30000"}
            async with client.request(
                kind.method, kind.path, data=encode(record), headers=headers
            ) as response:
                content = await response.read()
                assert response.status == kind.status, content
            answer, fingerprint = read_answer(record, content)
            assert (answer is not None) == (record.kind in SCORED)
            assert bool(fingerprint) == kind.takes_delta
    (path,) = (tmp_path / "traffic").iterdir()
    log = tmp_path / "log.jsonl.zst"
    write(log, read(path))
    for record, again in zip(sent, read(log), strict=True):
        assert encode(again) == encode(record) or msgspec.json.decode(encode(again)) == plain(
            record
        )
        assert again.answer is not None
        assert bool(again.answer.digest) == (record.kind in SCORED)
        assert bool(again.answer.fingerprint) == RECORDED[record.kind].takes_delta


def plain(record: QueryRecord) -> Any:
    """The record's body with columns as lists, as Parquet keeps them."""
    body = msgspec.json.decode(encode(record))
    for name in ("history", "events"):
        columns: LoggedHistory | None = getattr(record, name)
        if columns is not None:
            found = columns.events()
            body[name] = {
                "items": found.items.tolist(),
                "actions": found.actions.tolist(),
                "timestamps": found.timestamps.tolist(),
            }
    if "candidates" in body:
        body["candidates"] = record.candidate_ids().tolist()
    return body


def test_raw_columns_say_the_same_as_lists() -> None:
    raw = LoggedHistory.of(COLUMNS.events())
    assert len(raw) == len(COLUMNS)
    assert raw.events().fingerprint() == COLUMNS.events().fingerprint()
    text = msgspec.json.encode(QueryRecord(ts=0, kind="signal", user_id="a", history=raw))
    assert msgspec.json.decode(text, type=QueryRecord).history == raw
    with pytest.raises(ValueError, match="not a multiple"):
        LoggedHistory(items=b"123", actions=[], timestamps=[])
