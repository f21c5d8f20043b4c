"""`python -m benchmarks cascade`: a recommend request with and without the relay.

The engine, relay, tiers and cascade are real. One request runs at a time, each of a new user with a
history of the same length. Retrieval returns random items, in one of two ways:

    elsewhere       it waits for the time of another machine: a multiple of the prefill
    on this device  it keeps the only device thread busy with a full inference: nothing overlaps

The floor is computed from the parts measured alone: (retrieval + full inference) / (retrieval +
cached rank); it assumes that the prefill ends before the retrieval. Every request checks that
both arms return the same items.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import cast

import click
import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.frame import BACKEND, COUNT, SEED, THREADS, Line, Numbers, option, timed
from benchmarks.relay_rig import Arm, Rig, ServedArm, Shape, measure_idle
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.core.arrays import I64
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.names import Names, item_ids
from npu_gr.core.request import Outcome, RecommendAnswer, RecommendRequest
from npu_gr.core.served import ModelInfo
from npu_gr.engine.rank_engine import RankPass
from npu_gr.handlers.base import Call
from npu_gr.handlers.cascade_plan import RecommendConfig
from npu_gr.handlers.config import RankingConfig
from npu_gr.handlers.item_filters import ItemFilters
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.recommend import Cascade
from npu_gr.handlers.scored_items import ScoredItems
from npu_gr.handlers.sources import SizedSource, Source, SourceRequest
from npu_gr.metrics.registry import Metrics
from npu_gr.model.served_weights import ServedWeights
from npu_gr.service.config import SLOConfig

OPTIONS = (
    BACKEND,
    THREADS,
    SEED,
    option("--lengths", default="1024,2048", type=Numbers(), help="Tokens of a history."),
    option("--layers", default=3, type=COUNT),
    option("--count", default=15, type=click.IntRange(3), help="Requests of each arm."),
)
MULTIPLES = (1.0, 2.0, 4.0)  # time of retrieval elsewhere, relative to the prefill
ROUNDS = 3  # rounds in which the arms alternate
NO_RELAY = Arm("no relay", signals=False)
RELAY = Arm("relay")
BUDGET_S = 60.0
WITHIN = 0.85  # target, as a share of the floor


def lines(
    backend: BackendName, lengths: Sequence[int], layers: int, count: int, seed: int
) -> Iterator[Line]:
    """Yield the median of the cascade for each length of history and each retrieval.

    Args:
        backend: Name of the backend.
        lengths: Tokens of a history.
        layers: Number of layers of the ranker.
        count: Requests of each arm.
        seed: Random seed of weights and inputs.

    Raises:
        AssertionError: The relay changed the recommended items.
    """
    device = choose(backend)
    for num_tokens in lengths:
        rig = Rig(Shape(num_tokens, 100, layers), device, seed)
        rig.idle = asyncio.run(measure_idle(rig))
        for multiple in (*MULTIPLES, None):
            yield _line(rig, multiple, count)


def _line(rig: Rig, multiple: float | None, count: int) -> Line:
    found: dict[str, list[tuple[float, RecommendAnswer]]] = {
        arm.name: [] for arm in (NO_RELAY, RELAY)
    }
    for turn in range(ROUNDS):
        for arm in (NO_RELAY, RELAY):
            found[arm.name] += asyncio.run(_round(rig, arm, multiple, count // ROUNDS, turn))
    for (_, cold), (_, warm) in zip(found["no relay"], found["relay"], strict=True):
        assert warm.item_ids.tolist() == cold.item_ids.tolist(), (
            "the relay changed the recommended items"
        )
    ours, base = ([took_s for took_s, _ in found[name]] for name in ("relay", "no relay"))
    hits = np.mean([answer.outcome is Outcome.HBM_HIT for _, answer in found["relay"]])
    idle = rig.idle
    where = "on this device"
    floor = None
    if multiple is not None:
        wait_s = multiple * idle.prefill_s
        where = f"{multiple:g}x the prefill, elsewhere"
        floor = (wait_s + idle.full_s) / (wait_s + idle.rank_s)
    case = (
        f"L={rig.shape.num_tokens} M=100 layers={rig.shape.num_layers} retrieval {where} (HBM "
        f"hits {hits:.0%})"
    )
    return timed(
        "cascade", case, ours, "no relay", base, WITHIN * floor if floor else None, floor=floor
    )


async def _round(
    rig: Rig, arm: Arm, multiple: float | None, count: int, turn: int
) -> list[tuple[float, RecommendAnswer]]:
    """Run `count` requests, the same users for every arm; return their seconds and answers."""
    random = np.random.default_rng(turn)
    found = []
    serving: AbstractAsyncContextManager[ServedArm] = rig.serving(arm, 1.0)
    async with serving as served:
        ranking = _ranking(rig, served)
        source = _elsewhere(rig, multiple) if multiple is not None else _on_this_device(rig, served)
        metrics = Metrics(CollectorRegistry(), SLOConfig().objectives())
        sources = {"generate": SizedSource(source, 100)}
        # only a hook asks for names
        names = cast("Names", SimpleNamespace(item_ids=item_ids))
        filters = ItemFilters(lambda: None)
        cascade = Cascade(RecommendConfig(), lambda _: sources, metrics, filters, names)
        for number in range(-1, count):  # the first is a warm-up
            history = UserHistory.of(rig.user(random), 0, rig.model.config.max_history_tokens)
            request = RecommendRequest(
                user=UserKey("bench", f"{turn}-{number}"),
                history=HistoryRef(),
                num_items=10,
                exclude_seen=False,
                timestamp=1_900_000_000,
            )
            began_at = time.perf_counter()
            tokens = ranking.tokenize(history)
            now_at = time.monotonic()
            answer = await cascade.recommend(
                request, ranking, history, tokens, Call(now_at, now_at + BUDGET_S)
            )
            if number >= 0:
                found.append((time.perf_counter() - began_at, answer))
            served.pool.erase_user(request.user)
            await served.relay.settled()
    return found


def _ranking(rig: Rig, served: ServedArm) -> Ranking:
    shape = rig.model.config
    model = ModelInfo(
        name="bench",
        version="v",
        tasks=shape.tasks,
        actions=shape.actions,
        num_items=shape.num_items,
        max_history_tokens=shape.max_history_tokens,
        device=rig.backend.name,
        dtype=rig.layout.dtype,
    )
    metrics = Metrics(CollectorRegistry(), SLOConfig().objectives())
    items = ScoredItems(served.engine, rig.vocabulary)
    never_changed = cast(ServedWeights, None)
    settings = RankingConfig(selfcheck_ratio=0.0)
    return Ranking(settings, model, items, served.engine, served.relay, metrics, never_changed)


def _drawn(rig: Rig, events: Events) -> I64:
    """Draw random items, seeded by the history, so that both arms retrieve the same."""
    random = np.random.default_rng(int(events.items[0]))
    items: I64 = random.permutation(rig.model.config.num_items)[: rig.shape.num_candidates]
    return items


def _elsewhere(rig: Rig, multiple: float) -> Source:
    async def retrieve(asked: SourceRequest) -> I64:
        await asyncio.sleep(multiple * rig.idle.prefill_s)
        return _drawn(rig, asked.history.events)

    return retrieve


def _on_this_device(rig: Rig, served: ServedArm) -> Source:
    other = rig.tokens(rig.returning)

    async def retrieve(asked: SourceRequest) -> I64:
        await served.engine.rank(
            RankPass(other, 0, rig.candidates, 1_900_000_000), asked.call.deadline_at
        )
        return _drawn(rig, asked.history.events)

    return retrieve
