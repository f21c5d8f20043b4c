"""Placement depends on user and members only: no user moves without need, pairs always agree."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.kinds import Routing
from npu_gr.route.placement import (
    How,
    Member,
    Place,
    Ring,
    Signals,
    bound,
    order,
    place,
    routing_of,
    user_in,
)

USERS = [f"user-{i}".encode() for i in range(2000)]
NAMES = st.lists(
    st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9]", fullmatch=True),
    min_size=2,
    max_size=12,
    unique=True,
)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0])
MEMBERS = NAMES.flatmap(
    lambda names: st.tuples(*[st.builds(Member, st.just(name), WEIGHTS) for name in names])
)


@settings(deadline=None, max_examples=15)
@given(members=MEMBERS, shuffle=st.randoms())
def test_equal_members_give_equal_rings_in_whatever_order_they_came(
    members: tuple[Member, ...], shuffle: random.Random
) -> None:
    shuffled = list(members)
    shuffle.shuffle(shuffled)
    one = Ring(members)
    other = Ring(shuffled)
    assert [one.owner(user) for user in USERS[:200]] == [other.owner(user) for user in USERS[:200]]


@settings(deadline=None, max_examples=15)
@given(members=MEMBERS, data=st.data())
def test_losing_a_member_moves_its_users_and_no_others_each_to_its_successor(
    members: tuple[Member, ...], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(members))
    before = Ring(members)
    after = Ring([member for member in members if member != lost])
    for user in USERS[:300]:
        order = [name for name in before.walk(user) if name != lost.name]
        assert after.owner(user) == order[0]
        assert list(after.walk(user)) == order


@settings(deadline=None, max_examples=15)
@given(members=MEMBERS)
def test_a_walk_meets_every_member_once_and_begins_at_the_owner(
    members: tuple[Member, ...],
) -> None:
    ring = Ring(members)
    for user in USERS[:100]:
        walk = list(ring.walk(user))
        assert sorted(walk) == sorted(member.name for member in members)
        assert walk[0] == ring.owner(user)


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


@given(
    total=st.integers(0, 1000),
    factor=st.floats(1.01, 3),
    weights=st.lists(WEIGHTS, min_size=1, max_size=8),
)
def test_the_bounds_always_leave_room_for_one_more(
    total: int, factor: float, weights: list[float]
) -> None:
    assert sum(bound(total, weight, sum(weights), factor) for weight in weights) > total


@settings(deadline=None, max_examples=25)
@given(members=MEMBERS, data=st.data())
def test_a_request_goes_to_the_first_that_takes_it_and_spills_only_to_one_with_room(
    members: tuple[Member, ...], data: st.DataObject
) -> None:
    ring = Ring(members)
    names = [member.name for member in members]
    takes = data.draw(st.sets(st.sampled_from(names)))
    free = data.draw(st.sets(st.sampled_from(names)))
    for user in USERS[:50]:
        able = [name for name in ring.walk(user) if name in takes]
        strict = place(ring, user, takes.__contains__)
        assert (strict.name if strict else None) == next(iter(able), None)
        if strict is not None:
            assert strict.how == (How.HOME if strict.name == ring.owner(user) else How.SUCCESSOR)
        spilled = place(ring, user, takes.__contains__, has_room=free.__contains__)
        with_room = [name for name in able if name in free]
        assert (spilled.name if spilled else None) == next(iter(with_room or able), None)
        if spilled is not None:
            assert (spilled.how is How.SPILLED) == (spilled.name != able[0])


def test_a_rank_follows_its_signal_while_that_instance_takes_ranks() -> None:
    ring = Ring(map(Member, "abc"))
    owner = ring.owner(b"u")
    other = next(name for name in "abc" if name != owner)
    assert place(ring, b"u", lambda _: True, signalled=other) == Place(other, How.SIGNAL)
    assert place(ring, b"u", lambda name: name != other, signalled=other) == Place(owner, How.HOME)
    assert place(ring, b"u", lambda _: False, signalled=other) is None


def test_signals_are_remembered_for_the_life_of_a_prefix_and_only_so_many() -> None:
    signals = Signals(10.0, 2)
    signals.remember(b"u", "a", 0.0)
    signals.remember(b"v", "b", 1.0)
    assert signals.find(b"u", 9.9) == "a"
    assert signals.find(b"u", 10.0) is None
    signals.remember(b"u", "c", 2.0)  # a newer signal counts
    assert signals.find(b"u", 11.0) == "c"
    signals.remember(b"w", "a", 3.0)
    assert signals.find(b"v", 3.0) is None  # the oldest is forgotten
    assert signals.find(b"u", 3.0) == "c"


def test_no_weight_owns_nobody() -> None:
    ring = Ring([Member("a"), Member("b", 0.0)])
    assert {ring.owner(user) for user in USERS} == {"a"}


PATHS = {
    ("POST", "/v1/rank"): Routing.FOLLOW,
    ("POST", "/v2/models/rank/infer"): Routing.FOLLOW,
    ("POST", "/v1/signal"): Routing.SIGNAL,
    ("POST", "/v1/events"): Routing.ONCE,
    ("POST", "/v1/events/bulk"): Routing.BY_LOAD,
    ("DELETE", "/v1/users/ann%2Fb"): Routing.EVERYWHERE,
    ("GET", "/v1/users/ann%2Fb"): Routing.ONCE,
    ("GET", "/v1/rank"): None,
    ("GET", "/readyz"): None,
}


@pytest.mark.parametrize("asked", PATHS)
def test_method_and_path_say_how_a_request_is_placed(asked: tuple[str, str]) -> None:
    assert routing_of(*asked) is PATHS[asked]


def test_a_path_may_name_the_user() -> None:
    assert user_in("/v1/users/ann%2Fb%C3%A9+") == "ann/bé+".encode()
    assert user_in("/v1/rank") == b""


def test_a_request_is_tried_along_the_ring_after_the_instance_of_its_signal() -> None:
    ring = Ring(map(Member, "abcd"))
    walk = list(ring.walk(b"u"))
    busy = Counter[str]()
    assert order(ring, Routing.FOLLOW, b"u", walk, busy.__getitem__) == walk
    followed = order(ring, Routing.FOLLOW, b"u", walk, busy.__getitem__, walk[2])
    assert followed == [walk[2], walk[0], walk[1], walk[3]]
    assert order(ring, Routing.FOLLOW, b"u", set(walk[1:]), busy.__getitem__, walk[0]) == walk[1:]
    assert order(ring, Routing.SIGNAL, b"u", walk, busy.__getitem__, walk[2]) == walk
    spilled = order(
        ring, Routing.SIGNAL, b"u", walk, busy.__getitem__, has_room=lambda name: name == walk[3]
    )
    assert spilled == [walk[3], *walk[:3]]
    assert order(ring, Routing.FOLLOW, b"u", (), busy.__getitem__) == []


@pytest.mark.parametrize(
    ("routing", "user"), [(Routing.BY_LOAD, b"u"), (None, b"u"), (Routing.FOLLOW, b"")]
)
def test_what_is_no_users_goes_to_the_less_loaded_of_two(
    routing: Routing | None, user: bytes
) -> None:
    ring = Ring(map(Member, "abcd"))
    load = {"a": 9, "b": 1, "c": 5, "d": 7}
    first = Counter[str]()
    for _ in range(400):
        names = order(ring, routing, user, set(load), load.__getitem__)
        assert sorted(names) == sorted(load)
        assert load[names[0]] <= load[names[1]]
        first[names[0]] += 1
    assert first["b"] > first["c"] > first["d"] > first["a"] == 0
