"""Placement depends on the user and the members only: it moves no user without need, and a pair always agrees."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.router.ring import Member, Placement, Ring, bound, fraction, spill

USERS = [f"user-{i}".encode() for i in range(2000)]
NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9]", fullmatch=True), min_size=2, max_size=12, unique=True)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0])
MEMBERS = NAMES.flatmap(lambda names: st.tuples(*[st.builds(Member, st.just(name), WEIGHTS) for name in names]))


@settings(deadline=None, max_examples=15)
@given(members=MEMBERS, shuffle=st.randoms())
def test_equal_members_give_equal_rings_in_whatever_order_they_came(
    members: tuple[Member, ...], shuffle: random.Random
) -> None:
    shuffled = list(members)
    shuffle.shuffle(shuffled)
    one = Ring(members)
    other = Ring(shuffled)
    assert one.epoch == other.epoch
    assert [one.owner(user) for user in USERS[:200]] == [other.owner(user) for user in USERS[:200]]


@settings(deadline=None, max_examples=15)
@given(members=MEMBERS, data=st.data())
def test_losing_a_member_moves_its_users_and_no_others_each_to_its_successor(
    members: tuple[Member, ...], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(members))
    before = Ring(members)
    after = Ring([member for member in members if member != lost])
    assert before.epoch != after.epoch
    for user in USERS[:300]:
        order = [name for name in before.walk(user) if name != lost.name]
        assert after.owner(user) == order[0]
        assert list(after.walk(user)) == order


@settings(deadline=None, max_examples=15)
@given(members=MEMBERS)
def test_a_walk_meets_every_member_once_and_begins_at_the_owner(members: tuple[Member, ...]) -> None:
    ring = Ring(members)
    for user in USERS[:100]:
        walk = list(ring.walk(user))
        assert sorted(walk) == sorted(ring.names)
        assert walk[0] == ring.owner(user)
        assert list(ring.first_two(user)) == walk[:2]


def test_a_ring_of_one_or_none_has_no_second() -> None:
    assert Ring([Member("a")]).first_two(b"u") == ("a", None)
    assert Ring([]).first_two(b"u") == (None, None)


def test_a_member_that_joins_takes_about_its_share() -> None:
    before = Ring(map(Member, "abcdefghi"))
    after = Ring(map(Member, "abcdefghij"))
    moved = [user for user in USERS if before.owner(user) != after.owner(user)]
    assert {after.owner(user) for user in moved} == {"j"}
    assert 0.06 < len(moved) / len(USERS) < 0.15


def test_shares_follow_the_weights() -> None:
    ring = Ring([Member("a"), Member("b"), Member("c", 2.0)])
    count = Counter(ring.owner(f"{i}".encode()) for i in range(20_000))
    for name, share in (("a", 0.25), ("b", 0.25), ("c", 0.5)):
        assert abs(count[name] / 20_000 - share) < 0.04


def test_a_weight_that_grows_takes_users_and_gives_none() -> None:
    before = Ring([Member("a"), Member("b"), Member("c")])
    after = Ring([Member("a"), Member("b"), Member("c", 1.5)])
    assert {after.owner(user) for user in USERS if before.owner(user) != after.owner(user)} == {"c"}


def test_an_empty_ring_owns_nobody() -> None:
    with pytest.raises(ValueError, match="empty"):
        Ring(()).owner(b"u")


@given(total=st.integers(0, 1000), factor=st.floats(1.01, 3), weights=st.lists(WEIGHTS, min_size=1, max_size=8))
def test_the_bounds_always_leave_room_for_one_more(total: int, factor: float, weights: list[float]) -> None:
    assert sum(bound(total, weight, sum(weights), factor) for weight in weights) > total


@given(names=st.lists(st.text("ab", min_size=1), unique=True), free=st.sets(st.text("ab", min_size=1)))
def test_a_spill_goes_to_the_next_with_room_or_not_at_all(names: list[str], free: set[str]) -> None:
    name, is_spilled = spill(names, free.__contains__)
    with_room = [one for one in names if one in free]
    assert name == next(iter(with_room or names), None)
    assert is_spilled == (bool(with_room) and with_room[0] != names[0])


@given(name=st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,20}[A-Za-z0-9])?", fullmatch=True), is_spilled=st.booleans())
def test_a_placement_survives_its_header(name: str, is_spilled: bool) -> None:
    placement = Placement(name, "0123abcd", is_spilled)
    assert Placement.decode(placement.encode()) == placement


def test_what_is_no_placement_is_no_hint() -> None:
    for text in ("", "a", "a@xyz", "a@0123abcd+no", "@0123abcd", "a\n@0123abcd", "-a@0123abcd"):
        assert Placement.decode(text) is None


def test_fractions_are_even_and_have_nothing_to_do_with_the_owner() -> None:
    ring = Ring(map(Member, "abc"))
    mine = [fraction(user) for user in USERS if ring.owner(user) == "a"]
    assert abs(sum(value < 0.3 for value in mine) / len(mine) - 0.3) < 0.05
