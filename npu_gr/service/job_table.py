"""Make the handler of each kind: one entry per kind of `KINDS`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_gr.core.kinds import ERASE, EVENTS, GENERATE, INGEST, KINDS, MATCH, RANK, RECOMMEND, SIGNAL
from npu_gr.core.settings import LiveConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.base import KindJob
from npu_gr.handlers.cascade_plan import (
    HISTORY,
    NEIGHBOURS,
    POPULAR,
    SHARED_ENCODER,
    TRANSITIONS,
    RecommendConfig,
)
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.item_filters import ItemFilters
from npu_gr.handlers.lookups import Lookups, RecentItems
from npu_gr.handlers.match import MatchJob, ServedVectors
from npu_gr.handlers.recommend import Cascade, RecommendJob
from npu_gr.handlers.scored_items import CoverageRule, Items
from npu_gr.handlers.sources import (
    SizedSource,
    Source,
    from_generation,
    from_history,
    from_match,
    from_neighbours,
    from_shared_encoder,
    from_transitions,
)
from npu_gr.handlers.versions import GenerateJob, RankJob, ServedNames, SignalJob, Versions
from npu_gr.handlers.writes import EraseJob, EventsJob, IngestJob
from npu_gr.metrics.registry import Metrics
from npu_gr.service.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts that handlers share."""

    settings: LiveConfig[Config]
    versions: Versions
    histories: Histories
    vectors: ServedVectors | None  # None without the section match
    scheduler: Scheduler
    metrics: Metrics
    recent: RecentItems = field(default_factory=RecentItems)  # of the events that are written


AnyJob = KindJob[Any, Any]
Maker = Callable[[Shared, Mapping[str, AnyJob]], Awaitable[AnyJob]]
"""Makes a handler from the shared parts and the handlers of earlier kinds in `KINDS`."""


def _filters(shared: Shared) -> ItemFilters:
    generators = shared.versions.generators
    names = ServedNames(shared.histories, shared.versions, shared.vectors)
    return ItemFilters(
        lambda: None if generators is None else generators.current.items, names.item_ids
    )


async def _signal(shared: Shared, _: Mapping[str, AnyJob]) -> SignalJob:
    return SignalJob(shared.versions, shared.histories, shared.metrics)


async def _rank(shared: Shared, _: Mapping[str, AnyJob]) -> RankJob:
    return RankJob(shared.versions, shared.histories, shared.metrics)


async def _generate(shared: Shared, _: Mapping[str, AnyJob]) -> GenerateJob:
    return GenerateJob(shared.versions, shared.histories, shared.metrics)


async def _match(shared: Shared, _: Mapping[str, AnyJob]) -> MatchJob:
    assert shared.vectors is not None
    job = MatchJob(
        shared.vectors,
        shared.histories,
        _filters(shared),
        shared.scheduler,
        shared.metrics,
        lambda: shared.settings.config.slo.objective_s(MATCH.name),
    )
    await job.start()
    return job


async def _recommend(shared: Shared, jobs: Mapping[str, AnyJob]) -> RecommendJob:
    config = shared.settings.config.recommend
    assert config is not None
    made: dict[str, Source] = {
        SHARED_ENCODER: from_shared_encoder,
        TRANSITIONS: from_transitions,
        NEIGHBOURS: from_neighbours,
        HISTORY: from_history,
    }
    if GENERATE.name in jobs:
        made[GENERATE.name] = from_generation(shared.versions, shared.metrics)
    if isinstance(match := jobs.get(MATCH.name), MatchJob):
        made[MATCH.name] = from_match(match, shared.metrics)
    at_once = (TRANSITIONS, NEIGHBOURS, HISTORY)

    def sources(config: RecommendConfig) -> dict[str, SizedSource]:
        return {
            str(name): SizedSource(made[name], num_items, waits=name not in at_once)
            for name, num_items in config.sources.items()
        }

    names = ServedNames(shared.histories, shared.versions, shared.vectors)
    cascade = Cascade(config, sources, shared.metrics, _filters(shared), names)
    return RecommendJob(cascade, shared.versions, shared.histories)


async def _events(shared: Shared, _: Mapping[str, AnyJob]) -> EventsJob:
    return EventsJob(shared.versions, shared.histories, shared.recent)


async def _ingest(shared: Shared, _: Mapping[str, AnyJob]) -> IngestJob:
    return IngestJob(shared.versions, shared.histories, shared.recent)


async def _erase(shared: Shared, _: Mapping[str, AnyJob]) -> EraseJob:
    return EraseJob(shared.versions, shared.histories, shared.vectors)


MAKERS: dict[str, Maker] = {
    SIGNAL.name: _signal,
    RANK.name: _rank,
    GENERATE.name: _generate,
    MATCH.name: _match,
    RECOMMEND.name: _recommend,
    EVENTS.name: _events,
    INGEST.name: _ingest,
    ERASE.name: _erase,
}


def cascade_of(jobs: Mapping[str, AnyJob]) -> Cascade | None:
    """Return the parts of all cascades; None without the section `recommend`."""
    job = jobs.get(RECOMMEND.name)
    return job.cascade if isinstance(job, RecommendJob) else None


def lookups(shared: Shared, jobs: Mapping[str, AnyJob]) -> Lookups:
    """Make what answers look-ups of users and items."""
    cascade = cascade_of(jobs)
    nothing = np.empty(0, np.int64)
    return Lookups(
        shared.versions,
        shared.histories,
        shared.vectors,
        _filters(shared),
        shared.recent,
        lambda: nothing if cascade is None else cascade.parts.popular,
    )


def coverage_rule(shared: Shared, jobs: Mapping[str, AnyJob]) -> CoverageRule:
    """Make the coverage rule of the cascade's sources; empty without a cascade."""
    items: dict[str, Items] = {}
    if (cascade := cascade_of(jobs)) is not None:
        items[POPULAR] = lambda: cascade.parts.popular
    if GENERATE.name in jobs:
        items[GENERATE.name] = lambda: shared.versions.generator().items.item_ids()
    if shared.vectors is not None:
        items[MATCH.name] = shared.vectors.item_ids
    return CoverageRule(
        shared.settings.config.recommend,
        lambda: shared.versions.ranker().vocabulary,
        items,
        shared.metrics.recommend.covers,
    )


async def build_jobs(shared: Shared) -> dict[str, AnyJob]:
    """Make the handlers of all configured kinds.

    Returns:
        Handlers by the name of their kind.

    Raises:
        ConfigError: the vectors, the hook or the list of popular items cannot be used.
    """
    jobs: dict[str, AnyJob] = {}
    for name, kind in KINDS.items():
        if kind.section is None or getattr(shared.settings.config, kind.section) is not None:
            jobs[name] = await MAKERS[name](shared, jobs)
    return jobs
