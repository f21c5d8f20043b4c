"""Known prefixes stay under their bytes, oldest out first, and are forgotten with their user."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.history import UserKey
from npu_gr.core.shares import WANTS_S
from npu_gr.handlers.prefix_histories import KnownHistory, PrefixHistoryCache
from tests.models import events

USERS = [UserKey("t", "a"), UserKey("t", "b"), UserKey("other", "a")]


def test_the_least_recently_used_goes_first() -> None:
    one = PrefixHistoryCache(10**9)
    one.remember(UserKey("", "x"), "f", KnownHistory(events(10), 0))
    known = PrefixHistoryCache(3 * one.bytes_used)
    for name in "abc":
        known.remember(UserKey("", name), "f", KnownHistory(events(10), 0))
    assert known.find(UserKey("", "a"), "f") is not None
    known.remember(UserKey("", "d"), "f", KnownHistory(events(10), 0))
    assert [name for name in "abcd" if known.find(UserKey("", name), "f") is not None] == [
        "a",
        "c",
        "d",
    ]


def test_what_is_too_large_is_not_kept() -> None:
    known = PrefixHistoryCache(100)
    known.remember(UserKey("", "a"), "f", KnownHistory(events(10), 0))
    assert known.bytes_used == 0
    assert known.find(UserKey("", "a"), "f") is None


def test_a_slice_does_not_keep_what_it_was_cut_from() -> None:
    known, history = PrefixHistoryCache(10**6), events(5000)
    known.remember(UserKey("", "a"), "f", KnownHistory(history[4990:], 4990))
    kept = known.find(UserKey("", "a"), "f")
    assert kept is not None
    assert kept.first_index == 4990
    assert kept.events.fingerprint() == history[4990:].fingerprint()
    assert all(
        row.base is None for row in (kept.events.items, kept.events.actions, kept.events.timestamps)
    )


def remembered(known: PrefixHistoryCache, tenant: str, count: int) -> int:
    """How many of the users 0 to `count` of a tenant are known."""
    return sum(UserKey(tenant, str(n)) in known._by_user for n in range(count))


def test_a_tenant_that_brings_ever_new_histories_takes_none_of_another_within_its_share() -> None:
    one = PrefixHistoryCache(10**9)
    one.remember(UserKey("", "x"), "f", KnownHistory(events(10), 0))
    known = PrefixHistoryCache(8 * one.bytes_used)
    for n in range(20):
        known.remember(UserKey("e", str(n)), "f", KnownHistory(events(10), 0))
    assert remembered(known, "e", 20) == 8  # alone it may have all
    for n in range(4):
        known.remember(UserKey("v", str(n)), "f", KnownHistory(events(10), 0))
    for n in range(20, 100):
        known.remember(UserKey("e", str(n)), "f", KnownHistory(events(10), 0))
    assert remembered(known, "v", 4) == remembered(known, "e", 100) == 4
    known.resize(8 * one.bytes_used, {"v": 3.0})
    for n in range(10):
        known.remember(UserKey("v", str(n)), "f", KnownHistory(events(10), 0))
    assert (remembered(known, "v", 10), remembered(known, "e", 100)) == (6, 2)


def test_what_a_tenant_left_behind_goes_first() -> None:
    now_at = 0.0
    one = PrefixHistoryCache(10**9)
    one.remember(UserKey("", "x"), "f", KnownHistory(events(10), 0))
    known = PrefixHistoryCache(4 * one.bytes_used, lambda: now_at)
    known.remember(UserKey("v", "0"), "f", KnownHistory(events(10), 0))
    now_at = WANTS_S
    for n in range(4):
        known.remember(UserKey("e", str(n)), "f", KnownHistory(events(10), 0))
    assert (remembered(known, "v", 1), remembered(known, "e", 4)) == (0, 4)


@settings(deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(USERS), st.sampled_from("fgh"), st.integers(0, 60), st.booleans()
        ),
        max_size=40,
    )
)
def test_bytes_add_up(steps: list[tuple[UserKey, str, int, bool]]) -> None:
    known = PrefixHistoryCache(4000)
    for user, fingerprint, size, forget in steps:
        if forget:
            known.forget(user)
            assert known.find(user, fingerprint) is None
        else:
            known.remember(user, fingerprint, KnownHistory(events(size), 0))
        assert 0 <= known.bytes_used <= 4000
        assert known.bytes_used == sum(account.held for account in known._shares.accounts)
    for user in USERS:
        known.forget(user)
    assert known.bytes_used == 0
