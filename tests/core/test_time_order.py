"""Rows out of time order are rejected with their index, or sorted stably and counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import Unprocessable
from npu_gr.core.history import Events, oldest_first

TIMES = st.lists(st.integers(0, 5), max_size=8)


def events(times: list[int]) -> Events:
    return Events.make(range(len(times)), range(len(times)), times)


@given(TIMES, TIMES)
def test_rows_are_sorted_and_the_late_ones_of_the_request_are_counted(
    base: list[int], new: list[int]
) -> None:
    base = sorted(base)
    times = base + new
    found = oldest_first(events(times), "sort", "history", base=len(base))
    assert found.items.tolist() == sorted(range(len(times)), key=lambda row: times[row])
    assert found.timestamps.tolist() == sorted(times)
    assert found.actions.tolist() == found.items.tolist()
    assert found.origin.sorted_events == sum(
        any(other > time for other in times[:at]) for at, time in enumerate(times)
    )


@given(TIMES, TIMES)
def test_rows_are_rejected_by_their_index_in_the_request(base: list[int], new: list[int]) -> None:
    base = sorted(base)
    times = base + new
    bad = [at for at in range(max(len(base), 1), len(times)) if times[at] < times[at - 1]]
    if not bad:
        assert (
            oldest_first(events(times), "reject", "history", base=len(base)).timestamps.tolist()
            == times
        )
        return
    with pytest.raises(Unprocessable) as rejected:
        oldest_first(events(times), "reject", "history", base=len(base))
    index = bad[0] - len(base)
    said = f"history.timestamps: {times[bad[0]]} at index {index} is before {times[bad[0] - 1]}"
    assert str(rejected.value).startswith(said)
    assert ("the last of base" in str(rejected.value)) == (len(base) > 0 and index == 0)


def test_a_base_that_is_not_in_order_is_nobodys_fault() -> None:
    assert oldest_first(events([3, 1, 2]), "reject", "history", base=2).timestamps.tolist() == [
        3,
        1,
        2,
    ]
