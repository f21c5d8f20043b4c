"""Graphs of passes are captured on every stream before the first request, and then replayed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from npu_gr.backend.calls import GraphShape
from npu_gr.backend.npu import hstu_slots
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.core.history import HistoryReport
from npu_gr.engine.graph_capture import capture_graphs
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import JobOrder, SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.history_tokenizer import Tokens
from tests.backend.npu.fake_device import FakeRuntime
from tests.models import events, tiny_model

FAR = float("inf")


@pytest.mark.parametrize("streams", [1, 2])
async def test_no_rank_or_prefill_captures_a_graph(
    monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)
    monkeypatch.setattr(hstu_slots, "GRAPH_ROWS", (32, 64))
    monkeypatch.setattr(hstu_slots, "LEAST_GRAPH_KEYS", 256)
    backend = NPUBackend(npu=FakeRuntime().as_npu())
    backend.on_fallback = pytest.fail
    outcomes = list[str]()
    backend.on_graph = outcomes.append
    scheduler = Scheduler(
        SchedulerConfig(streams=streams, max_batch_requests=2, prefill_chunk_tokens=64),
        backend.stream,
    )
    model = tiny_model(qk_dim=16)
    shape = model.config
    layout = KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
    )
    arena = KVArena(layout, 9, torch.device("cpu"))
    engine = RankEngine(model, backend, scheduler, arena)
    history = events(250)
    tokens = Tokens(history, history.items, HistoryReport(fingerprint="f", num_tokens=250))
    shapes = backend.graph_shapes(2, len(tokens), 64)
    assert len(shapes) == 2 * 2 * 2 + 1, "2 widths, 2 numbers of rows and requests; a prefill"
    assert shapes[0] == GraphShape(1, 32, 256, has_candidates=True)
    scheduler.start()
    try:
        await capture_graphs(engine, shapes, tokens, PageRun(8, 1))
        assert outcomes == ["captured"] * (len(shapes) * streams)
        assert not any(plane[:, 8].any() for plane in (*arena._keys, *arena._values))
        outcomes.clear()
        runs = (PageRun(0, 4),)
        await engine.prefill(tokens[:200], runs, FAR, JobOrder(FAR))
        ranks = [
            RankPass(tokens[:200], 0, np.arange(count), 10**9, CachedPrefix(runs, 199))
            for count in (1, 20, 40, 60)
        ]
        await asyncio.gather(*(engine.rank(one, FAR) for one in ranks))
    finally:
        await scheduler.stop()
    assert set(outcomes) == {"replayed"}
