"""Admission admits what can be in time, rejects the rest at once, and ends as it began."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import Overloaded, Rejection
from npu_gr.core.kinds import EVENTS, GENERATE, KINDS, RANK, SIGNAL
from npu_gr.core.shares import WANTS_S
from npu_gr.server.admission.controller import (
    MIN_ACTIVE,
    AdmissionConfig,
    AdmissionController,
    Permit,
    ServiceTime,
)
from npu_gr.server.admission.fair_queue import MAX_PASSES, TOGETHER_S
from npu_gr.simulate.clock import VirtualLoop
from tests.server.admission.rig import OBJECTIVE_S, Instance, Seen, virtually

RETRY_S = 0.02
PLACES = int(MAX_PASSES * MIN_ACTIVE)  # of a tenant while others ask


def within_slo_ratio(seen: Seen, instance: Instance, seconds: float) -> float:
    return seen.in_time / (seconds * instance.capacity_per_s)


@pytest.mark.parametrize("clients", [4, 16, 64, 256])
def test_clients_that_retry_at_once_get_all_that_the_instance_can_do(clients: int) -> None:
    async def work() -> tuple[float, Seen]:
        instance = Instance()
        seen = Seen()
        await instance.closed(seen, clients, 3.0, service_time_s=clients / 1400)
        return within_slo_ratio(seen, instance, 3.0), seen

    ratio, seen = virtually(work)
    assert ratio >= (0.65 if clients == 4 else 0.95)  # four clients do not fill the device
    assert seen.counts["late"] <= 0.01 * seen.in_time


@pytest.mark.parametrize("size", [8, 16, 24, 32])
def test_a_burst_that_fits_is_rejected_nothing(size: int) -> None:
    async def work() -> Seen:
        instance = Instance()
        seen = Seen()
        await instance.bursts(seen, size, 4 * size / instance.capacity_per_s, 40)
        return seen

    assert virtually(work).counts == {"in_time": 40 * size}


@pytest.mark.parametrize("times", [1.0, 3.0, 10.0])
def test_an_open_loop_gets_the_capacity_from_the_first_moment_to_the_last(times: float) -> None:
    window_s = 0.5 / times + 0.2

    async def work() -> tuple[list[int], float, Seen]:
        instance = Instance()
        seen = Seen()
        source = random.Random(5)
        per_second = []
        asked = []
        for _ in range(4):
            before = seen.in_time
            end_at = instance.loop.time() + window_s
            while instance.loop.time() < end_at:
                asked.append(asyncio.ensure_future(instance.ask(seen)))
                await asyncio.sleep(source.expovariate(times * instance.capacity_per_s))
            per_second.append(round((seen.in_time - before) / window_s))
        await asyncio.gather(*asked)
        return per_second, instance.capacity_per_s, seen

    per_second, capacity_per_s, seen = virtually(work)
    assert min(per_second) >= 0.9 * capacity_per_s
    assert seen.counts["late"] <= 0.02 * seen.in_time
    if times > 1.0:
        told_s = sorted(seen.rejected_after_s)
        assert told_s[int(0.95 * len(told_s))] <= 0.002  # whoever cannot be in time is told at once


def test_a_small_tenant_beside_a_hot_one_is_never_rejected() -> None:
    async def work() -> tuple[Seen, Seen]:
        instance = Instance()
        hot = Seen()
        small = Seen()
        busy = asyncio.ensure_future(
            instance.closed(hot, 64, 3.0, service_time_s=RETRY_S, tenant="hot")
        )
        asked = []
        for _ in range(55):
            asked.append(asyncio.ensure_future(instance.ask(small, tenant="small")))
            await asyncio.sleep(0.05)
        await asyncio.gather(busy, *asked)
        return hot, small

    hot, small = virtually(work)
    assert hot.counts["rejected"] > 100
    assert small.counts == {"in_time": 55}
    assert max(small.latencies_s) < 0.6 * OBJECTIVE_S


def test_a_tenant_with_slow_requests_holds_no_more_than_its_share_while_another_waits() -> None:
    held = Held()
    hot = []
    while (guest := held.arrive(tenant="hot")).permit:
        hot.append(guest)
    small = [held.arrive(tenant="small") for _ in range(PLACES)]
    assert not any(waiting.rejection for waiting in (guest, *small))
    for number in range(PLACES):
        # so that the window stays as it is
        held.wait(held.admission.work.service_time_s(RANK.name))
        hot.pop().leave()
        # the places go to the small one, which has less than half of them
        assert small[number].permit
        assert not guest.permit
    while len(hot) >= PLACES:  # nobody else waits, but the other one asks at the same time
        assert not guest.permit
        hot.pop().leave()
    assert guest.permit


def test_a_tenant_that_fills_a_pass_keeps_nobody_waiting_behind_it() -> None:
    held = Held()
    hot = [held.arrive(tenant="hot") for _ in range(PLACES)]
    held.arrive(tenant="small").leave()
    more = [held.arrive(tenant="hot") for _ in range(3)]
    assert not any(guest.permit or guest.rejection for guest in more)
    other = held.arrive(tenant="other")
    assert other.permit  # although others came before it
    assert held.arrive(GENERATE.name, "small").permit is None  # a class behind them waits
    hot[0].leave()
    assert [bool(guest.permit) for guest in more] == [True, False, False]


def test_a_tenant_alone_fills_the_window_again_a_second_after_the_other_asked() -> None:
    held = Held()
    held.arrive(tenant="small").leave()
    assert [bool(held.arrive(tenant="hot").permit) for _ in range(PLACES + 1)] == [
        True
    ] * PLACES + [False]
    held.wait(TOGETHER_S)
    assert all(held.arrive(tenant="hot").permit for _ in range(MIN_ACTIVE))


def test_places_of_a_tenant_go_by_its_weight() -> None:
    held = Held(tenant_weights={"large": 1.5, "tiny": 0.25})
    held.arrive(tenant="small").leave()
    for tenant, places in (("tiny", 2), ("large", 9), ("plain", 6)):
        assert sum(bool(held.arrive(tenant=tenant).permit) for _ in range(12)) == places


def test_signals_of_several_tenants_enter_two_at_a_time_and_those_of_one_as_they_fit() -> None:
    held = Held()
    alone = [held.arrive(SIGNAL.name, "e") for _ in range(10)]
    assert all(guest.permit for guest in alone)
    held.arrive(tenant="v").leave()
    late = held.arrive(SIGNAL.name, "e")
    for guest in alone[:9]:
        assert not late.permit
        guest.leave()
    assert late.permit
    held.wait(WANTS_S)
    assert all(held.arrive(SIGNAL.name, "e").permit for _ in range(8))  # the other has gone


def test_the_last_permits_go_to_the_tenant_that_holds_fewer_of_them() -> None:
    held = Held(max_inflight=8)
    hung = [held.arrive(tenant="hot") for _ in range(4)]
    for guest in hung:  # they wait for a store that does not answer
        assert guest.permit is not None
        guest.permit.suspended().__enter__()
    inside = [held.arrive(tenant="small") for _ in range(2)] + [
        held.arrive(tenant="hot") for _ in range(2)
    ]
    assert all(guest.permit for guest in inside)
    hot = held.arrive(tenant="hot")
    small = held.arrive(tenant="small")
    inside[-1].leave()
    assert small.permit
    assert not hot.permit
    inside[-2].leave()
    assert hot.permit  # nobody else waits


def test_a_pause_is_forgotten_within_a_quarter_of_a_second() -> None:
    async def work() -> list[int]:
        instance = Instance()
        seen = Seen()
        load = asyncio.ensure_future(instance.closed(seen, 8, 2.0, service_time_s=RETRY_S))
        await asyncio.sleep(0.9)
        bins = []
        for number in range(8):
            if number == 1:
                instance.pause(0.110)
                await asyncio.sleep(0.110)
            before = seen.in_time
            await asyncio.sleep(0.05)
            bins.append(seen.in_time - before)
        await load
        return bins

    quiet, _, *after = virtually(work)
    assert after
    assert all(count >= 0.9 * quiet for count in after)


def test_an_instance_that_is_nearly_idle_rejects_nobody_whatever_its_objective() -> None:
    async def work() -> Seen:
        instance = Instance(objective_s=lambda _kind: 1e-5)  # far below what a request takes
        seen = Seen()
        await instance.closed(seen, MIN_ACTIVE, 1.0)
        return seen

    seen = virtually(work)
    assert not seen.counts["rejected"]
    assert seen.in_time > 500


def test_a_smaller_budget_is_the_time_that_counts() -> None:
    async def work() -> tuple[Seen, Seen]:
        instance = Instance()
        patient = Seen()
        hasty = Seen()
        load = asyncio.ensure_future(instance.closed(patient, 40, 1.0, service_time_s=RETRY_S))
        await asyncio.sleep(0.2)
        for _ in range(30):
            await instance.ask(hasty, budget_s=0.004)
            await asyncio.sleep(0.01)
        await load
        return patient, hasty

    patient, hasty = virtually(work)
    assert patient.in_time > 1000
    assert hasty.counts["rejected"] > 20  # 4 ms is less than what is inside takes


OPEN: list[Held] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for held in OPEN:
        held.__exit__()


class Held:
    """A controller on a virtual clock, and the requests that came to it."""

    def __init__(self, **settings_: Any) -> None:
        self.loop = VirtualLoop()
        self.admission = AdmissionController(
            AdmissionConfig(**settings_), lambda name: KINDS[name].objective_s, clock=self.loop.time
        )
        self.guests: list[Guest] = []
        OPEN.append(self)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in self.guests:
            guest.task.cancel()
        self.wait(0.001)
        self.loop.close()
        OPEN.remove(self)

    def arrive(self, kind: str = RANK.name, tenant: str = "", budget_s: float = 1.0) -> Guest:
        guest = Guest(self)
        entering = self.admission.enter(kind, tenant, self.loop.time(), budget_s)
        guest.task = self.loop.create_task(entering)
        self.guests.append(guest)
        self.turn()
        return guest

    def turn(self) -> None:
        """Let the loop do what is due now."""
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def do(self, function: Any) -> None:
        """Call a function inside the loop."""

        async def call() -> None:
            function()

        self.loop.run_until_complete(call())
        self.turn()


class Guest:
    task: asyncio.Task[Permit]

    def __init__(self, held: Held) -> None:
        self.held = held

    @property
    def permit(self) -> Permit | None:
        is_admitted = (
            self.task.done() and not self.task.cancelled() and self.task.exception() is None
        )
        return self.task.result() if is_admitted else None

    @property
    def rejection(self) -> Overloaded | None:
        error = self.task.exception() if self.task.done() and not self.task.cancelled() else None
        assert error is None or isinstance(error, Overloaded)
        return error

    def cancel(self) -> None:
        self.task.cancel()
        self.held.turn()

    def leave(self) -> None:
        assert self.permit is not None
        self.held.do(self.permit.leave)


def test_ranks_do_not_wait_behind_generates_nor_generates_behind_signals() -> None:
    held = Held()
    while (last := held.arrive(SIGNAL.name)).permit:
        pass
    signals = held.guests[:-1]
    generate = held.arrive(GENERATE.name)
    assert generate.permit  # a full house of signals is nothing to a generate
    while held.arrive(GENERATE.name).permit:
        pass
    waiting = held.guests[-1]
    rank = held.arrive()
    assert rank.permit
    signals[0].leave()
    assert not last.permit  # generates wait: they go before signals
    generate.leave()
    assert waiting.permit


def test_a_suspended_request_gives_the_place_to_others_and_no_queue_waits_for_the_way_back() -> (
    None
):
    held = Held()
    while held.arrive().permit:
        pass
    first, waiting = held.guests[0], held.guests[-1]
    assert first.permit is not None
    block = first.permit.suspended()
    held.do(block.__enter__)
    assert waiting.permit
    assert held.admission.work.counts(RANK.name)["suspended"] == 1
    held.do(lambda: block.__exit__(None, None, None))
    assert held.admission.work.counts(RANK.name)["suspended"] == 0
    assert held.admission.work.admitted == len(held.guests)


def test_a_hung_store_with_as_many_waiters_as_places_closes_the_door_to_nobody() -> None:
    held = Held()
    outside = []
    for _ in range(100):
        guest = held.arrive()
        assert guest.permit is not None
        step = guest.permit.suspended()
        held.do(step.__enter__)
        outside.append(step)
    assert held.arrive().permit
    for step in outside:
        held.do(lambda step=step: step.__exit__(None, None, None))


def test_the_bound_on_memory_holds_and_whoever_waits_for_it_is_told_in_time() -> None:
    held = Held(max_inflight=2)
    first, second, third = held.arrive(), held.arrive(), held.arrive()
    assert first.permit
    assert second.permit
    assert not third.permit
    held.wait(OBJECTIVE_S)
    assert third.rejection is not None
    fourth = held.arrive()
    first.leave()
    assert fourth.permit


def test_a_caller_that_hangs_up_while_it_waits_takes_nobodys_place() -> None:
    held = Held()
    while held.arrive().permit:
        pass
    gone = held.guests[-1]
    gone.cancel()
    gone.cancel()
    assert held.admission.waiting == 0
    after = held.arrive()
    held.guests[0].leave()
    assert after.permit
    assert not gone.permit
    assert gone.rejection is None


def test_a_permit_leaves_once() -> None:
    held = Held()
    guest = held.arrive()
    guest.leave()
    guest.leave()
    assert held.admission.work.admitted == 0


def test_switched_off_it_asks_nobody() -> None:
    held = Held(enabled=False)
    assert all(held.arrive().permit for _ in range(1000))


def test_a_cancelled_coroutine_gives_back_what_it_was_given() -> None:
    async def work() -> int:
        instance = Instance(max_inflight=1)
        permit = await instance.admission.enter(RANK.name, "", instance.loop.time(), 1.0)
        asked = [
            asyncio.ensure_future(
                instance.admission.enter(RANK.name, "", instance.loop.time(), 1.0)
            )
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        permit.leave()  # the first one has its permit, but has not run yet
        asked[0].cancel()
        asked[1].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return instance.admission.work.admitted

    assert virtually(work) == 0


def test_a_rejection_is_an_error_of_the_tree() -> None:
    async def work() -> None:
        instance = Instance(max_inflight=1)
        with (
            await instance.admission.enter(RANK.name, "", instance.loop.time(), 1.0),
            pytest.raises(Overloaded),
        ):
            await instance.admission.enter(RANK.name, "", instance.loop.time(), 1.0)

    virtually(work)


STEP = st.tuples(
    st.sampled_from([RANK.name, GENERATE.name, SIGNAL.name, EVENTS.name]),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["arrive", "arrive", "leave", "cancel", "out", "back"]),
    st.floats(0.0, 0.02),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(STEP, max_size=60), st.integers(1, 40))
def test_every_request_ends_once_and_the_counts_agree(
    steps: list[tuple[str, str, str, float]], most: int
) -> None:
    with Held(max_inflight=most) as held:
        active: list[Guest] = []
        out: list[tuple[Guest, Any]] = []
        left: list[Guest] = []
        for kind, tenant, step, after_s in steps:
            if step == "arrive":
                held.arrive(kind, tenant)
            elif step == "leave" and active:
                active[0].leave()
                left.append(active[0])
            elif step == "cancel" and held.guests:
                if not held.guests[-1].task.done():
                    held.guests[-1].cancel()
            elif step == "out" and active:
                assert active[0].permit is not None
                block = active[0].permit.suspended()
                held.do(block.__enter__)
                out.append((active[0], block))
            elif step == "back" and out:
                held.do(lambda: out.pop()[1].__exit__(None, None, None))
            held.wait(after_s)
            suspended = [guest for guest, _ in out]
            active = [
                one
                for one in held.guests
                if one.permit and one not in suspended and one not in left
            ]
            counts = [held.admission.work.counts(name) for name in KINDS]
            assert sum(count["active"] for count in counts) == len(active)  # D2
            assert sum(count["suspended"] for count in counts) == len(out)
            waiting = [one for one in held.guests if not one.task.done()]
            assert (
                held.admission.waiting == sum(count["waiting"] for count in counts) == len(waiting)
            )
            assert held.admission.work.admitted == len(active) + len(out) <= most
        while out:
            held.do(lambda: out.pop()[1].__exit__(None, None, None))
        held.wait(5.0)  # D1: whoever still waits is admitted or rejected in its time
        for one in held.guests:
            if one.permit and one not in left:
                one.leave()
        held.wait(5.0)
        for one in held.guests:
            if one.permit:
                one.leave()
        assert held.admission.waiting == 0
        assert held.admission.work.admitted == 0


def test_a_tenant_that_only_signals_is_rejected_where_others_share_the_instance() -> None:
    with Held() as held:

        def signal(tenant: str) -> Guest:
            guest = held.arrive(SIGNAL.name, tenant)
            if guest.permit is not None:
                guest.leave()
            return guest

        alone = [signal("flood") for _ in range(200)]  # nobody else is there: it may
        with_others, follows = [], []
        for _ in range(200):
            held.arrive(RANK.name, "shop").leave()
            with_others.append(signal("flood"))
            follows.append(signal("shop"))
    assert alone[-1].rejection is None
    assert follows[-1].rejection is None
    assert with_others[-1].rejection is not None
    assert with_others[-1].rejection.reason is Rejection.SHARE


def learnt(seconds: float, samples: int = 500) -> ServiceTime:
    estimate = ServiceTime(1.0)
    for _ in range(samples):
        estimate.observe(seconds)
    return estimate


def test_the_first_departures_replace_the_guess() -> None:
    assert learnt(0.001, 16).seconds < 0.07
    assert learnt(0.001).seconds == pytest.approx(0.001, rel=0.03)


@pytest.mark.parametrize("seconds", [0.0001, 0.0003, 0.001])
def test_a_pause_moves_the_service_time_by_a_quarter_and_sixty_departures_undo_it(
    seconds: float,
) -> None:
    estimate = learnt(seconds, 5000)
    estimate.observe(0.110)
    assert 1.1 * seconds < estimate.seconds < 1.27 * seconds
    for _ in range(600):
        estimate.observe(seconds)
    assert estimate.seconds == pytest.approx(seconds, rel=0.05)


def test_the_service_time_counts_what_other_threads_take_of_the_core() -> None:
    estimate = learnt(0.0004)
    seen = []
    for _ in range(100):
        estimate.observe(0.006)  # the process stood still
        for _ in range(39):
            estimate.observe(0.0004)
            seen.append(estimate.seconds)
    assert sum(seen) / len(seen) == pytest.approx((0.006 + 39 * 0.0004) / 40, rel=0.1)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=200))
def test_the_service_time_stays_between_nothing_and_the_largest_sample(gaps_s: list[float]) -> None:
    estimate = ServiceTime(0.001)
    for gap_s in gaps_s:
        estimate.observe(gap_s)
        assert 0.0 <= estimate.seconds <= max(0.001, *gaps_s)


def test_what_would_be_rejected_is_and_nothing_changes_by_asking() -> None:
    with Held() as held:
        held.admission.work.kinds[RANK.name].service_time.seconds = 0.02
        asked = []
        for _ in range(12):
            says = held.admission.would_reject(RANK.name, "", held.loop.time(), 1.0)
            asked.append((says, held.arrive().rejection is not None))
        assert [says for says, _ in asked] == [was for _, was in asked]
        assert {was for _, was in asked} == {True, False}


def test_a_proxy_is_told_how_many_fit_its_share_of_the_objective() -> None:
    with Held() as held:
        for service_s, limit in ((1e-5, 64), (0.0005, 12), (0.001, 6), (1.0, 2)):
            held.admission.work._mix.service_time.seconds = service_s
            held.admission.work._mix.objective_s = RANK.objective_s
            assert held.admission.work.proxy_limit(0.12, 2, 64) == limit
