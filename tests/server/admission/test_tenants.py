"""A tenant alone may do everything.

While others ask it has its places, its share and the signals that it earned.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.shares import MAX_TENANTS, OTHERS, WANTS_S
from npu_gr.server.admission.fair_queue import (
    EARNED,
    MAX_CREDIT,
    MAX_PASSES,
    TOGETHER_S,
    UNEARNED_SHARE,
    Holder,
    Tenants,
)
from tests.clock import Clock

PASS = 4
PLACES = int(MAX_PASSES * PASS)
PACE_S = 1e9  # of a signal: so slow that none is granted for nothing


class Asked:
    """Tenants whose clock a test moves."""

    def __init__(self, *asking: str, **weights: float) -> None:
        self.clock = Clock()
        self.tenants = Tenants(weights, PASS, self.clock)
        for name in asking:
            self.tenants.saw(name)

    def hold(self, tenant: str, num: int) -> list[Holder]:
        return [self.tenants.admitted(tenant, uses_device=True) for _ in range(num)]


def test_a_tenant_alone_is_never_full_nor_told_to_earn_its_signals() -> None:
    asked = Asked(*["hot"] * 5)
    asked.hold("hot", 100)
    assert not asked.tenants.is_full("hot")
    assert not asked.tenants.full()
    assert not asked.tenants.are_sharing()
    assert all(asked.tenants.take_signal("hot", PACE_S) for _ in range(1000))


def test_while_two_ask_a_tenant_is_full_with_one_and_a_half_passes() -> None:
    asked = Asked("hot", "small")
    asked.hold("hot", PLACES - 1)
    assert not asked.tenants.is_full("hot")
    asked.hold("hot", 1)
    assert asked.tenants.is_full("hot")
    assert asked.tenants.full() == {"hot"}
    assert not asked.tenants.is_full("small")
    asked.clock.now_at += TOGETHER_S
    assert not asked.tenants.is_full("hot")  # the other one has not asked again
    assert not asked.tenants.full()
    asked.tenants.saw("hot")
    assert asked.tenants.is_full("hot")  # after the small one, so they ask together


@pytest.mark.parametrize(("weight", "places"), [(0.25, 2), (1.0, 6), (1.5, 9), (0.001, 1)])
def test_places_go_by_weight_and_a_fraction_is_one(weight: float, places: int) -> None:
    asked = Asked("a", "b", b=weight)
    asked.hold("b", places - 1)
    assert not asked.tenants.is_full("b")
    asked.hold("b", 1)
    assert asked.tenants.is_full("b")


def test_another_configuration_takes_effect_at_once() -> None:
    asked = Asked("a", "b")
    asked.hold("a", PLACES)
    assert asked.tenants.is_full("a")
    asked.tenants.weights = {"a": 2.0}
    assert not asked.tenants.is_full("a")
    assert asked.tenants.are_sharing()


def test_a_place_outside_is_none_but_its_slot_is_still_held() -> None:
    asked = Asked("a", "b")
    holders = asked.hold("a", PLACES)
    for holder in holders:
        holder.active -= 1
    assert not asked.tenants.is_full("a")
    asked.hold("b", 2)
    back = asked.hold("a", 1)[0]
    asked.tenants.left(back)
    assert asked.hold("a", 1)[0] is back  # the slots outside were still its own
    asked.tenants.left(back)
    assert asked.tenants.over_their_share({"a"}, 2, of_permits=False) == {"b"}
    assert asked.tenants.over_their_share({"a"}, PLACES + 2, of_permits=True) == {"a"}


def test_a_tenant_is_over_its_share_by_weight_among_those_that_hold_or_wait() -> None:
    asked = Asked(large=3.0)
    asked.hold("large", 6)
    asked.hold("plain", 2)
    over = asked.tenants.over_their_share
    assert over(frozenset(), 8, of_permits=False) == set()  # 3 to 1, as they should be
    # a third has a share, and nothing
    assert over({"waiting"}, 8, of_permits=False) == {"large", "plain"}
    asked.hold("plain", 1)
    assert over(frozenset(), 9, of_permits=False) == {"plain"}


def test_where_tenants_share_a_signal_costs_what_a_request_to_the_device_earns() -> None:
    asked = Asked("shop", "flood")
    signal = asked.tenants.take_signal
    assert sum(signal("shop", PACE_S) for _ in range(1000)) == MAX_CREDIT
    asked.tenants.admitted("shop", uses_device=False)
    assert not signal("shop", PACE_S)  # an append of events earns nothing
    asked.hold("shop", 1)
    assert sum(signal("shop", PACE_S) for _ in range(10)) == EARNED
    asked.clock.now_at += WANTS_S
    assert signal("shop", PACE_S)  # nobody else has asked of late
    asked.hold("shop", 1)  # alone it need not earn any
    asked.tenants.saw("shop")
    asked.tenants.saw("flood")
    assert not signal("shop", PACE_S)


def test_invented_names_share_one_entry_and_a_name_with_a_weight_has_its_own() -> None:
    asked = Asked("a", "b", paying=1.0)
    for number in range(MAX_TENANTS):
        asked.hold(f"t{number}", 1)
    assert [
        asked.tenants.admitted(f"u{number}", uses_device=True).name for number in range(PLACES)
    ] == [OTHERS] * PLACES
    assert asked.tenants.is_full("never seen")  # it would be one of those
    assert not asked.tenants.is_full("t1")
    assert asked.tenants.admitted("paying", uses_device=True).name == "paying"
    assert len(asked.tenants._holders) == MAX_TENANTS + 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_a_holder_is_kept_as_long_as_it_holds_a_slot(steps: list[tuple[str, bool]]) -> None:
    asked = Asked()
    held: dict[str, list[Holder]] = {}
    for tenant, comes in steps:
        mine = held.setdefault(tenant, [])
        if comes:
            mine += asked.hold(tenant, 1)
        elif mine:
            asked.tenants.left(mine.pop())
        active = {name: one.active for name, one in asked.tenants._holders.items()}
        assert active == {name: len(holders) for name, holders in held.items() if holders}
        # T1
        assert asked.tenants._holders.keys() == {name for name, holders in held.items() if holders}
        # one entry a tenant
        assert all(len({id(one) for one in holders}) <= 1 for holders in held.values())


@settings(deadline=None, max_examples=20)
@given(num_tenants=st.integers(2, 200), rate_per_s=st.sampled_from([200, 2000, 20_000]))
def test_floods_of_all_tenants_together_take_their_share_of_the_loop(
    num_tenants: int, rate_per_s: int
) -> None:
    asked = Asked("a", "b")
    service_s = 0.001
    for number in range(64):  # what tenants begin with, of all accounts that there may be
        for _ in range(int(MAX_CREDIT)):
            asked.tenants.take_signal(f"t{number}", service_s)
    for _ in range(int(MAX_CREDIT)):
        asked.tenants.take_signal("shared", service_s)
    taken = 0
    for number in range(rate_per_s * 2):
        asked.clock.now_at += 1 / rate_per_s
        asked.tenants.saw(f"t{number % num_tenants}")
        taken += asked.tenants.take_signal(f"t{number % num_tenants}", service_s)
    assert taken <= UNEARNED_SHARE / service_s * 2 * 1.1 + 65
