"""In any order of events, pages are conserved, leases protect, and only published KV is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npu_gr.core.errors import PoolExhausted
from npu_gr.core.history import UserKey
from npu_gr.core.shares import MAX_TENANTS, WANTS_S
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.kv_cache.prefix_pool import (
    CREDIT,
    LEAST_CREDIT,
    EntryState,
    PrefixEntry,
    PrefixPool,
)
from npu_gr.engine.kv_cache.tier import PrefixKey
from tests.clock import Clock
from tests.engine.kv_cache.invariants import check_pool

LAYOUT = KVLayout(num_layers=1, num_heads=1, qk_dim=1, v_dim=1, page_tokens=4)
T_LIFE_S = 10.0


def pool(num_pages: int = 12) -> tuple[PrefixPool, Clock]:
    clock = Clock()
    arena = KVArena(LAYOUT, num_pages, torch.device("cpu"))
    return PrefixPool(arena, num_pages * LAYOUT.page_bytes, T_LIFE_S, clock), clock


def key(
    user: str = "u", fingerprint: str = "f", version: str = "v1", tenant: str = ""
) -> PrefixKey:
    return PrefixKey(UserKey(tenant, user), version, LAYOUT.layout_id, fingerprint)


def filled(
    pool: PrefixPool, name: PrefixKey, num_tokens: int = 4, *, is_signalled: bool = False
) -> PrefixEntry:
    entry = pool.reserve(name, num_tokens, is_signalled=is_signalled)
    assert pool.publish(entry)
    return entry


def is_spare(entry: PrefixEntry) -> bool:
    return entry.key.user.user == "d"


class PoolMachine(RuleBasedStateMachine):
    """Random interleavings of prefill jobs, ranks, expiry and erasure, against a plain model.

    Users "a" and "b" are of one tenant each, "c" of a third that has twice their weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.clock = pool()
        self.pool.shares.weights = {"of c": 2.0}
        self.asked_at: dict[str, float] = {}
        # until when it must stay, if its tenant is within its share
        self.promised: dict[PrefixEntry, float] = {}
        self.evicted: list[PrefixEntry] = []
        self.pool.on_evict = self.evicted.append
        self.reserved: list[PrefixEntry] = []
        self.visible: list[PrefixEntry] = []
        self.leases: list[tuple[PrefixEntry, AbstractContextManager[PrefixEntry]]] = []
        self.numbers = itertools.count()

    def forget(self, gone: list[PrefixEntry]) -> None:
        self.visible = [entry for entry in self.visible if entry not in gone]

    def held_pages(self, user: str) -> int:
        """Of the tenant of one user: every entry that has not given its pages back."""
        entries = {*self.reserved, *self.visible, *(entry for entry, _ in self.leases)}
        return sum(entry.num_pages for entry in entries if entry.key.user.user == user)

    def share_pages(self, user: str) -> float:
        """By definition: weight / weights of all that asked within the minute * pages."""
        recent = {u for u, at in self.asked_at.items() if self.clock.now_at - at < WANTS_S}
        wanting = recent - {"d"}  # spare entries are of no tenant
        weights = {u: 2.0 if u == "c" else 1.0 for u in wanting}
        return 12 * weights.get(user, 0.0) / (sum(weights.values()) or 1.0)

    @rule(user=st.sampled_from("abc"), num_tokens=st.integers(1, 24), is_signalled=st.booleans())
    def reserve(self, user: str, num_tokens: int, is_signalled: bool) -> None:
        self.asked_at[user] = self.clock.now_at
        free, evictable = self.pool.free_bytes, self.pool.evictable_bytes
        need = LAYOUT.pages(num_tokens)
        held = {u: self.held_pages(u) for u in "abc"}
        is_within = not held[user] or held[user] + need <= self.share_pages(user)
        is_alone = self.share_pages(user) == 12
        was_waiting = {e for e in self.visible if e.state is EntryState.LIVE}
        spare = {e for e in self.visible if is_spare(e) and e.state is EntryState.EVICTABLE}
        self.evicted.clear()
        try:
            entry = self.pool.reserve(
                key(user, str(next(self.numbers)), tenant=f"of {user}"),
                num_tokens,
                is_signalled=is_signalled,
            )
        except PoolExhausted:
            assert not self.evicted
            if is_alone:  # may have all
                assert need * LAYOUT.page_bytes > free + evictable
            elif is_within and not is_signalled:  # what others hold over their shares is in use
                unleased = [e for e in self.visible if not e.leases and e.key.user.user != user]
                for other in set("abc") - {user}:
                    pages = sum(e.num_pages for e in unleased if e.key.user.user == other)
                    over = max(0, held[other] - self.share_pages(other))
                    assert need > free // LAYOUT.page_bytes + min(over, pages)
            return
        assert all(map(is_spare, self.evicted)) or spare <= set(self.evicted)  # I5
        for gone in self.evicted:
            assert not gone.leases
            if is_spare(gone):
                continue
            other = gone.key.user.user
            if other != user:
                assert held[other] > self.share_pages(other)
            if gone in was_waiting:
                assert is_within
                assert other != user
            held[other] -= gone.num_pages
        self.forget(self.evicted)
        self.reserved.append(entry)

    @rule(num_tokens=st.integers(1, 24))
    def reserve_spare(self, num_tokens: int) -> None:
        spare = {e for e in self.visible if is_spare(e) and e.state is EntryState.EVICTABLE}
        room = self.pool.free_bytes // LAYOUT.page_bytes + sum(e.num_pages for e in spare)
        self.evicted.clear()
        name = key("d", str(next(self.numbers)), tenant="of d")
        try:
            entry = self.pool.reserve(name, num_tokens, is_spare=True)
        except PoolExhausted:
            assert LAYOUT.pages(num_tokens) > room
            assert not self.evicted
            return
        assert LAYOUT.pages(num_tokens) <= room
        assert all(map(is_spare, self.evicted))  # I5
        self.forget(self.evicted)
        self.reserved.append(entry)

    @precondition(lambda self: self.visible)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.visible))
        self.asked_at[entry.key.user.user] = self.clock.now_at
        self.pool.renew(entry)
        self.promised[entry] = self.clock.now_at + T_LIFE_S

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), publish=st.booleans())
    def end_reservation(self, data: st.DataObject, publish: bool) -> None:
        entry = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        was_dropped = entry.state is EntryState.DROPPED
        if publish:
            self.pool.publish(entry)
            if not was_dropped:
                self.visible.append(entry)
                if is_spare(entry):
                    with self.pool.lease(entry, consume=True):
                        pass  # so that it may be evicted
        else:
            self.pool.abandon(entry)

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), consume=st.booleans())
    def lease(self, data: st.DataObject, consume: bool) -> None:
        entry = data.draw(st.sampled_from(self.visible))
        self.asked_at[entry.key.user.user] = self.clock.now_at
        block = self.pool.lease(entry, consume=consume)
        block.__enter__()
        if consume:
            self.promised.pop(entry, None)
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
        self.pool.erase_user(UserKey(f"of {user}", user))
        self.visible = [entry for entry in self.visible if entry.key.user.user != user]

    @invariant()
    def holds(self) -> None:
        check_pool(self.pool)
        for user in "abcd":
            found = self.pool.find(UserKey(f"of {user}", user), "v1", LAYOUT.layout_id)
            assert set(map(id, found)) == {id(e) for e in self.visible if e.key.user.user == user}
        for entry in self.visible:
            assert self.pool.get(entry.key) is entry
            assert entry.leases == sum(leased is entry for leased, _ in self.leases)
        for entry, until_at in self.promised.items():
            if self.clock.now_at < until_at and entry in self.visible:
                assert entry.state is EntryState.LIVE
        for holding in self.pool.shares.accounts:
            assert LEAST_CREDIT <= holding.credit <= 1.0
        # each keeps its pages, dropped or not
        for entry in (*self.reserved, *(entry for entry, _ in self.leases)):
            others = [e for e in (*self.visible, *self.reserved) if e is not entry]
            taken = {
                page
                for e in others
                for first, count in e.runs
                for page in range(first, first + count)
            }
            assert not taken & {
                page for first, count in entry.runs for page in range(first, first + count)
            }

    def teardown(self) -> None:
        for _, block in self.leases:
            block.__exit__(None, None, None)
        for user in "abcd":
            self.pool.erase_user(UserKey(f"of {user}", user))
        for entry in self.reserved:
            self.pool.abandon(entry)
        assert self.pool.free_bytes == self.pool.budget_bytes


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=40, derandomize=True
)


def ranked(pool: PrefixPool, name: PrefixKey, num_tokens: int, *, is_spare: bool) -> PrefixEntry:
    entry = pool.reserve(name, num_tokens, is_spare=is_spare)
    assert pool.publish(entry)
    with pool.lease(entry, consume=True):
        pass
    return entry


def test_spare_entries_make_room_first_and_take_none() -> None:
    made, _ = pool(4)
    first = ranked(made, key("a"), 4, is_spare=False)
    spare = ranked(made, key("b"), 4, is_spare=True)
    last = ranked(made, key("c"), 4, is_spare=False)
    with pytest.raises(PoolExhausted):
        made.reserve(key("d"), 12, is_spare=True)  # one page is free, one is of a spare entry
    assert made.get(spare.key) is spare
    filled(made, key("e"), 8)  # of one tenant, whose oldest entry is `first`
    assert made.get(spare.key) is None
    assert made.get(first.key) is first
    assert made.get(last.key) is last
    with pytest.raises(PoolExhausted):
        made.reserve(key("d"), 4, is_spare=True)
    check_pool(made)


@pytest.mark.parametrize("end", ["publish", "abandon"])
def test_a_user_erased_during_a_reservation_stays_erased(end: str) -> None:
    """The pages stay with their writer, and are reported when it ends."""
    made, _ = pool()
    erased: list[tuple[tuple[PageRun, ...], Callable[[], None]]] = []
    made.on_erased = lambda runs, free: erased.append((runs, free))
    entry = made.reserve(key(), 5)
    made.erase_user(key().user)
    other = made.reserve(key(), 5)  # a new job for the same prefix, before the old one is done
    assert not set(entry.runs) & set(other.runs)
    assert not erased
    if end == "publish":
        made.publish(entry)
    made.abandon(entry)
    made.abandon(entry)
    [(runs, free)] = erased
    assert runs == entry.runs
    assert made.get(key()) is None
    assert made.live_bytes == 2 * LAYOUT.page_bytes  # until it is overwritten
    free()
    assert made.reserved_bytes == made.budget_bytes - made.free_bytes == 2 * LAYOUT.page_bytes
    made.publish(other)
    assert made.get(key()) is other
    check_pool(made)


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


def test_a_renewed_prefix_waits_for_one_more_rank() -> None:
    prefixes, clock = pool(2)
    entry = filled(prefixes, key("a"), 8, is_signalled=True)
    with prefixes.lease(entry, consume=True):
        prefixes.renew(entry)  # the signal for the next rank comes while this one runs
    clock.now_at = T_LIFE_S - 1.0
    assert prefixes.evictable_bytes == 0
    prefixes.renew(entry)
    clock.now_at += T_LIFE_S - 1.0
    with pytest.raises(PoolExhausted):
        prefixes.reserve(key("b"), 4)
    with prefixes.lease(entry, consume=True):
        pass
    prefixes.reserve(key("b"), 4)
    assert prefixes.get(key("a")) is None


def test_renewals_do_not_delay_the_expiry_of_others() -> None:
    prefixes, clock = pool(2)
    first = filled(prefixes, key("a"))
    filled(prefixes, key("b"))
    for _ in range(3):
        clock.now_at += T_LIFE_S / 2
        prefixes.renew(first)
    assert prefixes.evictable_bytes == LAYOUT.page_bytes
    assert prefixes.live_bytes == LAYOUT.page_bytes


def test_a_tenant_within_its_share_takes_what_was_signalled_and_never_ranked_first() -> None:
    prefixes, clock = pool(8)
    prefixes.waits.usual_s = 1.0
    ranked = filled(prefixes, key("r", tenant="e"))
    with prefixes.lease(ranked, consume=True):
        pass
    overdue = filled(prefixes, key("o", tenant="e"), is_signalled=True)
    clock.now_at = 2.0
    young = [filled(prefixes, key(str(n), tenant="e"), is_signalled=True) for n in range(6)]
    gone: list[PrefixEntry] = []
    prefixes.on_evict = gone.append
    for n in range(4):
        filled(prefixes, key(str(n), tenant="v"), is_signalled=n == 0)
    assert gone == [overdue, ranked, *young[:2]]
    with pytest.raises(PoolExhausted, match="other tenants want room too"):
        prefixes.reserve(key("more", tenant="v"), 4)  # both have their halves
    with pytest.raises(PoolExhausted):
        prefixes.reserve(key("more", tenant="e"), 4)
    check_pool(prefixes)


@pytest.mark.parametrize("asks", ["e", "w"])
def test_evictable_entries_of_a_tenant_within_its_share_stay(asks: str) -> None:
    prefixes, _ = pool(8)
    gone: list[PrefixEntry] = []
    prefixes.on_evict = gone.append
    for tenant, count in (("v", 2), ("e", 6)):  # all ranked; those of v are the oldest
        for n in range(count):
            with prefixes.lease(filled(prefixes, key(str(n), tenant=tenant)), consume=True):
                pass
    filled(prefixes, key("new", tenant=asks))
    assert [entry.key for entry in gone] == [key("0", tenant="e")]


def test_a_tenant_alone_may_have_everything_and_again_once_the_others_have_gone() -> None:
    prefixes, clock = pool(4)
    filled(prefixes, key("v", tenant="v"))
    for n in range(3):
        filled(prefixes, key(str(n), tenant="e"))
    clock.now_at = WANTS_S
    for n in range(4):
        filled(prefixes, key(f"again {n}", tenant="e"), is_signalled=True)
    assert prefixes.get(key("v", tenant="v")) is None


def test_who_wastes_signals_may_have_fewer_that_wait_and_who_ranks_may_have_more() -> None:
    prefixes, clock = pool(512)
    prefixes.waits.usual_s = 1.0

    def waiting(tenant: str) -> int:
        """Signals until it is rejected; none is published, and all of them are given up again."""
        entries: list[PrefixEntry] = []
        while prefixes.room(tenant, 4).num_pages:
            entries.append(
                prefixes.reserve(key(str(len(entries)), tenant=tenant), 4, is_signalled=True)
            )
        for entry in entries:
            prefixes.abandon(entry)
        return len(entries)

    for tenant in "ve":
        filled(prefixes, key(tenant=tenant))
    assert waiting("e") == waiting("v") == CREDIT * 256
    for n in range(100):
        wasted = filled(prefixes, key(f"w{n}", tenant="e"), is_signalled=True)
        with prefixes.lease(
            filled(prefixes, key(f"r{n}", tenant="v"), is_signalled=True), consume=True
        ):
            pass
        clock.now_at += 1.1
        assert prefixes.evictable_bytes  # evaluated
        prefixes.drop(wasted)
        prefixes.renew(prefixes.find(UserKey("e", "u"), "v1", LAYOUT.layout_id)[0])
    assert waiting("e") == LEAST_CREDIT * 256
    assert waiting("v") > 250


def test_a_prefix_that_is_extended_again_and_again_and_never_ranked_is_wasted() -> None:
    prefixes, _ = pool(512)
    filled(prefixes, key(tenant="v"))
    for n in range(100):  # within no time: none of them is late
        # as the extension's filler does
        prefixes.drop(filled(prefixes, key(str(n), tenant="e"), is_signalled=True))
    holding = prefixes.shares.asking("e")
    assert holding.credit == LEAST_CREDIT
    assert prefixes.shares.asking("v").credit == CREDIT


def test_the_instance_s_own_work_takes_what_no_rank_waits_for_and_no_tenant_s_share() -> None:
    prefixes, _ = pool(4)
    entries = [filled(prefixes, key(str(n), tenant="e"), is_signalled=True) for n in range(4)]
    own = key()
    with pytest.raises(PoolExhausted):
        prefixes.reserve(own, 4, is_own=True)
    with prefixes.lease(entries[1], consume=True):
        pass
    # of a tenant that is not over its share: no other tenant wants any
    borrowed = prefixes.reserve(own, 4, is_own=True)
    assert prefixes.get(entries[1].key) is None
    assert not prefixes.room("e", 4).is_at_share
    prefixes.abandon(borrowed)
    check_pool(prefixes)


def test_invented_tenants_cost_nothing_and_together_get_what_one_gets() -> None:
    prefixes, _ = pool(4 * MAX_TENANTS)
    prefixes.shares.weights = {"v": float(MAX_TENANTS)}
    for n in range(8 * MAX_TENANTS):
        try:
            filled(prefixes, key(tenant=f"made up {n}"))
        except PoolExhausted:
            break
    # its half, by its weight, but for the one share that is for all the others
    for n in range(2 * MAX_TENANTS - 2):
        filled(prefixes, key(str(n), tenant="v"))
    for n in range(1000):
        prefixes.room(f"asks {n}", 4)
    assert len(prefixes.shares.accounts) <= MAX_TENANTS + 2
    assert (
        len([n for n in range(2 * MAX_TENANTS - 2) if prefixes.get(key(str(n), tenant="v"))])
        == 2 * MAX_TENANTS - 2
    )
    check_pool(prefixes)


@pytest.mark.parametrize(
    "changed", [key("x"), key(version="v2"), key(fingerprint="g"), key()._replace(layout_id="l")]
)
def test_the_version_fence(changed: PrefixKey) -> None:
    prefixes, _ = pool()
    filled(prefixes, key())
    assert prefixes.get(key()) is not None
    assert prefixes.get(changed) is None


def test_a_million_users_cost_what_a_few_do() -> None:
    """The entries that one reserve visits do not grow with the pool."""
    prefixes, clock = pool(100_000)
    for number in range(100_000):
        filled(prefixes, key(str(number)), 1)
    clock.now_at = T_LIFE_S
    assert prefixes.evictable_bytes == prefixes.budget_bytes
    gone: list[PrefixEntry] = []
    prefixes.on_evict = gone.append
    prefixes.reserve(key("new"), 12)
    assert [entry.key.user.user for entry in gone] == ["0", "1", "2"]


def test_a_budget_below_one_page_is_rejected() -> None:
    arena = KVArena(LAYOUT, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="budget_bytes: 1 is less than one page"):
        PrefixPool(arena, 1, 1.0, Clock())
