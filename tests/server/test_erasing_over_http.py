"""After `DELETE /v1/users/{id}` nothing finds the user.

204: no byte is left; 202: the places that hold some.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.errors import StoreFailed
from npu_gr.core.history import UserKey
from npu_gr.handlers.histories import Histories
from npu_gr.replay.files import QueryLog
from npu_gr.replay.purge import purge
from npu_gr.vector_search.vectors import save
from tests.models import events
from tests.server.fake import FakeService, serving_fake
from tests.serving import FIRST_ID, columns, encoded, serving
from tests.vector_search.vectors import KNOWN, make_vectors

USER = "anna.archer@example.com"


async def post(client: TestClient[Any, Any], path: str, **body: Any) -> None:
    async with client.post(path, json=body) as response:
        assert response.status < 300, await response.text()


async def use(client: TestClient[Any, Any], *users: str) -> None:
    for user in users:
        history = columns(events(40))
        await post(
            client,
            "/v1/events",
            user_id=user,
            tenant="t",
            events=history,
            idempotency_key=f"{user}-1",
        )
        await post(client, "/v1/signal", user_id=user, tenant="t", history=history)
        await post(
            client, "/v1/rank", user_id=user, tenant="t", history=history, candidates=[FIRST_ID]
        )


async def erase(client: TestClient[Any, Any], user: str = USER) -> tuple[int, list[str]]:
    async with client.delete(f"/v1/users/{user}?tenant=t") as response:
        body = await response.json() if response.status == 202 else {}
        assert list(body.get("where", {})) == body.get("pending", [])
        return response.status, body.get("pending", [])


async def knows(client: TestClient[Any, Any], tenant: str = "t") -> dict[str, bool]:
    async with client.post("/debug/user", json={"user_id": USER, "tenant": tenant}) as response:
        assert response.status == 200
        places: dict[str, bool] = (await response.json())["places"]
        return places


def holding(folder: Path, user: str = USER) -> list[str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path.name for path in files if user.encode() in path.read_bytes()]


async def test_without_recordings_no_byte_is_left(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        await use(client, USER, "bert")
        await encoded(service.versions.ranker().relay)
        assert holding(tmp_path)
        assert await erase(client) == (204, [])
        assert holding(tmp_path) == []
        assert holding(tmp_path, "bert")
    assert holding(tmp_path) == []


async def test_with_recordings_the_answer_names_them(tmp_path: Path) -> None:
    record = {
        "folder": str(tmp_path / "traffic"),
        "enabled": True,
        "suffix": ".jsonl",
        "users": "clear",
    }
    async with serving(tmp_path, record=record) as (client, _):
        await use(client, USER, "bert")
        assert await erase(client) == (202, ["recordings"])
    assert all(name.startswith("traffic-") for name in holding(tmp_path))
    for path in (tmp_path / "traffic").glob("traffic-*"):
        assert {one.user_id for one in QueryLog(path)} == {"bert"}
    purge(tmp_path / "traffic")
    assert holding(tmp_path) == []
    assert holding(tmp_path, "bert")


async def test_a_reader_of_the_store_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, watched=False) as (client, _):
        await use(client, USER)
        other = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM users").fetchone()
        assert await erase(client) == (202, ["store"])
        async with client.get("/metrics") as response:
            text = await response.text()
        assert 'npu_gr_erasure_runs_total{place="store",result="held"} 1.0' in text
        other.close()
        assert await erase(client) == (204, [])
        async with client.get("/metrics") as response:
            assert 'npu_gr_erasure_pending_seconds{place="store"} 0.0' in await response.text()
        assert holding(tmp_path) == []


async def test_a_store_that_fails_does_not_keep_memory_and_recordings_from_forgetting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {
        "folder": str(tmp_path / "traffic"),
        "enabled": True,
        "suffix": ".jsonl",
        "users": "clear",
    }

    async def fail(*_: object) -> bool:
        raise StoreFailed("gone")

    async with serving(tmp_path, record=record) as (client, service):
        await use(client, USER)
        relay = service.versions.ranker().relay
        await encoded(relay)
        with monkeypatch.context() as broken:
            broken.setattr(Histories, "erase", fail)
            assert await erase(client) == (503, [])
        assert not len(relay.tiers[0])
    (path,) = (tmp_path / "traffic").glob("traffic-*")
    assert list(QueryLog(path)) == []


async def test_every_file_with_data_of_users_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        record = {"folder": str(tmp_path / "data" / "traffic"), "enabled": True}
        store = {"path": str(tmp_path / "data" / "history.db")}
        async with serving(tmp_path, record=record, history_store=store) as (client, _):
            await use(client, USER)
            await erase(client)
            files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
            assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
                path.name: "0o600" for path in files
            }
            assert len(files) >= 6
        (weights,) = (tmp_path / "checkpoint").glob("*.safetensors")
        assert oct(weights.stat().st_mode & 0o777) == "0o666"  # weights follow the umask
    finally:
        os.umask(before)


async def test_after_the_answer_the_process_knows_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        await use(client, USER)
        relay = service.versions.ranker().relay
        await encoded(relay)
        user = UserKey("t", USER)
        assert await knows(client) == {"histories": True, "prefixes": True, "vectors": False}
        assert not any((await knows(client, tenant="other")).values())
        assert await erase(client) == (204, [])
        assert service.parts.histories.cache.last_known(user) is None
        assert await knows(client) == dict.fromkeys(("histories", "prefixes", "vectors"), False)
        async with client.get("/debug/bundle") as response:
            assert USER.encode() not in await response.read()


async def test_vectors_that_were_trained_with_the_user_are_named(tmp_path: Path) -> None:
    users = [UserKey(tenant, KNOWN) for tenant in ("t", "other", "")]
    save(make_vectors(user_keys=users), tmp_path / "vectors")
    async with serving(tmp_path, match={"vectors": str(tmp_path / "vectors")}) as (client, _):
        assert await erase(client, KNOWN) == (202, ["vectors"])
        assert await erase(client) == (204, [])


@pytest.mark.parametrize("body", [b"{}", b"[", b'{"user_id": ""}', b'{"user_id": "a", "x": 1}'])
async def test_a_question_about_nobody_is_rejected(tmp_path: Path, body: bytes) -> None:
    async with serving_fake(FakeService({})) as (client, _):
        headers = {"Content-Type": "application/json"}
        async with client.post("/debug/user", data=body, headers=headers) as response:
            assert response.status in (400, 422)
