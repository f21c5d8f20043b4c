"""A promised prefix stays, and a tenant with fewer prefills than its share gets its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Verdict
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.relay.brownout import BrownoutConfig
from npu_gr.relay.config import TriggerConfig
from npu_gr.simulate import clock
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.device import SimulatedPrefix
from npu_gr.simulate.instance import SimulatedInstance
from tests.engine.kv_cache.invariants import check_pool

DEVICE = DeviceProfile(a0_s=0.001, a1_s=1e-4, b0_s=1e-5, kv_token_bytes=64)
PREFIX = SimulatedPrefix(100, 1000, 64)  # takes 11 ms
PAGES_OF_ONE = 2
T_LIFE_S = 10.0
HELD = (Verdict.ALREADY_RESIDENT, Verdict.PREINFER, Verdict.RELOAD, Verdict.ALREADY_RUNNING)


@asynccontextmanager
async def instance(prefixes: int, **trigger: object) -> AsyncIterator[SimulatedInstance]:
    made = SimulatedInstance(
        SimulateConfig(
            device=DEVICE,
            trigger=TriggerConfig(policy="always", min_prefix_tokens=1, **trigger),  # type: ignore[arg-type]
            brownout=BrownoutConfig(enabled=False),
            kv_cache=KVConfig(
                hbm_bytes=prefixes * PAGES_OF_ONE * 64 * 64, dram_bytes=4 * PAGES_OF_ONE * 64 * 64
            ),
        ),
        DEVICE,
        "one",
    )
    yield made
    await made.relay.stop()
    check_pool(made.tiers.pool)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["signal", "signal", "rank"]),
        st.integers(0, 7),
        st.sampled_from([0.0, 0.1, 4.0]),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(STEPS)
def test_a_signal_that_promises_a_prefix_keeps_it_for_as_long_as_it_says(
    steps: list[tuple[str, int, float]],
) -> None:
    """Until its rank comes or T_life is over, whatever other users signal or rank."""

    async def work() -> None:
        async with instance(4) as one:
            loop = asyncio.get_running_loop()
            promised: dict[UserKey, float] = {}
            for step, number, after_s in steps:
                user = UserKey("", str(number))
                if step == "signal":
                    verdict = one.relay.signal(user, PREFIX, 100)
                    if verdict is Verdict.ALREADY_RESIDENT:
                        promised[user] = loop.time() + T_LIFE_S
                else:
                    async with one.relay.lease(user, PREFIX, 100, loop.time() + 1.0) as lease:
                        if promised.pop(user, -1.0) > loop.time():
                            assert lease.outcome is Outcome.HBM_HIT
                await asyncio.sleep(after_s)
                for user, until_at in promised.items():
                    if loop.time() < until_at:
                        assert one.tiers.pool.find(
                            user, "simulated", one.tiers.pool.arena.layout.layout_id
                        )

    clock.run(work())


def test_a_tenant_below_its_share_starts_a_job_and_the_others_youngest_gives_way() -> None:
    async def work() -> None:
        async with instance(640, max_inflight=4) as one:
            flood = [one.relay.signal(UserKey("e", str(n)), PREFIX) for n in range(5)]
            assert flood == [Verdict.PREINFER] * 4 + [Verdict.SKIP_LOAD]  # alone it may have all
            assert [one.relay.signal(UserKey("v", str(n)), PREFIX) for n in range(3)] == [
                Verdict.PREINFER,
                Verdict.PREINFER,
                Verdict.SKIP_SHARE,
            ]
            assert one.relay.in_flight("prefill") == 4
            assert one.relay.signal(UserKey("e", "5"), PREFIX) is Verdict.SKIP_SHARE
            await asyncio.sleep(0.1)
            pool = one.tiers.pool
            found = {
                f"{tenant}{n}"
                for tenant in "ev"
                for n in range(5)
                if pool.find(UserKey(tenant, str(n)), "simulated", pool.arena.layout.layout_id)
            }
            assert found == {"e0", "e1", "v0", "v1"}
            assert not pool.reserved_bytes

    clock.run(work())


def test_a_pre_infer_that_a_rank_waits_for_does_not_give_way() -> None:
    async def work() -> None:
        async with instance(640, max_inflight=2) as one:
            loop = asyncio.get_running_loop()
            for n in range(2):
                one.relay.signal(UserKey("e", str(n)), PREFIX)
            await asyncio.sleep(0)
            longer = SimulatedPrefix(110, 1000, 64)  # it continues the prefix, so it joins

            async def rank() -> Outcome:
                async with one.relay.lease(
                    UserKey("e", "1"), longer, 100, loop.time() + 1.0
                ) as lease:
                    return lease.outcome

            joined = loop.create_task(rank())
            await asyncio.sleep(0)
            assert one.relay.signal(UserKey("v", "0"), PREFIX) is Verdict.PREINFER
            await asyncio.sleep(0.1)
            assert await joined is Outcome.JOINED

    clock.run(work())


@pytest.mark.parametrize("tenant", ["e", "v"])
def test_the_device_takes_the_prefills_of_tenants_in_turn(tenant: str) -> None:
    """A tenant with one prefill waits for the running one, not for the other tenant's queue."""

    async def work() -> bool:
        async with instance(640, max_inflight=8) as one:
            one.relay.signal(UserKey("v", "early"), PREFIX)
            await asyncio.sleep(1.0)
            for n in range(6):
                one.relay.signal(UserKey("e", str(n)), PREFIX)
            await asyncio.sleep(0.012)
            user = UserKey(tenant, "late")
            assert one.relay.signal(user, PREFIX) is Verdict.PREINFER
            await asyncio.sleep(0.03)  # enough for the one that runs, and for its own
            return bool(
                one.tiers.pool.find(user, "simulated", one.tiers.pool.arena.layout.layout_id)
            )

    assert clock.run(work()) == (tenant == "v")
