"""A generator's ops are tried at its start; one that is wrong or fails is not used."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from npu_gr.backend.base import BEAM_OPS, HSTU
from npu_gr.backend.calls import BeamCall, Choices, TopkCall
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import DeviceError
from npu_gr.engine.beam_ways import BeamShape, choose_beam_ways
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.scheduler import Scheduler
from tests.models import CPU

SHAPE = BeamShape(6, 4, 2, 8, 2, 3, 20, 16, torch.float32)


class Ways(TorchOps):
    """A device with two ways of each op: one with a fault of that name, and torch ops."""

    name = kernels = "test"

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.ops = dict.fromkeys(BEAM_OPS, "own")

    def beam_ways(self) -> Mapping[str, Sequence[str]]:
        return dict.fromkeys(BEAM_OPS, ("own", "torch"))

    def _has(self, op: str, fault: str) -> bool:
        return self.ops.get(op) == "own" and self.fault == fault

    def beam_attention(self, call: BeamCall) -> Tensor:
        if self._has("softmax_attention", "large"):
            raise RuntimeError("out of resource: shared memory, Required: 106496")
        if self._has("softmax_attention", "nan"):
            return super().beam_attention(call) * torch.nan
        if self._has("softmax_attention", "a slot less"):
            call = call._replace(num_slots=call.num_slots - 1)
        return super().beam_attention(call)

    def beam_topk(self, call: TopkCall) -> Choices:
        score, parent, edge = super().beam_topk(call)
        if self._has("beam_topk", "parents"):
            parent = parent.flip(0)
        if self._has("beam_topk", "edges"):
            edge = edge.flip(0)
            parent = parent.flip(0)
        if self._has("beam_topk", "unfiltered"):
            return super().beam_topk(call._replace(follow=call.follow._replace(allowed=None)))
        return Choices(score, parent, edge)

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        planes = (keys, keys) if self._has("beam_fork", "values stay") else (keys, values)
        super().beam_fork_(*planes, parent, num_slots)


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    made = Scheduler(SchedulerConfig(), TorchOps().stream)
    made.start()
    yield made
    await made.stop()


@pytest.mark.parametrize(
    ("op", "fault", "why"),
    [
        ("softmax_attention", "large", "RuntimeError on the device"),
        ("softmax_attention", "nan", "rows differ from those of plain torch ops by inf"),
        ("softmax_attention", "a slot less", "rows differ"),
        ("beam_topk", "parents", "parents of "),
        ("beam_topk", "edges", "chosen of "),
        ("beam_topk", "unfiltered", "of allowed codes differ"),
        ("beam_fork", "values stay", "values differ"),
    ],
)
async def test_a_way_that_fails_or_is_wrong_is_not_used(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, op: str, fault: str, why: str
) -> None:
    caplog.set_level(logging.INFO, "npu_gr.engine.beam_ways")
    backend, tried = await choose_beam_ways(Ways(fault), scheduler, SHAPE)
    assert backend.ops[op] == "torch"
    own, plain = tried[op]
    assert why in own.rejected
    assert (own.total_ms, plain.rejected) == (float("inf"), "")
    assert f"{op} by torch: own rejected: " in caplog.text
    for other in set(BEAM_OPS) - {op}:
        assert not any(way.rejected for way in tried[other])
    assert HSTU not in backend.ops, "a ranker's attention is tried with a ranker"


async def test_a_way_that_is_slower_is_not_used(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scheduler.call

    async def timed(self: Scheduler, function, *args, **more):  # type: ignore[no-untyped-def]
        done = await real(self, function, *args, **more)
        way = getattr(function, "args", (TorchOps(),))[0]
        is_own = isinstance(way, Ways) and way.ops.get("beam_topk") == "own"
        return replace(done, device_s=2.0 if is_own else 1.0)

    monkeypatch.setattr(Scheduler, "call", timed)
    backend, _ = await choose_beam_ways(Ways(""), scheduler, SHAPE)
    assert backend.ops == {
        "softmax_attention": "own",
        "beam_topk": "torch",
        "beam_fork": "own",
    }, "of equally fast ways the first"


async def test_torch_ops_that_fail_are_a_device_that_fails(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> Tensor:
        raise RuntimeError("lost")

    monkeypatch.setattr(TorchOps, "beam_attention", lost)
    with pytest.raises(DeviceError):
        await choose_beam_ways(Ways(""), scheduler, SHAPE)


async def test_one_way_is_not_measured(scheduler: Scheduler) -> None:
    backend = CPU
    assert await choose_beam_ways(backend, scheduler, SHAPE) == (backend, {})
