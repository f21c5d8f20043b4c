"""The door lets in what can be in time, tells the others at once, and is as it was when all have left."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.door import LEAST, MOST, Door, Slot
from npu_gr.admission.tenants import MIXED_S, PASSES
from npu_gr.core.errors import Overloaded, Refusal
from npu_gr.core.kinds import EVENTS, GENERATE, KINDS, RANK, SIGNAL
from npu_gr.core.shares import WANTS_S
from tests.admission.rig import OBJECTIVE_S, Instance, Seen, virtually

RETRY_S = 0.02
PLACES = int(PASSES * LEAST)  # of a tenant while others ask


def in_time_ratio(seen: Seen, instance: Instance, seconds: float) -> float:
    return seen.in_time / (seconds * instance.capacity_per_s)


@pytest.mark.parametrize("clients", [4, 16, 64, 256])
def test_clients_that_retry_at_once_get_all_that_the_instance_can_do(clients: int) -> None:
    async def work() -> tuple[float, Seen]:
        instance = Instance()
        seen = Seen()
        await instance.closed(seen, clients, 3.0, pace_s=clients / 1400)
        return in_time_ratio(seen, instance, 3.0), seen

    ratio, seen = virtually(work)
    assert ratio >= (0.65 if clients == 4 else 0.95)  # four clients do not fill the device
    assert seen.counts["late"] <= 0.01 * seen.in_time


@pytest.mark.parametrize("size", [8, 16, 24, 32])
def test_a_burst_that_fits_is_refused_nothing(size: int) -> None:
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
        told_s = sorted(seen.refused_after_s)
        assert told_s[int(0.95 * len(told_s))] <= 0.002  # whoever cannot be in time is told at once


def test_a_small_tenant_beside_a_hot_one_is_never_refused() -> None:
    async def work() -> tuple[Seen, Seen]:
        instance = Instance()
        hot = Seen()
        small = Seen()
        busy = asyncio.ensure_future(instance.closed(hot, 64, 3.0, pace_s=RETRY_S, tenant="hot"))
        asked = []
        for _ in range(55):
            asked.append(asyncio.ensure_future(instance.ask(small, tenant="small")))
            await asyncio.sleep(0.05)
        await asyncio.gather(busy, *asked)
        return hot, small

    hot, small = virtually(work)
    assert hot.counts["refused"] > 100
    assert small.counts == {"in_time": 55}
    assert max(small.latencies_s) < 0.6 * OBJECTIVE_S


def test_a_tenant_with_slow_requests_holds_no_more_than_its_share_of_the_places_while_another_waits() -> None:
    held = Held()
    hot = []
    while (guest := held.arrive(tenant="hot")).slot:
        hot.append(guest)
    small = [held.arrive(tenant="small") for _ in range(PLACES)]
    assert not any(waiting.refusals for waiting in (guest, *small))
    for number in range(PLACES):
        held.wait(held.door.pace_s(RANK.name))  # so that the window stays as it is
        hot.pop().leave()
        assert small[number].slot  # the places go to the small one, which has less than half of them
        assert not guest.slot
    while len(hot) >= PLACES:  # nobody else waits, but the other one asks at the same time
        assert not guest.slot
        hot.pop().leave()
    assert guest.slot


def test_a_tenant_that_fills_a_pass_keeps_nobody_waiting_behind_it() -> None:
    held = Held()
    hot = [held.arrive(tenant="hot") for _ in range(PLACES)]
    held.arrive(tenant="small").leave()
    more = [held.arrive(tenant="hot") for _ in range(3)]
    assert not any(guest.slot or guest.refusals for guest in more)
    other = held.arrive(tenant="other")
    assert other.slot  # although others came before it
    assert held.arrive(GENERATE.name, "small").slot is None  # a class behind them waits
    hot[0].leave()
    assert [bool(guest.slot) for guest in more] == [True, False, False]


def test_a_tenant_alone_fills_the_window_again_a_second_after_the_other_asked() -> None:
    held = Held()
    held.arrive(tenant="small").leave()
    assert [bool(held.arrive(tenant="hot").slot) for _ in range(PLACES + 1)] == [True] * PLACES + [False]
    held.wait(MIXED_S)
    assert all(held.arrive(tenant="hot").slot for _ in range(LEAST))


def test_places_of_a_tenant_go_by_its_weight() -> None:
    held = Held(tenant_weights={"large": 1.5, "tiny": 0.25})
    held.arrive(tenant="small").leave()
    for tenant, places in (("tiny", 2), ("large", 9), ("plain", 6)):
        assert sum(bool(held.arrive(tenant=tenant).slot) for _ in range(12)) == places


def test_signals_of_several_tenants_are_let_in_two_at_a_time_and_those_of_one_alone_as_they_fit() -> None:
    held = Held()
    alone = [held.arrive(SIGNAL.name, "e") for _ in range(10)]
    assert all(guest.slot for guest in alone)
    held.arrive(tenant="v").leave()
    late = held.arrive(SIGNAL.name, "e")
    for guest in alone[:9]:
        assert not late.slot
        guest.leave()
    assert late.slot
    held.wait(WANTS_S)
    assert all(held.arrive(SIGNAL.name, "e").slot for _ in range(8))  # the other has gone


def test_the_last_slots_go_to_the_tenant_that_holds_fewer_of_them() -> None:
    held = Held(max_inflight=8)
    hung = [held.arrive(tenant="hot") for _ in range(4)]
    for guest in hung:  # they wait for a store that does not answer
        assert guest.slot is not None
        guest.slot.outside().__enter__()
    inside = [held.arrive(tenant="small") for _ in range(2)] + [held.arrive(tenant="hot") for _ in range(2)]
    assert all(guest.slot for guest in inside)
    hot = held.arrive(tenant="hot")
    small = held.arrive(tenant="small")
    inside[-1].leave()
    assert small.slot
    assert not hot.slot
    inside[-2].leave()
    assert hot.slot  # nobody else waits


def test_a_pause_is_forgotten_within_a_quarter_of_a_second() -> None:
    async def work() -> list[int]:
        instance = Instance()
        seen = Seen()
        load = asyncio.ensure_future(instance.closed(seen, 8, 2.0, pace_s=RETRY_S))
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


def test_an_instance_that_is_nearly_idle_refuses_nobody_whatever_its_objective() -> None:
    async def work() -> Seen:
        instance = Instance(objective_s=lambda _kind: 1e-5)  # far below what a request takes
        seen = Seen()
        await instance.closed(seen, LEAST, 1.0)
        return seen

    seen = virtually(work)
    assert not seen.counts["refused"]
    assert seen.in_time > 500


def test_a_smaller_budget_is_the_time_that_counts() -> None:
    async def work() -> tuple[Seen, Seen]:
        instance = Instance()
        patient = Seen()
        hasty = Seen()
        load = asyncio.ensure_future(instance.closed(patient, 40, 1.0, pace_s=RETRY_S))
        await asyncio.sleep(0.2)
        for _ in range(30):
            await instance.ask(hasty, budget_s=0.004)
            await asyncio.sleep(0.01)
        await load
        return patient, hasty

    patient, hasty = virtually(work)
    assert patient.in_time > 1000
    assert hasty.counts["refused"] > 20  # 4 ms is less than what is inside takes


class Held:
    """A door whose clock a test moves, with slots that it holds."""

    def __init__(self, **settings_: Any) -> None:
        self.now_at = 100.0
        self.timers: list[tuple[float, Any]] = []
        self.door = Door(
            AdmissionConfig(**settings_),
            lambda name: KINDS[name].objective_s,
            clock=lambda: self.now_at,
            call_later=lambda after_s, call: self.timers.append((self.now_at + after_s, call)),
        )
        self.guests: list[Guest] = []

    def arrive(self, kind: str = RANK.name, tenant: str = "", budget_s: float = 1.0, since_s: float = 0.0) -> Guest:
        guest = Guest()
        self.guests.append(guest)
        guest.ticket = self.door.arrive(kind, tenant, self.now_at - since_s, budget_s, guest)
        return guest

    def wait(self, seconds: float) -> None:
        end_at = self.now_at + seconds
        while due := [timer for timer in self.timers if timer[0] <= end_at]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now_at = max(self.now_at, first[0])
            first[1]()
        self.now_at = end_at


class Guest:
    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.refusals = 0
        self.ticket: Any = None

    def let_in(self, slot: Slot) -> None:
        assert self.slot is None
        self.slot = slot

    def refuse(self, reason: Refusal) -> None:
        self.refusals += 1
        self.reason = reason

    def leave(self) -> None:
        assert self.slot is not None
        self.slot.leave()


def test_ranks_do_not_wait_behind_generates_nor_generates_behind_signals() -> None:
    held = Held()
    while (last := held.arrive(SIGNAL.name)).slot:
        pass
    signals = held.guests[:-1]
    generate = held.arrive(GENERATE.name)
    assert generate.slot  # a full house of signals is nothing to a generate
    while held.arrive(GENERATE.name).slot:
        pass
    waiting = held.guests[-1]
    rank = held.arrive()
    assert rank.slot
    signals[0].leave()
    assert not last.slot  # generates wait: they go before signals
    generate.leave()
    assert waiting.slot


def test_a_step_outside_gives_the_place_to_others_and_no_queue_waits_for_the_way_back() -> None:
    held = Held()
    while held.arrive().slot:
        pass
    first, waiting = held.guests[0], held.guests[-1]
    assert first.slot is not None
    with first.slot.outside():
        assert not waiting.slot  # a block that does not wait gives nothing away
        held.wait(0.001)
        assert waiting.slot
        assert held.door.counts(RANK.name)["outside"] == 1
    assert held.door.counts(RANK.name)["outside"] == 0
    assert held.door.admitted == len(held.guests)


def test_a_hung_store_with_as_many_waiters_as_places_closes_the_door_to_nobody() -> None:
    held = Held()
    outside = []
    for _ in range(100):
        guest = held.arrive()
        assert guest.slot is not None
        step = guest.slot.outside()
        step.__enter__()
        outside.append(step)
        held.wait(0.001)
    assert held.arrive().slot
    for step in outside:
        step.__exit__(None, None, None)


def test_the_bound_on_memory_holds_and_whoever_waits_for_it_is_told_in_time() -> None:
    held = Held(max_inflight=2)
    first, second, third = held.arrive(), held.arrive(), held.arrive()
    assert first.slot
    assert second.slot
    assert not third.slot
    held.wait(OBJECTIVE_S)
    assert third.refusals == 1
    fourth = held.arrive()
    first.leave()
    assert fourth.slot


def test_a_caller_that_hangs_up_while_it_waits_takes_nobodys_place() -> None:
    held = Held()
    while held.arrive().slot:
        pass
    gone = held.guests[-1]
    held.door.cancel(gone.ticket)
    held.door.cancel(gone.ticket)
    assert held.door.waiting == 0
    after = held.arrive()
    held.guests[0].leave()
    assert after.slot
    assert not gone.slot
    assert not gone.refusals


@given(
    inside=st.integers(0, 40),
    pace_s=st.sampled_from([1e-4, 1e-3, 5e-3, 0.02, 0.2]),
    budget_s=st.sampled_from([0.01, 0.05, 1.0]),
    waited_s=st.sampled_from([0.0, 0.02, 0.15]),
    on_its_way=st.sampled_from([0.0, 0.0811]),
)
def test_as_many_are_not_refused_as_there_is_room_for(
    inside: int, pace_s: float, budget_s: float, waited_s: float, on_its_way: float
) -> None:
    held = Held()
    held.door._lanes[RANK.name].pace.seconds = pace_s
    for _ in range(inside):
        held.arrive()
    held.wait(waited_s)
    room = held.door.room(RANK.name, "", budget_s, on_its_way)
    since_s = on_its_way * min(RANK.objective_s, budget_s)
    came = [held.arrive(budget_s=budget_s, since_s=since_s) for _ in range(room + MOST)]
    refused = [guest.refusals for guest in came]
    if came[0].slot is None and not on_its_way:  # there is a queue: exactly so many join it
        assert sum(refused) == MOST
    assert sum(refused[:room]) == 0
    assert refused == sorted(refused)


def test_a_slot_leaves_once() -> None:
    held = Held()
    guest = held.arrive()
    guest.leave()
    guest.leave()
    assert held.door.admitted == 0


def test_switched_off_it_asks_nobody() -> None:
    held = Held(enabled=False)
    assert all(held.arrive().slot for _ in range(1000))


def test_a_cancelled_coroutine_gives_back_what_it_was_given() -> None:
    async def work() -> int:
        instance = Instance(max_inflight=1)
        slot = await instance.door.enter(RANK.name, "", instance.loop.time(), 1.0)
        asked = [asyncio.ensure_future(instance.door.enter(RANK.name, "", instance.loop.time(), 1.0)) for _ in range(2)]
        await asyncio.sleep(0)
        slot.leave()  # the first one has its slot, but has not run yet
        asked[0].cancel()
        asked[1].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return instance.door.admitted

    assert virtually(work) == 0


def test_a_refusal_is_an_error_of_the_tree() -> None:
    async def work() -> None:
        instance = Instance(max_inflight=1)
        with await instance.door.enter(RANK.name, "", instance.loop.time(), 1.0), pytest.raises(Overloaded):
            await instance.door.enter(RANK.name, "", instance.loop.time(), 1.0)

    virtually(work)


STEP = st.tuples(
    st.sampled_from([RANK.name, GENERATE.name, SIGNAL.name, EVENTS.name]),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["arrive", "arrive", "leave", "cancel", "out", "back"]),
    st.floats(0.0, 0.02),
)


@settings(deadline=None)
@given(st.lists(STEP, max_size=120), st.integers(1, 40))
def test_every_ticket_ends_once_and_the_counts_agree(steps: list[tuple[str, str, str, float]], most: int) -> None:
    held = Held(max_inflight=most)
    inside: list[Guest] = []
    out: list[tuple[Guest, Any]] = []
    cancelled: set[int] = set()
    for kind, tenant, step, after_s in steps:
        if step == "arrive":
            held.arrive(kind, tenant)
        elif step == "leave" and inside:
            inside[0].leave()
            held.guests.remove(inside[0])
        elif step == "cancel" and held.guests:
            guest = held.guests[-1]
            if not guest.slot and not guest.refusals:
                held.door.cancel(guest.ticket)
                cancelled.add(id(guest))
        elif step == "out" and inside:
            assert inside[0].slot is not None
            block = inside[0].slot.outside()
            block.__enter__()
            out.append((inside[0], block))
        elif step == "back" and out:
            out.pop()[1].__exit__(None, None, None)
        held.wait(after_s)
        steps_outside = [guest for guest, _ in out]
        for guest in held.guests:
            ends = (guest.slot is not None) + guest.refusals + (id(guest) in cancelled)
            assert ends <= 1  # D1
        inside = [guest for guest in held.guests if guest.slot and guest not in steps_outside]
        counts = [held.door.counts(name) for name in KINDS]
        assert sum(count["inside"] for count in counts) == len(inside)  # D2
        assert sum(count["outside"] for count in counts) == len(out)
        waiting = [g for g in held.guests if not g.slot and not g.refusals and id(g) not in cancelled]
        assert held.door.waiting == sum(count["waiting"] for count in counts) == len(waiting)
        assert held.door.admitted <= most
    while out:
        out.pop()[1].__exit__(None, None, None)
    for guest in held.guests:
        if guest.slot:
            guest.leave()
    held.wait(5.0)
    assert held.door.waiting == 0  # nobody is forgotten
    for guest in held.guests:
        if guest.slot:
            guest.leave()
    assert held.door.admitted == 0


def test_a_tenant_that_only_signals_is_refused_where_others_share_the_instance() -> None:
    async def work() -> tuple[Guest, Guest, Guest]:
        clock = asyncio.get_running_loop().time
        door = Door(AdmissionConfig(), lambda _kind: OBJECTIVE_S, clock=clock)

        def signal(tenant: str) -> Guest:
            guest = Guest()
            door.arrive(SIGNAL.name, tenant, clock(), 1.0, guest)
            if guest.slot is not None:
                guest.leave()
            return guest

        alone = [signal("flood") for _ in range(1000)]  # nobody else is there: it may
        beside, follows = [], []
        for _ in range(1000):
            with await door.enter(RANK.name, "shop", clock(), 1.0):
                pass
            beside.append(signal("flood"))
            follows.append(signal("shop"))
        return alone[-1], beside[-1], follows[-1]

    alone, beside, follows = virtually(work)
    assert (alone.refusals, beside.refusals, follows.refusals) == (0, 1, 0)
    assert beside.reason is Refusal.SHARE
