"""`python -m benchmarks shared_encoder`: recommend with one shared encoder, against two models.

One instance with a project's own models serves both arms in this process, without HTTP; each
request chooses sources and order:

    one shared encoder  sources [shared_encoder], the configured order: NEXT, top k, and a pass over
                        the candidates, with one prefix
    two models          sources [generate], order rank: a beam search with its own prompt, then the
                        ranker's pass

First the median of a single recommend with a resident prefix, against a rank of as many candidates
with the same prefix. Then goodput: the highest rate of an open loop (Poisson arrivals, users who
return with one more event) at which 99 of 100 are answered within the goal. The goal is the same
for both arms: a multiple of two models' median.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import numpy as np
import torch
import uvloop

from benchmarks.frame import FILE, SEED, SET, Line, Numbers, compared, option, percentiles, timed
from benchmarks.relay_rig import allowed_late
from npu_gr.core.errors import ConfigError, NpuGrError
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import RANK, RECOMMEND
from npu_gr.core.request import OrderName, RankRequest, RecommendRequest, SourceName
from npu_gr.handlers.service import Service
from npu_gr.history_store.store import HistoryConfig
from npu_gr.service.app import instance
from npu_gr.service.config import Config, load

OPTIONS = (
    option(
        "--config",
        type=FILE,
        required=True,
        help="Configuration with a shared encoder and a generator, e.g. a project's serve.yaml.",
    ),
    SET,
    SEED,
    option("--lengths", default="128,512,1024", type=Numbers(), help="Tokens of a history."),
    option("--seconds", default=5.0, help="Seconds of each run of the open loop."),
    option("--count", default=200, type=click.IntRange(5), help="Single requests of each kind."),
)
SHOWN_AT = 1_900_000_000
BUDGET_S = 10.0
GOAL = 5.0  # goal, relative to the median of two models
LEAST_GOAL_S = 0.02  # below it the event loop would decide
USERS = 64  # returning users
NEWS = 64  # most events by which a user's history grows
HALVINGS = 4  # halvings of the interval of the highest rate
WITHIN = {1024: 1.3}  # target, from this length on: time of a recommend, in ranks
SHORT = 1.5  # target for shorter histories
TARGET = 1.6  # target: goodput of one shared encoder over two models


class Way(NamedTuple):
    """The sources and the order of one arm."""

    name: str
    sources: tuple[SourceName, ...]
    order: OrderName | None


ONE_SHARED_ENCODER = Way("one shared encoder", ("shared_encoder",), None)
TWO_MODELS = Way("two models", ("generate",), "rank")


def lines(
    config: Path,
    overrides: Sequence[str],
    lengths: Sequence[int],
    seconds: float,
    count: int,
    seed: int,
) -> Iterator[Line]:
    """Yield three lines a length: two of the median with a resident prefix, and the goodput.

    Args:
        config: Configuration file with a shared encoder and a generator.
        overrides: Overridden settings, `section.key=value`.
        lengths: Tokens of a history.
        seconds: Seconds of each run of the open loop.
        count: Single requests of each kind.
        seed: Random seed of users and arrivals.

    Raises:
        ConfigError: The configuration cannot be served, or has no cascade or generator.
    """
    given = load(config, overrides)
    torch.set_num_threads(given.threads)

    async def measure() -> list[Line]:
        async with instance(_both(given)) as (_, service):
            benches = (_Bench(service, num_tokens, seed) for num_tokens in lengths)
            return [line for bench in benches for line in await _lines(bench, seconds, count)]

    yield from uvloop.run(measure())


async def _lines(bench: _Bench, seconds: float, count: int) -> list[Line]:
    rank_s, shared_encoder_s, models_s = await bench.alone(count)
    goal_s = max(GOAL * percentiles(models_s)[0], LEAST_GOAL_S)
    ours, theirs = [
        await bench.goodput(way, goal_s, seconds) for way in (ONE_SHARED_ENCODER, TWO_MODELS)
    ]
    ratio = ours / theirs if theirs else float("inf")
    size = f"L={bench.num_tokens} M={bench.num_candidates}"
    lone = f"{size} lone recommend, prefix resident"
    case = f"{size} goodput at P99 <= {goal_s * 1e3:.0f} ms"
    return [
        timed(
            "shared_encoder",
            lone,
            shared_encoder_s,
            "a rank of as many",
            rank_s,
            1 / bench.most_ranks,
        ),
        timed("shared_encoder", lone, shared_encoder_s, "two models", models_s),
        compared(
            "shared_encoder", case, ours, "recommends/s", TWO_MODELS.name, theirs, ratio, TARGET
        ),
    ]


def _both(config: Config) -> Config:
    """Return the configuration with the sources of both arms, and without a history store."""
    if config.recommend is None or config.generate is None or config.checkpoint is None:
        raise ConfigError(
            "bench shared encoder: the configuration needs recommend, checkpoint and generate"
        )
    given = config.recommend.sources
    sources: dict[SourceName, int] = {
        "shared_encoder": given.get("shared_encoder", 200),
        "generate": given.get("generate", 100),
    }
    recommend = msgspec.structs.replace(config.recommend, sources=sources, hook=None, popular=None)
    return msgspec.structs.replace(
        config, recommend=recommend, history_store=HistoryConfig(kind="none"), record=None
    )


def request_of(way: Way, user: UserKey, events: Events) -> RecommendRequest:
    """Make the request of an arm."""
    return RecommendRequest(
        user=user,
        history=HistoryRef(events=events),
        num_items=10,
        exclude_seen=True,
        timestamp=SHOWN_AT,
        sources=way.sources,
        order=way.order,
    )


class _Bench:
    """Users with histories of one length, and the instance that serves them."""

    def __init__(self, service: Service, num_tokens: int, seed: int) -> None:
        self._service = service
        self._random = np.random.default_rng(seed)
        self._ranking = service.versions.ranker()
        self.num_tokens = min(num_tokens, self._ranking.max_events)
        recommend = service.parts.settings.config.recommend
        assert recommend is not None
        num_items = len(self._ranking.vocabulary.ids)
        self.num_candidates = min(
            recommend.sources["shared_encoder"], recommend.max_candidates, num_items
        )
        self.most_ranks = next(
            (most for least, most in WITHIN.items() if self.num_tokens >= least), SHORT
        )
        self._number = 0

    def _events(self, count: int, after: int = 1_600_000_000) -> Events:
        ids = self._ranking.vocabulary.ids
        actions = self._random.integers(0, len(self._ranking.model.actions), count)
        times = after + np.cumsum(self._random.integers(1, 3_600, count))
        return Events.make(ids[self._random.integers(0, len(ids), count)], actions, times)

    async def recommend(self, request: RecommendRequest) -> None:
        """Send one recommend."""
        answer = await self._service.serve(RECOMMEND, request, BUDGET_S)
        assert not answer.degraded, answer.stages

    async def alone(self, count: int) -> tuple[list[float], list[float], list[float]]:
        """Time a rank, a recommend of the shared encoder, and one of two models, prefix resident.

        Their order is random in each round, because the previous request affects the CPU caches.
        """
        events = self._events(self.num_tokens)
        user = UserKey("bench", f"alone {self.num_tokens}")
        candidates = self._random.permutation(self._ranking.vocabulary.ids)[: self.num_candidates]
        rank = RankRequest(
            user=user, candidates=candidates, history=HistoryRef(events=events), timestamp=SHOWN_AT
        )
        recommends = [request_of(way, user, events) for way in (ONE_SHARED_ENCODER, TWO_MODELS)]
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: self._service.serve(RANK, rank, BUDGET_S),
            lambda: self.recommend(recommends[0]),
            lambda: self.recommend(recommends[1]),
        ]
        samples: tuple[list[float], list[float], list[float]] = ([], [], [])
        for number in range(-3, count):  # the first ones make the prefixes resident
            for turn in self._random.permutation(len(asked)).tolist():
                began_at = time.perf_counter()
                await asked[turn]()
                if number >= 0:
                    samples[turn].append(time.perf_counter() - began_at)
        return samples

    async def goodput(self, way: Way, goal_s: float, seconds: float) -> float:
        """Find the highest rate that meets the goal: double it until it fails, then bisect."""
        low, high = 0.0, 8.0
        while await self._holds(way, high, goal_s, seconds):
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if await self._holds(way, middle, goal_s, seconds):
                low = middle
            else:
                high = middle
        return low

    async def _holds(self, way: Way, rate_per_s: float, goal_s: float, seconds: float) -> bool:
        """Return whether 99 of 100 requests of a run meet the goal; every run has new users."""
        self._number += 1
        count = max(20, int(rate_per_s * seconds))
        users = [UserKey("bench", f"{self._number}-{user}") for user in range(USERS)]
        histories = [self._events(max(1, self.num_tokens - NEWS)) for _ in users]
        due = np.cumsum(self._random.exponential(1 / rate_per_s, count))
        chosen = self._random.integers(0, USERS, count)
        visits = []
        for user in chosen.tolist():
            own = histories[user]
            # no growth beyond the window: if it moved, each request would miss
            if len(own) < self.num_tokens and self._random.random() < 0.5:
                histories[user] = own + self._events(1, int(own.timestamps[-1]))
            visits.append(histories[user])
        late = 0
        began_at = time.perf_counter()

        async def one(user: int, events: Events, due_at: float) -> None:
            nonlocal late
            await asyncio.sleep(due_at - time.perf_counter())
            if late > allowed_late(count):
                return  # the run has failed
            try:
                await self.recommend(request_of(way, users[user], events))
                late += time.perf_counter() - due_at > goal_s
            except (NpuGrError, AssertionError):
                late += 1

        async with asyncio.TaskGroup() as group:
            for user, events, at in zip(chosen.tolist(), visits, due.tolist(), strict=True):
                group.create_task(one(user, events, began_at + at))
        for user in users:
            await self._ranking.relay.erase(user)
        return late <= allowed_late(count)
