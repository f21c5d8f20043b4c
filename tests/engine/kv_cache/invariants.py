"""The invariants of the memory tiers: of the pages, of the DRAM store, and of the pool.

They look at every entry.
"""

from __future__ import annotations

from npu_gr.engine.kv_cache.pages import PageAllocator
from npu_gr.engine.kv_cache.prefix_pool import EntryState, PrefixPool
from npu_gr.engine.kv_cache.tier import DramStore


def check_pages(pages: PageAllocator) -> None:
    """Assert B2 and that the free blocks are disjoint and add up."""
    seen: set[int] = set()
    for order, blocks in enumerate(pages._free):
        for first in blocks:
            assert first % (1 << order) == 0
            buddy = first ^ (1 << order)
            assert order + 1 >= len(pages._free) or buddy not in blocks
            block = set(range(first, first + (1 << order)))
            assert not block & seen
            seen |= block
    assert len(seen) == pages.num_free
    assert all(0 <= page < pages.num_pages for page in seen)


def check_dram(store: DramStore) -> None:
    """Assert D1 and D2, and that tenants hold what their entries do."""
    check_pages(store._pages)
    pages = [
        p for e in store._found.values() for first, n in e.runs for p in range(first, first + n)
    ]
    assert len(pages) == len(set(pages))
    assert len(pages) <= store.arena.num_pages - store._pages.num_free
    for entry in store._found.values():
        assert entry.is_held
        assert entry.is_published
        store.verify(entry)
        assert entry.holding.copies[entry.key] is entry
    assert sum(len(holding.copies) for holding in store.shares.accounts) == len(store._found)
    assert (
        sum(holding.held for holding in store.shares.accounts)
        <= store.arena.num_pages - store._pages.num_free
    )


def check_pool(pool: PrefixPool) -> None:
    """Assert I1 to I3 over the whole pool: it looks at every entry."""
    check_pages(pool._pages)
    held = [*pool._found.values(), *pool._reserved.values()]
    pages = [
        page
        for entry in held
        for first, count in entry.runs
        for page in range(first, first + count)
    ]
    assert len(pages) == len(set(pages)), "a page in two places"
    assert len(pages) <= pool._pages.num_pages - pool._pages.num_free
    for entry in held:
        assert sum(run.num_pages for run in entry.runs) == entry.num_pages
        assert entry.is_held
    assert all(entry.state is EntryState.RESERVED for entry in pool._reserved.values())
    assert all(entry.is_published for entry in pool._found.values())
    assert pool._reserved.num_pages == sum(e.num_pages for e in pool._reserved.values())
    holdings = (*pool.shares.accounts, pool._tenant_room.spare)
    for holding in holdings:
        for group in (holding.waiting, holding.evictable):
            assert group.num_pages == sum(entry.num_pages for entry in group.values())
        of_its_own = [entry for entry in held if entry.holding is holding]
        waiting = [e for e in of_its_own if e.state is EntryState.LIVE and not e.leases]
        assert set(holding.waiting.values()) == set(waiting)
        assert all(entry.awaits_rank for entry in waiting)
        awaiting = [entry for entry in of_its_own if entry.is_signalled and entry.awaits_rank]
        assert holding.awaiting_pages == sum(entry.num_pages for entry in awaiting)
        assert holding.held >= sum(entry.num_pages for entry in of_its_own)
        for entry in holding.evictable.values():
            assert entry.state is EntryState.EVICTABLE
            assert not entry.leases
            assert not entry.awaits_rank
    assert pool._pages.num_pages - pool._pages.num_free >= sum(holding.held for holding in holdings)
    assert pool.waits.expiring.keys() >= {
        entry for entry in pool._found.values() if entry.awaits_rank and not entry.leases
    }
    assert (
        pool.free_bytes + pool.reserved_bytes + pool.live_bytes + pool.evictable_bytes
        == pool.budget_bytes
    )
    assert pool.live_bytes >= 0
