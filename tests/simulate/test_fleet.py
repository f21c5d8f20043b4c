"""Against theory where there is one; and the code that serves decides here too."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from npu_gr.backend.base import Arrangement
from npu_gr.core.errors import ConfigError
from npu_gr.core.request import Fetched, Outcome, Verdict
from npu_gr.core.settings import from_table
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.metrics.slo import Result
from npu_gr.relay.brownout import BrownoutConfig
from npu_gr.relay.config import RelayConfig, TriggerConfig
from npu_gr.server.admission.controller import AdmissionConfig
from npu_gr.simulate import clock
from npu_gr.simulate.config import (
    DeviceProfile,
    Lateness,
    Lognormal,
    PoolProfile,
    SimulateConfig,
    UsersConfig,
)
from npu_gr.simulate.device import SimulatedPrefix
from npu_gr.simulate.fleet import Fleet, FleetResult, search, simulate
from npu_gr.simulate.instance import SimulatedInstance
from npu_gr.simulate.users import TrafficRequest, signals_and_ranks, visits
from tests.engine.kv_cache.invariants import check_dram, check_pool

TOKEN_BYTES = 64
DEVICE = DeviceProfile(a0_s=0.001, a1_s=1e-5, b0_s=1e-5, b1_s=0.0, kv_token_bytes=TOKEN_BYTES)
USERS = UsersConfig(
    num_users=5000, zipf=0.8, history_tokens=Lognormal(median=300, sigma=0.5), growth_tokens=4
)


def config(**changes: Any) -> SimulateConfig:
    plain = SimulateConfig(
        device=DEVICE,
        duration_s=10.0,
        warmup_s=2.0,
        admission=AdmissionConfig(enabled=False),
        brownout=BrownoutConfig(enabled=False),
        trigger=TriggerConfig(policy="always", min_prefix_tokens=1),
        kv_cache=KVConfig(hbm_bytes=8_000_000, dram_bytes=40_000_000),
    )
    return msgspec.structs.replace(plain, **changes)


def traffic(
    qps: float, seconds: float = 10.0, users: UsersConfig = USERS, seed: int = 0
) -> Iterator[TrafficRequest]:
    return signals_and_ranks(visits(users, qps, seconds, seed), 100)


def run(
    settings: SimulateConfig, found: Iterable[TrafficRequest], profile: DeviceProfile = DEVICE
) -> tuple[FleetResult, Fleet]:
    kept = []

    async def work() -> FleetResult:
        kept.append(Fleet(settings, profile))
        return await kept[0].run(found)

    return clock.run(work()), kept[0]


def test_every_request_ends_once_and_leaves_nothing_behind() -> None:
    found = list(traffic(250.0))
    settings = config(instances=2, warmup_s=0.0, slo_s=0.02, brownout=BrownoutConfig())
    outcomes, fleet = run(settings, found)
    asked = Counter(request.kind for request in found if request.due_at < settings.duration_s)
    assert outcomes.num_ranks == asked["rank"]
    assert outcomes.outcomes.total() == outcomes.results.total() == asked["rank"]
    assert outcomes.verdicts.total() == asked["signal"]
    assert (
        len(outcomes.latencies_s) == outcomes.results[Result.GOOD] + outcomes.results[Result.SLOW]
    )
    assert {outcome for outcome, count in outcomes.outcomes.items() if count} > {
        Outcome.HBM_HIT,
        Outcome.DRAM_HIT,
    }
    for instance in fleet.instances.values():
        check_pool(instance.tiers.pool)
        assert instance.tiers.pool.reserved_bytes == 0
        assert instance.tiers.dram is not None
        check_dram(instance.tiers.dram)
    assert fleet._in_flight.total() == 0


def test_equal_seeds_give_equal_figures() -> None:
    profile = msgspec.structs.replace(DEVICE, late=[Lateness(ratios=[-0.1, 0.0, 0.3])])
    first, again = (run(config(instances=2), traffic(80.0), profile)[0].as_dict() for _ in range(2))
    other = run(config(instances=2, seed=1), traffic(80.0), profile)[0].as_dict()
    assert first == again
    assert first != other


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_wait_for_the_device_is_that_of_an_m_d_1_queue(load: float) -> None:
    service_s, seconds = 0.01, 400.0
    profile = DeviceProfile(a0_s=service_s, a1_s=0.0, kv_token_bytes=TOKEN_BYTES)
    settings = config(
        duration_s=seconds,
        warmup_s=10.0,
        budget_s=60.0,
        relay=RelayConfig(enabled=False, degrade=False),
        scheduler=SchedulerConfig(max_batch_requests=1, max_queue=100_000),
        admission=AdmissionConfig(enabled=False),
    )
    ranks = (
        request for request in traffic(load / service_s, seconds, seed=4) if request.kind == "rank"
    )
    outcomes, _ = run(settings, ranks, profile)
    wait_s = float(np.mean(outcomes.latencies_s)) - service_s
    theory_s = load * service_s / (2 * (1 - load))  # Pollaczek and Khinchine, deterministic service
    assert wait_s == pytest.approx(theory_s, rel=0.08)
    assert outcomes.busy_ratio == pytest.approx(load, rel=0.03)


def test_a_pool_without_pre_infers_hits_as_its_closed_form() -> None:
    """Equally likely users, room for K of N, first in first out: the hit rate is K / N."""
    num_users, room = 200, 60
    profile = DeviceProfile(a0_s=1e-6, a1_s=0.0, kv_token_bytes=TOKEN_BYTES)
    users = UsersConfig(
        num_users=num_users, zipf=0.0, history_tokens=Lognormal(median=64.5, sigma=0.0)
    )
    settings = config(
        duration_s=150.0,
        warmup_s=20.0,
        trigger=TriggerConfig(policy="at_risk", min_prefix_tokens=1),  # nothing is at risk
        kv_cache=KVConfig(hbm_bytes=room * 64 * TOKEN_BYTES, dram_bytes=0),
    )
    ranks = (request for request in traffic(100.0, 150.0, users) if request.kind == "rank")
    outcomes, _ = run(settings, ranks, profile)
    assert outcomes.hit_ratio(Outcome.HBM_HIT) == pytest.approx(room / num_users, abs=0.02)


def test_the_trigger_that_serves_decides_here() -> None:
    found = list(traffic(120.0))

    def verdicts(**changes: Any) -> Counter[str]:
        trigger = TriggerConfig(**{"policy": "always", "min_prefix_tokens": 1, **changes})
        return run(config(trigger=trigger), found)[0].verdicts

    always = verdicts()
    assert always[Verdict.PREINFER]
    # full_s = 1 ms + 10 us a token + 1 ms: of 300 tokens 5 ms
    short = sum(
        request.kind == "signal" and request.num_tokens < 300
        for request in found
        if request.due_at >= 2.0
    )
    assert verdicts(min_prefix_tokens=300)[Verdict.SKIP_NOT_AT_RISK] == pytest.approx(
        short, rel=0.2
    )
    assert verdicts(policy="at_risk", rank_budget_s=10.0)[Verdict.PREINFER] == 0
    assert (
        verdicts(policy="at_risk", rank_budget_s=0.008)[Verdict.PREINFER] < always[Verdict.PREINFER]
    )
    assert verdicts(max_inflight=1)[Verdict.SKIP_LOAD] > always[Verdict.SKIP_LOAD]
    limited = verdicts(q_m_per_s=10.0, q_m_fraction=0.5)
    assert limited[Verdict.SKIP_RATE]
    produced = limited[Verdict.PREINFER] + limited[Verdict.RELOAD] + limited[Verdict.EXTEND]
    assert produced == pytest.approx(5.0 * 8.0, rel=0.1)  # the bucket's rate


def test_ranks_that_never_come_are_wasted_pre_infers() -> None:
    users = msgspec.structs.replace(USERS, num_users=10**9, zipf=0.0, dropout_ratio=0.3)
    outcomes, _ = run(config(), traffic(100.0, users=users))
    assert outcomes.num_produced > 500
    assert outcomes.wasted_ratio == pytest.approx(0.3, abs=0.04)


def test_losing_an_instance_moves_its_users_alone() -> None:
    async def homes(instances: int) -> dict[str, str]:
        ring = Fleet(config(instances=instances), DEVICE).ring
        return {
            user: ring.owner(user.encode()) for user in (f"u{number}" for number in range(2000))
        }

    before, after = clock.run(homes(10)), clock.run(homes(9))
    moved = {user for user in before if before[user] != after[user]}
    assert moved == {user for user, home in before.items() if home == "gr-9"}
    assert len(moved) == pytest.approx(200, rel=0.35)


def test_a_sample_of_the_instances_serves_its_own_users_as_in_the_whole_fleet() -> None:
    found = list(traffic(400.0))
    _, whole = run(config(instances=8), found)
    sample, part = run(config(instances=8, sampled_instances=2), found)
    assert sample.simulated == 2
    for name, instance in part.instances.items():
        assert instance.num_produced == whole.instances[name].num_produced
        # spills that the end cuts short differ by where the end is
        assert instance.busy_s == pytest.approx(whole.instances[name].busy_s, rel=0.01)
    both: dict[str, Any] = {"device": "d", "sampled_instances": 2, "load_factor": 1.25}
    with pytest.raises(ConfigError, match="sampled_instances"):
        from_table(both, SimulateConfig)


def test_the_capacity_found_keeps_the_slo_and_one_less_does_not() -> None:
    settings = config(qps=250.0, duration_s=5.0, warmup_s=1.0, slo_s=0.02)

    def play(instances: int) -> FleetResult:
        return simulate(
            msgspec.structs.replace(settings, instances=instances), DEVICE, traffic(250.0, 5.0)
        )

    found = search(settings, DEVICE, lambda: traffic(250.0, 5.0), play)
    tried = dict(found.tried)
    assert found.needed is not None
    assert found.needed > found.at_least
    assert tried[found.needed].attainment_ratio >= 0.99 > tried[found.needed - 1].attainment_ratio


@pytest.mark.parametrize("over", [0, 1, 256, 257])
def test_a_history_over_the_window_loses_whole_steps(over: int) -> None:
    prefix = SimulatedPrefix(1000 + over, 1000, 256)
    assert len(prefix) == 1000 + over - -(-over // 256) * 256
    assert prefix.fingerprint(500) == SimulatedPrefix(1000 + over, 1000, 256).fingerprint(500)
    if over:
        assert prefix.fingerprint(500) != SimulatedPrefix(1000, 1000, 256).fingerprint(500)


def test_a_device_without_room_for_a_page_is_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.hbm_bytes"):
        run(config(kv_cache=KVConfig(hbm_bytes=100, dram_bytes=0)), [])


def test_with_an_attention_window_the_same_memory_keeps_more_users() -> None:
    settings = config(kv_cache=KVConfig(hbm_bytes=500_000, dram_bytes=1_000_000))
    ring = msgspec.structs.replace(DEVICE, attention_window_tokens=32, most_tokens=200)
    assert ring.cost.full_s(10_000, 0) == ring.cost.full_s(200, 0) < DEVICE.cost.full_s(201, 0)
    found = list(traffic(60.0))
    whole, windowed = (run(settings, found, profile)[0] for profile in (DEVICE, ring))
    assert windowed.outcomes[Outcome.DRAM_HIT] > 1.2 * whole.outcomes[Outcome.DRAM_HIT] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("arrangement", ["natural", "tiles"])
@pytest.mark.parametrize("window", [0, 100])
async def test_a_simulated_user_takes_the_bytes_of_a_real_one(
    dtype: str, arrangement: Arrangement, window: int
) -> None:
    """From the bytes of a token that `npu-gr calibrate` writes: with scales and padding."""
    real = KVLayout(
        num_layers=3,
        num_heads=4,
        qk_dim=20,
        v_dim=33,
        dtype=dtype,
        arrangement=arrangement,
        window_tokens=window,
        first_tokens=window // 10,
    )
    profile = msgspec.structs.replace(
        DEVICE,
        kv_token_bytes=real.token_bytes,
        attention_window_tokens=window,
        attention_first_tokens=window // 10,
    )
    simulated = SimulatedInstance(config(), profile, "a").tiers.pool.arena.layout
    for num_tokens in (1, 63, 64, 65, 1000):
        assert simulated.bytes(num_tokens) == real.bytes(num_tokens)


def test_a_pool_brings_what_dram_has_lost_and_conserves_its_bytes() -> None:
    """Every fetch ends once; what it brings lies in DRAM, and the pool never holds too much."""
    users = msgspec.structs.replace(USERS, num_users=300)
    found = list(traffic(80.0, 4.0, users))
    small = config(kv_cache=KVConfig(hbm_bytes=600_000, dram_bytes=600_000), warmup_s=0.0)
    profile = PoolProfile(num_bytes=2_000_000, bytes_per_s=1e9, call_s=1e-4)
    slow = PoolProfile(num_bytes=2_000_000, bytes_per_s=1e6)
    without, _ = run(small, found)
    pooled, fleet = run(msgspec.structs.replace(small, pool=profile), found)
    late, _ = run(msgspec.structs.replace(small, pool=slow), found)
    pool = fleet.pool
    assert pool is not None
    held = [value.num_bytes for value in pool._values.values()]
    assert sum(held) == pool.held_bytes <= profile.num_bytes
    assert len(pool) < len({request.user for request in found})  # it was full
    for instance in fleet.instances.values():
        check_pool(instance.tiers.pool)
        assert instance.tiers.dram is not None
        check_dram(instance.tiers.dram)
    hits = pooled.fetches[Fetched.HIT]
    assert hits > 20
    assert pooled.fetches[Fetched.ABSENT]
    assert not without.fetches
    # a hit is a reload in the place of a prefill
    assert pooled.verdicts[Verdict.RELOAD] >= pooled.fetches.total() - pooled.fetches["busy"]
    assert pooled.busy_ratio < without.busy_ratio
    assert late.fetches[Fetched.HIT] < hits / 4
    assert late.fetches[Fetched.TIMEOUT] + late.fetches[Fetched.SLOWER] > 0
    assert pooled.num_ranks == without.num_ranks == late.num_ranks


def test_a_value_of_the_pool_expires() -> None:
    found = [TrafficRequest(at, kind, user, 300, 10) for at, kind, user in (
        (1.0, "rank", "a"), (2.0, "rank", "b"), (3.0, "signal", "a"), (19.0, "rank", "b"),
        (20.0, "signal", "a"), (21.0, "rank", "a"),
    )]  # fmt: skip
    kv_cache = KVConfig(
        hbm_bytes=400 * TOKEN_BYTES,
        dram_bytes=400 * TOKEN_BYTES,
        dram_ttl_s=5.0,
        dram_ttl_jitter_ratio=0.0,
    )
    settings = config(
        kv_cache=kv_cache,
        duration_s=30.0,
        warmup_s=0.0,
        relay=RelayConfig(t_life_s=1.0),
        pool=PoolProfile(num_bytes=10**6, bytes_per_s=1e9),
    )
    outcomes, _ = run(settings, found)
    assert outcomes.fetches == {Fetched.HIT: 1, Fetched.EXPIRED: 1}


def test_what_a_simulation_does_not_have_is_rejected() -> None:
    for key, value in (("pool", "mooncake://127.0.0.1:50051"), ("dtype", "int8")):
        with pytest.raises(ConfigError, match=rf"kv_cache\.{key}"):
            from_table({"device": "d", "kv_cache": {key: value}}, SimulateConfig)
    pool = {"num_bytes": 1, "bytes_per_s": 1.0}
    with pytest.raises(ConfigError, match="it needs a DRAM tier"):
        from_table({"device": "d", "kv_cache": {"dram_bytes": 0}, "pool": pool}, SimulateConfig)
