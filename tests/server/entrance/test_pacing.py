"""Refusals are bounded whatever clients do; a lone refusal pauses nobody; places bring the paused back at once."""

from __future__ import annotations

import heapq
from typing import Any

import pytest

from npu_gr.server.entrance.pacing import BESIDE, MOST_S, SHARE, SPREAD, Pacer


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


def test_refusals_that_take_longer_are_fewer() -> None:
    world = World()
    assert world.pacer.refusals_per_s > 500
    for _ in range(500):
        world.pacer.took(1e-4)
    assert world.pacer.refusals_per_s == pytest.approx(SHARE / (BESIDE * 1e-4), rel=0.01)
    world.pacer.took(10.0)  # a pause in the middle of one
    assert world.pacer.refusals_per_s > 0.7 * SHARE / (BESIDE * 1e-4)


def test_a_lone_refusal_pauses_nobody() -> None:
    world = World()
    clients = [Client(world) for _ in range(50)]
    for client in clients:
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
        world.pacer.refused(client, world.now_at)
        world.pacer.refused(client, world.now_at)
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
        world.pacer.refused(client, world.now_at)
        world.pacer.refused(client, world.now_at)
    assert len(world.pacer) == 10
    world.pacer.forget(clients[0])
    world.pacer.release(3)
    assert sum(not client.is_paused for client in clients) == 3
    assert len(world.pacer) == 6
