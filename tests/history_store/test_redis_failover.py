"""A Redis that fails over is followed by its name; a cluster or a Sentinel is rejected in words."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis

from npu_gr.core.errors import ConfigError, StoreFailed
from npu_gr.core.history import UserKey, Write
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig, HistoryStore
from tests.history_store.redis_server import redis_path
from tests.models import events
from tests.ports import BUS, free_port

USER = UserKey("t", "u")


def config(url: str, timeout_s: float = 10.0) -> HistoryConfig:
    return HistoryConfig(kind="redis", url=SecretUrl(url), timeout_s=timeout_s)


@asynccontextmanager
async def opened(url: str, timeout_s: float = 10.0) -> AsyncIterator[HistoryStore]:
    store = await open_store(config(url, timeout_s))
    assert store is not None
    try:
        yield store
    finally:
        await store.close()


class Name:
    """A name that leads to a socket: what a service of Kubernetes or a DNS entry is for hosts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def leads_to(self, socket_path: str) -> None:
        new = self.path.with_suffix(".new")
        new.symlink_to(socket_path)
        new.replace(self.path)


@contextmanager
def pair(folder: Path) -> Iterator[tuple[str, str, Name]]:
    """Run a master and its replica; the name leads to the master."""
    ports = free_port(), free_port()
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    with (
        redis_path(folder / "a", "--port", str(ports[0])) as a,
        redis_path(
            folder / "b", "--port", str(ports[1]), "--replicaof", "127.0.0.1", str(ports[0])
        ) as b,
    ):
        name = Name(folder / "name")
        name.leads_to(a)
        with redis.Redis(unix_socket_path=b) as replica:
            ends_at = time.monotonic() + 20
            while replica.info("replication")["master_link_status"] != "up":
                assert time.monotonic() < ends_at
                time.sleep(0.05)
        yield a, b, name


def fail_over(a: str, b: str) -> None:
    """Promote the replica, and demote the master."""
    with redis.Redis(unix_socket_path=a) as old, redis.Redis(unix_socket_path=b) as new:
        old.wait(1, 5000)
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", new.config_get("port")["port"])


async def test_writes_follow_the_name_to_the_new_master(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b, name):
        async with opened(f"unix://{name.path}") as store:
            await store.append(USER, events(5))
            # several connections: each one's next command meets the demoted master
            await asyncio.gather(*(store.read(UserKey("", f"u{n}"), 9) for n in range(8)))
            fail_over(a, b)
            name.leads_to(b)
            assert (await store.append(USER, events(3, seed=1))).num_events == 8
            results = await store.write_many(
                [Write(UserKey("", f"u{n}"), events(2, seed=n)) for n in range(8)]
            )
            assert not [one for one in results if isinstance(one, Exception)]
            assert await store.erase(UserKey("", "u0"))
            # reads come from the new master too: what was written after the failover is there
            assert len((await store.read(USER, 99)).events) == 8
            with redis.Redis(unix_socket_path=b) as new:
                assert len(list(new.scan_iter("npu_gr:{*}:log"))) == 8


async def test_a_write_waits_until_the_name_leads_to_the_new_master(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b, name):
        async with opened(f"unix://{name.path}") as store:
            await store.append(USER, events(5))
            fail_over(a, b)
            writing = asyncio.ensure_future(store.append(USER, events(3, seed=1)))
            await asyncio.sleep(0.3)
            assert not writing.done()
            name.leads_to(b)
            assert (await writing).num_events == 8
            # the same append, not done twice
            assert len((await store.read(USER, 99)).events) == 8


async def test_without_a_new_master_a_write_fails_within_its_limit(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b, name):
        async with opened(f"unix://{name.path}", timeout_s=0.4) as store:
            await store.append(USER, events(5))
            fail_over(a, b)
            with pytest.raises(StoreFailed, match="not ready: ReadOnlyError"):
                await store.append(USER, events(3, seed=1))


@pytest.mark.parametrize(
    "said",
    [
        "LOADING Redis is loading the dataset in memory",
        "MOVED 1234 127.0.0.1:7001",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1): @user_script:5: @user_script: 5: -READONLY You "
        "can't write against a read only replica.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
    ],
)
async def test_what_a_server_says_during_a_failover_is_asked_again(
    said: str, tmp_path: Path
) -> None:
    """A stand-in answers the first commands; then the name leads to a real server."""
    with redis_path(tmp_path) as real:
        name = Name(tmp_path / "name")
        num_answers = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_answers
            while data := await reader.read(1 << 16):
                if b"HELLO" in data:
                    writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                elif b"INFO" in data:
                    about = b"redis_mode:standalone\r\n"
                    writer.write(b"$%d\r\n%b\r\n" % (len(about), about))
                else:
                    num_answers += 1
                    writer.write(b"-%b\r\n" % said.encode())
            writer.close()

        # what it answers while it loads, too: HELLO and INFO
        server = await asyncio.start_unix_server(answer, tmp_path / "stand-in")
        name.leads_to(str(tmp_path / "stand-in"))
        async with server, opened(f"unix://{name.path}") as store:
            writing = asyncio.ensure_future(store.append(USER, events(3)))
            async with asyncio.timeout(10):
                while not num_answers:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            name.leads_to(real)
            assert (await writing).num_events == 3
            assert len((await store.read(USER, 99)).events) == 3


async def test_a_node_of_a_cluster_is_rejected_in_words(tmp_path: Path) -> None:
    port = free_port(also=BUS)
    options = ("--port", str(port), "--cluster-enabled", "yes")
    with (
        redis_path(tmp_path, *options) as path,
        pytest.raises(
            ConfigError,
            match=r"history_store\.url: .*a node of a Redis Cluster: write redis-cluster://",
        ),
    ):
        await open_store(config(f"unix://{path}"), may_be_away=True)


@pytest.mark.parametrize("field", ["redis_mode", "server_mode"])  # that of Valkey
async def test_a_node_of_a_cluster_is_known_by_either_name(field: str, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            about = f"{field}:cluster\r\n".encode()
            hello = b"%1\r\n$5\r\nproto\r\n:3\r\n"
            writer.write(hello if b"HELLO" in data else b"$%d\r\n%b\r\n" % (len(about), about))
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "node"):
        with pytest.raises(ConfigError, match="a node of a Redis Cluster"):
            await open_store(config(f"unix://{tmp_path}/node"))


@contextmanager
def sentinel(folder: Path) -> Iterator[int]:
    """Run a Sentinel, and yield its port."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    port = free_port()
    (folder / "sentinel.conf").write_text(f"port {port}\ndir {folder}\n")
    command = [binary, str(folder / "sentinel.conf"), "--sentinel"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            ends_at = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert time.monotonic() < ends_at
                    time.sleep(0.05)
            yield port
        finally:
            server.terminate()


async def test_a_sentinel_is_rejected_in_words(tmp_path: Path) -> None:
    with (
        sentinel(tmp_path) as port,
        pytest.raises(
            ConfigError, match=r"history_store\.url: .*a Redis Sentinel: write redis-sentinel://"
        ),
    ):
        await open_store(config(f"redis://127.0.0.1:{port}/0"), may_be_away=True)


async def test_a_server_that_is_away_is_used_once_it_is_there(tmp_path: Path) -> None:
    store = await open_store(config(f"unix://{tmp_path}/redis.sock"), may_be_away=True)
    assert store is not None
    with pytest.raises(StoreFailed, match="does not answer"):
        await store.append(USER, events(3))
    with redis_path(tmp_path):
        assert (await store.append(USER, events(3))).num_events == 3
    await store.close()


async def test_a_cluster_that_came_while_the_server_was_away_is_not_used(tmp_path: Path) -> None:
    store = await open_store(config(f"unix://{tmp_path}/redis.sock", 0.3), may_be_away=True)
    assert store is not None
    options = ("--port", str(free_port(also=BUS)), "--cluster-enabled", "yes")
    with (
        redis_path(tmp_path, *options),
        pytest.raises(StoreFailed, match="a node of a Redis Cluster"),
    ):
        await store.append(USER, events(3))
    await store.close()


async def test_a_wrong_password_is_no_server_that_is_away(tmp_path: Path) -> None:
    with (
        redis_path(tmp_path, "--requirepass", "another") as path,
        pytest.raises(ConfigError, match="AuthenticationError"),
    ):
        await open_store(config(f"unix://:wrong@{path}"), may_be_away=True)


async def test_a_user_that_must_not_ask_for_the_kind_is_served(tmp_path: Path) -> None:
    with redis_path(tmp_path) as path:
        with redis.Redis(unix_socket_path=path) as admin:
            admin.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-info")
        async with opened(f"unix://u:p@{path}") as store:
            assert (await store.append(USER, events(3))).num_events == 3
