"""A relay's rank sends no history again once the signal is answered.

It waits for no signal, and survives all of them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from npu_gr.client import AsyncClient, Behaviours, Client
from npu_gr.core.errors import DeadlineExceeded, Unprocessable
from tests.client.scripted import HANG, RANKED, SIGNALLED, Answer, Asked, answer, problem, scripted
from tests.serving import until

GOOD = answer(RANKED)
SIGNALLED_SOON = answer(SIGNALLED, 202)
SEEN = Behaviours(["a", "b"], ["view", "view"], [1_700_000_000, 1_700_000_001])
LONG_S = 30.0


def body(one: Asked) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(one.body)
    return decoded


async def test_the_rank_continues_what_the_signal_brought() -> None:
    async with (
        scripted(SIGNALLED_SOON, GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
        client.relay("u", history=SEEN, num_candidates=2) as relay,
    ):
        await until(lambda: relay.signalled is not None)
        ranked = await relay.rank(["c", "d"], top_k=1)
    assert ranked.outcome == "hbm_hit"
    signal, rank = service.asked
    assert (signal.path, rank.path) == ("/v1/signal", "/v1/rank")
    assert body(signal)["history"]["actions"] == ["view", "view"]
    assert body(signal)["num_candidates"] == 2
    assert body(rank)["base"] == "f" * 32
    assert "history" not in body(rank)


@pytest.mark.parametrize(
    "bad",
    [
        HANG,
        problem(429, "your share"),
        problem(503, "it drains"),
        problem(500, "a fault"),
        Answer(b"", closes=True),
        answer(b"{"),
        answer(b"", 204),
    ],
    ids=["hangs", "429", "503", "500", "closed", "json", "204"],
)
async def test_no_signal_fails_a_rank(bad: Answer) -> None:
    async with scripted(bad) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        async with client.relay("u", history=SEEN) as relay:
            await until(
                lambda: len(service.asked) == 1 if bad is HANG else relay.failure is not None
            )
            service.answers = [GOOD]
            ranked = await relay.rank(["c", "d"])
            assert relay.signalled is None
        if bad is HANG:
            await until(lambda: service.num_left == 1)  # the signal ends with the block
    assert ranked.scores["click"][0] == 0.5
    assert body(service.asked[-1])["history"]["actions"] == ["view", "view"]
    assert "base" not in body(service.asked[-1])


async def test_a_rank_waits_for_no_signal() -> None:
    async with (
        scripted(HANG) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
        client.relay("u", history=SEEN) as relay,
    ):
        service.answers = [GOOD]  # whichever comes first is the rank: the signal has not begun
        await relay.rank(["c", "d"])


async def test_where_the_base_is_not_known_the_history_is_sent() -> None:
    unknown = problem(409, "base is not known here")
    async with (
        scripted(SIGNALLED_SOON, unknown, GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
        client.relay("u", history=SEEN) as relay,
    ):
        await until(lambda: relay.signalled is not None)
        await relay.rank(["c", "d"])
    assert "history" not in body(service.asked[1])
    assert (
        body(service.asked[2])["history"]["timestamps"]
        == body(service.asked[0])["history"]["timestamps"]
    )
    budgets = [float(one.headers["x-request-timeout-ms"]) for one in service.asked[1:]]
    assert budgets[1] < budgets[0], "one deadline for both"


async def test_a_base_that_is_not_known_is_asked_for_once() -> None:
    unknown = problem(409, "base is not known here")
    async with (
        scripted(SIGNALLED_SOON, unknown, GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
        client.relay("u", history=SEEN) as relay,
    ):
        await until(lambda: relay.signalled is not None)
        for _ in range(3):
            await relay.rank(["c", "d"])
        assert relay.signalled is not None, "it was answered, whatever became of its base"
    assert ["base" in body(one) for one in service.asked] == [False, True, False, False, False]


async def test_a_history_of_the_store_needs_none() -> None:
    unknown = problem(409, "base is not known here")
    async with (
        scripted(SIGNALLED_SOON, unknown, GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
        client.relay("u") as relay,
    ):
        await until(lambda: relay.signalled is not None)
        await relay.rank(["c", "d"])
    assert body(service.asked[2]).keys() == {"user_id", "candidates"}


async def test_the_ranks_own_failures_are_raised() -> None:
    async with (
        scripted(SIGNALLED_SOON, HANG) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        async with client.relay("u", history=Behaviours(["a"], [], [])) as relay:
            await until(lambda: relay.signalled is not None)
            with pytest.raises(DeadlineExceeded):
                await relay.rank(["c"], timeout_s=0.1)
        bad = Behaviours([""], ["view"], [1])
        async with client.relay("u", history=bad) as relay:
            with pytest.raises(Unprocessable, match=r"history\.items: index 0"):
                await relay.rank(["c"])


async def test_an_error_of_the_body_ends_the_signal() -> None:
    async with scripted(HANG) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012  (the block is what is tested)
            async with client.relay("u") as relay:
                await until(lambda: len(service.asked) == 1)
                raise ZeroDivisionError
        assert relay.failure is None, "it was not waited for"
        await until(lambda: service.num_left == 1)


async def test_for_threads_the_signal_is_on_its_way_while_the_body_works() -> None:
    def work(url: str, arrived: list[Asked]) -> None:
        with Client(url, timeout_s=LONG_S) as client, client.relay("u", history=SEEN) as relay:
            # retrieval: nothing of it calls the client
            ends_at = time.monotonic() + LONG_S
            while not arrived or relay.signalled is None:
                assert time.monotonic() < ends_at, (arrived, relay.signalled)
            assert relay.rank(["c", "d"]).outcome == "hbm_hit"
            assert relay.failure is None

    async with scripted(SIGNALLED_SOON, GOOD) as service:
        await asyncio.to_thread(work, service.url, service.asked)
    assert body(service.asked[1])["base"] == "f" * 32
