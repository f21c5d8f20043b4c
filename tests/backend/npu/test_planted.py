"""Mistakes of the host code that a review planted and no test noticed: each has its test here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from npu_gr.backend.calls import BiasTables, Continuations, HstuLayerCall, Over, TopkCall
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.npu.hstu_batch import layer_tables
from npu_gr.backend.npu.hstu_pass import PassMaker
from tests.backend.npu.fake_device import FakeRuntime
from tests.backend.npu.test_hstu_pass import User, plainly
from tests.models import CPU, events, tiny_model


@pytest.fixture
def npu() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    with made.recording():
        yield made


@pytest.fixture
def backend(npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> NPUBackend:
    """As if a library were loaded: the operators' definitions answer for it."""
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)
    made = NPUBackend(npu=npu.as_npu())
    made.on_fallback = pytest.fail
    return made


def test_a_device_thread_waits_for_the_weights(backend: NPUBackend, npu: FakeRuntime) -> None:
    weights = torch.zeros(8)
    npu.watch(weights, 8)
    weights.add_(1)  # as a load writes them, on the default stream

    def reads() -> None:
        with backend.stream():
            weights.sum()

    thread = threading.Thread(target=reads)
    thread.start()
    thread.join()
    assert len(npu._touched) == 1, "both have been seen"
    assert not npu.races


@pytest.mark.parametrize("over", ["row", "valid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_have_their_scale_in_every_dtype(
    backend: NPUBackend, dtype: torch.dtype, over: Over
) -> None:
    logits = torch.randn(2, 11, generator=torch.Generator().manual_seed(3)).to(dtype)
    code = torch.tensor([1, 3, 4, 9, 0, 7], dtype=torch.int32)
    follow = Continuations(torch.tensor([0, 4]), torch.tensor([4, 2]), code)
    call = TopkCall(logits, torch.tensor([-1.0, -0.5]), follow, 6, over=over, scale=0.5)
    want, got = CPU.beam_topk(call), backend.beam_topk(call)
    torch.testing.assert_close(got.score, want.score)
    assert torch.equal(got.edge, want.edge)


def test_a_new_layer_at_an_old_address_has_its_own_tables() -> None:
    """A reload frees the weights, and the allocator gives their memory to the next model."""
    maker, addresses, ids = PassMaker(torch.from_numpy, None), set(), set()
    for value in range(20):
        bias = BiasTables(torch.full((1, 4), float(value)), torch.zeros(1, 64))
        norm = nn.LayerNorm(4)
        nn.init.constant_(norm.weight, value)
        call = HstuLayerCall(0, torch.zeros(1), bias, norm, False)
        for got, want in zip(maker.tables(call), layer_tables(bias), strict=True):
            assert torch.equal(got, want)
        assert torch.equal(maker.norm(norm)[0], norm.weight)
        addresses.add(bias.position.data_ptr())
        ids.add(id(bias.position))
        del bias, norm, call
    assert len(addresses) < 20 or len(ids) < 20, "none was used again: the test shows nothing"


def test_a_graph_is_of_one_arena(backend: NPUBackend) -> None:
    """Two services in a process, or a reload: the same model and shapes, other pages."""
    model = tiny_model(torch.float32, qk_dim=16)
    users = [User(model), User(model)]
    users[1].events = events(120, seed=5)
    for user in users:
        user.prefill(model, backend, 120)
    for _ in range(2):  # captured, then replayed
        for user in users:
            segment = user.segment(120, 0, 9)
            got, want = model(backend, [segment])[0], plainly(model, segment)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_a_graph_is_of_one_scale_and_one_range_of_codes(backend: NPUBackend) -> None:
    """Levels of a search share the shapes of their logits, and the children."""
    logits = torch.randn(2, 11, generator=torch.Generator().manual_seed(3))
    code = torch.tensor([1, 3, 4, 9, 0, 7], dtype=torch.int32)
    follow = Continuations(torch.tensor([0, 4]), torch.tensor([4, 2]), code)
    call = TopkCall(logits, torch.tensor([-1.0, -0.5]), follow, 6)
    for _ in range(2):  # captured, then replayed
        for how in ({}, {"scale": 0.5}, {"codes": slice(0, 10)}, {"codes": slice(1, 11)}):
            one = call._replace(**how)
            want, got = CPU.beam_topk(one), backend.beam_topk(one)
            torch.testing.assert_close(got.score, want.score)
            assert torch.equal(got.edge, want.edge)


@pytest.mark.parametrize(("qk_dim", "q_scale"), [(16, -0.25), (32, 1.0)])
def test_only_a_power_of_two_is_folded_into_the_queries(
    backend: NPUBackend, npu: FakeRuntime, qk_dim: int, q_scale: float
) -> None:
    """Another factor would round the queries a second time."""
    model = tiny_model(torch.bfloat16, qk_dim=qk_dim)
    given, launched = set(), npu.launched

    def listen(func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name == "npu_gr::hstu_rows":
            given.add(args[func._schema.arguments.index(_named(func, "q_scale"))])
        return launched(func, args, kwargs)

    npu.launched = listen  # type: ignore[method-assign]
    model(backend, [User(model).segment(0, 20, 5)])
    assert given == {q_scale}


def _named(func: Any, name: str) -> Any:
    return next(argument for argument in func._schema.arguments if argument.name == name)
