"""Publishing keeps one value before the current one; rollback swaps the two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import DataError, Unavailable
from npu_gr.core.lifetime import Published


def test_nothing_is_served_before_the_first_publication() -> None:
    published: Published[str] = Published("the catalogue")
    assert published.is_empty
    assert published.previous is None
    with pytest.raises(Unavailable, match="no version of the catalogue has been published"):
        _ = published.current
    with pytest.raises(DataError, match="there is no previous version of the catalogue"):
        published.rollback()


def test_age_counts_from_the_change() -> None:
    now_at = 10.0
    published: Published[str] = Published("x", clock=lambda: now_at)
    published.publish("a")
    now_at = 12.0
    assert published.age_s == 2.0
    published.publish("b")
    now_at = 13.0
    published.rollback()
    assert (published.current, published.previous, published.age_s) == ("a", "b", 0.0)


@given(st.lists(st.sampled_from(["publish", "rollback", "drop"]), max_size=20))
def test_it_behaves_as_a_list_of_two(steps: list[str]) -> None:
    """The model: [previous, current], shortened to two."""
    published: Published[int] = Published("numbers")
    kept: list[int] = []
    for number, step in enumerate(steps):
        if step == "publish":
            published.publish(number)
            kept = [*kept[-1:], number]
        elif step == "drop":
            published.drop_previous()
            kept = kept[-1:]
        elif len(kept) == 2:
            published.rollback()
            kept.reverse()
        else:
            with pytest.raises(DataError):
                published.rollback()
        assert published.is_empty == (not kept)
        if kept:
            assert published.current == kept[-1]
            assert published.previous == (kept[0] if len(kept) == 2 else None)
