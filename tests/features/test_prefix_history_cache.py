"""Known prefixes stay under their bytes, oldest out first, and are forgotten with their user."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.request import UserKey
from npu_gr.features.prefix_history_cache import PrefixHistoryCache
from tests.models import events


def test_the_least_recently_used_goes_first() -> None:
    one = PrefixHistoryCache(10**9)
    one.remember(UserKey("", "x"), "f", events(10))
    known = PrefixHistoryCache(3 * one.bytes_used)
    for name in "abc":
        known.remember(UserKey("", name), "f", events(10))
    assert known.find(UserKey("", "a"), "f") is not None
    known.remember(UserKey("", "d"), "f", events(10))
    assert [name for name in "abcd" if known.find(UserKey("", name), "f") is not None] == ["a", "c", "d"]


def test_what_is_too_large_is_not_kept() -> None:
    known = PrefixHistoryCache(100)
    known.remember(UserKey("", "a"), "f", events(10))
    assert known.bytes_used == 0
    assert known.find(UserKey("", "a"), "f") is None


def test_a_slice_does_not_keep_what_it_was_cut_from() -> None:
    known, history = PrefixHistoryCache(10**6), events(5000)
    known.remember(UserKey("", "a"), "f", history[4990:])
    kept = known.find(UserKey("", "a"), "f")
    assert kept is not None
    assert kept.fingerprint() == history[4990:].fingerprint()
    assert all(row.base is None for row in (kept.items, kept.actions, kept.timestamps))


@settings(deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("fgh"), st.integers(0, 60), st.booleans()), max_size=40
    )
)
def test_bytes_add_up(steps: list[tuple[str, str, int, bool]]) -> None:
    known = PrefixHistoryCache(4000)
    for user, fingerprint, size, forget in steps:
        if forget:
            known.forget(UserKey("", user))
            assert known.find(UserKey("", user), fingerprint) is None
        else:
            known.remember(UserKey("", user), fingerprint, events(size))
        assert 0 <= known.bytes_used <= 4000
    for user in "abc":
        known.forget(UserKey("", user))
    assert known.bytes_used == 0
