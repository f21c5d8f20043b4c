"""Writing through a service, also if another program answers at the address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from npu_gr.core.errors import ConfigError, NpuGrError, Unavailable
from npu_gr.core.feature_schema.columns import Columns
from npu_gr.core.history import Events, Mode, UserKey, Write
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.ingest import INGEST_BYTES, IngestBody, UserEvents
from npu_gr.tools import ingest
from npu_gr.tools.ingest import ServiceWriter, url_of
from tests.client.scripted import Answer, answer, problem, scripted

DEEP = b"[" * 100_000
WRITE = Write(UserKey("", "u"), Events.make([1], [0], [1]), Mode.MERGE)


@asynccontextmanager
async def writing(said: Answer) -> AsyncIterator[ServiceWriter]:
    async with scripted(said) as service, aiohttp.ClientSession() as http:
        yield ServiceWriter(http, service.url, patience_s=0.0)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Welcome</html>",
        b"{}",
        b"[]",
        b'{"models": [{"name": "x"}]}',
        b'{"models": 1}',
        b'{"models": "\xff"}',
        DEEP,
        b"",
    ],
)
async def test_an_address_of_something_else_is_a_fault_of_the_configuration(body: bytes) -> None:
    async with writing(answer(body)) as writer:
        with pytest.raises(ConfigError, match="not a service of npu_gr"):
            await writer.model()


@pytest.mark.parametrize("body", [b"<html>Sign in</html>", b"{}", DEEP, b'{"users": "\xff"}'])
async def test_a_write_that_something_else_answers_is_not_done(body: bytes) -> None:
    async with writing(answer(body)) as writer:
        with pytest.raises(Unavailable, match="the answer is not of npu_gr"):
            await writer.write_many([WRITE])


@pytest.mark.parametrize("num", [0, 2])
async def test_an_answer_of_other_users_is_none(num: int) -> None:
    users = [{"num_events": 1, "num_added": 1, "error": None}] * num
    async with writing(
        answer({"request_id": "r", "num_added": num, "num_failed": 0, "users": users})
    ) as writer:
        with pytest.raises(Unavailable, match=f"has {num} of 1 users"):
            await writer.write_many([WRITE])


@pytest.mark.parametrize("body", [b'{"detail": "\xff"}', DEEP, b"no JSON", b"[]", b"{}"])
async def test_a_rejection_in_any_form_is_an_error_of_ours(body: bytes) -> None:
    async with writing(answer(body, 418)) as writer:
        with pytest.raises(NpuGrError, match="status 418"):
            await writer.model()


async def test_a_service_that_does_not_let_us_in_says_so() -> None:
    async with writing(problem(401, "no such key")) as writer:
        with pytest.raises(ConfigError, match="status 401: no such key"):
            await writer.model()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),
        ("::", "http://[::1]:8080"),
        ("::1", "http://[::1]:8080"),
        ("fd00::7", "http://[fd00::7]:8080"),
        ("gr.example", "http://gr.example:8080"),
    ],
)
def test_the_address_of_an_instance(host: str, url: str) -> None:
    config = ServerConfig(host=host, allow_unauthenticated=True)
    assert url_of(config) == url
    tls = ServerTlsConfig(certificate="c", key="k")
    assert url_of(msgspec.structs.replace(config, tls=tls)) == url.replace("http", "https")


@pytest.mark.parametrize("mode", [Mode.MERGE, Mode.REPLACE])
def test_calls_with_features_fit_and_lose_nothing(mode: Mode) -> None:
    """However wide the features are, and whatever the widths of those of other users."""
    random = np.random.default_rng(0)
    batch = []
    for number, (num, width) in enumerate(((9000, 1), (700, 60), (20, 0), (3, 1024), (5000, 3))):
        events = Events.make(np.arange(num), np.zeros(num), 1000 + np.arange(num))
        hashes = random.integers(1, 2**62, (num, width)).astype(np.uint64)
        columns = (
            Columns({"n": np.arange(num, dtype=np.float32)}, {"h": hashes}) if width else Columns()
        )
        batch.append(Write(UserKey("t", f"u{number}"), replace(events, features=columns), mode))
    seen: dict[int, Events] = {}
    for places, writes in ingest._calls(batch):
        users = [
            UserEvents(user_id=one.user.user, events=ingest._on_the_wire(one)) for one in writes
        ]
        body = msgspec.msgpack.encode(IngestBody(users=users, tenant="t", mode=writes[0].mode))
        assert len(body) <= INGEST_BYTES
        for place, one in zip(places, writes, strict=True):
            seen[place] = seen[place] + one.events if place in seen else one.events
    assert [seen[place].fingerprint() for place in range(len(batch))] == [
        one.events.fingerprint() for one in batch
    ]
