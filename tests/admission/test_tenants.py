"""A tenant alone may do everything; while others ask it has its places, its share and the signals that it earned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.earned import MOST, SIGNALS
from npu_gr.admission.tenants import MIXED_S, PASSES, Holder, Tenants
from npu_gr.core.shares import MAX_TENANTS, OTHERS, WANTS_S
from tests.clock import Clock

PASS = 4
PLACES = int(PASSES * PASS)
PACE_S = 1e9  # of a signal: so slow that none is granted for nothing


class Asked:
    """Tenants whose clock a test moves."""

    def __init__(self, *asking: str, **settings: Any) -> None:
        self.clock = Clock()
        self.tenants = Tenants(AdmissionConfig(**settings), PASS, self.clock)
        for name in asking:
            self.tenants.saw(name)

    def hold(self, tenant: str, num: int) -> list[Holder]:
        return [self.tenants.let_in(tenant, True) for _ in range(num)]


def test_a_tenant_alone_is_never_full_nor_told_to_earn_its_signals() -> None:
    asked = Asked(*["hot"] * 5)
    asked.hold("hot", 100)
    assert not asked.tenants.is_full("hot")
    assert not asked.tenants.full()
    assert not asked.tenants.are_sharing()
    assert all(asked.tenants.may_signal("hot", PACE_S) for _ in range(1000))


def test_while_two_ask_a_tenant_is_full_with_one_and_a_half_passes() -> None:
    asked = Asked("hot", "small")
    asked.hold("hot", PLACES - 1)
    assert not asked.tenants.is_full("hot")
    asked.hold("hot", 1)
    assert asked.tenants.is_full("hot")
    assert asked.tenants.full() == {"hot"}
    assert not asked.tenants.is_full("small")
    asked.clock.now_at += MIXED_S
    assert not asked.tenants.is_full("hot")  # the other one has not asked again
    assert not asked.tenants.full()
    asked.tenants.saw("hot")
    assert asked.tenants.is_full("hot")  # after the small one, so they ask together


@pytest.mark.parametrize(("weight", "places"), [(0.25, 2), (1.0, 6), (1.5, 9), (0.001, 1)])
def test_places_go_by_weight_and_a_fraction_is_one(weight: float, places: int) -> None:
    asked = Asked("a", "b", tenant_weights={"b": weight})
    asked.hold("b", places - 1)
    assert not asked.tenants.is_full("b")
    asked.hold("b", 1)
    assert asked.tenants.is_full("b")


def test_another_configuration_takes_effect_at_once() -> None:
    asked = Asked("a", "b")
    asked.hold("a", PLACES)
    assert asked.tenants.is_full("a")
    asked.tenants.config = AdmissionConfig(tenant_weights={"a": 2.0})
    assert not asked.tenants.is_full("a")
    assert asked.tenants.are_sharing()
    asked.tenants.config = AdmissionConfig(enabled=False)
    assert not asked.tenants.are_sharing()


def test_a_place_outside_is_none_but_its_slot_is_still_held() -> None:
    asked = Asked("a", "b")
    holders = asked.hold("a", PLACES)
    for holder in holders:
        holder.inside -= 1
    assert asked.tenants.inside() == {}
    assert not asked.tenants.is_full("a")
    asked.hold("b", 2)
    assert asked.tenants.inside() == {"b": 2}
    back = asked.hold("a", 1)[0]
    asked.tenants.left(back)
    assert asked.hold("a", 1)[0] is back  # the slots outside were still its own
    asked.tenants.left(back)
    assert asked.tenants.over_their_share({"a"}, 2, of_slots=False) == {"b"}
    assert asked.tenants.over_their_share({"a"}, PLACES + 2, of_slots=True) == {"a"}


def test_a_tenant_is_over_its_share_by_weight_among_those_that_hold_or_wait() -> None:
    asked = Asked(tenant_weights={"large": 3.0})
    asked.hold("large", 6)
    asked.hold("plain", 2)
    over = asked.tenants.over_their_share
    assert over(frozenset(), 8, of_slots=False) == set()  # 3 to 1, as they should be
    assert over({"waiting"}, 8, of_slots=False) == {"large", "plain"}  # a third has a share, and nothing
    asked.hold("plain", 1)
    assert over(frozenset(), 9, of_slots=False) == {"plain"}


def test_where_tenants_share_a_signal_costs_what_a_request_to_the_device_earns() -> None:
    asked = Asked("shop", "flood")
    signal = asked.tenants.may_signal
    assert sum(signal("shop", PACE_S) for _ in range(1000)) == MOST
    asked.tenants.let_in("shop", False)
    assert not signal("shop", PACE_S)  # an append of events earns nothing
    asked.hold("shop", 1)
    assert sum(signal("shop", PACE_S) for _ in range(10)) == SIGNALS
    asked.tenants.earned_elsewhere("shop", 3)
    assert sum(signal("shop", PACE_S) for _ in range(10)) == 3 * SIGNALS
    asked.clock.now_at += WANTS_S
    assert signal("shop", PACE_S)  # nobody else has asked of late
    asked.hold("shop", 1)  # alone it need not earn any
    asked.tenants.saw("flood")
    assert not signal("shop", PACE_S)


def test_who_asks_at_another_door_asks() -> None:
    asked = Asked("a")
    assert not asked.tenants.are_sharing()
    asked.tenants.earned_elsewhere("b", 1)
    assert asked.tenants.are_sharing()


def test_invented_names_share_one_entry_and_a_name_with_a_weight_has_its_own() -> None:
    asked = Asked("a", "b", tenant_weights={"paying": 1.0})
    for number in range(MAX_TENANTS):
        asked.hold(f"t{number}", 1)
    assert [asked.tenants.let_in(f"u{number}", True).name for number in range(PLACES)] == [OTHERS] * PLACES
    assert asked.tenants.is_full("never seen")  # it would be one of those
    assert not asked.tenants.is_full("t1")
    assert asked.tenants.let_in("paying", True).name == "paying"
    assert len(asked.tenants.inside()) == MAX_TENANTS + 2


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
        assert asked.tenants.inside() == {name: len(holders) for name, holders in held.items() if holders}
        assert asked.tenants._holders.keys() == {name for name, holders in held.items() if holders}  # T1
        assert all(len({id(one) for one in holders}) <= 1 for holders in held.values())  # one entry a tenant
