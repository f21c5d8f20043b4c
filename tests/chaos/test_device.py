"""A device that hangs or spoils KV: callers have answers, scores are right, the process ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from npu_gr.core.health import DEAD_S
from npu_gr.core.process import HUNG
from tests.chaos.open_loop import Answered, Ask, send
from tests.chaos.rig import Bodies, Instance, running
from tests.chaos.test_store import append

BUDGET_S = 0.5
LATE_S = 20.0  # until a busy machine has noticed what takes 2 s
OFF = "npu_gr_prefix_cache_switched_off"


class Hurt(Instance):
    """An instance whose device is hurt by files in its folder."""

    module = "tests.chaos.hurt"

    def start(self, what: str) -> None:
        (self.folder / what).touch()

    def stop(self, what: str) -> None:
        (self.folder / what).unlink()


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = LATE_S) -> None:
    give_up_at = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.1)


async def status(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as answer:
        return answer.status


async def rank(
    http: aiohttp.ClientSession, instance: Instance, body: dict[str, Any], budget_s: float = 5.0
) -> Answered:
    return await send(http, instance.url, Ask(body=body, budget_s=budget_s))


async def hang(http: aiohttp.ClientSession, instance: Hurt, bodies: Bodies) -> None:
    """Let the device hang in a rank, and wait until the instance has noticed."""
    assert (await rank(http, instance, bodies.ranks[0])).status == 200
    instance.start("hang")
    answers = await asyncio.gather(
        *(rank(http, instance, body, BUDGET_S) for body in bodies.ranks[:8])
    )
    assert {one.status for one in answers} <= {504, 429}, [one.status for one in answers]
    assert 504 in {one.status for one in answers}
    await until(lambda: is_status(http, f"{instance.url}/readyz", 503))


async def is_status(http: aiohttp.ClientSession, url: str, wanted: int) -> bool:
    return await status(http, url) == wanted


async def test_a_pass_that_hangs_and_goes_on(
    bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with running(Hurt(tmp_path, checkpoint)) as instance, aiohttp.ClientSession() as http:
        assert isinstance(instance, Hurt)
        await hang(http, instance, bodies)
        assert (await rank(http, instance, bodies.ranks[9])).status == 503
        assert await status(http, f"{instance.url}/healthz") == 200
        assert await instance.metric('npu_gr_device_pass_age_seconds{worker="device_0"}') > 2
        instance.stop("hang")
        await until(lambda: is_status(http, f"{instance.url}/readyz", 200))
        answers = [await rank(http, instance, body) for body in bodies.ranks[:8]]
        assert {one.status for one in answers} == {200}, answers


async def test_sigterm_ends_an_instance_whose_pass_hangs(
    bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with running(Hurt(tmp_path, checkpoint)) as instance, aiohttp.ClientSession() as http:
        assert isinstance(instance, Hurt)
        await hang(http, instance, bodies)
        instance.signal(signal.SIGTERM)
        # drain_grace_s, shutdown_timeout_s and 15 s: the grace period in deploy/compose.yaml
        assert await instance.ended(within_s=40.0) == HUNG
        text = instance.log.read_text()
        assert "npu_gr-device-0 did not end: its pass does not return" in text


@pytest.mark.chaos
async def test_an_instance_whose_pass_hangs_ends_by_itself(
    bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with running(Hurt(tmp_path, checkpoint)) as instance, aiohttp.ClientSession() as http:
        assert isinstance(instance, Hurt)
        await hang(http, instance, bodies)
        await until(lambda: is_status(http, f"{instance.url}/healthz", 503), DEAD_S + LATE_S)
        assert await instance.ended(within_s=40.0) == HUNG
        assert "has not moved for " in instance.log.read_text()


@pytest.mark.chaos
async def test_a_store_that_hangs_is_seen_and_does_not_keep_the_process(
    bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with running(Hurt(tmp_path, checkpoint)) as instance, aiohttp.ClientSession() as http:
        assert isinstance(instance, Hurt)
        instance.start("disk")
        assert (await send(http, instance.url, append(bodies, 0))).status in (503, 504)

        async def is_late() -> bool:
            return bool(await instance.metric('npu_gr_work_late{worker="history_writes"}'))

        await until(is_late, within_s=3 * LATE_S)
        assert (await rank(http, instance, bodies.ranks[0])).status == 200
        assert await status(http, f"{instance.url}/readyz") == 200, "ranks do without"
        assert await status(http, f"{instance.url}/healthz") == 200
        instance.signal(signal.SIGTERM)
        assert await instance.ended(within_s=40.0) == HUNG
        assert "the process did not stop within" in instance.log.read_text()


async def test_spoilt_kv_heals_and_is_switched_off_if_it_does_not(
    bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    async with running(Hurt(tmp_path, checkpoint)) as instance, aiohttp.ClientSession() as http:
        assert isinstance(instance, Hurt)
        right = [await rank(http, instance, body) for body in bodies.ranks[:8]]
        assert {one.status for one in right} == {200}
        instance.start("spoil")
        number = 0

        async def is_off() -> bool:
            nonlocal number
            for _ in range(20):
                answer = await rank(http, instance, bodies.ranks[8 + number % 40])
                assert answer.status in (200, 429), answer
                number += 1
            return bool(await instance.metric(OFF))

        await until(is_off, within_s=60.0)
        await same_scores(http, instance, bodies, right)
        assert await status(http, f"{instance.url}/readyz") == 200
        instance.stop("spoil")
        async with http.post(f"{instance.admin_url}/v1/models/reload") as answer:
            assert answer.status == 200
        assert await instance.metric(OFF) == 0
        await same_scores(http, instance, bodies, right)  # encodes the prefixes anew
        await same_scores(http, instance, bodies, right, outcome="hbm_hit")
        assert await instance.metric(OFF) == 0


async def same_scores(
    http: aiohttp.ClientSession,
    instance: Instance,
    bodies: Bodies,
    right: list[Answered],
    outcome: str | None = None,
) -> None:
    for body, wanted in zip(bodies.ranks, right, strict=False):
        answer = await rank(http, instance, body)
        assert answer.status == 200, answer
        assert outcome in (None, answer.body["outcome"])
        for task, scores in wanted.body["scores"].items():
            assert answer.body["scores"][task] == pytest.approx(scores, abs=1e-4)
