"""Tests of the whole router with fake instances: failures of one instance, drains, lists that change."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import yaml

from npu_gr.core.errors import ConfigError
from npu_gr.router.config import DiscoveryConfig, DNSConfig
from npu_gr.router.discovery import find
from npu_gr.router.instance import Health
from tests.router.fake import Fake, site


async def test_a_rank_is_tried_once_more_on_the_successor_and_a_signal_never() -> None:
    async with site() as s:
        bad = s.owner("u")
        for fault in ("status", "cuts"):
            setattr(bad, fault, {"status": 503, "cuts": True}[fault])
            status, answer, headers = await s.post("rank")
            assert status == 200
            assert answer["instance"] != bad.name
            assert headers["X-NpuGr-Instance"] == answer["instance"]
            before = sum(len(fake.seen) for fake in s.fakes)
            assert (await s.post("signal"))[0] in (502, 503)
            assert (await s.post("events"))[0] in (502, 503)
            assert sum(len(fake.seen) for fake in s.fakes) == before + 2


async def test_a_signal_that_nobody_has_taken_goes_to_the_successor_with_its_rank() -> None:
    async with site(health={"interval_s": 30.0, "timeout_s": 30.0, "fall": 100}) as s:  # nobody but requests tells
        away, draining, there = s.owner("u"), *(fake for fake in s.fakes if fake is not s.owner("u"))
        draining.status = 503
        draining.ready_status = 503
        draining.is_draining = True
        _, answer, headers = await s.post("signal", s.user_of(draining))
        assert answer["instance"] != draining.name
        assert headers["X-NpuGr-Placement"].startswith(answer["instance"])
        assert (await s.post("rank", s.user_of(draining)))[1]["hit"]
        assert s.router.members.instances[draining.name].health is Health.DRAINING
        num_seen = len(draining.seen)
        await away.stop()
        assert (await s.post("signal"))[1]["instance"] == there.name
        assert (await s.post("rank"))[1] == {"instance": there.name, "hit": True, "size": 8}
        assert len(draining.seen) == num_seen


async def test_a_rank_that_hangs_leaves_the_successor_enough_time() -> None:
    async with site() as s:
        bad = s.owner("u")
        bad.delay_s = 30.0
        status, answer, _ = await s.post("rank", X_Request_Timeout_Ms="2000")
        assert status == 200
        assert answer["instance"] != bad.name
        await s.until(lambda: bad.cancelled == 1)


async def test_retries_have_a_budget() -> None:
    async with site(2, retry={"ratio": 0.0, "burst": 2.0}, breaker={"failures": 1000}) as s:
        bad = s.fakes[0]
        bad.status = 503
        statuses = [(await s.post("rank", s.user_of(bad)))[0] for _ in range(5)]
        assert statuses == [200, 200, 503, 503, 503]


async def test_nobody_left_is_503_and_unready() -> None:
    async with site(2) as s:
        for fake in s.fakes:
            await fake.stop()
        await s.until(lambda: all(one.health is Health.DOWN for one in s.router.members.instances.values()))
        status, _, headers = await s.post("rank")
        assert (status, headers["Retry-After"]) == (503, "1")
        async with s.http.get(f"{s.url}/readyz") as answer:
            assert answer.status == 503
        async with s.http.get(f"{s.url}/healthz") as answer:
            assert answer.status == 200
        await s.fakes[0].start()
        await s.until(lambda: s.router.is_ready()[0])
        assert (await s.post("rank"))[0] == 200


async def test_a_drained_instance_keeps_its_pairs_and_gets_no_new_ones() -> None:
    async with site(relay={"t_life_s": 1.0}) as s:
        home = s.owner("u")
        await s.post("signal")
        async with s.http.post(f"{s.admin}/instances/{home.name}/drain") as answer:
            assert answer.status == 200
        assert (await s.post("rank"))[1]["instance"] == home.name
        other = s.user_of(home)
        _, signalled, headers = await s.post("signal", other)
        assert signalled["instance"] != home.name
        assert headers["X-NpuGr-Placement"].startswith(signalled["instance"])
        assert (await s.post("rank", other))[1]["hit"]
        await s.until(lambda: not s.router.members.instances[home.name].takes_ranks(time.monotonic()))
        assert (await s.post("rank"))[1]["instance"] != home.name


async def test_an_instance_that_joins_the_file_takes_its_users_and_one_that_leaves_gives_them_back(
    tmp_path: Path,
) -> None:
    path, new = tmp_path / "instances.yaml", Fake("new")
    await new.start()

    def write(*fakes: Fake) -> None:
        rows = [{"name": fake.name, "host": "127.0.0.1", "port": fake.port} for fake in fakes]
        path.write_text(yaml.safe_dump({"instances": rows}))

    others = [Fake("a"), Fake("b")]
    for fake in others:
        await fake.start()
    write(*others)
    try:
        async with site(1, discovery={"instances": [], "file": str(path), "period_s": 0.02}) as s:
            epoch = s.router.members.ring.epoch
            write(*others, new)
            await s.until(lambda: "new" in s.router.members.instances)
            one = s.router.members.instances["new"]
            await s.until(lambda: one.health is Health.UP and one.breaker.share(time.monotonic()) == 1.0)
            found = {user: (await s.post("rank", user))[1]["instance"] for user in map(str, range(40))}
            assert found == {user: s.router.members.ring.owner(user.encode()) for user in found}
            assert "new" in found.values()
            path.write_text("instances: [")
            await asyncio.sleep(0.1)
            assert "new" in s.router.members.instances, "a broken file changes nothing"
            write(*others)
            await s.until(lambda: s.router.members.ring.epoch == epoch)
            assert (await s.post("rank"))[1]["instance"] in ("a", "b")
    finally:
        for fake in (*others, new):
            await fake.stop()


async def test_a_name_is_resolved_to_all_its_addresses() -> None:
    found = await find(DiscoveryConfig(dns=DNSConfig(host="localhost", port=8080)))
    assert "127.0.0.1:8080" in [one.name for one in found]
    with pytest.raises(ConfigError, match="no-such-host"):
        await find(DiscoveryConfig(dns=DNSConfig(host="no-such-host.invalid", port=8080)))
