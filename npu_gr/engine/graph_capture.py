"""Captures the device graphs of a ranker before its first request.

A graph that is missing when requests come costs each stream a capture, which waits for the whole
device. So every shape that the backend lists is run once on every stream. The passes read and write
one borrowed page, whose bytes nothing else needs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from npu_gr.backend.calls import GraphShape
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix, warmup_order
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.model.history_tokenizer import Tokens

log = logging.getLogger(__name__)

MEET_S = 5.0  # a stream that is busy for longer captures its graph in its first such pass


async def capture_graphs(
    engine: RankEngine, shapes: Sequence[GraphShape], tokens: Tokens, page: PageRun
) -> None:
    """Run a pass of each shape once on every stream.

    Args:
        engine: Engine of the ranker.
        shapes: Result of the backend's `graph_shapes`.
        tokens: A history of the greatest length.
        page: A borrowed page; it holds zeros afterwards.

    Raises:
        Overloaded, DeviceError, Unavailable: As `Scheduler.call`.
    """
    config = engine.scheduler.config
    try:
        for shape in shapes:
            meeting = threading.Barrier(config.streams)
            run = partial(_on_a_stream, engine, _passes(engine, tokens, shape, page), meeting)
            await asyncio.gather(
                *(
                    engine.scheduler.call(run, float("inf"), warmup_order())
                    for _ in range(config.streams)
                )
            )
    finally:
        await engine.zero(engine.arena, [page])
    log.info("captured the graphs of %d shapes on %d streams", len(shapes), config.streams)


def _on_a_stream(
    engine: RankEngine, passes: Sequence[RankPass], meeting: threading.Barrier
) -> None:
    """Wait until every stream has one of these jobs, since a graph belongs to its stream."""
    with suppress(threading.BrokenBarrierError):
        meeting.wait(MEET_S)
    engine.forward(passes)


def _passes(engine: RankEngine, tokens: Tokens, shape: GraphShape, page: PageRun) -> list[RankPass]:
    new = 0 if shape.has_candidates else min(shape.rows, len(tokens))
    cached = max(0, min(len(tokens) - new, shape.keys - shape.rows))
    pages = (page,) * -(-(cached + new) // engine.arena.layout.page_tokens)
    candidates = np.zeros(shape.rows if shape.has_candidates else 0, np.int64)
    one = RankPass(
        tokens[: cached + new],
        0,
        candidates,
        int(tokens.events.timestamps.max(initial=0)),
        cached=CachedPrefix(pages, cached) if cached else None,
        keep=None if shape.has_candidates else pages,
    )
    return [one] * shape.requests
