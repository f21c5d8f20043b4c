"""Where a cascade's candidates come from: the ranker and its counts, generate, match, and a list of popular items."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ColdUser
from npu_gr.core.history import HistoryRef, UserKey
from npu_gr.core.kinds import GENERATE, MATCH
from npu_gr.core.request import GenerateRequest, MatchRequest
from npu_gr.jobs.base import Call
from npu_gr.jobs.cascade_plan import Denied, among
from npu_gr.jobs.histories import UserHistory
from npu_gr.jobs.match import MatchJob
from npu_gr.jobs.ranking import Ranking
from npu_gr.jobs.trunk import TrunkUse
from npu_gr.jobs.versions import Versions
from npu_gr.metrics.registry import Metrics


class SourceRequest(NamedTuple):
    """What a source is asked for."""

    user: UserKey
    history: UserHistory
    num_items: int
    denied: Denied
    exclude_seen: bool
    call: Call
    ranking: Ranking  # the version that serves the request
    rows: I64  # [n] the known items of its history as that version's item rows, oldest first
    trunk: TrunkUse


POPULAR = "popular"  # the list of popular items, among the names of sources

Source = Callable[[SourceRequest], Awaitable[I64]]
"""Answers items, best first, each once. Raises ColdUser if it knows nothing of the user, NpuGrError if it failed."""


class SizedSource(NamedTuple):
    """A source, and how many items it is asked for."""

    ask: Source
    num_items: int
    waits: bool = True  # for the device, or for others; False = it answers at once


async def from_trunk(asked: SourceRequest) -> I64:
    """Search the ranker's own items with its own user vector."""
    return await asked.trunk.find(asked.num_items, asked.denied, asked.call)


async def from_transitions(asked: SourceRequest) -> I64:
    """List what most often followed the last events."""
    ranking = asked.ranking
    if ranking.order is None or not len(asked.rows):
        raise ColdUser("no item of the history has transitions")
    found = ranking.vocabulary.ids_of(ranking.order.top(asked.rows, asked.num_items + len(asked.denied.ids)))
    return found[~among(found, asked.denied.ids)][: asked.num_items]


async def from_neighbours(asked: SourceRequest) -> I64:
    """List what has most in common with the history: what the same users had."""
    order = asked.ranking.order_sum
    rows = asked.rows[:0] if order is None else order.nearest(asked.rows, asked.num_items + len(asked.denied.ids))
    if not len(rows):
        raise ColdUser("no item of the history has neighbours")
    found = asked.ranking.vocabulary.ids_of(rows)
    return found[~among(found, asked.denied.ids)][: asked.num_items]


def from_generation(versions: Versions, metrics: Metrics) -> Source:
    """Make the source that searches with the generator in service."""

    async def retrieve(asked: SourceRequest) -> I64:
        began_at = time.monotonic()
        request = GenerateRequest(
            user=asked.user,
            history=HistoryRef(),
            num_items=asked.num_items,
            exclude_seen=False,  # what was seen is among the denied items
            deny_items=asked.denied.ids,
        )
        generation = versions.generator()
        with generation.use:
            answer = await generation.generate(request, asked.history, asked.call)
        metrics.generate.answered(answer)
        metrics.requests.answered(GENERATE, answer, time.monotonic() - began_at)
        return answer.item_ids

    return retrieve


def from_match(job: MatchJob, metrics: Metrics) -> Source:
    """Make the source that searches by the user's vector."""

    async def retrieve(asked: SourceRequest) -> I64:
        began_at = time.monotonic()
        request = MatchRequest(
            user=asked.user,
            num_items=asked.num_items,
            exclude_seen=asked.exclude_seen,
            deny_items=asked.denied.ids,
        )
        answer = await job.match(request, asked.history.events.items, asked.call)
        metrics.requests.answered(MATCH, answer, time.monotonic() - began_at)
        return answer.item_ids

    return retrieve
