"""Full histories, deltas and stored ones give equal bits and equal reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from npu_gr.core.feature_schema.columns import as_columns
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import EVENTS, GENERATE, RANK, SIGNAL
from npu_gr.core.request import (
    EventsRequest,
    GenerateAnswer,
    GenerateRequest,
    Outcome,
    RankAnswer,
    RankRequest,
    SignalRequest,
)
from npu_gr.handlers.service import Service
from tests.features_of import random_features, values
from tests.models import tiny_model
from tests.server.test_generate_over_http import section
from tests.serving import FIRST_ID, serving, write_checkpoint

WINDOW, STEP = 64, 16
BUDGET_S = 20.0
CANDIDATES = np.arange(20, dtype=np.int64) + FIRST_ID
NUM_ITEMS = tiny_model().config.num_items
SECTIONS: dict[str, Any] = {"service": {"max_history_tokens": WINDOW, "cut_step_tokens": STEP}}


def history(
    num_events: int,
    unknown_ratio: float,
    random: np.random.Generator,
    features: tuple[Feature, ...] = (),
) -> Events:
    """Events of which a share is of items that the model lacks, times that may be equal."""
    items = random.integers(0, NUM_ITEMS, num_events) + FIRST_ID
    items[random.random(num_events) < unknown_ratio] += 1_000_000
    actions, times = random.integers(0, 3, num_events), random.integers(0, 99, num_events).cumsum()
    known = {one.name: one for one in features if one.of == "event"}
    of_events = as_columns(known, values(features, "event", num_events, random), num_events)
    return replace(Events.make(items, actions, 1_700_000_000 + times), features=of_events)


async def ranked(service: Service, user: UserKey, ref: HistoryRef) -> RankAnswer:
    request = RankRequest(user=user, candidates=CANDIDATES, history=ref, timestamp=1_800_000_000)
    return await service.serve(RANK, request, budget_s=BUDGET_S)


async def in_deltas(service: Service, user: UserKey, events: Events, cuts: list[int]) -> RankAnswer:
    """Send the history up to the first cut, then delta by delta on what the answer before named."""
    answer = await ranked(service, user, HistoryRef(events=events[: cuts[0]]))
    for begin, end in zip(cuts, [*cuts[1:], len(events)], strict=True):
        answer = await ranked(
            service, user, HistoryRef(events=events[begin:end], base=answer.history.fingerprint)
        )
    return answer


def assert_same(got: RankAnswer, want: RankAnswer) -> None:
    ours, theirs = got.history, want.history
    assert (ours.fingerprint, ours.num_tokens, ours.cut_tokens, ours.unknown_items) == (
        theirs.fingerprint,
        theirs.num_tokens,
        theirs.cut_tokens,
        theirs.unknown_items,
    )
    for task, scores in want.scores.items():
        assert np.array_equal(got.scores[task], scores), (
            f"{task}: {abs(got.scores[task] - scores).max():.2g}"
        )


@pytest.mark.parametrize("unknown_ratio", [0.0, 0.1, 0.6])
async def test_any_way_to_send_a_history_gives_the_same_bits(
    tmp_path: Path, unknown_ratio: float
) -> None:
    """With random features of events, but for the first."""
    random = np.random.default_rng(int(unknown_ratio * 10))
    features = tuple(one for one in random_features(random) if one.of == "event" and unknown_ratio)
    write_checkpoint(tmp_path / "checkpoint", features=features)
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        for turn in range(25):
            events = history(int(random.integers(1, 4 * WINDOW)), unknown_ratio, random, features)
            cuts = sorted(random.integers(0, len(events) + 1, random.integers(1, 5)).tolist())
            users = [UserKey("", f"{turn}-{way}") for way in ("whole", "deltas", "store", "base")]
            want = await ranked(service, users[0], HistoryRef(events=events))
            window = want.history.num_tokens + want.history.unknown_items
            assert want.history.cut_tokens + window == len(events)
            assert want.history.cut_tokens % STEP == 0
            assert_same(await in_deltas(service, users[1], events, cuts), want)
            for part in (events[: cuts[0]], events[cuts[0] :]):
                await service.serve(
                    EVENTS, EventsRequest(user=users[2], events=part), budget_s=BUDGET_S
                )
            assert_same(await ranked(service, users[2], HistoryRef()), want)
            sent = await service.serve(
                SIGNAL,
                SignalRequest(user=users[3], history=HistoryRef(events=events)),
                budget_s=BUDGET_S,
            )
            assert_same(
                await ranked(service, users[3], HistoryRef(base=sent.history.fingerprint)), want
            )


async def test_a_rank_by_a_delta_finds_the_prefix_of_a_signal_with_the_whole(
    tmp_path: Path,
) -> None:
    """Beyond the window, which moved, with unknown items: the prefill is not wasted."""
    random = np.random.default_rng(7)
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        user, events = UserKey("", "u"), history(3 * WINDOW, 0.2, random)
        older = await ranked(service, user, HistoryRef(events=events[:-STEP]))
        whole = SignalRequest(user=user, history=HistoryRef(events=events))
        sent = await service.serve(SIGNAL, whole, budget_s=BUDGET_S)
        await service.versions.ranker().relay.settled()
        delta = HistoryRef(events=events[-STEP:], base=older.history.fingerprint)
        answer = await ranked(service, user, delta)
        assert answer.history.fingerprint == sent.history.fingerprint
        assert answer.outcome is Outcome.HBM_HIT
        assert answer.prefix_tokens == answer.history.num_tokens


async def test_unknown_items_that_part_two_histories_part_their_names(tmp_path: Path) -> None:
    """Read today they are the same tokens; a longer delta on them is not."""
    random = np.random.default_rng(3)
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        events = history(40, 0.0, random)
        unknown = history(10, 1.0, random)
        plain = await ranked(service, UserKey("", "u"), HistoryRef(events=events))
        longer = await ranked(service, UserKey("", "u"), HistoryRef(events=unknown + events))
        assert np.array_equal(plain.scores["click"], longer.scores["click"])
        assert plain.history.fingerprint != longer.history.fingerprint


async def test_a_prompt_is_the_same_however_its_history_comes(tmp_path: Path) -> None:
    """Deltas and the store bring the newest events alone.

    The prompt has room for fewer, and skips what it lacks.
    """
    random = np.random.default_rng(5)
    sections = {**SECTIONS, "generate": section(tmp_path, cut_step_items=4)}
    async with serving(tmp_path, watched=False, **sections) as (_, service):

        async def generated(user: UserKey, ref: HistoryRef) -> GenerateAnswer:
            request = GenerateRequest(
                user=user, history=ref, num_items=5, beam_width=8, exclude_seen=False
            )
            return await service.serve(GENERATE, request, budget_s=BUDGET_S)

        for turn in range(12):
            events = history(int(random.integers(2, 4 * WINDOW)), 0.0, random)
            # of which the catalogue has a third
            events.items[:] = random.integers(0, 150, len(events))
            events.items[-1] = 1
            cut = int(random.integers(1, len(events)))
            whole, delta, stored = (
                UserKey("", f"{turn}-{way}") for way in ("whole", "delta", "store")
            )
            want = await generated(whole, HistoryRef(events=events))
            first = SignalRequest(user=delta, history=HistoryRef(events=events[:cut]))
            base = (await service.serve(SIGNAL, first, budget_s=BUDGET_S)).history.fingerprint
            await service.serve(
                EVENTS, EventsRequest(user=stored, events=events), budget_s=BUDGET_S
            )
            for got in (
                await generated(delta, HistoryRef(events=events[cut:], base=base)),
                await generated(stored, HistoryRef()),
            ):
                assert replace(got.history, origin=want.history.origin) == want.history
                assert np.array_equal(got.item_ids, want.item_ids)
                assert np.abs(got.scores - want.scores).max() < 1e-4
