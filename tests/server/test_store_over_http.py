"""A history store that fails, over HTTP: keys count once.

Who brings the history never notices, the others are told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from redis import asyncio as redis

from npu_gr.core.errors import ConfigError
from npu_gr.core.history import Events
from tests.fault_proxy import FaultProxy, Mode
from tests.history_store.redis_cluster import address, cluster
from tests.history_store.redis_server import redis_path
from tests.models import events
from tests.ports import free_port
from tests.serving import FIRST_ID, columns, serving, write_checkpoint

CANDIDATES = list(range(FIRST_ID, FIRST_ID + 20))
PATIENT = {"X-Request-Timeout-Ms": "20000"}  # a busy machine


async def post(
    client: Any, path: str, body: dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    async with client.post(path, json=body, headers={**PATIENT, **headers}) as answer:
        return answer.status, await answer.json()


async def rank(client: Any, user: str, history: Events | None = None) -> tuple[int, dict[str, Any]]:
    body: dict[str, Any] = {"user_id": user, "candidates": CANDIDATES}
    if history is not None:
        body["history"] = columns(history)
    return await post(client, "/v1/rank", body)


@asynccontextmanager
async def on_redis(folder: Path, **features: Any) -> AsyncIterator[tuple[Any, FaultProxy]]:
    """An instance on a Redis behind a network that a test breaks."""
    with redis_path(folder) as path:
        async with FaultProxy(None, None, path=path) as proxy:
            section = {
                "kind": "redis",
                "url": f"redis://127.0.0.1:{proxy.port}/0",
                "timeout_s": 2.0,
                **features,
            }
            # an objective that a busy machine keeps too: what is rejected is rejected because of
            # the store
            async with serving(folder, history_store=section, slo={"rank_s": 2.0}) as (client, _):
                yield client, proxy


@pytest.mark.parametrize("mode", ["hang", "late"])
async def test_who_brings_the_history_never_notices(mode: Mode, tmp_path: Path) -> None:
    """Half of the ranks need a Redis that hangs, or is 300 ms late."""
    async with on_redis(tmp_path, read_timeout_s=0.1, timeout_s=0.2, retry_s=2.0) as (
        client,
        proxy,
    ):
        for number in range(4):
            await post(
                client,
                "/v1/events",
                {"user_id": f"known{number}", "events": columns(events(20, seed=number))},
            )
            assert (await rank(client, f"known{number}"))[1]["history"]["source"] == "store"
        proxy.set(mode, late_s=0.3)
        asked = []
        for turn in range(40):
            asked.append(asyncio.ensure_future(rank(client, f"own{turn}", events(30, seed=turn))))
            asked.append(asyncio.ensure_future(rank(client, f"known{turn % 4}")))
            await asyncio.sleep(0.02)
        answers = await asyncio.gather(*asked)
        assert [status for status, _ in answers[::2]] == [200] * 40
        assert {body["history"]["source"] for _, body in answers[::2]} == {"request"}
        for status, body in answers[1::2]:
            assert status == 200
            assert body["history"]["source"] == "last_known"
            assert body["history"]["fault"] in ("store_slow", "store_busy")
            assert body["history"]["num_tokens"] == 20
        text = await (await client.get("/metrics")).text()
        rejected = text.split('npu_gr_store_calls_total{operation="read",result="rejected"} ')[
            1
        ].split()[0]
        # the breaker is open: most of them do not even wait for the limit
        assert float(rejected) >= 20
        proxy.set("pass")
        async with asyncio.timeout(20):
            while (await rank(client, "known0"))[1]["history"]["source"] != "store":  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_slow_store_is_waited_for_where_nothing_is_known(tmp_path: Path) -> None:
    """A store that takes 12 times its limit: 200 from the store, as the request has the time.

    Who is known is answered from what was known, and the next time from what the store said late.
    """
    async with on_redis(tmp_path, read_timeout_s=0.025) as (client, proxy):
        for number in range(12):
            body = {"user_id": f"u{number}", "events": columns(events(20, seed=number))}
            assert (await post(client, "/v1/events", body))[0] == 200
        proxy.set("late", late_s=0.3)
        answers = await asyncio.gather(*(rank(client, f"u{number}") for number in range(12)))
        assert {(status, body["history"]["source"]) for status, body in answers} == {(200, "store")}
        text = await (await client.get("/metrics")).text()
        assert 'npu_gr_store_breaker_open{lane="reads",store="redis"} 0.0' in text
        body = {"user_id": "u0", "events": columns(events(5, seed=77))}
        assert (await post(client, "/v1/events", body))[0] == 200
        status, known = await rank(client, "u0")
        assert (status, known["history"]["source"]) == (200, "last_known")
        assert known["history"]["fault"] == "store_slow"
        assert known["history"]["num_tokens"] == 20
        async with asyncio.timeout(20):
            while (await rank(client, "u0"))[1]["history"]["num_tokens"] != 25:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_the_wait_ends_before_the_time_limit_of_the_request(tmp_path: Path) -> None:
    async with on_redis(tmp_path, read_timeout_s=0.025, timeout_s=30.0) as (client, proxy):
        proxy.set("hang")
        body = {"user_id": "new", "candidates": CANDIDATES}
        brief = {"X-Request-Timeout-Ms": "500"}
        async with client.post("/v1/rank", json=body, headers=brief) as answer:
            assert answer.status == 503  # and not 504: there was time left for an answer
            assert "did not answer within" in (await answer.json())["detail"]


async def test_a_start_without_redis_is_degraded_until_it_is_there(tmp_path: Path) -> None:
    section = {"kind": "redis", "url": f"unix://{tmp_path}/redis.sock", "retry_s": 0.05}
    async with serving(tmp_path, history_store=section) as (client, _):
        assert (await client.get("/readyz")).status == 200
        text = await (await client.get("/metrics")).text()
        for lane in ("reads", "writes"):
            assert f'npu_gr_store_breaker_open{{lane="{lane}",store="redis"}} 1.0' in text
        assert (await rank(client, "own", events(20)))[0] == 200
        status, body = await rank(client, "new")
        assert status == 503
        assert "the history store does not answer" in body["detail"]
        with redis_path(tmp_path):
            appended = {"user_id": "u", "events": columns(events(20))}
            async with asyncio.timeout(20):
                while (await post(client, "/v1/events", appended))[0] != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(20):
                while (await rank(client, "u"))[0] != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await rank(client, "u"))[1]["history"]["source"] == "store"


async def test_a_start_without_redis_is_an_error_where_a_failure_is(tmp_path: Path) -> None:
    section = {"kind": "redis", "url": f"unix://{tmp_path}/redis.sock", "on_failure": "fail"}
    with pytest.raises(ConfigError, match=r"history_store\.url: no answer from "):
        async with serving(tmp_path, history_store=section):
            pass


async def test_a_store_of_other_actions_that_comes_later_makes_it_unready(tmp_path: Path) -> None:
    section = {"kind": "redis", "url": f"unix://{tmp_path}/redis.sock", "retry_s": 0.05}
    async with serving(tmp_path, history_store=section) as (client, _):
        assert (await client.get("/readyz")).status == 200
        with redis_path(tmp_path) as path:
            async with redis.from_url(f"unix://{path}") as other:
                await other.rpush("npu_gr:actions", "view", "buy")
            async with asyncio.timeout(20):
                while (await client.get("/readyz")).status == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            detail = (await (await client.get("/readyz")).json())["detail"]
            assert "filled with other actions" in detail


async def test_users_of_whom_nothing_is_known(tmp_path: Path) -> None:
    async with on_redis(tmp_path) as (client, proxy):
        proxy.set("reset")
        status, body = await rank(client, "new")
        assert status == 503
        assert "history store" in body["detail"]
        status, body = await post(
            client, "/v1/events", {"user_id": "new", "events": columns(events(2))}
        )
        assert status == 503  # an append is never taken on trust
        async with client.delete("/v1/users/new") as answer:
            assert answer.status == 503
        text = await (await client.get("/metrics")).text()
        assert (
            'npu_gr_history_degraded_total{fault="store_unavailable",source="failed"} 1.0'
        ) in text


async def test_an_answer_without_behaviours_is_a_choice(tmp_path: Path) -> None:
    async with on_redis(tmp_path, on_failure="nothing") as (client, proxy):
        proxy.set("reset")
        status, body = await rank(client, "new")
        assert status == 200
        assert body["history"]["source"] == "nothing"
        assert body["history"]["fault"] == "store_unavailable"
        assert body["history"]["num_tokens"] == 0
        proxy.set("pass")
        async with asyncio.timeout(20):
            while (await rank(client, "new"))[1]["history"]["source"] != "store":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        # as a user without history
        assert (await rank(client, "new"))[1]["scores"] == body["scores"]


async def test_fail_means_fail(tmp_path: Path) -> None:
    async with on_redis(tmp_path, on_failure="fail") as (client, proxy):
        await post(client, "/v1/events", {"user_id": "u", "events": columns(events(20))})
        assert (await rank(client, "u"))[0] == 200
        proxy.set("reset")
        assert (await rank(client, "u"))[0] == 503


async def test_an_erased_user_is_not_remembered(tmp_path: Path) -> None:
    """Once erased, behaviours do not come back as the last known when the store fails."""
    async with on_redis(tmp_path, on_failure="nothing") as (client, proxy):
        await post(client, "/v1/events", {"user_id": "u", "events": columns(events(20))})
        assert (await rank(client, "u"))[1]["history"]["num_tokens"] == 20
        async with client.delete("/v1/users/u") as answer:
            assert answer.status == 204
        proxy.set("reset")
        assert (await rank(client, "u"))[1]["history"]["num_tokens"] == 0


async def test_an_erasure_outruns_a_read(tmp_path: Path) -> None:
    """A read that began before the erasure and ends after it is not remembered."""
    async with serving(tmp_path, watched=False, history_store={"on_failure": "nothing"}) as (
        client,
        service,
    ):
        await post(client, "/v1/events", {"user_id": "u", "events": columns(events(20))})
        histories = service.parts.histories
        store = histories.store
        assert store is not None
        whole, held, going_on = store.read, asyncio.Event(), asyncio.Event()

        async def slow(*asked: Any) -> Any:
            stored = await whole(*asked)
            held.set()
            await going_on.wait()
            return stored

        store.read = slow  # type: ignore[method-assign, assignment]
        reading = asyncio.ensure_future(rank(client, "u"))
        await asyncio.wait_for(held.wait(), 10)
        async with client.delete("/v1/users/u") as answer:
            assert answer.status == 204
        going_on.set()
        assert (await reading)[1]["history"]["num_tokens"] == 20
        from npu_gr.core.history import UserKey

        assert histories.cache.last_known(UserKey("", "u")) is None


async def test_damage_is_degraded_and_no_garbage(tmp_path: Path) -> None:
    async with serving(tmp_path, history_store={"on_failure": "nothing"}) as (client, _):
        for name in ("u", "v"):
            await post(client, "/v1/events", {"user_id": name, "events": columns(events(20))})
        with sqlite3.connect(tmp_path / "history.db") as db:
            db.execute(
                "UPDATE chunks SET data = randomblob(length(data)) WHERE substr(user, -1) = x'75'"
            )
        status, body = await rank(client, "u")
        assert status == 200
        assert (body["history"]["source"], body["history"]["fault"]) == ("nothing", "entry_corrupt")
        assert (await rank(client, "v"))[1]["history"]["source"] == "store"
        status, body = await post(
            client, "/v1/events", {"user_id": "u", "events": columns(events(2))}
        )
        assert status == 503
        assert "damaged" in body["detail"]
        text = await (await client.get("/metrics")).text()
        assert 'npu_gr_store_calls_total{operation="read",result="entry_corrupt"} 1.0' in text


# ---- idempotency keys


async def test_the_key_in_header_or_body(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        body = {"user_id": "u", "events": columns(events(3))}
        other = {"user_id": "u", "events": columns(events(3, seed=1))}
        assert (await post(client, "/v1/events", body, **{"Idempotency-Key": "k 1"}))[1][
            "num_events"
        ] == 3
        assert (await post(client, "/v1/events", body, **{"Idempotency-Key": "k 1"}))[1][
            "num_events"
        ] == 3
        assert (await post(client, "/v1/events", {**body, "idempotency_key": "k 1"}))[1][
            "num_events"
        ] == 3
        status, told = await post(client, "/v1/events", other, **{"Idempotency-Key": "k 1"})
        assert status == 422
        assert "idempotency_key" in told["detail"]
        assert (await post(client, "/v1/events", body))[1]["num_events"] == 6
        for key in ("", "x" * 129, "ü", "tab\tstop"):
            assert (await post(client, "/v1/events", body, **{"Idempotency-Key": key}))[0] == 400, (
                key
            )
        both = await post(
            client, "/v1/events", {**body, "idempotency_key": "a"}, **{"Idempotency-Key": "b"}
        )
        assert both[0] == 400
        assert (await post(client, "/v1/events", {**body, "idempotency_key": ""}))[0] == 422


@contextmanager
def process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real instance, killed at the end."""
    if not (folder / "checkpoint").exists():
        write_checkpoint(folder / "checkpoint")
    config = {
        "checkpoint": str(folder / "checkpoint"),
        "kv_cache": {"hbm_bytes": 8_000_000, "dram_bytes": 0},
        "history_store": {"path": str(folder / "history.db"), "timeout_s": 15.0},  # a busy machine
        "server": {"port": port, "admin_port": 0},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(folder / "serve.yaml")]
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=os.environ) as one,
    ):
        try:
            yield one
        finally:
            one.send_signal(signal.SIGKILL)


async def until_ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with http.get("/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def stored(http: aiohttp.ClientSession) -> int:
    status, told = await post(
        http, "/v1/events", {"user_id": "u", "events": columns(Events.empty())}
    )
    assert status == 200
    return int(told["num_events"])


async def test_a_key_survives_kill_minus_nine(tmp_path: Path) -> None:
    """Appends whose answers were lost are sent again to the next process: each counts once."""
    port = free_port()
    keys = [f"k{number}" for number in range(40)]

    def one(http: aiohttp.ClientSession, key: str) -> Any:
        body = {"user_id": "u", "events": columns(Events.make([int(key[1:])], [1], [1]))}
        return post(http, "/v1/events", body, **{"Idempotency-Key": key})

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        with process(tmp_path, port) as instance:
            await until_ready(http)
            sent = [asyncio.ensure_future(one(http, key)) for key in keys]
            await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            instance.send_signal(signal.SIGKILL)
            first = await asyncio.gather(*sent, return_exceptions=True)
    acknowledged = {
        key: done
        for key, done in zip(keys, first, strict=True)
        if not isinstance(done, BaseException)
    }
    assert acknowledged
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        with process(tmp_path, port):
            await until_ready(http)
            again = {key: await one(http, key) for key in keys}
            assert await stored(http) == len(keys)
    for key, (status, told) in acknowledged.items():
        assert (status, told["num_events"]) == (again[key][0], again[key][1]["num_events"])


async def test_appends_that_timed_out_count_once(tmp_path: Path) -> None:
    """Appends that are answered 504 and sent again count once.

    Another process holds SQLite's lock: three appends time out and are sent again, and
    then it is released.
    """
    port = free_port()
    bodies = [
        {"user_id": "u", "events": columns(Events.make([n], [1], [1])), "idempotency_key": f"k{n}"}
        for n in range(3)
    ]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        with process(tmp_path, port):
            await until_ready(http)
            assert await stored(http) == 0
            with sqlite3.connect(tmp_path / "history.db", isolation_level=None) as other:
                other.execute("BEGIN IMMEDIATE")
                brief = {"X-Request-Timeout-Ms": "150"}
                timed_out = await asyncio.gather(
                    *(post(http, "/v1/events", body, **brief) for body in bodies)
                )
                assert [status for status, _ in timed_out] == [504] * 3
                again = [asyncio.ensure_future(post(http, "/v1/events", body)) for body in bodies]
                await asyncio.sleep(0.1)
                other.execute("ROLLBACK")
            assert sorted(told["num_events"] for _, told in await asyncio.gather(*again)) == [
                1,
                2,
                3,
            ]
            assert await stored(http) == 3
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert "never retrieved" not in (tmp_path / "log").read_text()


async def test_a_dead_master_of_a_cluster_degrades_its_users_only(tmp_path: Path) -> None:
    """Its users are answered from what was last known, and appended to once its replica is up."""
    users = [f"u{number}" for number in range(12)]

    async def append(client: Any, user: str, seed: int) -> tuple[int, dict[str, Any]]:
        body = {"user_id": user, "events": columns(events(5, seed=seed))}
        return await post(client, "/v1/events", body, **{"Idempotency-Key": f"{user}-{seed}"})

    with cluster(tmp_path) as nodes:
        section = {"kind": "redis", "url": address(nodes), "timeout_s": 2.0, "read_timeout_s": 1.0}
        async with serving(tmp_path, history_store=section, slo={"rank_s": 2.0}) as (client, _):
            for user in users:
                assert (await append(client, user, 1))[0] == 200
                assert (await rank(client, user))[1]["history"]["source"] == "store"
            nodes[0].kill()
            answers = [await rank(client, user) for user in users]
            assert {status for status, _ in answers} == {200}
            sources = {body["history"]["source"] for _, body in answers}
            assert sources == {"store", "last_known"}
            for _, body in answers:
                assert body["history"]["num_tokens"] == 5
                is_known = body["history"]["source"] == "last_known"
                assert (body["history"]["fault"] == "store_unavailable") == is_known
            async with asyncio.timeout(30):
                for user in users:
                    while (await append(client, user, 2))[0] != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                while True:
                    again = [(await rank(client, user))[1]["history"] for user in users]
                    if {one["source"] for one in again} == {"store"}:
                        break
            assert {one["num_tokens"] for one in again} == {10}
