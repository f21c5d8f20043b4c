"""Second tries: a hedge goes out when an answer is late, the first that answers wins, and their number is bounded."""

from __future__ import annotations

import asyncio
import time

import pytest

from npu_gr.router.again import AnswerTimes, RetryBudget
from npu_gr.router.alarm import NEVER, Alarm
from npu_gr.router.config import RetryConfig
from tests.router.fake import Site, site


def again(s: Site, why: str) -> int:
    return s.router.metrics.retries.value(why=why)


def test_late_is_a_share_of_the_time_or_many_times_the_usual_whichever_is_earlier() -> None:
    times = AnswerTimes(RetryConfig(hedge_ratio=0.25, hedge_factor=4.0, hedge_min_s=0.02))
    assert times.after_s(b"/v1/rank", 1.0) == 0.25, "nothing is known yet"
    for i in range(128):
        times.answered(b"/v1/rank", 0.03 if i % 32 == 0 else 0.01)
    assert times.after_s(b"/v1/rank", 1.0) == pytest.approx(0.12)
    assert times.after_s(b"/v1/rank", 0.2) == pytest.approx(0.05)
    assert times.after_s(b"/v1/generate", 1.0) == 0.25, "another kind has other times"
    for _ in range(512):
        times.answered(b"/v1/rank", 0.001)
    assert times.after_s(b"/v1/rank", 1.0) == 0.02
    for i in range(100):
        times.answered(b"/v1/%d" % i, 0.001)
    assert len(times._took_s) <= 16


def test_hedges_leave_half_of_the_saved_tries_to_failures() -> None:
    budget = RetryBudget(RetryConfig(ratio=0.5, burst=4.0))
    assert [budget.take(is_hedge=True) for _ in range(3)] == [True, True, False]
    assert [budget.take(is_hedge=False) for _ in range(3)] == [True, True, False]
    for _ in range(100):
        budget.earn()
    assert [budget.take(is_hedge=False) for _ in range(5)] == [True] * 4 + [False]


async def test_an_alarm_rings_no_later_than_it_was_asked_for_and_again_for_what_is_next() -> None:
    rung: list[float] = []
    due = [time.monotonic() + 0.02, time.monotonic() + 0.05, time.monotonic() + 0.3]
    done = asyncio.Event()

    def ring(now_at: float) -> float:
        rung.extend(at for at in due if now_at >= at)
        due[:] = [at for at in due if now_at < at]
        if not due:
            done.set()
        return min(due, default=NEVER)

    alarm = Alarm(ring)
    for at in (due[1], due[2], due[0]):
        alarm.set(at)
    async with asyncio.timeout(10):
        await done.wait()
    assert rung == sorted(rung)
    assert len(rung) == 3
    due.append(time.monotonic())
    alarm.set(due[0])
    alarm.cancel()
    await asyncio.sleep(0.01)
    assert len(rung) == 3


async def test_beside_an_instance_that_hangs_another_one_answers_and_the_first_try_is_dropped() -> None:
    async with site(breaker={"failures": 2, "min_timeout_s": 0.0}) as s:
        bad = s.owner("u")
        bad.delay_s = 30.0
        for _ in range(2):
            status, answer, _ = await s.post("rank", X_Request_Timeout_Ms="800")
            assert status == 200
            assert answer["instance"] != bad.name
        await s.until(lambda: bad.cancelled == 2)
        assert again(s, "late") == 2
        assert s.router.metrics.hedges.value(winner="second") == 2
        assert s.router.members.instances[bad.name].in_flight == 0
        assert s.router.members.instances[bad.name].breaker.is_open(time.monotonic()), "who hangs is taken out"


async def test_a_first_try_that_answers_after_all_wins_and_the_hedge_is_dropped() -> None:
    async with site() as s:
        first = s.owner("u")
        others = [fake for fake in s.fakes if fake is not first]
        first.delay_s = 0.4
        for fake in others:
            fake.delay_s = 30.0
        status, answer, _ = await s.post("rank", X_Request_Timeout_Ms="1000")
        assert (status, answer["instance"]) == (200, first.name)
        await s.until(lambda: sum(fake.cancelled for fake in others) == 1)
        assert s.router.metrics.hedges.value(winner="first") == 1
        assert not s.router.metrics.failures.value(), "nobody is to blame"


async def test_a_hedge_that_fails_leaves_the_first_try_its_time_and_the_other_way_round() -> None:
    async with site() as s:
        first = s.owner("u")
        others = [fake for fake in s.fakes if fake is not first]
        first.delay_s = 0.4
        for fake in others:
            fake.status = 503
        status, answer, _ = await s.post("rank", X_Request_Timeout_Ms="1000")
        assert (status, answer["instance"]) == (200, first.name)
        first.status = 503
        for fake in others:
            fake.status = 200
            fake.delay_s = 0.4
        status, answer, _ = await s.post("rank", X_Request_Timeout_Ms="1000")
        assert status == 200
        assert answer["instance"] != first.name
        assert again(s, "late") == 2


async def test_hedges_have_a_budget_and_none_goes_out_while_most_instances_hang() -> None:
    async with site(retry={"ratio": 0.0, "burst": 2.0}, breaker={"failures": 1000}) as s:
        bad = s.owner("u")
        bad.delay_s = 30.0
        statuses = [(await s.post("rank", X_Request_Timeout_Ms="2000"))[0] for _ in range(2)]
        assert statuses == [200, 504]
    async with site() as s:
        for fake in s.fakes:
            fake.delay_s = 30.0
        *earlier, user = [s.user_of(fake) for fake in s.fakes]
        hanging = [asyncio.create_task(s.post("rank", one, X_Request_Timeout_Ms="20000")) for one in earlier]
        await s.until(lambda: all(fake.seen for fake in s.fakes[:2]))
        assert (await s.post("rank", user, X_Request_Timeout_Ms="800"))[0] == 504
        assert again(s, "late") == 0
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_a_signal_goes_beside_an_instance_that_answers_nothing_and_its_rank_follows_the_winner() -> None:
    async with site() as s:
        frozen = s.owner("u")
        frozen.delay_s = 30.0
        status, answer, headers = await s.post("signal", X_Request_Timeout_Ms="1000")
        assert status == 202
        assert answer["instance"] != frozen.name
        assert headers["X-NpuGr-Placement"].startswith(answer["instance"])
        frozen.delay_s = 0.0
        assert (await s.post("rank"))[1] == {"instance": answer["instance"], "hit": True, "size": 8}


async def test_if_the_first_instance_answers_a_hedged_signal_after_all_the_rank_follows_that_one() -> None:
    async with site() as s:
        first = s.owner("u")
        first.delay_s = 0.5
        for fake in s.fakes:
            if fake is not first:
                fake.delay_s = 30.0
        status, answer, headers = await s.post("signal", X_Request_Timeout_Ms="1500")
        assert (status, answer["instance"]) == (202, first.name)
        assert headers["X-NpuGr-Placement"].startswith(f"{first.name}@")
        assert s.router.metrics.hedges.value(winner="first") == 1
        for fake in s.fakes:
            fake.delay_s = 0.0
        assert (await s.post("rank"))[1] == {"instance": first.name, "hit": True, "size": 8}


async def test_a_signal_that_is_merely_slow_is_sent_once() -> None:
    async with site(retry={"hedge_ratio": 0.25}) as s:
        owner = s.owner("u")
        owner.delay_s = 0.6
        slow = asyncio.create_task(s.post("signal", X_Request_Timeout_Ms="1000"))
        await s.until(lambda: owner.seen)
        owner.delay_s = 0.0
        while not slow.done():  # the instance answers others meanwhile
            await s.post("rank")
            await asyncio.sleep(0.01)
        assert (await slow)[1]["instance"] == owner.name
        assert again(s, "late") == 0


async def test_a_rank_that_its_owner_refuses_for_load_is_served_by_another_and_a_signal_is_not() -> None:
    async with site() as s:
        hot = s.owner("u")
        hot.status = 429
        assert (await s.post("rank"))[1]["instance"] != hot.name
        assert (await s.post("signal"))[0] == 429
        assert not s.router.metrics.failures.value(), "to refuse is no failure"
        for fake in s.fakes:
            fake.status = 429
        statuses = [(await s.post("rank", f"u{i}"))[0] for i in range(10)]
        assert statuses == [429] * 10
        assert again(s, "429") <= 3, "where most refuse, nobody else is asked"
