"""A rank with a cached prefix gives the scores of full inference, wherever the history is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend.cpu.hstu import HstuKernels
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.model.hstu_layer import Past
from tests.models import CPU, NONE, Request, Store, cached, full, tiny_model

# Largest allowed difference as a share of the logits' standard deviation; docs/exactness.md.
GATES = {torch.float64: 1e-12, torch.float32: 1e-5}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"activation": "u", "residual": "concat"},
    {"norm": "group", "positions": "start"},
    {"num_layers": 1, "item_features": ()},
]


def drift(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.std())


@pytest.mark.parametrize("dtype", GATES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_cached_rank_equals_full_inference(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    model, request = tiny_model(dtype, **variant), Request(203, 37)
    want = full(model, request)
    for cut in (1, 64, 127, 202, 203):
        assert drift(cached(model, request, cut, slab_tokens=64), want) <= GATES[dtype], cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_the_pages_that_were_just_written(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are packed once a layer; chunks, a rank in the same batch and full inference agree."""
    arrangement = CPU.arrangement(dtype, 64)
    if arrangement != "tiles":
        pytest.skip("no kernels")
    packed = list[int]()
    pack = HstuKernels.pack

    def counted(self: HstuKernels, *args: Any) -> None:
        packed.append(len(args[2]))
        pack(self, *args)

    monkeypatch.setattr(HstuKernels, "pack", counted)
    model, request = tiny_model(dtype), Request(203, 37)
    want, shape = full(model, request), model.config
    layout = KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        dtype=str(dtype).removeprefix("torch."),
        arrangement=arrangement,
    )
    arena, runs = KVArena(layout, 8, CPU.device, pack=CPU.pack_kv), (PageRun(5, 2), PageRun(1, 2))
    packed.clear()
    model(CPU, [request.segment(0, 100, NONE, sink=arena.sink(runs))])
    past = Past(request.times[:100], lambda layer: arena.slabs(layer, runs, 100))
    extended = model(CPU, [request.segment(100, past=past, sink=arena.sink(runs, 100))])[0]
    # a run ends at token 128
    assert packed == [100] * shape.num_layers + [28, 75] * shape.num_layers
    past = Past(request.times, lambda layer: arena.slabs(layer, runs, 203))
    cached = model(CPU, [request.segment(203, past=past)])[0]
    assert torch.equal(extended, want)
    assert torch.equal(cached, want)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(data=st.data(), num_history=st.integers(1, 300), num_candidates=st.integers(1, 40))
def test_any_cut_and_any_slabs(data: st.DataObject, num_history: int, num_candidates: int) -> None:
    model, request = (
        tiny_model(torch.float64),
        Request(num_history, num_candidates, seed=num_history),
    )
    cut = data.draw(st.integers(1, num_history))
    slab = data.draw(st.integers(1, 80))
    got, want = cached(model, request, cut, slab), full(model, request)
    assert float((got - want).abs().max()) <= 1e-12 * max(float(want.abs().max()), 1.0)


def test_bf16_stays_within_its_gate() -> None:
    """At most 2 ulp of the largest logit, at most 1e-2 after the sigmoid, the same top tenth.

    On the page's odd-sized fixture: 4 layers, d 128, weights of the usual scale.
    """
    shape = {
        "dim": 128,
        "num_layers": 4,
        "num_heads": 4,
        "qk_dim": 32,
        "v_dim": 32,
        "scaling_seqlen": 1024,
    }
    for seed in range(3):
        model, request = (
            tiny_model(torch.bfloat16, seed=seed, std=0.12, **shape),
            Request(1003, 64, seed=seed),
        )
        want = full(model, request)
        for cut in (1, 500, 1003):
            got = cached(model, request, cut, slab_tokens=256)
            ulp = 2.0 ** (torch.floor(torch.log2(want.abs().max())) - 7)
            assert float((got - want).abs().max()) <= 2 * float(ulp)
            assert float((got.sigmoid() - want.sigmoid()).abs().max()) <= 1e-2
            best, again = want[:, 0].topk(6).indices.tolist(), got[:, 0].topk(7).indices.tolist()
            assert set(best) <= set(again)


@pytest.mark.parametrize("breaker", [{"scaling": "runtime"}, {"positions": "reverse"}], ids=str)
def test_the_breakers_would_be_noticed(breaker: dict[str, Any]) -> None:
    """E1 and E2 of docs/exactness.md: a wrong scale or reversed positions fail the gate by far."""
    model, request = tiny_model(torch.float32, **breaker), Request(203, 37)
    assert drift(cached(model, request, 150), full(model, request)) > 100 * GATES[torch.float32]


def test_the_reference_agrees() -> None:
    """The chunked ops equal the dense definition, in every variant."""
    for variant in VARIANTS:
        model, request = tiny_model(torch.float64, **variant), Request(90, 11)
        want = full(model, request, ReferenceBackend())
        assert drift(full(model, request), want) <= 1e-12


def test_scores_do_not_depend_on_the_other_candidates() -> None:
    model, request = tiny_model(torch.float64), Request(100, 30)
    want = full(model, request)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert (
        drift(model(CPU, [request.segment(candidates=request.candidates[order])])[0], want[order])
        <= 1e-12
    )
    for size in (1, 7, 29):
        parts = [
            model(CPU, [request.segment(candidates=part)])[0]
            for part in request.candidates.split(size)
        ]
        assert drift(torch.cat(parts), want) <= 1e-12


def test_scores_do_not_depend_on_the_batch() -> None:
    model = tiny_model(torch.float64)
    requests = [Request(n, c, seed=n) for n, c in ((0, 3), (50, 1), (130, 20), (7, 9))]
    together = model(CPU, [r.segment() for r in requests])
    for request, scores in zip(requests, together, strict=True):
        assert float((scores - full(model, request)).abs().max()) <= 1e-12


def test_appending_equals_recomputing() -> None:
    """A prefix extended in any number of steps has the keys and values of one computed at once."""
    model, request = tiny_model(torch.float64), Request(150, 5)
    whole, grown = Store(), Store()
    model(CPU, [request.segment(0, 150, NONE, sink=whole.write)])
    for start, stop in ((0, 40), (40, 41), (41, 150)):
        past = grown.past(request.times[:start]) if start else None
        model(CPU, [request.segment(start, stop, NONE, past=past, sink=grown.write)])
    for layer, (k, v) in whole.layers.items():
        torch.testing.assert_close(grown.layers[layer][0], k, rtol=0, atol=1e-12)
        torch.testing.assert_close(grown.layers[layer][1], v, rtol=0, atol=1e-12)


def test_the_history_never_sees_the_candidates_or_the_future() -> None:
    model, request = tiny_model(torch.float64), Request(120, 10)
    alone, with_candidates, longer = Store(), Store(), Store()
    model(CPU, [request.segment(0, 80, NONE, sink=alone.write)])
    model(CPU, [request.segment(0, 80, sink=with_candidates.write)])
    model(CPU, [request.segment(0, 120, NONE, sink=longer.write)])
    for layer, (k, v) in alone.layers.items():
        for other in (with_candidates, longer):
            torch.testing.assert_close(other.layers[layer][0][:80], k, rtol=0, atol=1e-12)
            torch.testing.assert_close(other.layers[layer][1][:80], v, rtol=0, atol=1e-12)


def test_every_input_matters() -> None:
    """Items, actions, times, side features and the request's time all reach the scores."""
    model, request = tiny_model(torch.float64), Request(60, 8)
    want = full(model, request)
    for field in ("items", "actions", "times"):
        changed = Request(60, 8)
        values = getattr(changed, field)
        values[10] = (values[10] + 1) % 3 if field != "times" else values[10] - 50_000
        assert drift(full(model, changed), want) > 1e-6, field
    later = Request(60, 8)
    later.shown_at += 10_000_000
    assert drift(full(model, later), want) > 1e-6
    plain = tiny_model(torch.float64)
    plain.get_buffer("feature_ids_0")[:] = 0
    plain.items.freeze()
    assert drift(full(plain, request), want) > 1e-6


def test_an_empty_history_is_scored() -> None:
    scores = full(tiny_model(), Request(0, 4))
    assert scores.shape == (4, 2)
    assert bool(torch.isfinite(scores).all())
