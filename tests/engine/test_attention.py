"""The way of a ranker's attention is measured and compared before it is used.

One that is wrong is rejected.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_gr.backend.base import HSTU
from npu_gr.backend.calls import HstuCall, HstuShape
from npu_gr.backend.tiles import Tiles
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import ConfigError, DeviceError
from npu_gr.core.history import HistoryReport
from npu_gr.core.served import AttentionWay
from npu_gr.engine.attention import Trial, choose_way, possible
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.engine.scheduler import Scheduler
from npu_gr.engine.ways import fastest
from npu_gr.model.history_tokenizer import Tokens
from tests.models import events, tiny_model

RUNS = (PageRun(0, 4),)


def with_next_row(x: Tensor) -> Tensor:
    """The same rows, and the one behind them in memory."""
    return torch.as_strided(x, (len(x) + 1, *x.shape[1:]), x.stride(), x.storage_offset())


class Ways(TorchOps):
    """A device with three ways: a right one, one that is a little off, one that fails.

    And torch ops.

    Others are right on a long history of one user, whose pages have zeros behind it.
    """

    name = kernels = "test"
    pages_at = 0  # where the arena is

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.ops = way, {"hstu_attention": way}
        self._last: HstuCall | None = None

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        return "right", "off", "lost", "torch"

    def running(self, way: str, op: str = HSTU) -> Self:
        assert op == HSTU
        return type(self)(way)

    def hstu_targets(self, call: HstuCall) -> Tensor:
        if self.way == "lost":
            raise RuntimeError("no such kernel")
        last, self._last = self._last, call
        slabs = [slab for slab in call.cached if not isinstance(slab, Tiles)]
        kept = [slab for slab in slabs if slab[0].untyped_storage().data_ptr() == self.pages_at]
        if (
            self.way == "reads the other's"
            and last is not None
            and last.bias.time is call.bias.time
            and kept
        ):
            # a second request in the same layer
            call = call._replace(cached=last.cached, times=last.times)
        if self.way == "spoils" and kept and len(call.times) == 1:
            call = call._replace(cached=[(k, v / 1.05) for k, v in kept])
        found = super().hstu_targets(call)
        if self.way == "reads on" and kept:
            found = found + with_next_row(kept[-1][1])[-1]
        if self.way == "writes on" and kept:
            with_next_row(kept[-1][0])[-1] = 0.0
        if self.way == "unsteady":
            found = found + torch.rand_like(found) * 1e-7
        if self.way == "long" and len(call.times) == 1:
            return found.flip(1)
        if self.way == "whole pages" and len(call.times) == 65:
            return found.flip(1)
        if self.way == "nan of pages" and len(call.cached) > 1:
            return found * float("nan")
        return found.flip(1) if self.way == "off" else found  # a factor would be lost in the norm


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RankEngine]:
    model = tiny_model()
    shape = model.config
    layout = KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
    )
    backend = Ways()
    scheduler = Scheduler(SchedulerConfig(), backend.stream)
    scheduler.start()
    arena = KVArena(layout, 4, torch.device("cpu"))
    monkeypatch.setattr(Ways, "pages_at", arena._keys[0].untyped_storage().data_ptr())
    yield RankEngine(model, backend, scheduler, arena)
    await scheduler.stop()


def trial() -> Trial:
    history = events(100)
    tokens = Tokens(history, history.items, HistoryReport(fingerprint="f", num_tokens=100))
    other = events(100, seed=1)
    others = Tokens(other, other.items, HistoryReport(fingerprint="o", num_tokens=100))
    return Trial(tokens, 80, 30, np.arange(9), RUNS, others)


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
    tried = await choose_way(
        engine, engine.backend, possible(engine, engine.backend, "auto"), trial()
    )
    assert engine.backend.ops["hstu_attention"] == best
    right, off, lost, plain = tried
    assert (right.name, right.total_ms, right.drift) == ("right", 2 * right_ms, 0.0)
    assert (plain.name, plain.total_ms) == ("torch", 2 * torch_ms)
    assert off.total_ms == lost.total_ms == float("inf")
    assert "differ from those of plain torch ops" in off.rejected
    assert lost.rejected == "RuntimeError on the device"
    assert f"attention by {best}: right {right_ms:.2f} ms a chunk" in caplog.text
    assert "lost rejected: RuntimeError on the device" in caplog.text
    assert engine.scheduler.failures_in_a_row == 0, "an instance that serves by another way is well"
    for plane in (*engine.arena._keys, *engine.arena._values):
        assert not plane.any(), "the pages are given back as they were"


async def test_a_single_way_is_rejected_where_it_computes_something_else(
    engine: RankEngine,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"attention: off cannot be used here: scores differ .* the "
        r"limit is 1e-03",
    ):
        await choose_way(engine, engine.backend, ["off"], trial())


async def test_scores_that_are_no_numbers_are_rejected_also_behind_right_ones(
    engine: RankEngine,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"attention: nan of pages cannot be used here: scores "
        r"differ .* by nan of",
    ):
        await choose_way(engine, engine.backend, ["nan of pages"], trial())


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (
            "reads on",
            "1 of 1 tokens cached: scores differ from those of plain torch ops by nan of their",
        ),
        ("reads the other's", "requests of two users in a pass: scores differ"),
        ("writes on", "1 of 1 tokens cached: a rank writes into pages"),
        ("spills", "1 of 1 tokens cached: a prefill writes outside of its tokens"),
        ("spoils", "1 of 1 tokens cached: keys and values differ"),
        ("unsteady", "1 of 1 tokens cached: a second run of the same request gives other scores"),
        ("long", "1 of 1 tokens cached: scores differ"),
        ("whole pages", "65 of 65 tokens cached: scores differ"),
    ],
)
async def test_a_way_that_is_right_on_one_long_history_alone_is_rejected(
    engine: RankEngine, monkeypatch: pytest.MonkeyPatch, way: str, says: str
) -> None:
    took(engine, monkeypatch, {way: 1.0, "torch": 9.0})
    write = KVArena.write

    def wrongly(
        self: KVArena, layer: int, runs: Sequence[PageRun], start: int, k: Tensor, v: Tensor
    ) -> None:
        now = engine.backend.ops["hstu_attention"]
        write(
            self, layer, runs, start, k, v * 1.05 if now == "spoils" and start + len(k) == 1 else v
        )
        if now == "spills" and (start + len(k)) % 64:
            write(
                self, layer, runs, start + len(k), torch.zeros_like(k[:1]), torch.zeros_like(v[:1])
            )

    monkeypatch.setattr(KVArena, "write", wrongly)
    rejected, plain = await choose_way(engine, engine.backend, [way, "torch"], trial())
    assert says in rejected.rejected
    assert rejected.drift is not None
    assert rejected.drift < 1e-5, "of the long history all scores are right"
    assert (plain.name, plain.rejected) == ("torch", "")
    assert engine.backend.ops["hstu_attention"] == "torch"
    for plane in (*engine.arena._keys, *engine.arena._values):
        assert not plane.any(), "no NaN stays behind"


async def test_a_way_need_not_be_steadier_than_torch_ops(
    engine: RankEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ways, "running", lambda _self, way, _op=HSTU: Ways("unsteady"))
    took(engine, monkeypatch, {"unsteady": 1.0})
    (way,) = await choose_way(engine, engine.backend, ["any"], trial())
    assert not way.rejected


async def test_torch_ops_that_fail_are_a_device_that_fails(
    engine: RankEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> Tensor:
        raise RuntimeError("lost")

    monkeypatch.setattr(Ways, "hstu_targets", lost)
    with pytest.raises(DeviceError):
        await choose_way(engine, engine.backend, ["right", "torch"], trial())


async def test_a_way_that_cannot_run_the_ranker_is_named(engine: RankEngine) -> None:
    assert possible(engine, engine.backend, "torch") == ("torch",)
    with pytest.raises(
        ConfigError,
        match="attention: triton cannot run this ranker here; available: right, off, lost",
    ):
        possible(engine, engine.backend, "triton")


def test_a_later_way_must_be_worth_it() -> None:
    ways = [AttentionWay(name=str(ms), prefill_ms=ms, rank_ms=0.0) for ms in (10.0, 9.6, 9.4, 9.0)]
    assert fastest(ways).name == "9.4"
    assert fastest([AttentionWay(name="a", rejected="no"), ways[0]]).name == "10.0"
