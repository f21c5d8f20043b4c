"""The NEXT row: a candidate without an item; its final row is compared with every item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.backend.reference import ReferenceBackend
from npu_gr.model.config import write_keys
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.weights import Checkpoint, load, save
from tests.models import CPU, NONE, Request, Store, full, tiny_config, tiny_model

NEXT = torch.tensor([tiny_config().num_items])
bit_for_bit = pytest.mark.skipif(CPU.arrangement(torch.float32, 64) != "tiles", reason="no kernels")


def shared_encoder(dtype: torch.dtype = torch.float32, **changes: Any) -> HSTU:
    return tiny_model(dtype, retrieval=True, **changes)


def ask(request: Request, start: int = 0, **more: Any) -> Segment:
    """The segment of NEXT at the request's time."""
    return request.segment(start, candidates=NEXT, is_next=True, **more)


def vector(model: HSTU, request: Request, backend: Any = CPU) -> Tensor:
    return model(backend, [ask(request)])[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "changes", [{}, {"norm": "group", "positions": "start"}, {"item_features": ()}], ids=str
)
def test_cold_and_cached_agree_with_the_definition(changes: dict[str, Any]) -> None:
    model, request = shared_encoder(torch.float64, **changes), Request(150, 5)
    want = vector(model, request, ReferenceBackend())
    assert want.shape == (1, model.config.dim)
    for cut in (1, 64, 150):
        store = Store()
        model(CPU, [request.segment(0, cut, NONE, sink=store.write)])
        got = model(CPU, [ask(request, cut, past=store.past(request.times[:cut], 64))])[0]
        assert float((got - want).abs().max()) <= 1e-12 * float(want.std())


@bit_for_bit
@settings(deadline=None, max_examples=20, derandomize=True)
@given(num_history=st.integers(0, 260), num_candidates=st.integers(1, 70), data=st.data())
def test_the_same_bits_alone_in_company_and_from_a_prefix(
    num_history: int, num_candidates: int, data: st.DataObject
) -> None:
    """Neither the cached prefix nor who shares the pass moves u.

    Nor do other candidates move a logit.
    """
    model, request = shared_encoder(), Request(num_history, num_candidates, seed=num_history)
    want, logits = vector(model, request), full(model, request)
    cut = data.draw(st.integers(0, num_history))
    past = None
    if cut:
        store = Store()
        model(CPU, [request.segment(0, cut, NONE, sink=store.write)])
        past = store.past(request.times[:cut], data.draw(st.integers(1, 80)))
    mates = [
        Request(n, c, seed=n)
        for n, c in data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9))))
    ]
    segments = [m.segment() if len(m.items) % 2 else ask(m) for m in mates]
    place = data.draw(st.integers(0, len(segments)))
    segments[place:place] = [ask(request, cut, past=past), request.segment(cut, past=past)]
    results = model(CPU, segments)
    assert torch.equal(results[place], want)
    assert torch.equal(results[place + 1], logits)
    size = data.draw(st.integers(1, num_candidates))
    parts = [
        model(CPU, [request.segment(candidates=part)])[0] for part in request.candidates.split(size)
    ]
    assert torch.equal(torch.cat(parts), logits)


def test_it_sees_the_history_the_time_and_itself() -> None:
    model, request = shared_encoder(torch.float64), Request(60, 1)
    want = vector(model, request)
    other, later = Request(60, 1), Request(60, 1)
    other.items[3] = (other.items[3] + 1) % 300
    later.shown_at += 10_000_000
    for changed in (other, later):
        assert float((vector(model, changed) - want).abs().max()) > 1e-6
    with torch.no_grad():
        model.next_item[0] += 0.5
    model.items.freeze()
    assert float((vector(model, request) - want).abs().max()) > 1e-6


def test_the_table_is_the_items_with_their_features_and_one_row_more() -> None:
    model = shared_encoder()
    rows = torch.arange(301)
    assert torch.equal(model.items.vectors(), model.items.embed(rows)[:300])
    assert torch.equal(model.items.embed(rows)[300], model.next_item)
    assert shared_encoder(torch.bfloat16).items.vectors().dtype == torch.float32


def test_a_new_model_starts_as_its_final_row() -> None:
    """The vector is the identity at first: training starts from the shared encoder's geometry."""
    model = HSTU(tiny_config(retrieval=True))
    row = torch.randn(3, 32)
    assert torch.equal(model.user_vectors(row), model.norm_next(row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_keeps_it(tmp_path: Path, dtype: torch.dtype) -> None:
    model = shared_encoder(dtype)
    save(Checkpoint(model=model, item_ids=np.arange(300), name="tiny"), tmp_path)
    again = load(tmp_path).model
    again.items.freeze()
    assert torch.equal(vector(again, Request(50, 1)), vector(model, Request(50, 1)))
    assert vector(again, Request(50, 1)).dtype == torch.float32


def test_a_ranker_without_it_is_written_as_before() -> None:
    """An older version rejects a key that it does not know."""
    assert "retrieval" not in write_keys(tiny_config())
    assert write_keys(tiny_config(retrieval=True))["retrieval"] is True
