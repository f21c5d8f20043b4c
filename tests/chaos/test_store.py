"""When the history store fails, ranks that bring a history go on, the others are told at once."""

from __future__ import annotations

import asyncio
import resource
import shutil
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos.open_loop import Answered, Answers, Ask, OpenLoop, send
from tests.chaos.rig import LONG, Bodies, Instance, Scale, check, each_scale, running
from tests.fault_proxy import FaultProxy, Mode
from tests.history_store.redis_server import redis_path
from tests.history_store.test_redis_failover import fail_over, pair
from tests.ports import free_port

PER_S = 40.0
APPENDED = 40  # users
LEAVES = (0x0A, 0x0D)  # first byte of a leaf of an index and of a table, in SQLite's file format
MODES: tuple[Mode, ...] = ("hang", "late", "reset")


def half_bring_their_history(bodies: Bodies, instance: Instance) -> OpenLoop:
    needing = bodies.without_history()

    def make(number: int) -> Ask:
        index = number // 2 % len(bodies.ranks)
        if number % 2:
            return Ask(name="brings", body=bodies.ranks[index])
        return Ask(name="needs", body=needing[index])

    return OpenLoop(instance.url, make, PER_S)


def append(
    bodies: Bodies, number: int, key: str | None = None, budget_s: float = 1.0, num: int = 3
) -> Ask:
    rank = bodies.ranks[number % len(bodies.ranks)]
    events = {name: values[:num] for name, values in rank["history"].items()}
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"user_id": rank["user_id"], "tenant": rank["tenant"], "events": events}
    return Ask(name="append", path="/v1/events", body=body, headers=headers, budget_s=budget_s)


async def append_all(
    instance: Instance, bodies: Bodies, num_users: int, num_events: int = 3
) -> Answers:
    """One append for each user, all at once.

    Who is rejected for load comes again after a moment.
    """

    async def one(http: aiohttp.ClientSession, number: int) -> Answered:
        give_up_at = time.monotonic() + 10
        while True:
            sample = await send(http, instance.url, append(bodies, number, num=num_events))
            if sample.status != 429 or time.monotonic() > give_up_at:
                return sample
            await asyncio.sleep(0.05)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        return Answers(await asyncio.gather(*(one(http, number) for number in range(num_users))))


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    port = free_port()
    command = [
        binary,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        "--save",
        "",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            yield port
        finally:
            server.kill()


@asynccontextmanager
async def behind_a_proxy(
    folder: Path, checkpoint: Path
) -> AsyncIterator[tuple[Instance, FaultProxy]]:
    """An instance whose Redis can hang, be late, or reset its connections."""
    with redis_server(folder) as port:
        async with FaultProxy("127.0.0.1", port) as proxy:
            url = f"redis://127.0.0.1:{proxy.port}/0"
            async with running(
                Instance(folder, checkpoint, "history_store.kind=redis", f"history_store.url={url}")
            ) as instance:
                yield instance, proxy


@each_scale
async def test_a_sick_redis_is_not_noticed_by_those_who_do_not_need_it(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    sick: dict[str, Answers] = {}
    well: dict[str, Answers] = {}
    async with behind_a_proxy(tmp_path, checkpoint) as (instance, proxy):
        stored = await append_all(instance, bodies, len(bodies.ranks))
        assert not stored.failed, stored.failed[:3]
        async with half_bring_their_history(bodies, instance).running() as loop:
            await loop.over(2 * len(bodies.ranks) / PER_S)  # everybody was seen once
            quiet = await loop.over(scale.load_s)
            for mode in MODES:
                proxy.set(mode, late_s=0.3)
                sick[mode] = await loop.over(scale.load_s)
                proxy.set("pass")
                await asyncio.sleep(0.5)
                well[mode] = await loop.over(0.5)
    for mode in MODES:
        check(sick[mode].of("brings"), quiet.of("brings"), scale)
        needs = sick[mode].of("needs")
        assert set(needs.statuses) <= {200, 429, 503}, (mode, needs.failed[:3])
        assert needs.statuses[200], f"{mode}: what was known of a user is not used"
        assert set(well[mode].statuses) <= {200, 429}, (mode, well[mode].failed[:3])
        if scale is LONG:
            assert needs.quantile_s(0.95) < 0.35, (
                f"{mode}: those who need the store wait for much of their budget"
            )
            assert needs.statuses[200] >= 0.9 * len(needs), (
                f"{mode}: what was known of a user is not used"
            )


@each_scale
async def test_a_failover_of_redis_loses_nothing(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """The replica is promoted, the master demoted, and the name leads to the new one."""
    with pair(tmp_path) as (a, b, name):
        on_redis = ("history_store.kind=redis", f"history_store.url=unix://{name.path}")
        async with running(Instance(tmp_path, checkpoint, *on_redis)) as instance:
            assert not (await append_all(instance, bodies, len(bodies.ranks))).failed
            async with half_bring_their_history(bodies, instance).running() as loop:
                quiet = await loop.over(scale.load_s / 2)
                from_at = time.monotonic()
                await asyncio.to_thread(fail_over, a, b)
                name.leads_to(b)
                appended = await append_all(instance, bodies, len(bodies.ranks))
                hurt = await loop.between(from_at, time.monotonic())
                well = await loop.over(scale.load_s / 2)
    assert not appended.failed, appended.failed[:3]
    assert {sample.body["num_events"] for sample in appended.samples} == {6}
    check(hurt.of("brings"), quiet.of("brings"), scale)
    assert set(well.statuses) <= {200, 429}, well.failed[:3]


@each_scale
async def test_an_instance_starts_without_its_redis(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """Those who bring their history are served, and all of them once Redis is there."""
    on_redis = ("history_store.kind=redis", f"history_store.url=unix://{tmp_path}/redis.sock")
    async with (
        running(Instance(tmp_path, checkpoint, *on_redis)) as instance,
        half_bring_their_history(bodies, instance).running() as loop,
    ):
        without = await loop.over(scale.load_s / 2)
        with redis_path(tmp_path):
            await heals(instance, bodies)
            appended = await append_all(instance, bodies, len(bodies.ranks))
            well = await loop.over(scale.load_s / 2)
    brought = without.of("brings")
    check(brought, brought, scale)
    assert set(without.of("needs").statuses) <= {429, 503}, without.statuses
    assert not appended.failed, appended.failed[:3]
    assert set(well.statuses) <= {200, 429}, well.failed[:3]


@each_scale
async def test_a_full_disk_stops_appends_and_nothing_else(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with running(Instance(tmp_path, checkpoint)) as instance:
        assert not (await append_all(instance, bodies, APPENDED)).failed
        async with half_bring_their_history(bodies, instance).running() as loop:
            quiet = await loop.over(scale.load_s)
            instance.limit(resource.RLIMIT_FSIZE, largest(instance.folder) // 2)
            full = [await append_all(instance, bodies, APPENDED) for _ in range(2)]
            during = await loop.over(scale.load_s)
            instance.limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
            await heals(instance, bodies)
            healed = await append_all(instance, bodies, APPENDED)
    for answers in full:
        assert set(answers.statuses) <= {503}, answers.statuses
        assert all("detail" in body for _, body in answers.failed)
    check(during, quiet, scale)
    assert not healed.failed, healed.failed[:3]


async def heals(instance: Instance, bodies: Bodies) -> None:
    """Wait until an append works again.

    A breaker tries it again from time to time, which must not take long.
    """
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        while (await send(http, instance.url, append(bodies, 0))).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def largest(folder: Path) -> int:
    """The bytes of the store's largest file."""
    return max(path.stat().st_size for path in folder.glob("history.db*"))


@each_scale
async def test_an_append_that_is_sent_again_counts_once(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """Another process holds the write lock.

    Who is answered 504 or 503 sends the same again under the same key.
    """
    async with running(Instance(tmp_path, checkpoint)) as instance:
        assert not (await append_all(instance, bodies, 1)).failed
        async with (
            aiohttp.ClientSession() as http,
            half_bring_their_history(bodies, instance).running() as loop,
        ):
            quiet = await loop.over(scale.load_s / 2)
            lock = sqlite3.connect(instance.database, isolation_level=None, timeout=10)
            lock.execute("BEGIN IMMEDIATE")
            from_at = time.monotonic()
            tried = [
                await send(http, instance.url, append(bodies, 0, f"key-{n}", budget_s=0.3))
                for n in range(3)
            ]
            assert {sample.status for sample in tried} <= {503, 504}, [
                sample.status for sample in tried
            ]
            held = await loop.between(from_at, time.monotonic())
            lock.execute("ROLLBACK")
            lock.close()
            counts = [
                (await again(http, instance, append(bodies, 0, f"key-{n}"))) for n in range(3)
            ]
            repeated = await again(http, instance, append(bodies, 0, "key-2"))
    assert counts == [6, 9, 12]
    assert repeated == 12
    check(held.of("brings"), quiet.of("brings"), scale)
    assert "never retrieved" not in instance.log.read_text()


async def again(http: aiohttp.ClientSession, instance: Instance, ask: Ask) -> Any:
    """Send until it is answered. Returns the number of events that are kept of the user."""
    give_up_at = time.monotonic() + 10
    while True:
        sample = await send(http, instance.url, ask)
        if sample.status == 200:
            return sample.body["num_events"]
        assert time.monotonic() < give_up_at, sample
        await asyncio.sleep(0.05)


@each_scale
async def test_a_spoilt_page_fails_its_own_users_only(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """Appends that come at once share a transaction; one bad page of many fails nobody else's."""
    async with running(Instance(tmp_path, checkpoint)) as instance:
        for _ in range(8):
            assert not (await append_all(instance, bodies, len(bodies.ranks), num_events=60)).failed
        instance.end()
        spoil(instance.database, str(bodies.ranks[0]["user_id"]))
        instance.launch()
        await instance.ready()
        async with half_bring_their_history(bodies, instance).running() as loop:
            appended = [await append_all(instance, bodies, len(bodies.ranks)) for _ in range(3)]
            during = await loop.over(scale.load_s / 2)
    for answers in appended:
        assert set(answers.statuses) <= {200, 503}, answers.statuses
        assert answers.statuses[200] >= 0.5 * len(answers), answers.statuses
    assert set(during.of("brings").statuses) <= {200, 429}, during.failed[:3]


def spoil(database: Path, user: str) -> None:
    """Overwrite most of one leaf with behaviours of a user, in a file that nobody has open."""
    with sqlite3.connect(database) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page_bytes = int(file.execute("PRAGMA page_size").fetchone()[0])
    file.close()
    data = bytearray(database.read_bytes())
    pages = [data[start : start + page_bytes] for start in range(0, len(data), page_bytes)]
    leaves = [
        number for number, page in enumerate(pages) if page[0] in LEAVES and user.encode() in page
    ]
    assert len(pages) > 50
    start = leaves[-1] * page_bytes
    data[start + 8 : start + page_bytes] = b"\xa5" * (page_bytes - 8)
    database.write_bytes(data)
