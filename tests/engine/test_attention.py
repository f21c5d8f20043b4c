"""The way of a ranker's attention is measured and compared before it is used; one that is wrong is refused."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_gr.backend.calls import HstuCall, HstuShape
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.errors import ConfigError, DeviceError
from npu_gr.core.history import HistoryReport
from npu_gr.core.served import AttentionWay
from npu_gr.engine.attention import Trial, choose_way, fastest, possible
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.engine.scheduler import Scheduler
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import KVLayout, PageRun
from tests.models import events, tiny_model

RUNS = (PageRun(0, 4),)


class Ways(TorchOps):
    """A device with three ways: a right one, one that is a little off, one that fails; and torch ops."""

    name = kernels = "test"

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.ops = way, {"hstu_attention": way}

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        return "right", "off", "lost", "torch"

    def running(self, way: str) -> Self:
        return type(self)(way)

    def hstu_targets(self, call: HstuCall) -> Tensor:
        if self.way == "lost":
            raise RuntimeError("no such kernel")
        found = super().hstu_targets(call)
        if self.way == "nan of pages" and len(call.cached) > 1:
            return found * float("nan")
        return found.flip(1) if self.way == "off" else found  # a factor would be lost in the norm


@pytest.fixture
async def engine() -> AsyncIterator[RankEngine]:
    model = tiny_model()
    shape = model.config
    layout = KVLayout(num_layers=shape.num_layers, num_heads=shape.num_heads, qk_dim=shape.qk_dim, v_dim=shape.v_dim)
    backend = Ways()
    scheduler = Scheduler(SchedulerConfig(), backend.stream)
    scheduler.start()
    yield RankEngine(model, backend, scheduler, KVArena(layout, 4, torch.device("cpu")))
    await scheduler.stop()


def trial() -> Trial:
    history = events(100)
    tokens = Tokens(history, history.items, HistoryReport(fingerprint="f", num_tokens=100))
    return Trial(tokens, 80, 30, np.arange(9), RUNS)


def took(engine: RankEngine, monkeypatch: pytest.MonkeyPatch, ms: dict[str, float]) -> None:
    """Every pass runs; its time is the way's."""

    async def timed(run: Callable[[], Any]) -> float:
        await engine.scheduler.call(run, float("inf"))
        return ms[engine.backend.ops["hstu_attention"]] / 1e3

    monkeypatch.setattr(engine, "timed", timed)


@pytest.mark.parametrize(
    ("right_ms", "torch_ms", "best"),
    [(3.0, 9.0, "right"), (9.0, 3.0, "torch"), (3.0, 3.0, "right"), (3.0, 2.9, "right")],
)
async def test_the_fastest_right_way_is_taken_and_of_equals_the_first(
    engine: RankEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    right_ms: float,
    torch_ms: float,
    best: str,
) -> None:
    took(engine, monkeypatch, {"right": right_ms, "off": 0.1, "lost": 0.1, "torch": torch_ms})
    caplog.set_level(logging.INFO, "npu_gr.engine.attention")
    tried = await choose_way(engine, engine.backend, possible(engine, engine.backend, "auto"), trial())
    assert engine.backend.ops["hstu_attention"] == best
    right, off, lost, plain = tried
    assert (right.name, right.total_ms, right.drift) == ("right", 2 * right_ms, 0.0)
    assert (plain.name, plain.total_ms) == ("torch", 2 * torch_ms)
    assert off.total_ms == lost.total_ms == float("inf")
    assert "differ from plain torch ops'" in off.refused
    assert lost.refused == "RuntimeError on the device"
    assert f"attention by {best}: right {right_ms:.2f} ms a chunk" in caplog.text
    assert "lost refused: RuntimeError on the device" in caplog.text
    assert engine.scheduler.failures_in_a_row == 0, "an instance that serves by another way is well"
    for plane in (*engine.arena._keys, *engine.arena._values):
        assert not plane.any(), "the pages are given back as they were"


async def test_a_single_way_is_refused_where_it_computes_something_else(engine: RankEngine) -> None:
    with pytest.raises(ConfigError, match=r"attention: off is of no use here: scores differ .* the limit is 1e-03"):
        await choose_way(engine, engine.backend, ["off"], trial())


async def test_scores_that_are_no_numbers_are_refused_also_behind_right_ones(engine: RankEngine) -> None:
    with pytest.raises(ConfigError, match=r"attention: nan of pages is of no use here: scores differ .* by nan of"):
        await choose_way(engine, engine.backend, ["nan of pages"], trial())


async def test_torch_ops_that_fail_are_a_device_that_fails(engine: RankEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> Tensor:
        raise RuntimeError("lost")

    monkeypatch.setattr(Ways, "hstu_targets", lost)
    with pytest.raises(DeviceError):
        await choose_way(engine, engine.backend, ["right", "torch"], trial())


async def test_a_way_that_cannot_run_the_ranker_is_named(engine: RankEngine) -> None:
    assert possible(engine, engine.backend, "torch") == ("torch",)
    with pytest.raises(ConfigError, match="attention: triton cannot run this ranker here; what can: right, off, lost"):
        possible(engine, engine.backend, "triton")


def test_a_later_way_must_be_worth_it() -> None:
    ways = [AttentionWay(name=str(ms), prefill_ms=ms, rank_ms=0.0) for ms in (10.0, 9.6, 9.4, 9.0)]
    assert fastest(ways).name == "9.4"
    assert fastest([AttentionWay(name="a", refused="no"), ways[0]]).name == "10.0"
