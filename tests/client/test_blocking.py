"""The client for threads: shared by many, ended in any way, and no thread ever waits for ever."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type

import pytest

from npu_gr.client import AsyncClient, AsyncRelayCall, Client, Ranked, RelayCall
from npu_gr.core.errors import DeadlineExceeded, Overloaded
from npu_gr.core.served import ModelInfo
from tests.client.scripted import HANG, RANKED, Answer, answer, problem, scripted
from tests.serving import until

GOOD = answer(RANKED)
LONG_S = 30.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "npu_gr client"]


async def test_many_threads_share_a_client_and_its_connections() -> None:
    def work(client: Client) -> float:
        return float(client.rank("u", [1, 2]).scores["click"][0])

    async with scripted(Answer(GOOD.sent, after_s=0.005)) as service:
        with (
            Client(service.url, timeout_s=LONG_S, max_connections=4) as client,
            ThreadPoolExecutor(16) as pool,
        ):
            loop = asyncio.get_running_loop()
            scores = await asyncio.gather(
                *(loop.run_in_executor(pool, work, client) for _ in range(64))
            )
    assert scores == [0.5] * 64
    assert len(service.asked) == 64
    assert {one.connection for one in service.asked} == {0, 1, 2, 3}
    assert not threads()


async def test_errors_come_as_they_are() -> None:
    def work(url: str) -> None:
        with Client(url, timeout_s=0.3) as client:
            with pytest.raises(Overloaded, match="full"):
                client.rank("u", [1])
            with pytest.raises(DeadlineExceeded):
                client.rank("u", [1])

    async with scripted(problem(429, "full", Retry_After="60"), HANG) as service:
        await asyncio.to_thread(work, service.url)


async def test_closing_ends_the_calls_in_flight() -> None:
    async with scripted(HANG) as service:
        client = Client(service.url, timeout_s=LONG_S)
        call = asyncio.create_task(asyncio.to_thread(client.rank, "u", [1]))
        await until(lambda: len(service.asked) == 1)
        await asyncio.to_thread(client.close)
        with pytest.raises(RuntimeError, match="closed during the call"):
            await call
        with pytest.raises(RuntimeError, match="the client is closed"):
            client.rank("u", [1])
        client.close()  # a second time does nothing
        await until(lambda: service.num_left == 1)
    assert not threads()


async def test_threads_that_call_while_it_closes_all_come_back() -> None:
    def work(client: Client) -> int:
        for done in range(100_000):
            try:
                client.rank("u", [1, 2])
            except RuntimeError:
                return done
        raise AssertionError("it never closed")

    async with scripted(GOOD) as service:
        client = Client(service.url, timeout_s=LONG_S)
        with ThreadPoolExecutor(8) as pool:
            loop = asyncio.get_running_loop()
            calls = [loop.run_in_executor(pool, work, client) for _ in range(8)]
            await until(lambda: len(service.asked) > 20)
            await asyncio.to_thread(client.close)
            async with asyncio.timeout(20):
                await asyncio.gather(*calls)


async def test_a_forgotten_client_ends_its_thread() -> None:
    async with scripted(GOOD) as service:
        client = Client(service.url, timeout_s=LONG_S)
        await asyncio.to_thread(client.rank, "u", [1, 2])
        about = weakref.ref(client)
        del client

        def is_gone() -> bool:  # the worker's thread lets go of it a moment later
            gc.collect()
            return about() is None

        await until(is_gone)
        await until(lambda: not threads())


async def test_a_relay_keeps_its_client() -> None:
    def work(url: str) -> str:
        with Client(url, timeout_s=LONG_S).relay("u") as relay:
            gc.collect()
            return relay.rank([1, 2]).outcome

    async with scripted(GOOD) as service:
        assert await asyncio.to_thread(work, service.url) == "hbm_hit"
        gc.collect()
        await until(lambda: not threads())


def run(code: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=timeout_s
    )


def test_a_program_that_forgets_to_close_ends_in_silence() -> None:
    done = run("from npu_gr.client import Client; client = Client(); print('done')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


async def test_an_interrupt_cancels_the_call() -> None:
    async with scripted(HANG) as service:
        code = f"""
from npu_gr.client import Client
client = Client({service.url!r}, timeout_s=60)
try:
    client.rank("u", [1])
except KeyboardInterrupt:
    print("interrupted", flush=True)
    input()
"""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        await until(lambda: len(service.asked) == 1)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"interrupted\n"
            await until(lambda: service.num_left == 1)
            assert process.returncode is None
            await process.communicate(b"\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_client_of_before_a_fork_says_so() -> None:
    code = """
import os
from npu_gr.client import Client
client = Client()
child = os.fork()
if child == 0:
    try:
        client.models()
    except RuntimeError as error:
        assert "fork" in str(error)
        client.close()
        del client
        raise SystemExit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client.close()
"""
    done = run(code)
    assert done.stdout == "7\n", done.stderr


@pytest.mark.parametrize(("waits", "inner"), [(Client, AsyncClient), (RelayCall, AsyncRelayCall)])
def test_both_clients_do_the_same(waits: Any, inner: Any) -> None:
    """Each public coroutine of one is a method of the other: same arguments, same words."""
    for name, method in inspect.getmembers(inner, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            own = getattr(waits, name)
            assert inspect.signature(own) == inspect.signature(method)
            assert own.__doc__ == method.__doc__
    if waits is Client:
        assert inspect.signature(Client) == inspect.signature(AsyncClient)
        mine = inspect.signature(Client.relay).replace(return_annotation=None)
        assert mine == inspect.signature(AsyncClient.relay).replace(return_annotation=None)


def typed_use(client: Client) -> None:
    """Never called: mypy checks that the methods of the client for threads have types."""
    assert_type(client.rank("u", [1], top_k=3), Ranked)
    assert_type(client.models(timeout_s=1.0), tuple[ModelInfo, ...])
    with client.relay("u") as relay:
        assert_type(relay, RelayCall)
        assert_type(relay.rank([1]), Ranked)
    client.rank("u")  # type: ignore[call-arg]
    client.rank("u", [1], tpo_k=3)  # type: ignore[call-arg]
