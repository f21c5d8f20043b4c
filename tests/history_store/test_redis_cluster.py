"""Histories on a real Redis Cluster, and behind a real Sentinel, also while a master dies."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis
from redis.crc import key_slot

from npu_gr.core.errors import ConfigError, StoreFailed
from npu_gr.core.history import Mode, UserKey, Write
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store import redis_cluster
from npu_gr.history_store.open import open_store
from npu_gr.history_store.redis import _keys, check_redis
from npu_gr.history_store.redis_client import host_names, make_servers
from npu_gr.history_store.redis_cluster import Address, Cluster
from npu_gr.history_store.store import HistoryConfig, HistoryStore
from tests.history_store.redis_cluster import Node, address, cluster, wait_for
from tests.history_store.redis_server import redis_path
from tests.models import events
from tests.ports import free_port

USERS = [UserKey("t", f"u{number}") for number in range(60)]


@asynccontextmanager
async def opened(
    url: str, wait_replicas: int = 0, timeout_s: float = 5.0
) -> AsyncIterator[HistoryStore]:
    config = HistoryConfig(
        kind="redis", url=SecretUrl(url), timeout_s=timeout_s, wait_replicas=wait_replicas
    )
    store = await open_store(config)
    assert store is not None
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def url(nodes: list[Node]) -> str:
    for node in nodes[:3]:
        node.admin.flushall()
    return address(nodes)


async def test_a_store_on_a_cluster_does_what_every_store_does(url: str, nodes: list[Node]) -> None:
    async with opened(url) as store:
        batch = [
            Write(user, events(5, seed=number), Mode.APPEND, "k")
            for number, user in enumerate(USERS)
        ]
        for _ in range(2):  # the second time the keys are known
            results = await store.write_many(batch)
            assert [one.num_events for one in results] == [5] * len(USERS)  # type: ignore[union-attr]
        for number, user in enumerate(USERS):
            found = (await store.read(user, 99)).events
            np.testing.assert_array_equal(found.items, np.asarray(events(5, seed=number).items))
        late = await store.append(USERS[0], events(1, seed=9)[:1])
        assert late.num_events == 6
        merged = await store.write_many([Write(USERS[1], events(5, seed=1), Mode.MERGE)])
        assert merged[0].num_added == 0  # type: ignore[union-attr]
        assert await store.name_actions(["view", "buy"]) == ("view", "buy")
        assert await store.erase(USERS[2])
        assert not len((await store.read(USERS[2], 9)).events)
    assert all(list(node.admin.scan_iter("npu_gr:{*}:log")) for node in nodes[:3])
    checked = await check_redis(url)
    assert (checked.num_users, checked.num_damaged) == (len(USERS) - 1, 0)


async def test_a_slot_that_moves_is_followed(url: str, nodes: list[Node]) -> None:
    user = USERS[0]
    slot = key_slot(_keys(user)[0].encode())
    ends = [16384 * number // 3 for number in range(4)]
    source = next(n for n in range(3) if ends[n] <= slot < ends[n + 1])
    target = (source + 1) % 3
    ids = [node.my_id() for node in nodes]
    async with opened(url, wait_replicas=1) as store:
        await store.append(user, events(5))
        nodes[target].say("SETSLOT", slot, "IMPORTING", ids[source])
        nodes[source].say("SETSLOT", slot, "MIGRATING", ids[target])
        keys = nodes[source].say("GETKEYSINSLOT", slot, 10)
        nodes[source].admin.migrate("127.0.0.1", nodes[target].port, keys, 0, 5000)
        for node in nodes[:3]:
            node.say("SETSLOT", slot, "NODE", ids[target])
        try:
            assert (await store.append(user, events(3, seed=1))).num_events == 8
            assert len((await store.read(user, 99)).events) == 8
        finally:
            await store.erase(user)
            for node in nodes[:3]:
                node.say("SETSLOT", slot, "NODE", ids[source])


async def test_an_append_that_too_few_replicas_have_is_not_acknowledged(url: str) -> None:
    async with opened(url, wait_replicas=2, timeout_s=0.5) as store:
        with pytest.raises(StoreFailed, match=r"1 of 2 replicas .*wait_replicas"):
            await store.append(USERS[0], events(3), "key")
        # it is done on the master, so that a repeat appends nothing
        assert len((await store.read(USERS[0], 99)).events) == 3
    async with opened(url, wait_replicas=1) as store:
        assert (await store.append(USERS[0], events(3), "key")).num_events == 3


@pytest.mark.parametrize(
    "wrong",
    [
        "redis-cluster://h:1/3",
        "redis-cluster://",
        "redis-sentinel://h",
        "redis-sentinel://h/x#m",
        "redis-sentinel://h:a/0#m",
        "rediscluster://h",
        "redis-cluster://user:pa,ss@h?x=1",
    ],
)
async def test_an_address_that_is_none_is_rejected_without_its_password(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"history_store\.url: .* is no address") as found:
        make_servers(SecretUrl(wrong), 1.0, 8, None)
    assert "pa,ss" not in str(found.value)


def test_all_hosts_of_an_address_are_known() -> None:
    assert host_names("rediss-cluster://u:p@a:1,[::1]:2") == ["a", "::1"]
    assert host_names("redis://10.0.0.1:6379/0") == ["10.0.0.1"]
    assert host_names("unix:///run/redis.sock") == []


async def test_no_acknowledged_event_is_lost_when_a_master_dies(tmp_path: Path) -> None:
    acknowledged = dict.fromkeys(USERS, 0)
    failed: set[UserKey] = set()

    async def round_of(store: HistoryStore, number: int) -> None:
        async def write(user: UserKey) -> None:
            try:
                # the key, because a write whose answer was lost is repeated by its client
                done = await store.append(user, events(1, seed=number), f"{number}")
                acknowledged[user] = done.num_events
            except StoreFailed:
                failed.add(user)

        await asyncio.gather(*map(write, USERS))

    with cluster(tmp_path) as nodes:
        async with opened(address(nodes), wait_replicas=1, timeout_s=5.0) as store:
            for number in range(5):
                await round_of(store, number)
            assert not failed
            writing = asyncio.ensure_future(round_of(store, 5))
            await asyncio.sleep(0.005)  # some of them are under way
            nodes[0].kill()
            await writing
            # users of the other masters are served meanwhile
            assert len(failed) < len(USERS) / 2
        # one replica has become a master without a replica, so none is waited for
        async with opened_later(address(nodes)) as store:
            for number in range(6, 106):
                failed.clear()
                await round_of(store, number)
                if not failed:
                    break
                await asyncio.sleep(0.1)
            assert not failed, "the replica has not taken the place of its master"
            for user in USERS:
                assert len((await store.read(user, 999)).events) == acknowledged[user] > 5


async def test_a_node_that_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = [("new", 1)]

    async def answered(address: Address, client: object) -> list[object]:
        if address != ("first", 1):
            raise StoreFailed("away")
        return [redis_cluster._Slots(0, 16383, master) for master in masters]

    monkeypatch.setattr(redis_cluster, "_masters", answered)
    servers = make_servers(SecretUrl("redis-cluster://first:1"), 1.0, 8, None)
    assert isinstance(servers, Cluster)
    first = await servers.client_of("a")
    assert first is not servers.any_client
    masters[:] = [("newer", 1)]
    servers.suspect()
    assert await servers.client_of("a") is not first
    assert set(servers._nodes) == {("first", 1), ("newer", 1)}
    await servers.close()


@contextmanager
def watched(folder: Path) -> Iterator[tuple[Node, Node, int]]:
    """Run a master, its replica, and a Sentinel; yield its port too."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    ports = free_port(), free_port(), free_port()
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    with (
        redis_path(folder / "a", "--port", str(ports[0])) as a,
        redis_path(
            folder / "b", "--port", str(ports[1]), "--replicaof", "127.0.0.1", str(ports[0])
        ) as b,
    ):
        master, replica = Node(a, ports[0]), Node(b, ports[1])
        wait_for(lambda: replica.admin.info("replication")["master_link_status"] == "up")
        (folder / "sentinel.conf").write_text(
            f"port {ports[2]}\ndir {folder}\nsentinel monitor main 127.0.0.1 {ports[0]} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        command = [binary, str(folder / "sentinel.conf"), "--sentinel"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:

                def knows_both() -> bool:
                    try:
                        with redis.Redis(port=ports[2]) as sentinel:
                            return len(sentinel.sentinel_slaves("main")) == 1
                    except redis.RedisError:
                        return False

                wait_for(knows_both)
                yield master, replica, ports[2]
            finally:
                process.terminate()
                master.admin.close()
                replica.admin.close()


async def test_the_master_that_a_sentinel_names_is_followed(tmp_path: Path) -> None:
    with watched(tmp_path) as (master, _, port):
        url = f"redis-sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/0#main"
        async with opened(url, wait_replicas=1, timeout_s=5.0) as store:
            assert (await store.append(USERS[0], events(5), "first")).num_events == 5
            master.kill()
        async with opened_later(url) as store:
            written = 0
            for _ in range(100):
                try:
                    written = (await store.append(USERS[0], events(3, seed=1), "second")).num_events
                    break
                except StoreFailed:
                    await asyncio.sleep(0.1)
            assert written == 8


@asynccontextmanager
async def opened_later(url: str) -> AsyncIterator[HistoryStore]:
    """Open a store while its server may be away, as an instance does."""
    store = await open_store(
        HistoryConfig(kind="redis", url=SecretUrl(url), timeout_s=1.0), may_be_away=True
    )
    assert store is not None
    try:
        yield store
    finally:
        await store.close()


async def test_a_sentinel_that_does_not_know_the_master_is_said(tmp_path: Path) -> None:
    with watched(tmp_path) as (_, _, port):
        url = SecretUrl(f"redis-sentinel://127.0.0.1:{port}/0#other")
        with pytest.raises(ConfigError, match=r"history_store\.url: .*MasterNotFoundError"):
            await open_store(HistoryConfig(kind="redis", url=url, timeout_s=0.5))
