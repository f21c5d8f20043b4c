"""Freed memory is given back in a turn without a request, and after the end of a version.

`tests/chaos/test_neighbours.py` has the real memory of a real process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from npu_gr.service.idle_heap import LEAST_BYTES, IdleHeap


class Process:
    """A service, and the memory of its process."""

    def __init__(self) -> None:
        self.resident_bytes = self.used_bytes = 10 * LEAST_BYTES
        self.trims = 0
        self.work = SimpleNamespace(admitted=0)
        self.parts = SimpleNamespace(
            admission=SimpleNamespace(work=self.work, waiting=0),
            scheduler=SimpleNamespace(depth=0),
        )
        self.versions = SimpleNamespace(is_retiring=False)
        self.num_begun = 0

    def grow(self, num_bytes: int, kept: int = 0) -> None:
        """Take memory, and free all but `kept` of it."""
        self.resident_bytes += num_bytes
        self.used_bytes += kept

    def trim(self) -> None:
        self.trims += 1
        self.resident_bytes = self.used_bytes

    def heap(self) -> IdleHeap:
        service: Any = self
        return IdleHeap(service, lambda: self.resident_bytes, self.trim)


async def test_a_burst_is_given_back_in_the_first_turn_without_a_request() -> None:
    process = Process()
    heap = process.heap()
    process.grow(LEAST_BYTES)
    process.num_begun += 1
    await heap.turn()
    assert process.trims == 0, "a request began in this turn"
    await heap.turn()
    await heap.turn()
    assert process.trims == 1, "and nothing has grown since"
    assert process.resident_bytes == process.used_bytes


@pytest.mark.parametrize("where", ["admitted", "waiting", "depth"])
async def test_nobody_waits_for_it(where: str) -> None:
    process = Process()
    heap = process.heap()
    process.grow(LEAST_BYTES)
    parts = process.parts
    of = {"admitted": process.work, "waiting": parts.admission, "depth": parts.scheduler}[where]
    setattr(of, where, 1)
    await heap.turn()
    assert process.trims == 0
    setattr(of, where, 0)
    await heap.turn()
    assert process.trims == 1


async def test_what_is_in_use_is_not_trimmed_again_and_again() -> None:
    process = Process()
    heap = process.heap()
    process.grow(2 * LEAST_BYTES, kept=2 * LEAST_BYTES)
    for _ in range(3):
        await heap.turn()
    assert process.trims == 1
    process.grow(LEAST_BYTES - 1)
    await heap.turn()
    assert process.trims == 1, "too little for a pause"
    process.resident_bytes = process.used_bytes = LEAST_BYTES  # a version was freed
    await heap.turn()
    process.grow(LEAST_BYTES)
    await heap.turn()
    assert process.trims == 2, "it counts from the smallest"


async def test_the_end_of_a_version_does_not_wait_for_a_pause() -> None:
    """Nor for growth: two versions took more than is left of one and its copies."""
    process = Process()
    heap = process.heap()
    process.versions.is_retiring = True
    process.grow(3 * LEAST_BYTES, kept=3 * LEAST_BYTES)
    await heap.turn()
    assert process.trims == 1
    process.used_bytes -= 2 * LEAST_BYTES
    process.resident_bytes -= LEAST_BYTES
    for is_retiring in (True, False, False):
        process.versions.is_retiring = is_retiring
        process.num_begun += 1
        await heap.turn()
        assert process.trims == 1 + (not is_retiring)
    assert process.resident_bytes == process.used_bytes
