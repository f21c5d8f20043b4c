"""A rank uses the longest usable prefix: resident before running before DRAM.

A rank waits only as long as it can still do without, and computes only what it can finish.

A user's last signal explains a miss, and is timed once.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.history import UserKey
from npu_gr.core.request import Reason, Verdict
from npu_gr.engine.cost import LEAST_TOKENS, CostModel
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.engine.kv_cache.tier import DramEntry, DramStore, PrefixKey
from npu_gr.engine.queue import JobOrder
from npu_gr.relay.config import LiveSettings, RelayConfig, TriggerConfig
from npu_gr.relay.lookup import (
    AdoptPrefill,
    ComputeAll,
    Existing,
    JoinPrefill,
    LastSignals,
    RankTime,
    ReloadCopy,
    UseResident,
    choose,
    longest,
    longest_job,
)
from npu_gr.relay.prefill_job import PrefillJob, PrefillKind, PrefillState
from tests.relay.rig import bench, tokens

LAYOUT = KVLayout(num_layers=1, num_heads=1, qk_dim=1, v_dim=1, page_tokens=4)
HISTORY = tokens(100)


def key(num_tokens: int, seed: int = 0) -> PrefixKey:
    return PrefixKey(UserKey("", "u"), "v", "l", tokens(100, seed).fingerprint(num_tokens))


def resident(num_tokens: int, seed: int = 0) -> PrefixEntry:
    pool = PrefixPool(
        KVArena(LAYOUT, 64, torch.device("cpu")), 64 * LAYOUT.page_bytes, 1.0, lambda: 0.0
    )
    return pool.reserve(key(num_tokens, seed), num_tokens)


def copied(num_tokens: int) -> DramEntry:
    arena = KVArena(LAYOUT, 64, torch.device("cpu"))
    store = DramStore(arena, ttl_s=1.0, ttl_jitter_ratio=0.0, seed=0, clock=lambda: 0.0)
    return store.reserve(key(num_tokens), num_tokens)


def prefill_job(
    num_tokens: int = 100,
    kind: PrefillKind = PrefillKind.PREFILL,
    state: PrefillState = PrefillState.RUNNING,
    joiners: int = 0,
) -> PrefillJob:
    async def fill(_: PrefillJob) -> None:
        raise AssertionError("it is not run")

    made = PrefillJob(resident(num_tokens), kind, fill, JobOrder(0.0), state)
    made.joiners = joiners
    return made


ENTRY, COPY = resident(60), copied(70)


def test_what_is_nearer_wins() -> None:
    running = prefill_job()
    for entry, each, copy in itertools.product((ENTRY, None), (running, None), (COPY, None)):
        got = choose(
            Existing(entry, each, copy, copy_pays=True, why_missing=Reason.EXPIRED), 100, 64
        )
        if entry is not None:
            assert got == UseResident(ENTRY)
        elif each is not None:
            assert got == AdoptPrefill(running)
        else:
            assert got == (ReloadCopy(COPY) if copy is not None else ComputeAll(Reason.EXPIRED))


def test_a_copy_that_does_not_pay_is_left() -> None:
    assert choose(Existing(copy=COPY), 100, 64) == ComputeAll(Reason.RELOAD_SLOWER)


@pytest.mark.parametrize("state", [PrefillState.RUNNING, PrefillState.DESERTED])
def test_only_an_unwanted_prefill_of_the_whole_history_is_adopted(state: PrefillState) -> None:
    adoptable = prefill_job(state=state)
    assert choose(Existing(job=adoptable), 100, 64) == AdoptPrefill(adoptable)
    for other in (
        prefill_job(60, state=state),  # of the beginning of the history
        prefill_job(kind=PrefillKind.RELOAD, state=state),
        prefill_job(state=PrefillState.STOPPING),  # for another rank
        prefill_job(state=PrefillState.ADOPTED),
        prefill_job(state=state, joiners=1),
    ):
        assert choose(Existing(job=other), 100, 64) == JoinPrefill(other)


def test_a_prefill_job_has_a_limited_number_of_joiners() -> None:
    assert choose(Existing(job=prefill_job(joiners=64)), 100, 64) == ComputeAll(
        Reason.REJECTED_LOAD
    )


def test_the_longest_usable_prefix_counts() -> None:
    entries = [resident(30), resident(60), resident(50)]
    assert longest(entries, HISTORY) is entries[1]
    assert longest([resident(60, seed=1)], HISTORY) is None  # other tokens
    assert longest([resident(60)], tokens(59)) is None  # longer than the history
    assert longest([], HISTORY) is None


def test_the_prefill_job_of_an_erased_user_counts_for_nothing() -> None:
    short, long = prefill_job(50), prefill_job(80)
    assert longest_job([short, long], HISTORY) is long
    long.entry.is_erased = True
    assert longest_job([short, long], HISTORY) is short


MARGIN_S = 0.01


async def test_what_a_rank_has_time_for() -> None:
    async with bench() as b:
        b.engine.cost = CostModel(0.0, 0.001, 0.0, 0.0, 0.0)  # a millisecond a token
        b.engine.objective_s = 0.05
        config = RelayConfig(margin_s=MARGIN_S)

        def time(deadline_at: float, num_tokens: int = 100) -> RankTime:
            return RankTime(config, b.engine, lambda: 10.0, num_tokens, 1, deadline_at)

        assert time(10.5).left_s == pytest.approx(0.49)
        assert time(10.5).order_at == pytest.approx(10.05)  # its objective
        assert time(10.02).order_at == pytest.approx(10.02)  # or its deadline
        assert time(10.5).patience_s == pytest.approx(0.5 - 0.1 - 2 * MARGIN_S)
        # no time to do without: until the end
        assert time(10.08).patience_s == pytest.approx(0.08 - MARGIN_S)
        assert time(9.0).patience_s == 0.0
        assert time(10.5).first_token == 0
        assert time(10.05).first_token == 60  # 40 ms for 40 tokens
        assert time(9.0).first_token == 100 - LEAST_TOKENS  # late, and still not none
        assert time(9.0, num_tokens=LEAST_TOKENS).first_token == 0
        assert time(10.05, num_tokens=0).first_token == 0
        assert time(10.05).is_enough_from(61)
        assert not time(10.05).is_enough_from(50)
        whole = RelayConfig(margin_s=MARGIN_S, degrade=False)
        assert RankTime(whole, b.engine, lambda: 10.0, 100, 1, 10.05).first_token == 0


@given(left=st.floats(0, 2), a1=st.floats(0, 0.01))
def test_after_waiting_there_is_time_to_do_without_or_no_time_was_there(
    left: float, a1: float
) -> None:
    class Idle:
        cost = CostModel(0.0, a1, 0.0, 0.0, 0.0)
        queue_s = 0.0
        objective_s = 1.0

    time = RankTime(RelayConfig(margin_s=MARGIN_S), Idle(), lambda: 0.0, 100, 1, left)
    full_s = Idle.cost.full_s(100, 1) + 2 * MARGIN_S
    if left > full_s:
        assert left - time.patience_s >= full_s - 1e-9
    else:
        assert time.patience_s == max(left - MARGIN_S, 0.0)


A, B, C = (UserKey("", user) for user in "abc")


def test_why_a_prefix_is_missing() -> None:
    signals = LastSignals(LiveSettings(RelayConfig(), TriggerConfig()))
    assert signals.why_missing(A) is Reason.NO_SIGNAL
    signals.remember(A, Verdict.SKIP_RATE, 1.0)
    assert signals.why_missing(A) is Reason.REJECTED_RATE
    signals.remember(A, Verdict.PREINFER, 2.0)
    assert signals.why_missing(A) is Reason.EXPIRED
    signals.forget(A)
    assert signals.why_missing(A) is Reason.NO_SIGNAL


def test_only_the_first_rank_after_a_signal_is_timed() -> None:
    signals = LastSignals(LiveSettings(RelayConfig(), TriggerConfig()))
    assert signals.rank_ended(A, 1.0) is None
    signals.remember(A, Verdict.PREINFER, 2.0)
    assert signals.rank_ended(A, 5.0) == 3.0
    assert signals.rank_ended(A, 6.0) is None
    signals.remember(A, Verdict.ALREADY_RESIDENT, 7.0)
    assert signals.rank_ended(A, 8.0) == 1.0


def test_the_oldest_is_forgotten_and_a_reload_changes_the_limit() -> None:
    settings = LiveSettings(RelayConfig(max_remembered=2), TriggerConfig())
    signals = LastSignals(settings)
    for user in (A, B, A, C):  # A came again after B
        signals.remember(user, Verdict.PREINFER, 0.0)
    assert [signals.why_missing(user) for user in (A, B, C)] == [
        Reason.EXPIRED,
        Reason.NO_SIGNAL,
        Reason.EXPIRED,
    ]
    settings.relay = RelayConfig(max_remembered=100)
    signals.remember(B, Verdict.PREINFER, 0.0)
    assert signals.why_missing(A) is Reason.EXPIRED
