"""Two tenants with a user of one name on one instance.

Neither reads, changes or erases anything of the other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.history import UserKey
from npu_gr.handlers.service import Service
from npu_gr.replay.files import read
from npu_gr.vector_search.vectors import save
from tests.fault_proxy import FaultProxy
from tests.history_store.redis_server import redis_path
from tests.keys import bearer, entry, write_keys
from tests.models import events
from tests.serving import FIRST_ID, columns, encoded, serving
from tests.vector_search.vectors import make_vectors

CANDIDATES = list(range(FIRST_ID, FIRST_ID + 20))
HISTORY = columns(events(20))
PATIENT = {"X-Request-Timeout-Ms": "20000"}  # a busy machine


class Tenant:
    """A client with a key of its own."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._headers = {**PATIENT, **bearer(name)}

    async def post(self, kind: str, **body: Any) -> tuple[int, dict[str, Any]]:
        body = {"user_id": "u1", **({"candidates": CANDIDATES} if kind == "rank" else {}), **body}
        async with self._client.post(f"/v1/{kind}", json=body, headers=self._headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def erase(self) -> int:
        async with self._client.delete("/v1/users/u1", headers=self._headers) as answer:
            return int(answer.status)

    async def num_stored(self) -> int:
        status, answer = await self.post("rank")
        assert status == 200, answer
        return int(answer["history"]["num_tokens"])


@asynccontextmanager
async def two(folder: Path, **sections: Any) -> AsyncIterator[tuple[Tenant, Tenant, Service]]:
    keys = write_keys(folder / "keys", entry("a", tenant="a"), entry("b", tenant="b"))
    server = {"api_keys_file": keys}
    async with serving(folder, watched=False, server=server, slo={"rank_s": 2.0}, **sections) as (
        client,
        service,
    ):
        yield Tenant(client, "a"), Tenant(client, "b"), service


@pytest.mark.parametrize("store", ["embedded", "redis"])
async def test_histories_and_idempotency_keys(tmp_path: Path, store: str) -> None:
    async with AsyncExitStack() as stack:
        features = {}
        if store == "redis":
            path = stack.enter_context(redis_path(tmp_path))
            features = {"kind": "redis", "url": f"unix://{path}"}
        a, b, _ = await stack.enter_async_context(two(tmp_path, history_store=features))
        first, second = columns(events(20)), columns(events(7, seed=2))
        assert (await a.post("events", events=first, idempotency_key="once"))[0] == 200
        assert await b.num_stored() == 0
        assert (await b.post("events", events=second, idempotency_key="once"))[1]["num_events"] == 7
        assert (await a.post("events", events=first, idempotency_key="once"))[1]["num_events"] == 20
        assert (await a.num_stored(), await b.num_stored()) == (20, 7)
        assert await b.erase() == 204
        assert (await a.num_stored(), await b.num_stored()) == (20, 0)
        # forgotten too
        assert (await b.post("events", events=second, idempotency_key="once"))[1]["num_events"] == 7


async def test_prefixes_and_known_histories(tmp_path: Path) -> None:
    async with two(tmp_path) as (a, b, service):
        _, signal = await a.post("signal", history=HISTORY)
        await encoded(service.versions.ranker().relay)
        base = signal["history"]["fingerprint"]
        assert (await a.post("rank", base=base))[0] == 200
        assert (await b.post("rank", base=base))[0] == 409
        assert (await b.post("signal", base=base))[0] == 409
        _, of_a = await a.post("rank", history=HISTORY)
        _, of_b = await b.post("rank", history=HISTORY)
        assert (of_a["outcome"], of_b["outcome"]) == ("hbm_hit", "miss_full")
        assert await b.erase() == 204
        assert (await a.post("rank", base=base))[1]["outcome"] == "hbm_hit"
        assert (await b.post("rank", base=base))[0] == 409


async def test_last_known_histories(tmp_path: Path) -> None:
    with redis_path(tmp_path) as path:
        async with FaultProxy(None, None, path=path) as proxy:
            features = {
                "kind": "redis",
                "url": f"redis://127.0.0.1:{proxy.port}/0",
                "read_timeout_s": 0.1,
            }
            async with two(tmp_path, history_store=features) as (a, b, _):
                await a.post("events", events=HISTORY)
                assert await a.num_stored() == 20
                proxy.set("hang")
                status, answer = await a.post("rank")
                assert (status, answer["history"]["source"]) == (200, "last_known")
                assert (await b.post("rank"))[0] == 503
                proxy.set("pass")


async def test_vectors(tmp_path: Path) -> None:
    keys = [UserKey("a", "u1"), UserKey("b", "u1"), UserKey("", "u1")]
    vectors = make_vectors(
        user_keys=keys, in_target=np.array([True, False, True]), in_source=np.zeros(3, np.bool_)
    )
    save(vectors, tmp_path / "vectors")
    async with two(tmp_path, match={"vectors": str(tmp_path / "vectors")}) as (a, b, _):
        _, of_a = await a.post("match", num_items=10, exclude_seen=False)
        _, of_b = await b.post("match", num_items=10, exclude_seen=False)
        assert (of_a["basis"], of_b["basis"]) == ("target", "popularity")
        scores = vectors.items @ vectors.users[0]
        assert of_a["scores"] == sorted(scores.tolist(), reverse=True)[:10]


async def test_recordings(tmp_path: Path) -> None:
    record = {
        "folder": str(tmp_path / "traffic"),
        "enabled": True,
        "suffix": ".jsonl",
        "users": "clear",
    }
    async with two(tmp_path, record=record) as (a, b, _):
        await a.post("rank", history=HISTORY)
        await b.post("rank", history=HISTORY)
    (file,) = await asyncio.to_thread(lambda: list((tmp_path / "traffic").glob("traffic-*.jsonl")))
    assert [(record.tenant, record.user_id) for record in read(file)] == [("a", "u1"), ("b", "u1")]
