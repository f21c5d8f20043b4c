"""The DRAM tier finds complete copies only, evicts the LRU one, and detects an overwritten one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import PoolExhausted, StaleEntry
from npu_gr.core.history import UserKey
from npu_gr.core.shares import WANTS_S
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.kv_cache.tier import DramEntry, DramStore
from tests.clock import Clock
from tests.engine.kv_cache.invariants import check_dram
from tests.engine.kv_cache.test_prefix_pool import LAYOUT, key


def store(num_pages: int = 8, jitter: float = 0.0) -> tuple[DramStore, Clock]:
    clock = Clock()
    arena = KVArena(LAYOUT, num_pages, torch.device("cpu"))
    return DramStore(arena, ttl_s=60.0, ttl_jitter_ratio=jitter, seed=0, clock=clock), clock


def kept(dram: DramStore, user: str, num_tokens: int = 4, tenant: str = "") -> DramEntry:
    entry = dram.reserve(key(user, tenant=tenant), num_tokens)
    dram.commit(entry)
    return entry


def test_incomplete_copies_are_not_found() -> None:
    dram, _ = store()
    entry = dram.reserve(key("a"), 8)
    assert dram.get(key("a")) is None
    assert dram.find(UserKey("", "a"), "v1", LAYOUT.layout_id) == []
    dram.commit(entry)
    assert dram.find(UserKey("", "a"), "v1", LAYOUT.layout_id) == [entry]
    failed = dram.reserve(key("b"), 4)
    dram.abandon(failed)
    assert dram.live_bytes == 2 * LAYOUT.page_bytes


def test_the_least_recently_used_goes_first() -> None:
    dram, _ = store(3)
    for user in "abc":
        kept(dram, user)
    with dram.lease(dram.get(key("a"))):  # type: ignore[arg-type]
        pass
    kept(dram, "d")
    assert [user for user in "abcd" if dram.get(key(user))] == ["a", "c", "d"]


def test_a_flood_of_copies_takes_none_of_a_tenant_within_its_share() -> None:
    dram, clock = store(8)
    for n in range(10):
        kept(dram, str(n), tenant="e")
    assert len(dram) == 8  # alone it may have all
    mine = [kept(dram, str(n), tenant="v") for n in range(4)]
    for n in range(10, 100):
        kept(dram, str(n), tenant="e")
    assert [dram.get(entry.key) for entry in mine] == mine
    fifth = kept(dram, "4", tenant="v")  # it has its half: its own oldest goes
    assert [dram.get(entry.key) for entry in mine] == [None, *mine[1:]]
    assert dram.get(fifth.key) is fifth
    clock.now_at = WANTS_S / 2
    kept(dram, "more", tenant="e")
    clock.now_at = WANTS_S - 1e-9
    with dram.lease(fifth):  # a reload: it still wants its copies
        pass
    clock.now_at = WANTS_S + 1.0
    for n in range(100, 110):
        kept(dram, str(n), tenant="e")
    assert dram.get(fifth.key) is fifth
    clock.now_at = 2 * WANTS_S
    for n in range(110, 120):
        kept(dram, str(n), tenant="e")
    assert len(dram) == 8
    assert dram.get(fifth.key) is None  # and now it does not
    check_dram(dram)


def test_a_leased_copy_stays() -> None:
    dram, _ = store(2)
    first = kept(dram, "a")
    kept(dram, "b")
    with dram.lease(first):
        kept(dram, "c")
        assert dram.get(key("a")) is first
        with pytest.raises(PoolExhausted):
            dram.reserve(key("d"), 8)
        dram.erase_user(UserKey("", "a"))
        assert dram.get(key("a")) is None
        check_dram(dram)
        dram.verify(first)
        with pytest.raises(PoolExhausted):
            dram.reserve(key("e"), 8)
    dram.reserve(key("f"), 8)


def test_copies_expire_and_use_renews_them() -> None:
    dram, clock = store()
    for user in "ab":
        kept(dram, user)
    clock.now_at = 50.0
    with dram.lease(dram.get(key("a"))):  # type: ignore[arg-type]
        pass
    clock.now_at = 70.0
    assert dram.get(key("a")) is not None
    assert dram.get(key("b")) is None
    assert len(dram) == 1


def test_expiry_is_spread() -> None:
    dram, _ = store(8, jitter=0.1)
    instants = [kept(dram, user).expires_at for user in "abcdefgh"]
    assert len(set(instants)) == 8
    assert all(54.0 <= instant <= 66.0 for instant in instants)


def test_an_overwritten_copy_is_noticed() -> None:
    dram, _ = store(2)
    entry = kept(dram, "a", 8)
    dram.verify(entry)
    dram.drop(entry)
    kept(dram, "b", 4)
    with pytest.raises(StaleEntry):
        dram.verify(entry)


def test_erasing_a_user_during_a_copy() -> None:
    """The pages stay with the copy that is being written, and are reported when it ends."""
    dram, _ = store()
    erased: list[tuple[tuple[PageRun, ...], Callable[[], None]]] = []
    dram.on_erased = lambda runs, free: erased.append((runs, free))
    entry = dram.reserve(key("a"), 4)
    dram.erase_user(UserKey("", "a"))
    assert not erased
    assert dram.free_bytes < dram.budget_bytes
    dram.commit(entry)
    dram.abandon(entry)
    [(runs, free)] = erased
    assert runs == entry.runs
    assert dram.get(key("a")) is None
    assert dram.free_bytes < dram.budget_bytes
    free()
    assert dram.free_bytes == dram.budget_bytes


@settings(deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(0, 5), st.integers(1, 20)), max_size=40
    )
)
def test_pages_are_conserved(steps: list[tuple[str, int, int]]) -> None:
    dram, clock = store(6)
    pending: list[DramEntry] = []
    for user, action, size in steps:
        match action:
            case 0:
                try:
                    pending.append(dram.reserve(key(user), size))
                except PoolExhausted:
                    assert size > 4 or pending
            case 1 if pending:
                entry = pending.pop()
                dram.commit(entry)
            case 2 if pending:
                dram.abandon(pending.pop(0))
            case 3:
                dram.erase_user(UserKey("", user))
            case 4:
                clock.now_at += size * 10
            case _:
                if (found := dram.get(key(user))) is not None:
                    with dram.lease(found):
                        dram.verify(found)
        check_dram(dram)
    for entry in pending:
        dram.abandon(entry)
    for user in "abcde":
        dram.erase_user(UserKey("", user))
    assert dram.free_bytes == dram.budget_bytes
