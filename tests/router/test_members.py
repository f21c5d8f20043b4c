"""Whatever happens to instances, a rank follows its signal and the others' users stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import Overloaded, Unavailable
from npu_gr.core.settings import from_table
from npu_gr.router.breaker import Breaker
from npu_gr.router.config import BreakerConfig, InstanceConfig, RouterConfig
from npu_gr.router.instance import Check, Health, InstanceState
from npu_gr.router.members import Choice, How, Members, Takes, ring_of
from npu_gr.router.ring import fraction

USERS = [f"user-{i}".encode() for i in range(300)]
T_LIFE_S = 10.0


def instances(num: int = 3, **more: Any) -> list[InstanceConfig]:
    return [InstanceConfig(name=f"i{i}", host="127.0.0.1", port=1000 + i, **more) for i in range(num)]


def members(found: list[InstanceConfig] | None = None, **sections: Any) -> Members:
    found = found or instances()
    config = from_table({"discovery": {"file": "unused"}, **sections}, RouterConfig)
    made = Members(config)
    made.replace(found, ring_of(found))
    for one in made.instances.values():
        one.checked(Check.READY, 0.0)
    return made


def homes(m: Members, now_at: float = 0.0) -> dict[bytes, str]:
    return {user: m.for_rank(user, None, now_at, ()).instance.name for user in USERS}


def down(one: InstanceState, now_at: float = 0.0) -> None:
    for _ in range(2):
        one.checked(Check.FAILED, now_at)


def is_right(m: Members, choice: Choice, now_at: float, takes: Takes) -> bool:
    """Whether an instance that takes the work was chosen, in a panic perhaps a suspect; anyone only if none is left."""
    one = choice.instance
    is_panic = m.trust(now_at).is_panic
    able = [i for i in m.instances.values() if takes(i, now_at) or (is_panic and i.is_suspect(now_at))]
    return one in able if able else choice.how is How.BLIND and not one.is_drained


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["fail", "ready", "unready", "drain", "undrain", "open", "signal", "rank", "load", "add", "wait"]
        ),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(happens=EVENTS, factor=st.sampled_from([0.0, 1.25]))
def test_a_rank_goes_where_its_signal_went_as_long_as_that_one_takes_ranks(
    happens: list[tuple[str, int, int]], factor: float
) -> None:
    m = members(relay={"load_factor": factor, "t_life_s": T_LIFE_S}, breaker={"max_open_ratio": 1.0})
    now_at = 0.0
    placed = {}
    for what, which, who in happens:
        names = list(m.instances)
        user = USERS[who]
        one = m.instances[names[which % len(names)]]
        match what:
            case "fail":
                one.checked(Check.FAILED, now_at)
            case "ready":
                one.checked(Check.READY, now_at)
            case "unready":
                one.checked(Check.UNREADY, now_at)
            case "drain":
                one.drain(now_at)
            case "undrain":
                one.undrain(now_at)
            case "open":
                one.breaker.open(now_at)
            case "load":
                one.in_flight = who
            case "add":
                found = [i.config for i in m.instances.values()]
                found.append(InstanceConfig(name=f"i{len(found)}", host="h", port=1))
                m.replace(found[:6], ring_of(found[:6]))
            case "wait":
                now_at += who / 4
            case "signal":
                try:
                    choice, placement = m.for_signal(user, now_at)
                except Unavailable:
                    assert all(i.is_drained for i in m.instances.values())
                    continue
                assert is_right(m, choice, now_at, InstanceState.takes_signals)
                assert placement.instance == choice.instance.name
                placed[user] = (placement, now_at)
            case "rank":
                for brought in (placed.get(user, (None, 0))[0], None):
                    try:
                        choice = m.for_rank(user, brought, now_at, ())
                    except Unavailable:
                        assert all(i.is_drained for i in m.instances.values())
                        continue
                    assert is_right(m, choice, now_at, InstanceState.takes_ranks)
                    if user in placed and now_at < placed[user][1] + T_LIFE_S:
                        went = m.instances[placed[user][0].instance]
                        if went.takes_ranks(now_at):
                            assert choice.instance is went
                            assert choice.how is How.SIGNAL
            case _:
                raise AssertionError(what)


@pytest.mark.parametrize("lost", ["i0", "i1", "i2"])
def test_losing_one_moves_its_users_only_and_they_come_back_slowly_and_in_one_direction(lost: str) -> None:
    m = members(breaker={"return_s": 4.0, "return_share": 0.25})
    before = homes(m)
    down(m.instances[lost])
    after = homes(m)
    assert all(after[user] == before[user] for user in USERS if before[user] != lost)
    assert lost not in after.values()
    m.instances[lost].checked(Check.READY, 100.0)
    back: set[bytes] = set()
    for now_at in (100.0, 101.0, 102.0, 103.0, 104.0):
        found = homes(m, now_at)
        assert all(found[user] == before[user] for user in USERS if before[user] != lost)
        here = {user for user in USERS if found[user] == lost}
        assert here >= back
        back = here
        if now_at == 100.0:
            assert back == {user for user in USERS if before[user] == lost and fraction(user) < 0.25}
    assert homes(m, 104.0) == before


def signals(m: Members, now_at: float) -> dict[bytes, tuple[str, How]]:
    return {user: (found.instance.name, found.how) for user in USERS for found in [m.for_signal(user, now_at)[0]]}


def owners(m: Members) -> dict[bytes, tuple[str, How]]:
    return {user: (m.ring.owner(user), How.HOME) for user in USERS}


def test_when_all_come_back_at_once_each_takes_all_of_its_users_at_once() -> None:
    m = members(breaker={"return_s": 5.0, "return_share": 0.1})
    for one in m.instances.values():
        down(one)
    for one in m.instances.values():
        one.checked(Check.READY, 100.0)
    for now_at in (100.0, 100.1, 104.0, 106.0):
        assert signals(m, now_at) == owners(m)
        assert homes(m, now_at) == {user: name for user, (name, _) in owners(m).items()}


@settings(deadline=None, max_examples=100)
@given(
    back_at=st.lists(st.floats(0.0, 6.0), min_size=3, max_size=3),
    looks_after_s=st.lists(st.floats(0.0, 12.0), min_size=1, max_size=6),
)
def test_however_they_come_back_an_instance_that_is_up_takes_everybody(
    back_at: list[float], looks_after_s: list[float]
) -> None:
    m = members(breaker={"return_s": 5.0, "return_share": 0.1}, relay={"t_life_s": 0.001})
    for one in m.instances.values():
        down(one)
        for _ in range(2):
            one.checked(Check.GONE, 0.0)
    waiting = sorted(zip(back_at, m.instances.values(), strict=True), key=lambda pair: pair[0])
    for now_at in sorted(10.0 + waiting[0][0] + after_s for after_s in looks_after_s):
        while waiting and 10.0 + waiting[0][0] <= now_at:
            instant, one = waiting.pop(0)
            one.checked(Check.READY, 10.0 + instant)
        for user in USERS[:60]:
            choice, _ = m.for_signal(user, now_at)
            assert choice.instance.health is Health.UP
            assert m.for_rank(user, None, now_at, ()).instance is choice.instance


def test_who_comes_back_to_others_that_stayed_gets_its_share_and_no_more() -> None:
    m = members(breaker={"return_s": 5.0, "return_share": 0.25})
    for name in ("i0", "i1"):
        down(m.instances[name])
        m.instances[name].checked(Check.READY, 100.0)
    found = signals(m, 100.0)
    here = {user for user in USERS if found[user][0] != "i2"}
    assert here == {user for user in USERS if m.ring.owner(user) != "i2" and fraction(user) < 0.25}


def test_a_share_counts_in_relation_to_the_fullest_one() -> None:
    m = members(breaker={"return_s": 5.0, "return_share": 0.25})
    for one in m.instances.values():
        for _ in range(2):
            one.checked(Check.GONE, 0.0)
    m.instances["i0"].checked(Check.READY, 100.0)
    m.instances["i1"].checked(Check.READY, 102.0)
    assert m.instances["i0"].breaker.share(102.0) == pytest.approx(0.55)
    found = signals(m, 102.0)
    here = {user for user in USERS if found[user] == ("i1", How.HOME)}
    assert here == {user for user in USERS if m.ring.owner(user) == "i1" and fraction(user) < 0.25 / 0.55}


def test_in_a_panic_who_does_not_answer_gets_its_users_and_who_is_gone_or_refuses_does_not() -> None:
    m = members(instances(5), health={"panic_ratio": 0.5})
    before = homes(m)
    for name in ("i0", "i1"):
        down(m.instances[name])
    assert not m.trust(0.0).is_panic
    assert set(homes(m).values()) == {"i2", "i3", "i4"}
    down(m.instances["i2"])
    assert m.trust(0.0).is_panic
    assert homes(m) == before
    assert {name for name, _ in signals(m, 0.0).values()} == set(m.instances)
    m.instances["i0"].checked(Check.UNREADY, 20.0)
    assert not m.trust(20.0).is_panic, "two are well, two are suspects"
    down(m.instances["i3"], 20.0)
    assert m.trust(20.0).is_panic
    m.instances["i1"].checked(Check.GONE, 20.0)
    found = homes(m, 20.0)
    assert set(found.values()) == {"i2", "i3", "i4"}
    assert all(found[user] == before[user] for user in USERS if before[user] not in ("i0", "i1"))
    for name in ("i1", "i2", "i3", "i0"):
        m.instances[name].checked(Check.GONE, 20.0)
    assert not m.trust(20.0).is_panic, "one is well, and nobody who could take users is out"
    m.instances["i2"].drain(20.0)
    assert "i2" not in homes(m, 20.0 + T_LIFE_S).values(), "an operator knows better"


def test_in_a_panic_with_bounded_load_signals_go_to_suspects() -> None:
    m = members(relay={"load_factor": 1.25})
    for one in m.instances.values():
        down(one)
    choice, placement = m.for_signal(b"u", 1.0)
    assert choice.instance.name == placement.instance == m.ring.owner(b"u")


@settings(deadline=None, max_examples=15)
@given(happens=st.lists(st.tuples(st.sampled_from(["down", "drain", "full", "open"]), st.integers(0, 3)), max_size=4))
def test_a_gateways_second_choice_is_the_one_that_a_retry_would_get(happens: list[tuple[str, int]]) -> None:
    found = instances(4)
    m = members(found)
    for what, which in happens:
        one = m.instances[f"i{which}"]
        if what == "down":
            down(one)
        elif what == "drain":
            one.drain(0.0)
        elif what == "open":
            one.breaker.open(0.0)
        else:
            one.in_flight = 512
    for tried in ((), ("i1",)):
        for user in USERS[:40]:
            try:
                first = m.for_rank(user, None, 1.0, tried)
            except (Unavailable, Overloaded):
                continue
            try:
                again = m.for_rank(user, None, 1.0, [*tried, first.instance.name])
            except (Unavailable, Overloaded):
                assert m.second(user, first.instance, 1.0, tried) is None
                continue
            second = m.second(user, first.instance, 1.0, tried)
            assert second is not None
            assert second is not first.instance
            assert second.name not in tried
            if again.how not in (How.NORMAL, How.BLIND):  # those are drawn
                assert second is again.instance


def test_a_panic_ignores_breakers_and_ends_when_enough_are_well() -> None:
    m = members(instances(3), breaker={"max_open_ratio": 1.0}, health={"panic_ratio": 0.5})
    before = homes(m)
    for name in ("i0", "i1"):
        m.instances[name].breaker.open(0.0)
    assert homes(m, 1.0) == before
    m.instances["i0"].breaker.come_back(1.5)
    assert not m.trust(1.5).is_panic
    assert "i1" not in homes(m, 1.5).values()
    never = members(instances(3), health={"panic_ratio": 0.0})
    for name in ("i0", "i1"):
        down(never.instances[name])
    assert set(homes(never).values()) == {"i2"}


def test_where_nobody_is_known_to_serve_somebody_is_asked_all_the_same() -> None:
    m = members()
    for one in m.instances.values():
        for _ in range(2):
            one.checked(Check.GONE, 0.0)
    user = USERS[0]
    first, second, third = m.ring.walk(user)
    assert not m.is_served(0.0)
    assert [m.for_signal(user, 0.0, tried)[0] for tried in ((), (first,))] == [
        (m.instances[first], How.BLIND),
        (m.instances[second], How.BLIND),
    ]
    assert m.for_rank(user, None, 0.0, (first, second)) == (m.instances[third], How.BLIND)
    m.instances[third].checked(Check.READY, 0.0)
    with pytest.raises(Unavailable):
        m.for_signal(user, 0.0, (third,))
    with pytest.raises(Unavailable):
        m.for_rank(user, None, 0.0, (third,))
    for one in m.instances.values():
        one.drain(0.0)
    with pytest.raises(Unavailable, match="no instance takes signals"):
        m.for_signal(user, T_LIFE_S)


def test_no_hedge_while_most_are_slow_or_silent_with_work() -> None:
    m = members(instances(4))
    for one in m.instances.values():
        one.begun(0.0)
        one.answered(0.01, True, 0.01)
    assert m.may_hedge(0.05, 0.04)
    assert not m.may_hedge(0.05, 0.2), "all have work and have been silent for .19 s"
    for name in ("i0", "i1"):
        m.instances[name].answered(0.01, True, 0.19)
    assert m.may_hedge(0.05, 0.2), "two of four are silent"
    for _ in range(60):
        m.instances["i0"].answered(0.5, True, 0.2)
    assert not m.may_hedge(0.05, 0.2), "one answers, but slowly"
    for one in m.instances.values():
        one.in_flight = 0
    assert m.may_hedge(0.05, 9.0), "idle is not silent"


def test_a_refused_rank_goes_to_who_does_not_refuse_unless_most_do() -> None:
    m = members(instances(4))
    m.instances["i0"].refused(10.0)
    m.instances["i1"].refused(9.5)
    assert {m.for_overflow(10.1, ["i0"]).instance.name for _ in range(50)} == {"i2", "i3"}
    m.instances["i2"].refused(10.1)
    with pytest.raises(Unavailable, match="most instances refuse"):
        m.for_overflow(10.2, ["i2"])
    assert m.for_overflow(10.9, ["i0"]).instance.name in ("i1", "i3"), "what i1 said is a second old"


def test_draining_signals_stop_at_once_ranks_after_t_life() -> None:
    drain_or_unready: tuple[Callable[[InstanceState], None], ...] = (
        lambda one: one.drain(0.0),
        lambda one: one.checked(Check.UNREADY, 0.0),
    )
    for begin in drain_or_unready:
        m = members(relay={"t_life_s": T_LIFE_S})
        user = next(user for user in USERS if m.ring.owner(user) == "i1")
        _, placement = m.for_signal(user, 0.0)
        begin(m.instances["i1"])
        assert m.for_rank(user, placement, 1.0, ()).instance.name == "i1"
        choice, _ = m.for_signal(user, 1.0)
        assert (choice.instance.name != "i1", choice.how) == (True, How.SUCCESSOR)
        assert m.for_rank(user, None, 1.0, ()).instance is choice.instance
        stranger = next(one for one in USERS if one != user and m.ring.owner(one) == "i1")
        assert m.for_rank(stranger, None, 1.0, ()).instance.name == "i1"
        assert m.for_rank(stranger, placement, T_LIFE_S + 1, ()).instance.name != "i1"


def test_an_instance_that_drained_and_is_undrained_gets_its_users_back() -> None:
    m = members()
    before = homes(m)
    m.instances["i0"].drain(0.0)
    assert "i0" not in homes(m, 50.0).values()
    m.instances["i0"].checked(Check.READY, 50.0)
    assert "i0" not in homes(m, 50.0).values(), "a check does not overrule the operator"
    m.instances["i0"].undrain(60.0)
    assert homes(m, 100.0) == before


def test_a_signal_spills_once_and_its_rank_follows() -> None:
    m = members(relay={"load_factor": 1.25})
    user = USERS[0]
    first, second = list(m.ring.walk(user))[:2]
    m.instances[first].in_flight = 50
    choice, placement = m.for_signal(user, 0.0)
    assert (choice.instance.name, choice.how, placement.is_spilled) == (second, How.SPILLED, True)
    m.instances[first].in_flight = 0
    m.instances[second].in_flight = 50
    for brought in (placement, None):
        assert m.for_rank(user, brought, 1.0, ()).instance.name == second
    assert m.for_rank(user, None, 20.0, ()).instance.name == first, "the pair is over"


def test_strict_by_default_load_spills_nobody() -> None:
    m = members()
    m.instances[m.ring.owner(USERS[0])].in_flight = 500
    choice, placement = m.for_signal(USERS[0], 0.0)
    assert choice.instance.name == m.ring.owner(USERS[0])
    assert not placement.is_spilled


def test_at_its_limit_a_rank_goes_elsewhere_and_a_signal_is_refused() -> None:
    m = members(limits={"instance_inflight": 2})
    owner = m.instances[m.ring.owner(USERS[0])]
    owner.in_flight = 2
    assert m.for_rank(USERS[0], None, 0.0, ()).instance is not owner
    with pytest.raises(Overloaded, match="2 requests"):
        m.for_signal(USERS[0], 0.0)
    for one in m.instances.values():
        one.in_flight = 2
    with pytest.raises(Overloaded):
        m.for_rank(USERS[0], None, 0.0, ())


def test_normal_instances_have_no_users_and_take_what_is_left() -> None:
    found = [
        InstanceConfig(name="special", host="h", port=1, normal=False),
        InstanceConfig(name="normal", host="h", port=2, special=False),
    ]
    m = members(found)
    assert set(homes(m).values()) == {"special"}
    assert m.for_any(0.0).instance.name == "normal"
    down(m.instances["special"])
    assert set(homes(m).values()) == {"normal"}
    assert m.for_signal(USERS[0], 0.0)[0] == (m.instances["special"], How.BLIND), "only it could take the signal"
    m.instances["special"].drain(0.0)
    with pytest.raises(Unavailable):
        m.for_signal(USERS[0], 0.0)
    m.instances["normal"].drain(0.0)
    with pytest.raises(Unavailable):
        m.for_rank(USERS[0], None, T_LIFE_S, ())


def test_by_load_the_less_loaded_of_two_is_taken() -> None:
    m = members(instances(2))
    m.instances["i0"].in_flight = 5
    assert all(m.for_any(0.0).instance.name == "i1" for _ in range(20))


def test_who_is_far_slower_than_the_rest_is_taken_out_and_never_more_than_allowed() -> None:
    m = members(breaker={"slow_ratio": 5.0, "slow_intervals": 2, "slow_min_requests": 5})
    opened: list[tuple[str, str]] = []
    m.observe(lambda name, why: opened.append((name, why)))

    def interval(slow: tuple[str, ...], now_at: float) -> None:
        for one in m.instances.values():
            for _ in range(6):
                one.answered(0.1 if one.name in slow else 0.01, True, now_at)
        m.compare(now_at)

    interval(("i0",), 0.5)
    assert not opened
    interval((), 1.0)
    interval(("i0",), 1.5)
    assert not opened, "once is no habit"
    interval(("i0",), 2.0)
    assert opened == [("i0", "slow")]
    assert "i0" not in homes(m, 2.0).values()
    for now_at in (2.5, 3.0, 3.5):
        for _ in range(9):
            m.failed(m.instances["i1"], now_at)
    assert opened == [("i0", "slow")], "half of three is one"


def test_a_breaker_opens_on_failures_in_a_row_and_longer_each_time() -> None:
    breaker = Breaker(BreakerConfig(failures=3, open_s=1.0, max_open_s=3.0, return_s=2.0, return_share=0.1))
    assert [breaker.failed(0.0), breaker.failed(0.0)] == [False, False]
    breaker.succeeded(0.0)
    assert [breaker.failed(0.0), breaker.failed(0.0), breaker.failed(0.0)] == [False, False, True]
    assert breaker.open(0.0) == 1.0
    assert (breaker.share(0.9), breaker.share(1.0), breaker.share(2.0), breaker.share(3.0)) == (0.0, 0.1, 0.55, 1.0)
    assert breaker.failed(2.0), "one while it returns is enough"
    assert breaker.open(2.0) == 2.0
    assert breaker.failed(4.5)
    assert breaker.open(4.5) == 3.0
    breaker.succeeded(9.6)
    assert not breaker.failed(9.7)
    assert [breaker.failed(9.7), breaker.failed(9.7), breaker.open(9.7)] == [False, True, 1.0]


def test_replacing_the_list_keeps_the_state_of_those_that_stay() -> None:
    m = members()
    down(m.instances["i0"])
    found = [*instances(2), InstanceConfig(name="i2", host="other", port=1)]
    gone = m.replace(found, ring_of(found))
    assert [one.config.host for one in gone] == ["127.0.0.1"]
    assert (m.instances["i0"].health, m.instances["i2"].health) == (Health.DOWN, Health.UNKNOWN)


def test_signals_are_forgotten_when_their_time_is_over_or_there_are_too_many() -> None:
    m = members(relay={"max_remembered": 10, "t_life_s": 5.0})
    for user in USERS[:50]:
        m.for_signal(user, 0.0)
    assert len(m._signalled) == 10
    m.for_signal(USERS[60], 6.0)
    assert list(m._signalled) == [USERS[60]]
