"""Behind the file that `npu-gr route` writes, each request is answered, or rejected in words.

Rates are figures of `python -m benchmarks door`; here only counts are evaluated, and that all is
well again afterwards.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from benchmarks.loadgen import LoadStream, Pause, StreamCounts, drive
from benchmarks.servers import Server, behind, proxy
from benchmarks.servers import running as served
from tests.chaos.open_loop import LOST, Answered, Ask, send
from tests.chaos.rig import Bodies, Instance, Scale, each_scale, running

# of each request, which the client waits for: a busy machine is slow, and loses nothing
BUDGET_S = 5.0
PAUSE_S = 0.5
SILENT = 500  # connections
WELL_AGAIN_S = 20.0


@asynccontextmanager
async def routed(checkpoint: Path, folder: Path) -> AsyncIterator[Server]:
    """One instance and the router in front of it, as the README starts them."""
    if shutil.which("haproxy") is None:
        pytest.skip("no haproxy on PATH (Debian: apt-get install haproxy)")
    with ExitStack() as stack:
        one = behind("instance", checkpoint, folder)
        yield await asyncio.to_thread(
            stack.enter_context, served("routed", one, proxy("router", [one], folder))
        )


async def load(at: Server, stream: LoadStream, pause: Pause | None = None) -> StreamCounts:
    report = await asyncio.to_thread(drive, at.port, [stream], pause=pause, deadline_s=BUDGET_S)
    return report.stream(stream.name)


async def well_again(at: Server, bodies: Bodies) -> None:
    """Wait until a request is answered."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(WELL_AGAIN_S):
        while (await rank(http, at, bodies)).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def rank(http: aiohttp.ClientSession, at: Server, bodies: Bodies) -> Answered:
    body = bodies.ranks[0]
    headers = {"X-User-Id": str(body["user_id"])}
    return await send(
        http, f"http://127.0.0.1:{at.port}", Ask(body=body, headers=headers, budget_s=BUDGET_S)
    )


def stream(bodies: Bodies, scale: Scale, mode: str) -> LoadStream:
    shapes = {
        "bursts": LoadStream(
            name="bursts",
            mode="bursts",
            bodies=bodies.path,
            to_s=scale.load_s,
            connections=48,
            burst_size=24,
            every_s=0.25,
        ),
        "retries": LoadStream(
            name="retries", mode="closed", bodies=bodies.path, to_s=scale.load_s, connections=64
        ),
        "overload": LoadStream(
            name="overload",
            mode="poisson",
            bodies=bodies.path,
            to_s=scale.load_s,
            connections=512,
            rate_per_s=5000.0,
        ),
    }
    return shapes[mode]


@each_scale
@pytest.mark.parametrize("mode", ["bursts", "retries", "overload"])
async def test_no_load_loses_a_request(
    mode: str, scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with routed(checkpoint, tmp_path) as at:
        counts = await load(at, stream(bodies, scale, mode))
        assert counts.other + counts.errors == 0, counts
        assert counts.answered > 0
        assert counts.due == counts.answered + counts.rejected + counts.timeouts
        await well_again(at, bodies)


@each_scale
async def test_a_pause_of_the_instance_under_load_loses_nothing(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with routed(checkpoint, tmp_path) as at:
        pause = Pause(pid=at.processes[0].pid, at_s=0.5, for_s=PAUSE_S)
        retries = stream(bodies, scale, "retries")
        counts = await load(at, retries.moved("retries", 0.0, 0.5 + PAUSE_S + scale.load_s), pause)
        assert counts.other + counts.errors == 0, counts
        assert counts.answered > 0
        await well_again(at, bodies)


async def test_silent_connections_and_slow_heads_shut_nobody_out(
    bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    sent = (b"", b"POST /v1/rank HTTP/1.1\r\nContent-Le", b"\x16\x03\x01\x00")
    async with routed(checkpoint, tmp_path) as at:
        with ExitStack() as stack:
            for number in range(SILENT):
                one = stack.enter_context(
                    socket.create_connection(("127.0.0.1", at.port), timeout=5)
                )
                one.sendall(sent[number % len(sent)])
            await well_again(at, bodies)
            async with aiohttp.ClientSession() as http:
                statuses = {(await rank(http, at, bodies)).status for _ in range(20)}
            assert statuses <= {200, 429}
            assert 200 in statuses


@each_scale
async def test_a_stop_under_load_loses_nothing(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """Every request that was sent before the listener closed is answered.

    The process ends with 0.
    """
    samples: list[Answered] = []
    loop = asyncio.get_running_loop()
    async with running(Instance(tmp_path, checkpoint)) as instance, aiohttp.ClientSession() as http:
        stopped_at = float("inf")

        async def ask(number: int) -> None:
            while True:
                body = bodies.ranks[number % len(bodies.ranks)]
                sample = await send(http, instance.url, Ask(body=body, budget_s=BUDGET_S))
                samples.append(sample)
                if sample.status == LOST and sample.due_at > stopped_at:
                    # refused; or reset, where it waited in the backlog as the listener closed
                    error = str(sample.body)
                    assert "ConnectionRefused" in error or "Can not write request body" in error
                    return
                await asyncio.sleep(0.1)

        asking = [asyncio.create_task(ask(number)) for number in range(8)]
        await asyncio.sleep(scale.load_s / 2)
        stopped_at = loop.time()
        instance.signal(signal.SIGTERM)
        assert await instance.ended(within_s=30) == 0
        await asyncio.gather(*asking)
    answered = [sample for sample in samples if sample.status != LOST]
    assert {sample.status for sample in answered} <= {200, 429}
    # each client noticed once that nobody listens any more
    assert len(samples) - len(answered) <= len(asking)
    assert any(sample.due_at > stopped_at for sample in answered), (
        "it did not serve while it drained"
    )
