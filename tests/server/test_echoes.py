"""An error gives back no more than a glance of what its caller wrote.

It never takes long to find its words.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from npu_gr.core.text_format import MOST, cut, quoted
from tests.server.raw import Site, site

LONG = "z" * 60_000
HISTORY = {"items": [1], "actions": [0], "timestamps": [1]}
RANK = {"user_id": "u", "candidates": [1]}


def sent(path: str, body: Any, **headers: str) -> bytes:
    data = json.dumps(body).encode()
    given = {
        "Content-Type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def echoed(at: Site, message: bytes) -> tuple[int, str]:
    raw = await at.connect()
    raw.send(message)
    status, headers, body = await raw.answer()
    assert sum(map(len, headers.values())) < 1000
    return status, body.decode()


@pytest.mark.parametrize(
    "message",
    [
        sent("/v1/rank", {LONG: 1}),
        sent("/v1/rank", {**RANK, "history": {LONG: 1}}),
        sent("/v1/rank", {**RANK, "base": LONG}),
        sent("/v1/rank", {**RANK, "candidates": LONG}),
        sent("/v1/generate", {"user_id": "u", "normalise": LONG}),
        sent("/v1/generate", {"user_id": "u", "attributes": {LONG: [1]}}),
        sent("/v1/generate", {"user_id": "u", "attributes": {"a": [LONG]}}),
        sent("/v1/recommend", {"user_id": "u", "context": {LONG: 1}}),
        sent("/v1/recommend", {"user_id": "u", "context": {"a": {LONG: 1}}}),
        sent("/v1/events", {"user_id": "u", "events": HISTORY, "idempotency_key": LONG}),
        sent("/v1/catalog/items", {"add": [{LONG: 1}]}),
        sent("/v1/rank", RANK, Content_Type="a" * 8000),
        sent("/v1/rank", RANK, X_Request_Timeout_Ms="z" * 8000),
        sent("/v1/rank", RANK, grpc_timeout="z" * 8000),
        sent("/v1/rank", RANK, Content_Encoding="z" * 8000),
        sent("/v1/events", {"user_id": "u", "events": HISTORY}, Idempotency_Key="z" * 8000),
        sent("/v1/" + "z" * 8000, {}),
        sent("/v1/rank", RANK).replace(b'"u"', b'"' + b"\xff" * 3 + b'"'),
    ],
)
async def test_a_long_text_does_not_come_back(message: bytes) -> None:
    async with site() as at:
        status, body = await echoed(at, message)
    assert 400 <= status < 500
    assert "z" * 101 not in body
    assert "a" * 101 not in body
    assert len(body) < 500


async def test_a_name_that_is_nearly_right_is_still_suggested() -> None:
    async with site() as at:
        _, body = await echoed(at, sent("/v1/rank", {**RANK, "histori": 1}))
        assert "unknown field histori; did you mean history?" in body
        _, body = await echoed(at, sent("/v1/rank", {**RANK, "history" + "y" * MOST: 1}))
        assert "did you mean" not in body


def test_words_are_cut_and_say_how_long_they_were() -> None:
    assert cut("a" * MOST) == "a" * MOST
    assert cut("a" * 65) == "a" * 64 + "... (65 characters)"
    assert quoted("it's") == '"it\'s"'
    assert quoted("a" * 100) == "'" + "a" * 64 + "'... (100 characters)"
    assert quoted(10**100).startswith("1000")
    assert len(quoted(10**100)) < 100
