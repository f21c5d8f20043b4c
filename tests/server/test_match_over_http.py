"""POST /v1/match against a real instance.

Bases, filters, batches, versions under load, bad input, overload.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.errors import ConfigError, StoreFailed
from npu_gr.engine.queue import JobOrder
from npu_gr.handlers.match import MatchJob
from npu_gr.handlers.service import Service
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.store import StoredHistory
from npu_gr.vector_search.vectors import save
from tests.server.test_generate_over_http import section as of_generator
from tests.serving import serving, until
from tests.vector_search.test_fold import make_folding
from tests.vector_search.vectors import COLD, FIRST_ID, KNOWN, make_vectors

Client = TestClient[Any, Any]


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    if not (folder / "vectors").exists():
        save(make_vectors(), folder / "vectors")
    return {"vectors": str(folder / "vectors"), **changes}


async def post(
    client: Client, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def match(client: Client, **body: Any) -> dict[str, Any]:
    patient = {"X-Request-Timeout-Ms": "30000"}  # a busy machine
    status, answer = await post(client, "/v1/match", {"user_id": KNOWN, **body}, **patient)
    assert status == 200, answer
    return answer


@asynccontextmanager
async def busy_device(service: Service) -> AsyncIterator[None]:
    """The device thread is kept from its work while the block runs, and let go however it ends."""
    held = asyncio.Event()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def wait() -> None:
        begun.set()
        await held.wait()

    def hold() -> None:
        asyncio.run_coroutine_threadsafe(wait(), loop).result()

    blocker = asyncio.create_task(
        service.parts.scheduler.call(hold, float("inf"), order=JobOrder(0.0))
    )
    try:
        await begun.wait()
        yield
    finally:
        held.set()
        await blocker


async def test_every_kind_of_user_is_answered_and_the_answer_says_how(tmp_path: Path) -> None:
    vectors = make_vectors()
    async with serving(tmp_path, match=section(tmp_path)) as (client, _):
        for user, basis in ((KNOWN, "target"), (COLD, "source"), ("stranger", "popularity")):
            answer = await match(client, user_id=user, num_items=7, exclude_seen=False)
            assert (answer["basis"], answer["status"]) == (basis, "complete")
            assert answer["scores"] == sorted(answer["scores"], reverse=True)
        answer = await match(client, num_items=7)
        scores = vectors.items @ vectors.users[0]
        scores[[1, 5, 7]] = -np.inf
        assert answer["items"] == (np.argsort(-scores, kind="stable")[:7] * 2 + FIRST_ID).tolist()
        assert set(answer["stages_s"]) == {"history", "queue", "device"}
        text = await (await client.get("/metrics")).text()
        assert 'npu_gr_match_duration_seconds_count{basis="source"} 1.0' in text
        assert 'npu_gr_admissions_total{kind="match",verdict="admitted"} 4.0' in text
        assert 'npu_gr_request_duration_seconds_count{kind="match"} 4.0' in text
        assert 'npu_gr_slo_requests_total{kind="match",result="' in text
        assert "npu_gr_matched_items_total 28.0" in text


async def test_seen_items_are_left_out_as_configured_unless_the_request_says(
    tmp_path: Path,
) -> None:
    seen = {FIRST_ID + 2 * row for row in (1, 5, 7)}
    every = len(make_vectors().item_ids)
    configured = {**section(tmp_path), "exclude_seen": False}
    async with serving(tmp_path, match=configured) as (client, _):
        assert seen <= {*(await match(client, num_items=every))["items"]}
        hidden = await match(client, num_items=every, exclude_seen=True)
        assert not seen & {*hidden["items"]}


async def test_a_new_user_is_served_from_the_request_or_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vectors"
    save(make_vectors(folding=make_folding()), folder)
    items = [FIRST_ID + 2 * row for row in (3, 9)]
    history = {"items": items, "actions": [1, 1], "timestamps": [1, 2]}
    async with serving(tmp_path, match=section(tmp_path)) as (client, _):
        sent = await match(client, user_id="stranger", history=history, num_items=5)
        assert sent["basis"] == "folded"
        assert not set(items) & set(sent["items"])
        assert (await match(client, user_id="stranger"))["basis"] == "popularity"
        assert (await post(client, "/v1/events", {"user_id": "stranger", "events": history}))[
            0
        ] == 200
        stored = await match(client, user_id="stranger", num_items=5)
        assert (stored["basis"], stored["items"]) == ("folded", sent["items"])

        async def fail(*_: object) -> StoredHistory:
            raise StoreFailed("no store today")

        monkeypatch.setattr(EmbeddedStore, "read", fail)
        # from what is known of the user here
        assert (await match(client, user_id="stranger"))["basis"] == "folded"
        assert (await match(client, user_id="another stranger"))["basis"] == "popularity"


async def test_filters_and_exhaustion(tmp_path: Path) -> None:
    async with serving(tmp_path, match=section(tmp_path)) as (client, _):
        every = await match(client, num_items=100)
        assert (every["status"], every["limited_by"]) == ("exhausted", "filter")
        # of 40: without three that the user had, and a near-duplicate of one of them
        assert len(every["items"]) == 36
        denied = await match(client, num_items=5, deny_items=every["items"][:3])
        assert denied["items"] == every["items"][3:8]
        allowed = await match(client, num_items=5, allow_items=[*every["items"][-2:], 1])
        assert allowed["items"] == every["items"][-2:]
        nothing = await match(client, allow_items=[])
        assert (nothing["items"], nothing["limited_by"]) == ([], "filter")
        whole = await match(client, user_id="a stranger", num_items=100)
        assert (len(whole["items"]), whole["limited_by"]) == (40, "catalogue")
        enough = await match(client, user_id="a stranger", num_items=40)
        assert (enough["status"], enough["limited_by"]) == ("complete", "")


async def test_a_withdrawn_item_is_not_matched(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "match": section(tmp_path),
        "generate": of_generator(tmp_path),
    }
    async with serving(tmp_path, **sections) as (client, _):
        every = (await match(client, num_items=100))["items"]
        for change, found in (
            ({"withdraw": [every[0]]}, every[1:]),
            ({"restore": [every[0]]}, every),
            ({"withdraw": [every[0]]}, every[1:]),
        ):
            status, answer = await post(client, "/v1/catalog/items", change)
            assert status == 200, answer
            assert (await match(client, num_items=100))["items"] == found
        denied = await match(client, num_items=5, deny_items=every[1:2])
        assert denied["items"] == every[2:7]


async def test_msgpack_carries_raw_columns(tmp_path: Path) -> None:
    async with serving(tmp_path, match=section(tmp_path)) as (client, _):
        plain = await match(client, num_items=6)
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        body = {"user_id": KNOWN, "num_items": 6, "deny_items": np.array([1], "<i8").tobytes()}
        async with client.post(
            "/v1/match", data=msgspec.msgpack.encode(body), headers=headers
        ) as response:
            answer = msgspec.msgpack.decode(await response.read())
        assert np.frombuffer(answer["items"], "<i8").tolist() == plain["items"]
        assert np.frombuffer(answer["scores"], "<f4").tolist() == plain["scores"]


@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        ({"num_items": 0}, 422, "num_items: Expected `int` >= 1"),
        ({"num_items": 1001}, 422, "num_items: 1001, the limit is 1000"),
        ({"vectors_version": "x"}, 404, "vectors_version: 'x' is not served"),
        ({"deny_items": list(range(20_000))}, 413, "deny_items: 20000 entries"),
        ({"denyitems": [1]}, 422, "unknown field denyitems; did you mean deny_items?"),
    ],
)
async def test_bad_requests_are_named(
    change: dict[str, Any], status: int, detail: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, match=section(tmp_path)) as (client, _):
        got, answer = await post(client, "/v1/match", {"user_id": KNOWN, **change})
        assert got == status
        assert detail in answer["detail"]


async def test_an_instance_without_vectors_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        assert (await post(client, "/v1/match", {"user_id": "u"}))[0] == 404
        assert (await post(client, "/v1/match/reload"))[0] == 404


async def test_vectors_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"match\.vectors: .*No such file"):
        async with serving(tmp_path, match={"vectors": str(tmp_path / "none")}):
            pass


async def test_what_waits_shares_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    best_items = CPUBackend.best_items

    def counting(backend: CPUBackend, queries: Any, *rest: Any) -> Any:
        sizes.append(len(queries))
        return best_items(backend, queries, *rest)

    searching = 0
    search = MatchJob._search

    async def counted(job: MatchJob, *arguments: Any) -> Any:
        nonlocal searching
        searching += 1
        return await search(job, *arguments)

    monkeypatch.setattr(CPUBackend, "best_items", counting)
    monkeypatch.setattr(MatchJob, "_search", counted)
    slo = {"match_s": 10.0}  # all of them are let in
    async with serving(tmp_path, slo=slo, match=section(tmp_path, max_batch_requests=16)) as (
        client,
        service,
    ):
        alone = await match(client, num_items=9)
        async with busy_device(service):
            asked = [asyncio.create_task(match(client, num_items=9)) for _ in range(24)]
            await until(lambda: searching == 25)
        answers = await asyncio.gather(*asked)
        assert {tuple(answer["items"]) for answer in answers} == {tuple(alone["items"])}
        assert sum(sizes) == 25
        assert max(sizes) <= 16
        assert len(sizes) <= 1 + 3  # alone, those that came first, the rest


async def test_versions_swap_and_roll_back_under_load(tmp_path: Path) -> None:
    config = section(tmp_path)
    answers: list[dict[str, Any]] = []
    async with serving(tmp_path, match=config) as (client, _):

        async def load() -> None:
            while True:
                answers.append(await match(client, num_items=5))

        tasks = [asyncio.create_task(load()) for _ in range(4)]
        async with client.get("/v1/match/vectors") as response:
            first = (await response.json())["version"]
        assert (await post(client, "/v1/match/rollback"))[0] == 422
        await asyncio.to_thread(save, make_vectors(seed=1), Path(config["vectors"]))
        second = (await post(client, "/v1/match/reload"))[1]
        assert (second["previous"], second["num_items"]) == (first, 40)
        await asyncio.sleep(0.1)
        (tmp_path / "vectors" / "vectors.safetensors").write_bytes(b"damaged")
        status, problem = await post(client, "/v1/match/reload")
        assert status == 422
        assert "its digest differs" in problem["detail"]
        back = (await post(client, "/v1/match/rollback"))[1]
        assert (back["version"], back["previous"]) == (first, second["version"])
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found = {answer["vectors_version"]: set() for answer in answers}  # type: dict[str, set[tuple[int, ...]]]
    for answer in answers:
        found[answer["vectors_version"]].add(tuple(answer["items"]))
    assert found.keys() == {first, second["version"]}
    assert all(len(items) == 1 for items in found.values())  # a version always answers the same


async def test_a_deadline_and_a_full_queue_end_as_for_the_other_routes(tmp_path: Path) -> None:
    async with serving(tmp_path, match=section(tmp_path), admission={"max_inflight": 1}) as (
        client,
        service,
    ):
        async with busy_device(service):
            waiting = asyncio.create_task(match(client, num_items=3))
            await until(lambda: service.admission.work.admitted == 1)
            status, _ = await post(client, "/v1/match", {"user_id": KNOWN})
            assert status == 429
        assert (await waiting)["status"] == "complete"
        async with busy_device(service):
            status, _ = await post(
                client, "/v1/match", {"user_id": KNOWN}, **{"X-Request-Timeout-Ms": "30"}
            )
            assert status == 504
        assert (await match(client, num_items=3))["status"] == "complete"
