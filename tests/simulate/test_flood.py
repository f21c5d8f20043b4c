"""A tenant that floods signals takes neither cache hits nor time from another tenant.

The scene of the security review: 20 users of tenant V with 800 tokens each, who signal and then
rank; tenant E signals ever new users, and never ranks. Before tenants had shares, a flood of 310
signals a second left V 3 % of its hits.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.core.request import Outcome, Verdict
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.relay.brownout import BrownoutConfig
from npu_gr.relay.config import TriggerConfig
from npu_gr.server.admission.controller import AdmissionConfig
from npu_gr.simulate import clock
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.instance import SimulatedInstance
from npu_gr.simulate.users import TrafficRequest
from tests.engine.kv_cache.invariants import check_pool

TOKENS = 800
TOKEN_BYTES = 8192
SECONDS = 30.0
WARM_S = 2.0  # not counted: until T_life is measured, the rate is a guess
HITS = (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)
DEVICE = DeviceProfile(  # a prefix of 800 tokens takes it 9 ms, and a rank on that 3 ms
    a0_s=0.001,
    a1_s=1e-5,
    b0_s=1e-5,
    kv_token_bytes=TOKEN_BYTES,
    signal_host_s=0.0005,
    rank_host_s=[0.0015],
)


@dataclass
class Seen:
    """What became of the requests of both tenants."""

    outcomes: Counter[str] = field(default_factory=Counter)  # of V's ranks
    latencies_s: list[float] = field(default_factory=list)
    verdicts: Counter[Verdict | None] = field(default_factory=Counter)  # of E's signals

    @property
    def hit_ratio(self) -> float:
        return sum(self.outcomes[hit] for hit in HITS) / self.outcomes.total()

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.latencies_s, 99))


def request(kind: str, tenant: str, user: str, num_tokens: int) -> TrafficRequest:
    return TrafficRequest(0.0, kind, user, num_tokens, 200, tenant)


def scene(
    flood_per_s: float, *, q_m_per_s: float | None = None, hbm_prefixes: int = 100, names: int = 1
) -> Seen:
    """Play half a minute of V, and E with so many signals a second (under so many names)."""
    config = SimulateConfig(
        device=DEVICE,
        trigger=TriggerConfig(policy="always", min_prefix_tokens=1, q_m_per_s=q_m_per_s),
        brownout=BrownoutConfig(enabled=False),
        kv_cache=KVConfig(
            hbm_bytes=hbm_prefixes * TOKENS * TOKEN_BYTES, dram_bytes=200 * TOKENS * TOKEN_BYTES
        ),
        admission=AdmissionConfig(tenant_weights={"V": 1.0}),
    )

    async def work() -> Seen:
        instance = SimulatedInstance(config, DEVICE, "one")
        instance.start()
        loop = asyncio.get_running_loop()
        seen = Seen()

        async def flood() -> None:
            async def one(number: int) -> None:
                signal = request(SIGNAL.name, f"E{number % names}", f"e{number}", TOKENS)
                seen.verdicts[await instance.signal(signal)] += 1

            asked: set[asyncio.Task[None]] = set()
            for number in range(int(SECONDS * flood_per_s)):
                task = loop.create_task(one(number))
                asked.add(task)
                task.add_done_callback(asked.discard)
                await asyncio.sleep(1 / flood_per_s)

        async def visitor(user: int) -> None:
            source = random.Random(user)
            await asyncio.sleep(source.random())
            num_tokens = TOKENS
            while loop.time() < SECONDS:
                num_tokens += 2
                await instance.signal(request(SIGNAL.name, "V", f"v{user}", num_tokens))
                await asyncio.sleep(0.05)
                ranked = await instance.rank(request(RANK.name, "V", f"v{user}", num_tokens))
                if loop.time() > WARM_S:
                    seen.outcomes[ranked.outcome or ranked.error] += 1
                    seen.latencies_s.append(ranked.latency_s)
                await asyncio.sleep(source.expovariate(1.0))

        flooding = loop.create_task(flood()) if flood_per_s else None
        await asyncio.gather(*(visitor(user) for user in range(20)))
        if flooding is not None:
            flooding.cancel()
        await instance.stop()
        check_pool(instance.tiers.pool)
        return seen

    return clock.run(work())


@pytest.fixture(scope="module")
def quiet() -> Seen:
    return scene(0.0)


@pytest.mark.parametrize("flood_per_s", [10.0, 100.0, 310.0, 1000.0, 3000.0])
def test_a_flood_of_signals_leaves_another_tenant_its_hits_and_its_time(
    quiet: Seen, flood_per_s: float
) -> None:
    seen = scene(flood_per_s)
    assert seen.hit_ratio >= 0.95 * quiet.hit_ratio
    assert seen.p99_s <= 1.2 * quiet.p99_s
    assert seen.verdicts[Verdict.SKIP_SHARE]
    assert quiet.hit_ratio > 0.9


@pytest.mark.parametrize(
    "limits", [{"q_m_per_s": 40.0}, {"hbm_prefixes": 30}], ids=["rate", "small-pool"]
)
def test_it_holds_whatever_the_limit_is_that_they_share(limits: dict[str, Any]) -> None:
    quiet, seen = scene(0.0, **limits), scene(310.0, **limits)
    assert seen.hit_ratio >= 0.95 * quiet.hit_ratio
    assert seen.p99_s <= 1.2 * quiet.p99_s


def test_names_that_the_flood_invents_take_no_hits(quiet: Seen) -> None:
    assert scene(310.0, names=1000).hit_ratio >= 0.95 * quiet.hit_ratio


def test_a_tenant_alone_may_pre_infer_as_much_as_fits() -> None:
    async def work() -> Counter[Verdict | None]:
        config = SimulateConfig(
            device=DEVICE,
            trigger=TriggerConfig(policy="always", min_prefix_tokens=1),
            kv_cache=KVConfig(hbm_bytes=100 * TOKENS * TOKEN_BYTES, dram_bytes=0),
        )
        instance = SimulatedInstance(config, DEVICE, "one")
        verdicts: Counter[Verdict | None] = Counter()
        for number in range(200):
            verdicts[await instance.signal(request(SIGNAL.name, "E", f"e{number}", TOKENS))] += 1
            await asyncio.sleep(0.02)
        pool = instance.tiers.pool
        assert pool.live_bytes >= 0.9 * pool.budget_bytes
        await instance.stop()
        return verdicts

    verdicts = clock.run(work())
    assert verdicts[Verdict.PREINFER] >= 90
    assert not verdicts[Verdict.SKIP_SHARE]
