"""Whatever happens in whatever order: pages are conserved, leases protect, nothing unfinished is ever found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npu_gr.core.errors import PoolExhausted
from npu_gr.core.request import UserKey
from npu_gr.kv.arena import KVArena
from npu_gr.kv.keys import PrefixKey
from npu_gr.kv.layout import KVLayout, PageRun
from npu_gr.kv.prefix_pool import EntryState, PrefixEntry, PrefixPool

LAYOUT = KVLayout(num_layers=1, num_heads=1, qk_dim=1, v_dim=1, page_tokens=4)
T_LIFE_S = 10.0


class Clock:
    now_at = 0.0

    def __call__(self) -> float:
        return self.now_at


def pool(num_pages: int = 12) -> tuple[PrefixPool, Clock]:
    clock = Clock()
    arena = KVArena(LAYOUT, num_pages, torch.device("cpu"))
    return PrefixPool(arena, num_pages * LAYOUT.page_bytes, T_LIFE_S, clock), clock


def key(user: str = "u", fingerprint: str = "f", version: str = "v1") -> PrefixKey:
    return PrefixKey(UserKey("", user), version, LAYOUT.layout_id, fingerprint)


def times(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens)


def filled(pool: PrefixPool, name: PrefixKey, num_tokens: int = 4) -> PrefixEntry:
    entry = pool.reserve(name, num_tokens)
    assert pool.publish(entry, times(num_tokens))
    return entry


class PoolMachine(RuleBasedStateMachine):
    """Random interleavings of producers, ranks, expiry and erasure, against a plain model of what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.clock = pool()
        self.evicted: list[PrefixEntry] = []
        self.pool.on_evict = self.evicted.append
        self.reserved: list[PrefixEntry] = []
        self.visible: list[PrefixEntry] = []
        self.leases: list[tuple[PrefixEntry, AbstractContextManager[PrefixEntry]]] = []
        self.numbers = itertools.count()

    def forget(self, gone: list[PrefixEntry]) -> None:
        self.visible = [entry for entry in self.visible if entry not in gone]

    @rule(user=st.sampled_from("abc"), num_tokens=st.integers(1, 24))
    def reserve(self, user: str, num_tokens: int) -> None:
        before = (self.pool.free_bytes, self.pool.evictable_bytes, list(self.visible))
        self.evicted.clear()
        try:
            entry = self.pool.reserve(key(user, str(next(self.numbers))), num_tokens)
        except PoolExhausted:
            assert LAYOUT.pages(num_tokens) * LAYOUT.page_bytes > before[0] + before[1]
            assert not self.evicted
            return
        for gone in self.evicted:
            assert not gone.leases
            assert gone.consumed or gone.expires_at <= self.clock.now_at
        self.forget(self.evicted)
        self.reserved.append(entry)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), publish=st.booleans())
    def end_reservation(self, data: st.DataObject, publish: bool) -> None:
        entry = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        was_dropped = entry.state is EntryState.DROPPED
        if publish:
            self.pool.publish(entry, times(entry.num_tokens))
            if not was_dropped:
                self.visible.append(entry)
        else:
            self.pool.abandon(entry)

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), consume=st.booleans())
    def lease(self, data: st.DataObject, consume: bool) -> None:
        entry = data.draw(st.sampled_from(self.visible))
        block = self.pool.lease(entry, consume=consume)
        block.__enter__()
        self.leases.append((entry, block))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, block = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        block.__exit__(None, None, None)

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_at += seconds

    @precondition(lambda self: self.visible)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.visible))
        self.pool.drop(entry)
        self.forget([entry])

    @rule(user=st.sampled_from("abc"))
    def erase_user(self, user: str) -> None:
        self.pool.erase_user(UserKey("", user))
        self.visible = [entry for entry in self.visible if entry.key.user.user != user]

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        for user in "abc":
            found = self.pool.find(UserKey("", user), "v1", LAYOUT.layout_id)
            assert set(map(id, found)) == {id(e) for e in self.visible if e.key.user.user == user}
        for entry in self.visible:
            assert self.pool.get(entry.key) is entry
            assert entry.leases == sum(leased is entry for leased, _ in self.leases)
        for entry in (*self.reserved, *(entry for entry, _ in self.leases)):  # each keeps its pages, dropped or not
            others = [e for e in (*self.visible, *self.reserved) if e is not entry]
            taken = {page for e in others for first, count in e.runs for page in range(first, first + count)}
            assert not taken & {page for first, count in entry.runs for page in range(first, first + count)}

    def teardown(self) -> None:
        for _, block in self.leases:
            block.__exit__(None, None, None)
        for user in "abc":
            self.pool.erase_user(UserKey("", user))
        for entry in self.reserved:
            self.pool.abandon(entry)
        assert self.pool.free_bytes == self.pool.budget_bytes


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=40, derandomize=True)


@pytest.mark.parametrize("end", ["publish", "abandon"])
def test_a_user_erased_during_a_reservation_stays_erased(end: str) -> None:
    """The pages stay with their writer, who may still be at work, and are reported as they come back."""
    made, _ = pool()
    erased: list[tuple[tuple[PageRun, ...], Callable[[], None]]] = []
    made.on_erased = lambda runs, free: erased.append((runs, free))
    entry = made.reserve(key(), 5)
    made.erase_user(key().user)
    other = made.reserve(key(), 5)  # a new producer of the same prefix, before the old one is done
    assert not set(entry.runs) & set(other.runs)
    assert not erased
    if end == "publish":
        made.publish(entry, times(5))
    made.abandon(entry)
    made.abandon(entry)
    [(runs, free)] = erased
    assert runs == entry.runs
    assert made.get(key()) is None
    assert made.live_bytes == 2 * LAYOUT.page_bytes  # until it is overwritten
    free()
    assert made.reserved_bytes == made.budget_bytes - made.free_bytes == 2 * LAYOUT.page_bytes
    made.publish(other, times(5))
    assert made.get(key()) is other
    made.check()


def test_a_leased_prefix_of_an_erased_user_keeps_its_pages_to_the_last_reader() -> None:
    made, _ = pool()
    erased: list[tuple[tuple[PageRun, ...], Callable[[], None]]] = []
    made.on_erased = lambda runs, free: erased.append((runs, free))
    entry = filled(made, key())
    with made.lease(entry, consume=True), made.lease(entry, consume=True):
        made.erase_user(key().user)
        assert made.get(key()) is None
        assert not erased
    [(runs, free)] = erased
    assert runs == entry.runs
    assert made.free_bytes < made.budget_bytes
    free()
    assert made.free_bytes == made.budget_bytes


def test_an_abandoned_reservation_leaves_nothing() -> None:
    prefixes, _ = pool()
    entry = prefixes.reserve(key(), 8)
    assert prefixes.is_reserved(key())
    for _ in range(2):  # the second time it does nothing
        prefixes.abandon(entry)
        assert not prefixes.is_reserved(key())
        assert prefixes.get(key()) is None
        assert prefixes.free_bytes == prefixes.budget_bytes
    kept = filled(prefixes, key())
    prefixes.abandon(kept)  # as a task does whose prefix was published
    assert prefixes.get(key()) is kept


def test_what_waits_for_its_rank_is_not_evicted() -> None:
    prefixes, clock = pool(2)
    first = filled(prefixes, key("a"), 4)
    with pytest.raises(PoolExhausted, match="need 2 pages, 1 of 2 are free and 0 can be evicted"):
        prefixes.reserve(key("b"), 8)
    clock.now_at = T_LIFE_S
    wasted: list[PrefixEntry] = []
    prefixes.on_evict = wasted.append
    prefixes.reserve(key("b"), 8)
    assert wasted == [first]
    assert not first.consumed
    assert prefixes.get(key("a")) is None


def test_a_consumed_prefix_is_found_until_its_room_is_needed() -> None:
    prefixes, _ = pool(2)
    entry = filled(prefixes, key("a"), 8)
    with prefixes.lease(entry, consume=True):
        assert prefixes.evictable_bytes == 0
    assert prefixes.get(key("a")) is entry
    assert prefixes.evictable_bytes == prefixes.budget_bytes
    with prefixes.lease(entry, consume=False), pytest.raises(PoolExhausted):
        prefixes.reserve(key("b"), 4)
    prefixes.reserve(key("b"), 4)
    assert prefixes.get(key("a")) is None


@pytest.mark.parametrize("changed", [key("x"), key(version="v2"), key(fingerprint="g"), key()._replace(layout_id="l")])
def test_the_version_fence(changed: PrefixKey) -> None:
    prefixes, _ = pool()
    filled(prefixes, key())
    assert prefixes.get(key()) is not None
    assert prefixes.get(changed) is None


def test_a_million_users_cost_what_a_few_do() -> None:
    """Entries looked at by one reserve do not grow: eviction takes the oldest, expiry the front of a queue."""
    prefixes, clock = pool(100_000)
    for number in range(100_000):
        filled(prefixes, key(str(number)), 1)
    clock.now_at = T_LIFE_S
    assert prefixes.evictable_bytes == prefixes.budget_bytes
    gone: list[PrefixEntry] = []
    prefixes.on_evict = gone.append
    prefixes.reserve(key("new"), 12)
    assert [entry.key.user.user for entry in gone] == ["0", "1", "2"]


def test_a_budget_below_one_page_is_refused() -> None:
    arena = KVArena(LAYOUT, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="budget_bytes: 1 is less than one page"):
        PrefixPool(arena, 1, 1.0, Clock())
