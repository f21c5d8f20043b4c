"""Against real instances: the client answers what the service computes, in the company's names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.client import AsyncClient, Behaviours, Client
from npu_gr.core.errors import (
    DeadlineExceeded,
    Forbidden,
    NotFound,
    Overloaded,
    Unauthorized,
    UnknownPrefix,
    Unprocessable,
    Unreachable,
)
from npu_gr.core.history import HistoryRef, UserKey
from npu_gr.core.kinds import RANK, Scope
from npu_gr.core.request import RankRequest
from npu_gr.handlers.service import Service
from npu_gr.service.app import instance as running
from tests.keys import entry, secret, write_keys
from tests.models import events
from tests.ports import free_port
from tests.serving import (
    FIRST_ID,
    InstanceServer,
    columns,
    encoded,
    make_config,
    serving,
    until,
    write_checkpoint,
)

LONG_S = 30.0
CANDIDATES: list[str | int] = [FIRST_ID + 3, str(FIRST_ID + 5), 7, "no such SKU"]


def address(client: TestClient[Any, Any]) -> str:
    return str(client.make_url("/"))


def behaviours(num: int, seed: int = 0) -> Behaviours:
    history = columns(events(num, seed))
    return Behaviours(history["items"], history["actions"], history["timestamps"])


@pytest.fixture
async def instance(tmp_path: Path) -> AsyncIterator[tuple[str, Service]]:
    async with serving(tmp_path) as (http, service):
        yield address(http), service


@pytest.fixture
async def client(instance: tuple[str, Service]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(instance[0], timeout_s=LONG_S) as one:
        yield one


async def test_a_rank_is_bit_for_bit_the_services(
    client: AsyncClient, instance: tuple[str, Service]
) -> None:
    history = events(40)
    ranked = await client.rank(
        "u", CANDIDATES, history=behaviours(40), timestamp=1_700_000_000, top_k=2
    )
    request = RankRequest(
        user=UserKey("", "u"),
        candidates=np.array([FIRST_ID + 3, FIRST_ID + 5, 7, 8]),
        history=HistoryRef(
            events=type(history)(history.items + FIRST_ID, history.actions, history.timestamps)
        ),
        timestamp=1_700_000_000,
    )
    computed = await instance[1].serve(RANK, request, LONG_S)
    assert ranked.names == CANDIDATES
    assert ranked.scores.keys() == computed.scores.keys()
    for task, column in computed.scores.items():
        assert ranked.scores[task].tobytes() == column.tobytes()
    first = ranked.scores["click"]
    best = sorted((0, 1), key=lambda place: -first[place])
    assert [(item.name, item.score) for item in ranked.top] == [
        (CANDIDATES[at], first[at]) for at in best
    ]
    assert ranked.answer.unknown_candidates == 2


async def test_a_relays_rank_finds_the_prefix(
    client: AsyncClient, instance: tuple[str, Service]
) -> None:
    seen = behaviours(60, seed=1)
    async with client.relay("relayed", history=seen) as relay:
        await encoded(instance[1].versions.ranker().relay)
        await until(lambda: relay.signalled is not None)
        ranked = await relay.rank(CANDIDATES, timestamp=1_700_000_000)
    assert ranked.outcome == "hbm_hit"
    assert relay.signalled is not None
    assert ranked.answer.history.fingerprint == relay.signalled.history.fingerprint
    whole = await client.rank("another", CANDIDATES, history=seen, timestamp=1_700_000_000)
    np.testing.assert_allclose(ranked.scores["click"], whole.scores["click"], rtol=1e-5, atol=1e-6)


async def test_a_base_that_is_not_known_is_an_error_of_its_own(client: AsyncClient) -> None:
    with pytest.raises(UnknownPrefix):
        await client.rank("u", CANDIDATES, base="f" * 32)


async def test_events_are_appended_once(client: AsyncClient) -> None:
    new = behaviours(5)
    assert (await client.events("me", new)).num_events == 5
    assert (await client.events("me", new)).num_events == 10, "two calls, two keys"
    assert (await client.events("me", new, idempotency_key="k")).num_events == 15
    assert (await client.events("me", new, idempotency_key="k")).num_events == 15
    ranked = await client.rank("me", CANDIDATES)
    assert (ranked.answer.history.source, ranked.answer.history.num_tokens) == ("store", 15)


@pytest.mark.parametrize(
    "user", ["me", "..", ".", "a/../b", "a/b?c=d#e%2Fé &;", "%2e%2e", "a\nb", "x" * 128, 42]
)
async def test_any_user_is_erased(client: AsyncClient, user: str | int) -> None:
    assert (await client.events(user, behaviours(3))).num_events == 3
    assert (await client.events("bystander", behaviours(3), idempotency_key="k")).num_events == 3
    assert await client.erase(user) == ()
    assert (await client.events(user, behaviours(1))).num_events == 1
    assert (await client.rank("bystander", CANDIDATES)).answer.history.num_tokens == 3


@pytest.mark.parametrize("user", [" me", "me ", "\n", "\xa0me"])
async def test_a_user_with_blanks_around_the_id_can_only_be_erased(
    client: AsyncClient, user: str
) -> None:
    """Older versions stored such users; `prepare` removes the blanks."""
    with pytest.raises(Unprocessable, match="has blanks around it"):
        await client.events(user, behaviours(3))
    with pytest.raises(Unprocessable, match="has blanks around it"):
        await client.rank(user, CANDIDATES)
    assert await client.erase(user) == ()


async def test_tenants_are_apart(instance: tuple[str, Service]) -> None:
    async with AsyncClient(instance[0], tenant="shop & co", timeout_s=LONG_S) as client:
        await client.events("me", behaviours(4))
        assert (await client.rank("me", CANDIDATES)).answer.history.num_tokens == 4
        assert (await client.rank("me", CANDIDATES, tenant="other")).answer.history.num_tokens == 0
        await client.erase("me", tenant="other")
        assert (await client.rank("me", CANDIDATES)).answer.history.num_tokens == 4
        await client.erase("me")
        assert (await client.rank("me", CANDIDATES)).answer.history.num_tokens == 0


async def test_what_the_service_rejects_names_its_field(client: AsyncClient) -> None:
    with pytest.raises(Unprocessable) as raised:
        await client.rank("u", CANDIDATES, top_k=0)
    assert (raised.value.field, raised.value.title) == ("top_k", "unprocessable request")
    assert raised.value.request_id
    with pytest.raises(Unprocessable) as raised:
        await client.rank("", CANDIDATES)
    assert raised.value.field == "user_id"
    with pytest.raises(NotFound, match="section generate"):
        await client.generate("u", history=behaviours(3))
    with pytest.raises(NotFound):
        await client.rank("u", CANDIDATES, model_version="none")


async def test_models_and_readiness(client: AsyncClient, instance: tuple[str, Service]) -> None:
    [model] = await client.models()
    assert model == instance[1].models()[0]
    assert await client.is_ready()
    instance[1].set_ready("draining")
    assert not await client.is_ready()


async def test_a_deadline_that_cannot_be_met(client: AsyncClient) -> None:
    with pytest.raises((DeadlineExceeded, Overloaded)):  # whoever notices first
        await client.rank("u", CANDIDATES, history=behaviours(500), timeout_s=0.001)


async def test_keys(tmp_path: Path) -> None:
    keys = write_keys(
        tmp_path / "keys.json",
        entry("all", tenant="shop"),
        entry("reads", tenant="shop", scopes=[Scope.INFER]),
        entry("slow", tenant="shop", rate_per_s=0.01),
    )
    async with serving(tmp_path, server={"api_keys_file": keys}) as (http, _):
        async with AsyncClient(address(http), timeout_s=LONG_S) as nobody:
            with pytest.raises(Unauthorized):
                await nobody.rank("u", CANDIDATES)
            assert await nobody.is_ready()
        async with AsyncClient(address(http), api_key=secret("all"), timeout_s=LONG_S) as shop:
            assert (await shop.events("u", behaviours(2))).num_events == 2
            with pytest.raises(Forbidden, match="tenant"):
                await shop.rank("u", CANDIDATES, tenant="another")
        async with AsyncClient(address(http), api_key=secret("reads"), timeout_s=LONG_S) as reader:
            assert (await reader.rank("u", CANDIDATES)).answer.history.num_tokens == 2
            with pytest.raises(Forbidden, match="ingest"):
                await reader.events("u", behaviours(1))
        async with AsyncClient(
            address(http), api_key=secret("slow"), timeout_s=LONG_S, max_attempts=1
        ) as slow:
            await slow.rank("u", CANDIDATES)
            with pytest.raises(Overloaded) as raised:
                await slow.rank("u", CANDIDATES)
            assert raised.value.retry_after_s == 1


async def test_an_instance_that_starts_again_is_found_again(
    tmp_path: Path,
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def rank(client: Client) -> str:
        return client.rank("u", CANDIDATES, history=behaviours(10)).outcome

    write_checkpoint(tmp_path / "checkpoint")
    with Client(url, timeout_s=LONG_S) as client:
        for _ in range(2):
            async with (
                running(make_config(tmp_path)) as (app, _),
                InstanceServer(app, port=port),
            ):
                assert await asyncio.to_thread(rank, client) == "miss_full"
            with pytest.raises(Unreachable):
                await asyncio.to_thread(rank, client)
