"""Graphs: a replay is the work itself, on any rows; nothing outlives its owner.

Who cannot capture runs without.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from npu_gr.backend import graphs
from npu_gr.backend.cuda import CUDABackend
from npu_gr.backend.graphs import BUCKETS, Graphs
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.health import UNKNOWN_S, Worker
from npu_gr.engine.generate_engine import Generator
from npu_gr.metrics.registry.requests import GRAPH_OUTCOMES
from npu_gr.model import decoder as experts
from npu_gr.model.decoder import Experts, ExpertsConfig
from tests.backend.npu.fake_device import FakeRuntime
from tests.backend.npu.test_backend import generated
from tests.engine.test_beam_search import model
from tests.engine.test_generate_engine import catalogue
from tests.models import CPU


@pytest.fixture
def device() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    with made.recording():
        yield made


def never(op: str, why: str) -> None:
    raise AssertionError(f"{op} fell back: {why}")


def replays(device: FakeRuntime) -> int:
    return sum(call == "replay" for call, _ in device.calls)


def test_a_replay_is_the_work_on_any_rows_of_a_bucket(device: FakeRuntime) -> None:
    made, layer = Graphs(device, device.CUDAGraph, never), nn.Linear(3, 5)
    random = torch.Generator().manual_seed(0)
    for rows in (7, 31, 1, 32, 7, 33, 2000, 64, 0):
        x, y = torch.randn(rows, 3, generator=random), torch.randn(rows, 2, 5, generator=random)

        def work(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return layer(x), y + layer(x)[:, None]

        want = work(x, y)
        for got, each in zip(made.row_wise(layer, "work", work, [x, y]), want, strict=True):
            torch.testing.assert_close(got, each)
    assert len(made._of[layer]) == 2, "a graph for up to 32 rows, and one for up to 64"
    assert replays(device) == 8 + 2, "each is proved once; what is wider than any bucket has none"
    assert BUCKETS[-1] < 2000


@pytest.mark.parametrize("is_grouped", [True, False])
def test_a_mixture_of_experts_replays_on_rows_with_other_experts(
    device: FakeRuntime, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shape depends on which experts the rows like."""
    monkeypatch.setattr(experts, "_has_grouped", lambda x, weight: is_grouped)
    config = ExpertsConfig(num_experts=6, num_per_token=2, mlp_dim=16, normalises=True)
    made, layer, ops = (
        Graphs(device, device.CUDAGraph, never),
        Experts(8, config).requires_grad_(False),
        TorchOps(),
    )
    for rows in (7, 30, 1, 32):
        x = torch.randn(rows, 8)
        (got,) = made.row_wise(layer, "experts", lambda x: (layer(x, ops),), [x])
        torch.testing.assert_close(got, layer(x, ops))
    assert len(made._of[layer]) == 1
    assert replays(device) == 4 + 1, "proved once"


def test_works_types_and_owners_have_graphs_of_their_own(device: FakeRuntime) -> None:
    made, one, other = Graphs(device, device.CUDAGraph, never), nn.Identity(), nn.Identity()
    x = torch.arange(6.0).reshape(2, 3)
    owner = one
    for factor in (2.0, 3.0):
        for owner in (one, other):
            for dtype in (torch.float32, torch.float64):
                named = factor + (owner is other)
                (got,) = made.row_wise(owner, named, lambda x, by=named: (x * by,), [x.to(dtype)])
                assert torch.equal(got, x.to(dtype) * named)
    assert [len(made._of[owner]) for owner in (one, other)] == [4, 4]
    assert len(made._inputs) == 2, "graphs of one shape read the same buffers"
    del other, owner
    assert list(made._of.keys()) == [one], "they go with their owner"


def test_the_least_recently_used_graph_makes_room(
    device: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    counted, padded = list[str](), list[tuple[object, ...]]()
    made = Graphs(device, device.CUDAGraph, never, counted.append, lambda *x: padded.append(x))
    owner = nn.Identity()
    for what in (1, 2, 1, 3, 1, 2):
        (got,) = made.row_wise(owner, what, lambda x, by=what: (x * by,), [torch.ones(4)])
        assert torch.equal(got, torch.full((4,), float(what)))
    assert [what for what, _ in made._of[owner]] == [1, 2]
    assert counted == [
        *("captured", "captured", "replayed", "dropped", "captured", "replayed"),
        *("dropped", "captured"),
    ]
    assert set(counted) <= set(graphs.OUTCOMES) == set(GRAPH_OUTCOMES)
    assert padded == 6 * [("rows", 4, 32)]


def test_a_capture_tells_the_heartbeat(device: FakeRuntime) -> None:
    made, layer, worker = Graphs(device, device.CUDAGraph, never), nn.Linear(3, 5), Worker()
    limits = []
    for rows in (7, 31, 33):
        with worker.busy(2.0):
            made.row_wise(layer, "work", lambda x: (layer(x),), [torch.randn(rows, 3)])
            limits += [work.limit_s for work in worker.works()]
    assert limits == [UNKNOWN_S, 2.0, UNKNOWN_S], "a replay has its usual limit"


def test_a_thread_captures_for_itself(device: FakeRuntime) -> None:
    """The stand-in demands that a capture is on the stream and in the pool of its thread."""
    made, owner, found = (
        Graphs(device, device.CUDAGraph, never),
        nn.Identity(),
        list[torch.Tensor](),
    )

    def call() -> None:
        with device.stream(device.Stream()):
            (got,) = made.row_wise(owner, 0, lambda x: (x + 1,), [torch.ones(4)])
            found.append(got.clone())

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(device.graphs) == 2
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("how", ["capture_fails", "capture_lies"])
def test_what_cannot_be_captured_runs_without_and_is_counted(
    device: FakeRuntime, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(device, how, True)
    backend, owner, fell = CUDABackend(device), nn.Identity(), list[str]()
    backend.on_fallback = fell.append
    for what in (0, 1):
        for value in (1.0, 2.0):
            x = torch.full((3,), value)
            (got,) = backend.row_wise(owner, what, lambda x: (x * x,), [x])
            assert torch.equal(got, x * x)
    assert backend._graphs is not None
    assert list(backend._graphs._of[owner].values()) == [None, None]
    assert fell == ["graphs", "graphs"]
    assert len([line for line in caplog.messages if line.startswith("graphs: ")]) == 1


def test_a_whole_search_on_cuda_is_the_cpus(device: FakeRuntime) -> None:
    """Every replay spoils what earlier ones gave: nothing is read too late."""
    decoder, trie, history = model(20, num_layers=3).float(), catalogue(), [0, 7, 21, 70, 7]
    want = generated(Generator(decoder, CPU, 20, 3), trie, history)
    backend = CUDABackend(device)
    backend._triton = None
    assert backend.ops["graphs"] == "cuda_graph"
    for _ in range(2):
        with backend.stream():
            got = generated(Generator(decoder, backend, 20, 3), trie, history)
        assert np.array_equal(got.item_ids, want.item_ids)
        np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)
    assert replays(device) >= 2 * 2 * 4
