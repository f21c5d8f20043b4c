"""Matches of an approximate index are checked in idle time, one in many."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.history import UserKey
from npu_gr.handlers.match_recall import RecallChecks
from npu_gr.vector_search.matcher import MatchedItems, Matcher, MatchQuery
from tests.vector_search.vectors import KNOWN, make_vectors


def matched(index: str, user: str = KNOWN) -> tuple[Matcher, MatchQuery, MatchedItems]:
    matcher = Matcher(make_vectors(), index, CPUBackend())  # type: ignore[arg-type]
    query = matcher.search_for(UserKey("", user), 10, True, None, None)
    (found,) = matcher.run([query])
    return matcher, query, found


class Checks(RecallChecks):
    """Checks every second match, and keeps what was counted."""

    def __init__(self) -> None:
        self.busy = 0  # looks until the device is idle
        self.found: list[tuple[int, int]] = []
        super().__init__(self.look, lambda *found: self.found.append(found), every=2)

    def look(self) -> bool:
        self.busy -= 1
        return self.busy < 0

    async def ended(self) -> None:
        await asyncio.gather(*self._tasks)


async def test_every_second_match_is_counted_with_what_it_lacks() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    matcher, query, found = matched("ivf")
    checks = Checks()
    for lacks in (0, 3):
        others = np.setdiff1d(np.arange(40), found.items)[:lacks]
        given = np.concatenate([found.items[: 10 - lacks], others])
        for _ in range(2):
            checks.busy = 3
            checks.offer(given, partial(matcher.exactly, query))
            await checks.ended()
    assert checks.found == [(10, 0), (10, 3)]
    for _ in range(2):
        checks.offer(found.items, partial(matcher.exactly, query), lambda: False)  # other items now
        await checks.ended()
    assert len(checks.found) == 2


async def test_one_check_runs_at_a_time_and_ends_with_the_service() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    matcher, query, found = matched("ivf")
    checks = Checks()
    checks.busy = 10**9  # never idle
    for _ in range(8):
        checks.offer(found.items, partial(matcher.exactly, query))
        await asyncio.sleep(0)
    assert len(checks._tasks) == 1
    await checks.stop()
    assert not checks.found
    assert not checks._tasks


async def test_what_no_index_has_searched_is_not_checked() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    checks = Checks()
    matcher, query, found = matched("ivf", "none's")  # by popularity
    for _ in range(4):
        checks.offer(found.items, partial(matcher.exactly, query))
        await checks.ended()
    assert not checks.found
