"""No bad neighbour stops an instance: one reads no log, one sends half of what it promised."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import aiohttp

from benchmarks.loadgen import LoadStream
from npu_gr.service.idle_heap import LEAST_BYTES
from tests.chaos.open_loop import Ask, OpenLoop
from tests.chaos.rig import LONG, Bodies, Instance, Scale, check, drive_all, each_scale, running

PER_S = 40.0
HALF_BODIES = 400
BODY_BYTES = 400_000


def ranks(bodies: Bodies, instance: Instance) -> OpenLoop:
    return OpenLoop(instance.url, lambda n: Ask(body=bodies.ranks[n % len(bodies.ranks)]), PER_S)


async def is_answered(url: str) -> bool:
    """Whether a caller on a new connection is answered within a second."""
    try:
        async with aiohttp.request("GET", url, timeout=aiohttp.ClientTimeout(total=1.0)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError):
        return False


@each_scale
async def test_a_log_that_nobody_reads_stops_nothing(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """A pipe holds 64 kB, some 150 lines."""
    read, write = os.pipe()
    try:
        async with running(Instance(tmp_path, checkpoint), stdout=write) as instance:
            load = LoadStream(
                name="load", mode="closed", bodies=bodies.path, to_s=2 * scale.load_s, connections=4
            )
            counts = (await drive_all(instance, [load])).stream("load")
            assert counts.due > 180, "the pipe may not be full"
            assert counts.timeouts + counts.errors + counts.other == 0
            assert counts.in_time + counts.late > 0
            assert await is_answered(f"{instance.url}/readyz")
            assert await is_answered(f"{instance.url}/healthz")
            if scale is LONG:  # the queue is full too
                assert await instance.metric('npu_gr_log_lines_dropped_total{stream="stdout"}') > 0
            instance.signal(signal.SIGTERM)
            assert await instance.ended(within_s=15) == 0
    finally:
        os.close(read)
        os.close(write)


@each_scale
async def test_half_requests_cost_neither_time_nor_memory(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """Half a head or half a body ends when its budget of 500 ms does, or at the server's limit."""
    head = (
        "POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        "application/json\r\nX-Request-Timeout-Ms: 500\r\n"
        f"Content-Length: {2 * BODY_BYTES}\r\n\r\n"
    ).encode()
    half_body = head + json.dumps({"user_id": "u" * BODY_BYTES}).encode()[:BODY_BYTES]
    half_head = head[: len(head) // 2]
    async with running(Instance(tmp_path, checkpoint)) as instance:
        async with ranks(bodies, instance).running() as loop:
            quiet = await loop.over(scale.load_s / 2)
            before_bytes = instance.resident_bytes
            from_at = time.monotonic()
            sent = [asyncio.create_task(half(instance.port, half_body)) for _ in range(HALF_BODIES)]
            sent += [asyncio.create_task(half(instance.port, half_head)) for _ in range(50)]
            grown_bytes = 0
            while not all(task.done() for task in sent[:HALF_BODIES]):
                grown_bytes = max(grown_bytes, instance.resident_bytes - before_bytes)
                await asyncio.sleep(0.1)
            answers = [task.result() for task in sent[:HALF_BODIES]]
            await asyncio.sleep(scale.load_s / 2)  # with the half heads still there
            hurt = await loop.between(from_at + 1.0, time.monotonic())
            for task in sent:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)
        assert {answer.split(b" ")[1] for answer in answers if answer} <= {
            b"408",
            b"503",
            b"504",
            b"429",
        }
        check(hurt, quiet, scale)
        assert grown_bytes < 1.3 * HALF_BODIES * BODY_BYTES, "more is held than came"
        assert await instance.metric("npu_gr_requests_in_flight") <= 1  # the scrape itself
        assert grown_bytes > 1.3 * LEAST_BYTES, "too little comes to be given back"
        async with asyncio.timeout(20):  # and given back, now that nobody asks
            while instance.resident_bytes > before_bytes + LEAST_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def half(port: int, what: bytes) -> bytes:
    """Send half a request and wait for whatever comes.

    Returns what came before the connection was closed.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(what)
        await writer.drain()
        return await reader.read()
    except OSError:
        return b""  # closed with a reset: bytes of it were never read
    finally:
        writer.transport.abort()
