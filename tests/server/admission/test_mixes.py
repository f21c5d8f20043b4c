"""Overload is answered as well from many tenants, with many time limits, as from one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from npu_gr.core.shares import TokenBucket
from tests.server.admission.rig import OBJECTIVE_S, Instance, Seen, virtually

SECONDS = 1.0
MANY = 256
CAPACITY_PER_S = 1 / 0.0007  # of the rig's instance: .8 ms a pass of 4, and .5 ms a request


@dataclass
class Got:
    """What became of an open loop's requests."""

    admitted: list[bool]  # of each request, in the order of arrival
    seen: Seen


def open_loop(
    times: float,
    tenant_of: Callable[[int], str] = lambda _: "",
    budget_s_of: Callable[[int], float] = lambda _: 1.0,
    rate_per_s: float | None = None,
) -> Got:
    """Send `times` the capacity, each request with a tenant and a time limit.

    Args:
        times: Of the capacity.
        tenant_of: Tenant of a request, by its number.
        budget_s_of: Time limit of a request, by its number.
        rate_per_s: A token bucket in front, as of the tenant's key.
    """

    async def work() -> Got:
        instance, seen = Instance(), Seen()
        source = random.Random(7)
        bucket = TokenBucket(rate_per_s, rate_per_s / 20) if rate_per_s else None
        asked = []
        number = 0
        while instance.loop.time() < SECONDS:
            if bucket is None or bucket.take(instance.loop.time()):
                one = instance.ask(seen, tenant=tenant_of(number), budget_s=budget_s_of(number))
                asked.append(asyncio.ensure_future(one))
                number += 1
            await asyncio.sleep(source.expovariate(times * instance.capacity_per_s))
        return Got(list(await asyncio.gather(*asked)), seen)

    got: Got = virtually(work)
    return got


@pytest.fixture(scope="module", params=[3.0, 10.0])
def times(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(scope="module")
def one(times: float) -> Got:
    """One tenant, one time limit."""
    return open_loop(times)


def test_time_limits_above_the_objective_change_no_decision(times: float, one: Got) -> None:
    """As a caller writes what is left of its own: each time another number."""
    many = open_loop(times, budget_s_of=lambda number: 1.0 - 0.9 * (number % MANY) / MANY)
    assert many.admitted == one.admitted
    assert many.seen.counts == one.seen.counts


def test_time_limits_around_the_objective_keep_the_goodput(times: float, one: Got) -> None:
    many = open_loop(times, budget_s_of=lambda number: OBJECTIVE_S * (0.7 + (number % MANY) / MANY))
    assert many.seen.in_time >= 0.95 * one.seen.in_time
    assert many.seen.counts["late"] <= 0.02 * many.seen.in_time


def test_many_tenants_get_together_what_one_gets(times: float, one: Got) -> None:
    source = random.Random(3)
    equal = open_loop(times, tenant_of=lambda number: f"t{number % MANY}")
    drawn = open_loop(times, tenant_of=lambda _: f"t{int(MANY * source.random() ** 3)}")
    for many in (equal, drawn):
        assert many.seen.in_time >= 0.95 * one.seen.in_time
        assert many.seen.counts["late"] <= 0.02 * many.seen.in_time


def test_a_token_bucket_of_one_tenant_changes_nothing_below_its_rate(
    times: float, one: Got
) -> None:
    wide = open_loop(times, rate_per_s=1e9)
    assert wide.admitted == one.admitted
    narrow = open_loop(times, rate_per_s=CAPACITY_PER_S)
    # the bucket passes the capacity on, of which all is answered
    assert narrow.seen.in_time >= 0.95 * min(one.seen.in_time, len(narrow.admitted))
