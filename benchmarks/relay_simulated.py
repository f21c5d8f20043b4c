"""The part `simulated` of `benchmarks relay`: the widest objective on a virtual clock.

The simulator runs the relay, the queue and the tiers that serve; passes take what the model of
their cost says. Users come in the order of a trace, each with `--lengths` events and a few more at
each return. HBM holds `HBM` of their prefixes and DRAM those of a tenth of the users, in bytes of
full attention. The costs are CPU seconds of one core, of docs/measured/rank.md: in float32 full
attention of 920 ms and a cached rank of 46 ms at 4,096 events and 100 candidates; in bfloat16 with
a window of 192 and the first 32 tokens 78 ms and 5.1 ms at any length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from benchmarks.frame import Line, compared, tell
from npu_gr.core.errors import DataError
from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.core.request import Outcome
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.relay.brownout import BrownoutConfig
from npu_gr.relay.config import RelayConfig, TriggerConfig
from npu_gr.server.admission.controller import AdmissionConfig
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.fleet import FleetResult, simulate
from npu_gr.simulate.users import TrafficRequest

TOKENS, CANDIDATES = 4096, 100
NEW_TOKENS = 16  # events between two requests of a user
LEAD = 2.0  # from a signal to its rank, in full inferences
OBJECTIVE = 3.0  # in full inferences
HBM = 16  # prefixes of full attention
TENTH = 10
TOKEN_BYTES = 8192
COUNTED, BEFORE = 600, 1200  # requests that count, and those ahead, which fill the tiers
LOWEST = 0.1  # first rate that is tried, of the capacity of full inference
STEP, STEPS = 1.1, 24  # ratio and number of the rates
SUSTAINED = 0.99
TARGET = 2.0
FULL, WINDOW = "full attention", "a window"
_PLAIN = DeviceProfile(
    a0_s=0.001,
    a1_s=(0.920 - 0.046) / TOKENS,
    b0_s=0.045 / CANDIDATES,
    copy_bytes_per_s=1e10,
    copy_host_s=50e-6,
    kv_token_bytes=TOKEN_BYTES,
    max_history_tokens=1_000_000,
)
_READ = 8 * 191 + 32  # tokens that a cold pass with the window reads
PROFILES = {
    FULL: _PLAIN,
    WINDOW: msgspec.structs.replace(
        _PLAIN,
        a1_s=(0.078 - 0.0051) / _READ,
        b0_s=0.0041 / CANDIDATES,
        most_tokens=_READ,
        attention_window_tokens=192,
        attention_first_tokens=32,
    ),
}


def lines(sessions: Sequence[int]) -> Iterator[Line]:
    """Yield, for each model, the sustained rate with the relay against full inference's."""
    for name, profile in PROFILES.items():
        tell("relay", f"simulates {name}")
        full_s = profile.cost.full_s(TOKENS, CANDIDATES)
        base, _ = _sustained(sessions, profile, full_s, relayed=False)
        rate, found = _sustained(sessions, profile, full_s, relayed=True)
        hits = found.hit_ratio(Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)
        case = (
            f"simulated, slo {OBJECTIVE}x, {name}, relay on the trace ({hits:.0%} hits, from DRAM "
            f"{found.verdicts['reload'] / max(1, found.num_ranks):.0%}, device busy "
            f"{found.busy_ratio:.0%})"
        )
        yield compared("relay", case, rate, "req/s", "full", base, rate / base, TARGET)


def _sustained(
    sessions: Sequence[int], profile: DeviceProfile, full_s: float, *, relayed: bool
) -> tuple[float, FleetResult]:
    """Find the highest rate at which 99 of 100 ranks meet the objective."""
    rates = [LOWEST / full_s * STEP**step for step in range(STEPS)]
    found: dict[int, FleetResult] = {}

    def fails(step: int) -> bool:
        found[step] = _run(sessions, profile, full_s, rates[step], relayed=relayed)
        return found[step].attainment_ratio < SUSTAINED

    last = bisect_left(range(STEPS), True, key=fails) - 1
    if last < 0:
        raise DataError("not even the lowest rate is sustained")
    return rates[last], found[last]


def _run(
    sessions: Sequence[int], profile: DeviceProfile, full_s: float, rate: float, *, relayed: bool
) -> FleetResult:
    count = BEFORE + COUNTED
    random = np.random.default_rng(0)
    due = np.cumsum(random.exponential(1 / rate, count))
    users = len(set(sessions[:count]))
    each = TOKENS * TOKEN_BYTES
    config = SimulateConfig(
        device=profile,
        qps=rate,
        duration_s=float(due[-1]),
        warmup_s=float(due[BEFORE]),
        slo_s=OBJECTIVE * full_s,
        budget_s=12 * full_s,
        admission=AdmissionConfig(enabled=False),
        brownout=BrownoutConfig(enabled=False),
        relay=RelayConfig(enabled=relayed, degrade=False, t_life_s=max(1.0, 10 * full_s)),
        trigger=TriggerConfig(policy="always", min_prefix_tokens=1, max_inflight=1_000_000),
        kv_cache=KVConfig(
            hbm_bytes=HBM * each,
            dram_bytes=users // TENTH * each if relayed else 0,
            dram_ttl_s=1e9,
        ),
    )
    return simulate(config, profile, _traffic(sessions[:count], due.tolist(), full_s, relayed))


def _traffic(
    sessions: Sequence[int], due: Sequence[float], full_s: float, signals: bool
) -> Iterator[TrafficRequest]:
    """Yield signals, and ranks `LEAD` full inferences later, in time order."""
    lengths: dict[int, int] = {}
    lead_s = LEAD * full_s
    made = []
    for session, at in zip(sessions, due, strict=True):
        lengths[session] = lengths.get(session, TOKENS - NEW_TOKENS) + NEW_TOKENS
        kinds = ((SIGNAL.name, at), (RANK.name, at + lead_s))[not signals :]
        made += [
            TrafficRequest(when, kind, str(session), lengths[session], CANDIDATES)
            for kind, when in kinds
        ]
    yield from sorted(made)
