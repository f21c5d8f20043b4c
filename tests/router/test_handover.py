"""A router takes the port over from another one: every connection is accepted and every request answered."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import from_table
from npu_gr.router.config import RouterConfig
from npu_gr.router.handover import ask
from npu_gr.router.run import listening
from tests.keys import bearer, entry, write_keys
from tests.router.chaos import Process, free_port
from tests.router.fake import Fake, site, table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are handed over on Linux only")
_EACH_S = 1 / 150  # between two new connections


def same_ports(port: int, admin: str, fakes: list[Fake]) -> RouterConfig:
    return from_table(table(fakes, port=port, admin_port=int(admin.rpartition(":")[2])), RouterConfig)


async def test_the_new_router_gets_new_connections_and_the_old_one_ends_its_own_after_an_answer() -> None:
    async with site(2) as s:
        assert (await s.post("rank"))[0] == 200  # on a connection that is kept
        config = same_ports(s.port, s.admin, s.fakes)
        async with listening(config, takes_over=True) as (new, port, _):
            assert port == s.port
            await s.router.taken_over.wait()
            assert s.router.is_ready()[0], "balancers may still ask on connections that they have kept"
            status, _, headers = await s.post("rank")
            assert (status, headers["Connection"]) == (200, "close")
            assert not len(new.connections)
            assert (await s.post("rank"))[0] == 200
            assert len(new.connections) == 1
            admin_port = int(s.admin.rpartition(":")[2])
            assert [num_listening(port) for port in (s.port, admin_port)] == [1, 1], "the old one has closed its copies"


def num_listening(port: int) -> int:
    """The sockets of this process that listen on the port; copies count."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            found += is_listening and one.family == socket.AF_INET and one.getsockname()[1] == port
    return found


async def test_if_the_new_router_fails_the_old_one_goes_on() -> None:
    async with site(1) as s:
        for _ in range(2):
            (await ask("127.0.0.1", s.port)).close()
            assert (await s.post("rank", Connection="close"))[0] == 200
        assert not s.router.taken_over.is_set()
        async with listening(same_ports(s.port, s.admin, s.fakes), takes_over=True):
            await s.router.taken_over.wait()


async def test_without_the_flag_the_port_is_in_use_and_with_it_nobody_needs_to_be_there() -> None:
    async with site(1) as s:
        with pytest.raises(ConfigError, match=r"port: cannot listen.*--take-over"):
            async with listening(same_ports(s.port, s.admin, s.fakes)):
                pass
        config = from_table(table(s.fakes, port=free_port(), admin_port=free_port()), RouterConfig)
        async with listening(config, takes_over=True) as (_, port, _):
            assert port == config.port


async def test_another_port_in_the_new_configuration_is_bound_anew() -> None:
    async with site(1) as s:
        other = free_port()
        config = same_ports(s.port, f"http://127.0.0.1:{other}", s.fakes)
        async with listening(config, takes_over=True) as (_, port, admin_port):
            assert (port, admin_port) == (s.port, other)


async def test_the_new_router_reads_the_key_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    async with site(1, api_keys_file=write_keys(path, entry("old"))) as s:
        other = tmp_path / "other.yaml"
        settings = table(s.fakes, port=s.port, admin_port=int(s.admin.rpartition(":")[2]))
        config = from_table({**settings, "api_keys_file": str(other)}, RouterConfig)
        with pytest.raises(ConfigError, match="No such file"):
            async with listening(config, takes_over=True):
                pass
        assert (await s.post("rank", Connection="close", **bearer("old")))[0] == 200, "the old one goes on"
        write_keys(other, entry("new"))
        async with listening(config, takes_over=True):
            await s.router.taken_over.wait()
            assert (await s.post("rank", Connection="close", **bearer("new")))[0] == 200
            assert (await s.post("rank", Connection="close", **bearer("old")))[0] == 401
            assert (await s.post("rank", Connection="close"))[0] == 401


async def test_who_is_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(1) as s:
        monkeypatch.setattr("npu_gr.router.handover._users", lambda: (12345,))
        with pytest.raises(ConfigError, match="belongs to user"):
            await ask("127.0.0.1", s.port)
        assert (await s.post("rank"))[0] == 200


async def connections(port: int, stop: asyncio.Event) -> list[str]:
    """Ask on a new connection each time, all at their due instants. Returns what went wrong, "" = an answer."""

    async def one() -> str:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\nContent-Length: 2\r\n\r\n{}")
            line = await reader.readline()
            writer.close()
        except OSError as error:
            return repr(error)
        return "" if line.startswith(b"HTTP/1.1 200 ") else f"answer {line!r}"

    loop = asyncio.get_running_loop()
    due_at = loop.time()
    asked = []
    while not stop.is_set():
        asked.append(asyncio.create_task(one()))
        due_at += _EACH_S
        await asyncio.sleep(due_at - loop.time())
    return await asyncio.gather(*asked)


async def test_a_router_restarts_under_new_connections_and_none_is_refused_or_reset(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    settings: dict[str, Any] = {
        "port": ports[0],
        "admin_port": ports[1],
        "drain_grace_s": 0.2,
        "default_budget_s": 10.0,
        "discovery": {"instances": [{"name": "a", "host": "127.0.0.1", "port": ports[2]}]},
    }
    (tmp_path / "router.yaml").write_text(yaml.safe_dump(settings))
    command = ("npu_gr", "route", "--config", str(tmp_path / "router.yaml"), "--take-over")
    instance = Process(tmp_path / "a.log", "tests.router.light", "a", str(ports[2]), "v")
    routers = [Process(tmp_path / f"router-{i}.log", *command) for i in range(3)]
    stop = asyncio.Event()
    try:
        instance.start()
        routers[0].start()
        await ready(ports[0])
        load = asyncio.create_task(connections(ports[0], stop))
        for old, new in pairwise(routers):
            new.start()
            assert await old.ended() == 0
        await asyncio.sleep(0.3)
        stop.set()
        outcomes = await load
    finally:
        for process in (instance, *routers):
            process.end()
    assert [outcome for outcome in outcomes if outcome] == []
    assert len(outcomes) > 50


async def ready(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                async with aiohttp.request("GET", f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
