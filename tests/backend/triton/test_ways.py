"""A generator's ops are Triton's where these are right, torch's where the device is too small."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from npu_gr.backend.base import BEAM_OPS
from npu_gr.backend.cuda import CUDABackend
from npu_gr.engine.beam_ways import BeamShape, choose_beam_ways
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.scheduler import Scheduler
from tests.backend.test_cuda import Recorder

pytestmark = [
    pytest.mark.triton,
    # the interpreter's
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

SHAPE = BeamShape(5, 4, 2, 8, 2, 2, 20, 40, torch.float32)


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    made = Scheduler(SchedulerConfig(), CUDABackend(Recorder()).stream)
    made.start()
    yield made
    await made.stop()


@pytest.fixture
def backend(triton_device: torch.device) -> CUDABackend:
    if triton_device.type != "cpu":
        pytest.skip("the device's own trial is that of a start")
    return CUDABackend(Recorder())


async def test_every_way_is_right(backend: CUDABackend, scheduler: Scheduler) -> None:
    _, tried = await choose_beam_ways(backend, scheduler, SHAPE)
    assert set(tried) == set(BEAM_OPS)
    for op, ways in tried.items():
        assert [(way.name, way.rejected) for way in ways] == [("triton", ""), ("torch", "")], op
        assert ways[0].drift is not None
        assert ways[0].drift < 1e-4


async def test_a_kernel_that_does_not_fit_the_device_is_not_used(
    backend: CUDABackend,
    scheduler: Scheduler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As Triton says it at a launch; without a trial every generate would be a 503."""
    from triton.runtime.errors import OutOfResources

    from npu_gr.backend.triton import beams

    class TooLarge:
        def __getitem__(self, _grid: object) -> Any:
            raise OutOfResources(135_168, 101_376, "shared memory")

    monkeypatch.setattr(beams, "shared_kernel", TooLarge())
    caplog.set_level(logging.INFO, "npu_gr.engine.beam_ways")
    chosen, _ = await choose_beam_ways(backend, scheduler, SHAPE)
    assert chosen.ops["softmax_attention"] == "torch"
    assert "triton rejected: OutOfResources on the device" in caplog.text
    assert backend.ops["softmax_attention"] == "triton", "only the generator's copy has changed"


@pytest.mark.parametrize(
    ("dtype", "dim", "shared_bytes", "rows"),
    [
        (torch.bfloat16, 128, 101_376, 64),  # L4, A10, 4090, 5090
        (torch.bfloat16, 256, 101_376, 32),
        (torch.float32, 128, 101_376, 32),
        (torch.float32, 256, 101_376, 16),
        (torch.float32, 128, 65_536, 16),  # T4
        (torch.float32, 512, 65_536, 16),  # too large: the trial rejects it
    ],
)
def test_rows_follow_from_the_shared_memory_of_the_device(
    triton_device: torch.device, dtype: torch.dtype, dim: int, shared_bytes: int, rows: int
) -> None:
    from npu_gr.backend.triton import beams
    from npu_gr.backend.triton.hstu import DeviceLimits

    tile = beams.tile_of(dtype, dim, DeviceLimits(8, shared_bytes))
    assert tile.rows == rows
    assert (tile.shared_bytes(dim, dtype) <= shared_bytes) == (dim < 512)
