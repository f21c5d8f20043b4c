"""Refusals are bounded whatever clients do; a lone refusal pauses nobody; places bring the paused back at once.

An open loop comes back from a standstill, although all its connections are in use then and look like those of retries.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

import pytest

from npu_gr.server.entrance.pacing import BESIDE, FORGETS_S, MOST_RUN_S, MOST_S, RETRY_S, RUN_S, SHARE, SPREAD, Pacer


class World:
    """A clock that jumps from timer to timer, and clients that retry at once."""

    def __init__(self) -> None:
        self.now_at = 10.0
        self._timers: list[tuple[float, int, Any]] = []
        self._number = 0
        self.pacer = Pacer(lambda: self.now_at, self.call_at, lambda: 0)

    def call_at(self, at: float, call: Any) -> None:
        self._number += 1
        heapq.heappush(self._timers, (at, self._number, call))

    def run(self, seconds: float) -> None:
        end_at = self.now_at + seconds
        while self._timers and self._timers[0][0] <= end_at:
            self.now_at, _, call = heapq.heappop(self._timers)
            call()
        self.now_at = end_at


class Client:
    """Retries as soon as it is read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.refused_at = float("-inf")
        self.at_once_since_at = world.now_at
        self.refusals = 0
        self.sent_at = 0.0
        self.is_paused = False
        self.resumed_at = 0.0

    def send(self) -> None:
        self.refusals += 1
        self.world.pacer.refused(self, self.sent_at)
        self.sent_at = self.world.now_at  # at once; it lies in the kernel while nobody reads
        if not self.is_paused:
            self.world.call_at(self.world.now_at + 1e-4, self.send)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self.resumed_at = self.world.now_at
        self.world.call_at(self.world.now_at + 1e-4, self.send)


def retries(world: World, client: Client) -> None:
    """Be refused twice, by a client that has long sent at once."""
    client.at_once_since_at = 0.0
    world.pacer.refused(client, world.now_at)
    world.pacer.refused(client, world.now_at)


def test_refusals_are_bounded_for_any_number_of_clients() -> None:
    for num_clients in (1, 4, 64, 256):
        world = World()
        clients = [Client(world) for _ in range(num_clients)]
        for client in clients:
            client.send()
        world.run(1.0)
        before = sum(client.refusals for client in clients)
        world.run(2.0)
        per_s = (sum(client.refusals for client in clients) - before) / 2.0
        assert per_s <= 1.4 * world.pacer.refusals_per_s, num_clients


def ends(world: World, every_s: float, late_s: float, for_s: float) -> float:
    """How long a caller's run is that sends at once for `every_s`, and is late once, again and again."""
    since_at = began_at = world.now_at
    while world.now_at < began_at + for_s:
        world.now_at += every_s + late_s
        since_at = world.pacer.late(since_at, world.now_at - late_s, world.now_at)
    return world.now_at - since_at


def test_a_caller_that_is_late_at_times_still_retries_and_one_that_waits_does_not() -> None:
    assert ends(World(), 0.1, 0.015, 2.0) > RUN_S  # a busy machine
    assert ends(World(), 1e-3, 0.1, 2.0) == 0.0  # ten requests a second
    assert ends(World(), 0.02, 0.03, 2.0) < 0.1
    assert ends(World(), 1e-3, 3600.0, 7200.0) == 0.0


def test_an_old_run_is_over_as_soon_as_another() -> None:
    world = World()
    since_at = world.now_at
    world.now_at += 3600.0
    for _ in range(12):
        world.now_at += 0.1
        since_at = world.pacer.late(since_at, world.now_at - 0.1, world.now_at)
    assert world.now_at - since_at <= RUN_S
    assert world.pacer.late(float("-inf"), world.now_at, world.now_at + 3 * RUN_S) > world.now_at  # never for ever


def test_refusals_that_take_longer_are_fewer() -> None:
    world = World()
    assert world.pacer.refusals_per_s > 400
    for _ in range(500):
        world.pacer.took(1e-4)
    assert world.pacer.refusals_per_s == pytest.approx(SHARE / (BESIDE * 1e-4), rel=0.01)
    world.pacer.took(10.0)  # a pause in the middle of one
    assert world.pacer.refusals_per_s > 0.7 * SHARE / (BESIDE * 1e-4)


def test_a_lone_refusal_pauses_nobody() -> None:
    world = World()
    clients = [Client(world) for _ in range(50)]
    for client in clients:
        client.at_once_since_at = 0.0
        world.pacer.refused(client, world.now_at)
    assert len(world.pacer) == 0
    world.now_at += 0.2
    world.pacer.refused(clients[0], world.now_at)  # long after the first one
    assert len(world.pacer) == 0
    world.pacer.refused(clients[0], world.now_at)
    assert len(world.pacer) == 1


def test_no_pause_is_longer_than_it_may_be() -> None:
    world = World()
    clients = [Client(world) for _ in range(2000)]
    for client in clients:
        retries(world, client)
    began_at = world.now_at
    for client in clients:
        client.resume = lambda client=client: setattr(client, "resumed_at", world.now_at)  # type: ignore[method-assign, misc]
    world.run(1.0)
    assert max(client.resumed_at for client in clients) - began_at <= MOST_S * (1 + SPREAD) + 1e-6
    assert len(world.pacer) == 0


def test_free_places_bring_as_many_back_at_once() -> None:
    world = World()
    clients = [Client(world) for _ in range(10)]
    for client in clients:
        retries(world, client)
    assert len(world.pacer) == 10
    world.pacer.forget(clients[0])
    world.pacer.release(3)
    assert sum(not client.is_paused for client in clients) == 3
    assert len(world.pacer) == 6


def test_a_caller_whose_queue_drains_is_not_paused() -> None:
    """All connections of an open loop are in use for a moment, and each sends the next request at once."""
    world = World()
    client = Client(world)
    client.send()
    world.run(0.9 * RUN_S)
    assert not client.is_paused
    world.run(0.2 * RUN_S)
    assert client.is_paused or client.resumed_at


def test_where_callers_do_not_wait_a_run_has_to_be_longer() -> None:
    world = World()
    for number in range(1000):
        world.pacer.resumed(has_hung_up=number % 20 == 0)  # some always do
    assert world.pacer.run_s == RUN_S
    for times in (4, 16):
        world.now_at += 1.0
        for _ in range(20):
            world.pacer.resumed(has_hung_up=True)
        assert 0.85 * times * RUN_S < world.pacer.run_s <= times * RUN_S
    run_s = world.pacer.run_s
    for _ in range(20):
        world.pacer.resumed(has_hung_up=True)  # of the same moment
    assert world.pacer.run_s == run_s
    client = Client(world)
    client.send()
    world.run(0.4 * run_s)
    assert not client.is_paused
    assert not client.resumed_at
    world.now_at += FORGETS_S
    assert world.pacer.run_s < 0.6 * run_s
    for _ in range(30):
        world.now_at += 1.0
        for _ in range(20):
            world.pacer.resumed(has_hung_up=True)
    assert world.pacer.run_s == MOST_RUN_S


RATE_PER_S = 6000  # of an open loop
NUM_CONNECTIONS = 256
PATIENCE_S = 1.0
REFUSES_S = 1e-4  # what a refusal takes


class OpenLoop:
    """Callers of a steady rate over some connections, who give up after `PATIENCE_S`; a server that refuses all."""

    def __init__(self, stands_still: tuple[float, float], ends_at: float) -> None:
        self.world = World()
        self.began_at = self.world.now_at
        self.ends_at = self.began_at + ends_at
        self.stands_still = [self.began_at + at for at in stands_still]
        self.idle = deque(PooledConnection(self) for _ in range(NUM_CONNECTIONS))
        self.due: deque[float] = deque()  # what has no connection yet
        self.readable: deque[PooledConnection] = deque()
        self.is_reading = False
        self.told_after_s: list[tuple[float, float]] = []  # when each was due, and how long it took to be refused
        self.world.call_at(self.began_at, self.arrive)

    def run(self) -> None:
        self.world.run(self.ends_at - self.began_at + 2 * PATIENCE_S)

    def arrive(self) -> None:
        now_at = self.world.now_at
        self.due.append(now_at)
        self.send()
        if now_at < self.ends_at:
            self.world.call_at(now_at + 1 / RATE_PER_S, self.arrive)

    def send(self) -> None:
        while self.due and self.idle:
            due_at = self.due.popleft()
            if due_at > self.world.now_at - PATIENCE_S:
                self.idle.popleft().send(due_at)

    def read(self) -> None:
        """Read a connection, which takes its time."""
        self.is_reading = bool(self.readable)
        if not self.readable:
            return
        stops_at, goes_on_at = self.stands_still
        now_at = self.world.now_at
        if stops_at <= now_at < goes_on_at:
            self.world.call_at(goes_on_at, self.read)
        else:
            self.readable.popleft().answer()
            self.world.call_at(now_at + REFUSES_S, self.read)

    def wake(self) -> None:
        if not self.is_reading:
            self.is_reading = True
            self.world.call_at(self.world.now_at, self.read)


class PooledConnection:
    """Of an `OpenLoop`; both ends of it."""

    def __init__(self, loop: OpenLoop) -> None:
        self.loop = loop
        self.refused_at = float("-inf")
        self.at_once_since_at = 0.0
        self.is_paused = False
        self.was_paused = False
        self.has_hung_up = False
        self.answered_at = float("-inf")
        self.due_at = self.sent_at = 0.0
        self.number = 0  # of its request

    def send(self, due_at: float) -> None:
        now_at = self.loop.world.now_at
        self.due_at, self.sent_at = due_at, now_at
        self.number += 1
        number = self.number
        self.loop.world.call_at(due_at + PATIENCE_S, lambda: self.give_up(number))
        if not self.is_paused:
            self.is_read()

    def is_read(self) -> None:
        self.loop.readable.append(self)
        self.loop.wake()

    def give_up(self, number: int) -> None:
        if number == self.number and self.due_at:  # nothing was answered
            self.has_hung_up = True
            self.loop.idle.append(PooledConnection(self.loop))
            self.loop.send()

    def answer(self) -> None:
        pacer, now_at = self.loop.world.pacer, self.loop.world.now_at
        if self.was_paused:
            pacer.resumed(has_hung_up=self.has_hung_up)
            self.was_paused = False
        if self.has_hung_up:
            return
        self.loop.told_after_s.append((self.due_at, now_at - self.due_at))
        if self.sent_at - self.answered_at > RETRY_S:
            self.at_once_since_at = pacer.late(self.at_once_since_at, self.answered_at, self.sent_at)
        self.answered_at, self.due_at = now_at, 0.0
        pacer.refused(self, self.sent_at)
        self.loop.idle.append(self)
        self.loop.send()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused, self.was_paused = False, True
        if self.due_at:
            self.is_read()


@pytest.mark.parametrize(("still_s", "within_s"), [(0.1, 2.0), (0.3, 4.0), (0.6, 4.0), (1.5, 6.0)])
def test_an_open_loop_comes_back_from_a_standstill(still_s: float, within_s: float) -> None:
    loop = OpenLoop((1.0, 1.0 + still_s), 1.0 + still_s + within_s)
    loop.run()
    last = [took_s for due_at, took_s in loop.told_after_s if loop.ends_at - 1 < due_at < loop.ends_at]
    assert len(last) >= 0.99 * RATE_PER_S, "some were given up"
    assert sorted(last)[int(0.99 * len(last))] < 0.01
