"""Which prefix a rank uses, of what exists: resident before running before DRAM, and the longest usable one of each."""

from __future__ import annotations

import itertools

import pytest
import torch

from npu_gr.core.history import UserKey
from npu_gr.core.request import Reason
from npu_gr.engine.job import JobOrder
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.dram_store import DramEntry, DramStore
from npu_gr.engine.kv.keys import PrefixKey
from npu_gr.engine.kv.layout import KVLayout
from npu_gr.engine.kv.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.relay.find import (
    AdoptPrefill,
    ComputeAll,
    Existing,
    JoinProducer,
    ReloadCopy,
    UseResident,
    choose,
    longest,
    longest_producer,
)
from npu_gr.relay.producer import Producer, ProducerKind, ProducerState
from tests.relay.rig import tokens

LAYOUT = KVLayout(num_layers=1, num_heads=1, qk_dim=1, v_dim=1, page_tokens=4)
HISTORY = tokens(100)


def key(num_tokens: int, seed: int = 0) -> PrefixKey:
    return PrefixKey(UserKey("", "u"), "v", "l", tokens(100, seed).fingerprint(num_tokens))


def resident(num_tokens: int, seed: int = 0) -> PrefixEntry:
    pool = PrefixPool(KVArena(LAYOUT, 64, torch.device("cpu")), 64 * LAYOUT.page_bytes, 1.0, lambda: 0.0)
    return pool.reserve(key(num_tokens, seed), num_tokens)


def copied(num_tokens: int) -> DramEntry:
    arena = KVArena(LAYOUT, 64, torch.device("cpu"))
    store = DramStore(arena, ttl_s=1.0, ttl_jitter_ratio=0.0, seed=0, clock=lambda: 0.0)
    return store.reserve(key(num_tokens), num_tokens)


def producer(
    num_tokens: int = 100,
    kind: ProducerKind = ProducerKind.PREFILL,
    state: ProducerState = ProducerState.RUNNING,
    joiners: int = 0,
) -> Producer:
    async def fill(_: Producer) -> None:
        raise AssertionError("it is not run")

    made = Producer(resident(num_tokens), kind, fill, JobOrder(0.0), state)
    made.joiners = joiners
    return made


ENTRY, COPY = resident(60), copied(70)


def test_what_is_nearer_wins() -> None:
    running = producer()
    for entry, each, copy in itertools.product((ENTRY, None), (running, None), (COPY, None)):
        got = choose(Existing(entry, each, copy, copy_pays=True, why_missing=Reason.EXPIRED), 100, 64)
        if entry is not None:
            assert got == UseResident(ENTRY)
        elif each is not None:
            assert got == AdoptPrefill(running)
        else:
            assert got == (ReloadCopy(COPY) if copy is not None else ComputeAll(Reason.EXPIRED))


def test_a_copy_that_does_not_pay_is_left() -> None:
    assert choose(Existing(copy=COPY), 100, 64) == ComputeAll(Reason.RELOAD_SLOWER)


@pytest.mark.parametrize("state", [ProducerState.RUNNING, ProducerState.DESERTED])
def test_only_an_unwanted_prefill_of_the_whole_history_is_adopted(state: ProducerState) -> None:
    adoptable = producer(state=state)
    assert choose(Existing(producer=adoptable), 100, 64) == AdoptPrefill(adoptable)
    for other in (
        producer(60, state=state),  # of the beginning of the history
        producer(kind=ProducerKind.RELOAD, state=state),
        producer(state=ProducerState.STOPPING),  # for another rank
        producer(state=ProducerState.ADOPTED),
        producer(state=state, joiners=1),
    ):
        assert choose(Existing(producer=other), 100, 64) == JoinProducer(other)


def test_a_producer_has_a_limited_number_of_joiners() -> None:
    assert choose(Existing(producer=producer(joiners=64)), 100, 64) == ComputeAll(Reason.REJECTED_LOAD)


def test_the_longest_usable_prefix_counts() -> None:
    entries = [resident(30), resident(60), resident(50)]
    assert longest(entries, HISTORY) is entries[1]
    assert longest([resident(60, seed=1)], HISTORY) is None  # other tokens
    assert longest([resident(60)], tokens(59)) is None  # longer than the history
    assert longest([], HISTORY) is None


def test_the_producer_of_an_erased_user_counts_for_nothing() -> None:
    short, long = producer(50), producer(80)
    assert longest_producer([short, long], HISTORY) is long
    long.entry.is_erased = True
    assert longest_producer([short, long], HISTORY) is short
