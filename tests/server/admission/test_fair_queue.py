"""Tenants get time by weight, the first due goes first within a tenant, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.shares import MAX_TENANTS
from npu_gr.server.admission.fair_queue import FairQueue


@dataclass(eq=False)
class Asked:
    tenant: str
    due_at: float = 0.0
    cost_s: float = 1.0
    queue: str = ""
    is_gone: bool = False


def served(turns: FairQueue[Asked], count: int) -> list[Asked]:
    taken = []
    for _ in range(count):
        head = turns.head()
        assert isinstance(head, Asked)
        turns.take(head)
        taken.append(head)
    return taken


def test_within_a_tenant_the_first_due_goes_first_and_equals_in_their_order() -> None:
    turns = FairQueue[Asked]({})
    asked = [Asked("a", at) for at in (3.0, 1.0, 2.0, 1.0)]
    for one in asked:
        turns.push(one)
    assert served(turns, 4) == [asked[1], asked[3], asked[2], asked[0]]


def test_a_small_tenant_does_not_wait_for_a_large_ones_queue() -> None:
    turns = FairQueue[Asked]({})
    for n in range(100):
        turns.push(Asked("hot", n))
    served(turns, 10)
    small = Asked("small", 1000.0)
    assert turns.ahead_s("small", 1000.0) <= 1.0
    turns.push(small)
    assert small in served(turns, 2)


@pytest.mark.parametrize("weight", [1.0, 2.0, 5.0])
def test_time_is_shared_by_weight(weight: float) -> None:
    turns = FairQueue[Asked]({"heavy": weight})
    for n in range(600):
        turns.push(Asked("heavy", n))
        turns.push(Asked("light", n))
    counts = Counter(one.tenant for one in served(turns, 600))
    assert counts["heavy"] / counts["light"] == pytest.approx(weight, rel=0.05)


def test_time_counts_not_requests() -> None:
    turns = FairQueue[Asked]({})
    for n in range(300):
        turns.push(Asked("dear", n, cost_s=4.0))
        turns.push(Asked("cheap", n, cost_s=1.0))
    taken = served(turns, 200)
    spent = Counter[str]()
    for one in taken:
        spent[one.tenant] += int(one.cost_s)
    assert spent["dear"] == pytest.approx(spent["cheap"], rel=0.1)


def test_what_is_ahead_is_what_goes_before() -> None:
    turns = FairQueue[Asked]({"b": 2.0})
    for n in range(20):
        turns.push(Asked("a", n))
        turns.push(Asked("b", n))
        turns.push(Asked("c", 2 * n))
    served(turns, 7)
    for tenant, due_at in (("a", 5.0), ("a", 100.0), ("b", 12.0), ("c", 9.0), ("new", 3.0)):
        forecast_s = turns.ahead_s(tenant, due_at)
        probe = Asked(tenant, due_at)
        turns.push(probe)
        before_s = 0.0
        taken = []
        while (head := turns.head()) is not probe:
            assert isinstance(head, Asked)
            turns.take(head)
            taken.append(head)
            before_s += head.cost_s
        assert forecast_s == pytest.approx(before_s, abs=3.0)  # one request of each tenant
        turns.drop(probe)
        for one in taken:
            one.is_gone = False
            turns.push(one)


def test_a_flood_of_names_shares_one_queue() -> None:
    turns = FairQueue[Asked]({})
    for n in range(MAX_TENANTS - 1):
        turns.push(Asked(f"t{n}"))
    flood = [Asked(f"made up {n}") for n in range(500)]
    for one in flood:
        turns.push(one)
    queues = {one.queue for one in flood}
    assert len(queues) == 2  # one got a queue of its own, the others share one
    assert len(served(turns, len(turns))) == MAX_TENANTS - 1 + 500
    assert not turns._tenants


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.floats(0, 9),
            st.floats(0.1, 2),
            st.sampled_from(("push", "take", "drop")),
        ),
        max_size=60,
    )
)
def test_every_request_leaves_once_and_the_cost_is_the_sum(
    steps: list[tuple[str, float, float, str]],
) -> None:
    turns = FairQueue[Asked]({"a": 3.0})
    waiting: list[Asked] = []
    for tenant, due_at, cost_s, step in steps:
        if step == "push" or not waiting:
            waiting.append(Asked(tenant, due_at, cost_s))
            turns.push(waiting[-1])
        elif step == "take":
            head = turns.head()
            assert isinstance(head, Asked)
            waiting.remove(head)
            turns.take(head)
        else:
            turns.drop(waiting.pop(len(waiting) // 2))
        assert len(turns) == len(waiting)
        assert turns.cost_s == pytest.approx(sum(one.cost_s for one in waiting), abs=1e-9)
        assert {id(one) for one in turns.heads()} <= {id(one) for one in waiting}
        assert (turns.head() is None) == (not waiting)
