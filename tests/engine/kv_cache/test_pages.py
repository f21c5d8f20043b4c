"""Pages are conserved, never in two places, and coalesce until one is as good as new."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import PoolExhausted
from npu_gr.engine.kv_cache.pages import PageAllocator, PageRun
from tests.engine.kv_cache.invariants import check_pages


def pages(runs: tuple[PageRun, ...]) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]


@settings(deadline=None, derandomize=True)
@given(data=st.data(), num_pages=st.integers(1, 200))
def test_conservation(data: st.DataObject, num_pages: int) -> None:
    allocator = PageAllocator(num_pages)
    held: list[tuple[PageRun, ...]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        gives_back = data.draw(st.booleans())
        if held and gives_back:
            allocator.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            want = data.draw(st.integers(1, num_pages))
            if want > allocator.num_free:
                with pytest.raises(
                    PoolExhausted, match=f"need {want} pages, {allocator.num_free} of {num_pages}"
                ):
                    allocator.allocate(want)
            else:  # whatever the fragmentation, n free pages are enough for n
                runs = allocator.allocate(want)
                assert sum(run.num_pages for run in runs) == want
                held.append(runs)
        check_pages(allocator)
        taken = [page for runs in held for page in pages(runs)]
        assert len(taken) == len(set(taken)) == num_pages - allocator.num_free
    for runs in held:
        allocator.free(runs)
    check_pages(allocator)
    assert len(allocator.allocate(num_pages)) == 1


def test_an_entry_is_few_runs_in_a_fresh_pool() -> None:
    allocator = PageAllocator(4096)
    assert all(len(allocator.allocate(n)) <= n.bit_length() for n in (1, 63, 65, 100, 255, 257))


def test_the_work_does_not_grow_with_the_number_of_entries() -> None:
    """Steps of one allocate and free, with ten and with a hundred thousand entries held."""
    steps = []
    for entries in (10, 100_000):
        allocator = PageAllocator(1 << 20)
        for _ in range(entries):
            allocator.allocate(7)
        before = allocator.steps
        allocator.free(allocator.allocate(7))
        steps.append(allocator.steps - before)
    assert max(steps) <= 2 * 3 * 20


def test_pages_are_not_freed_twice() -> None:
    allocator = PageAllocator(8)
    runs = allocator.allocate(1)
    allocator.free(runs)
    allocator.allocate(8)
    allocator.free([PageRun(0, 4)])
    with pytest.raises(AssertionError, match="free already"):
        allocator.free([PageRun(0, 4)])
