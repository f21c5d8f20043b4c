"""An item without a residual row is what a trained one is, less that row.

Writing one changes nothing else.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality_cold import with_new_items
from npu_gr.core.feature_schema.encode import encode
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.engine.device_weights import DeviceWeights
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.config import HSTUConfig, ItemFeature, write_keys
from npu_gr.model.feature_rows import ItemCodeRows, NewItems, draw_kept
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, load, save
from tests.models import CPU, Request, tiny_config, tiny_model

CODES = (5, 6)
SCHEMA = (
    Feature(name="brand", of="item", kind="hashed", num_buckets=11),
    Feature(name="price", of="item", kind="number", mean=3.0, scale=2.0),
)


def ranker(dtype: torch.dtype = torch.float32, **changes: object) -> HSTU:
    model = tiny_model(dtype, item_codes=CODES, row_dropout=0.2, retrieval=True, **changes)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    codes = [torch.randint(0, count + 1, (300,), generator=random) for count in CODES]
    model.codes.of_item.copy_(torch.stack(codes, dim=1))
    model.items.freeze(4)
    return model


def new_items(count: int = 3, with_values: bool = False) -> NewItems:
    random = np.random.default_rng(2)
    columns: dict[str, list[str] | list[float | None]] = {
        "brand": [f"b{n}" for n in range(count)],
        "price": [1.0, 9.0, None][:count],
    }
    return NewItems(
        (random.integers(0, 8, (count, 3)),),
        np.stack([random.integers(0, n + 1, count) for n in CODES], axis=1).astype(np.int32),
        encode(SCHEMA, columns, count) if with_values else None,
    )


def test_a_frozen_table_serves_without_the_residual_rows() -> None:
    model, again = ranker(), ranker()
    again.items.drop_residuals()
    assert again.item.weight.numel() == 0
    assert torch.equal(model.items.vectors(), again.items.vectors())
    new = new_items()
    assert torch.equal(model.items.new_vectors(new), again.items.new_vectors(new))
    rows = torch.arange(300)
    assert torch.equal(model.items.rows(rows), model.items.embed(rows))
    with pytest.raises(RuntimeError, match="index"):
        again.items.embed(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_row_is_that_of_a_trained_item_without_a_residual(dtype: torch.dtype) -> None:
    model = ranker(dtype)
    table = model.items.vectors().clone()
    new = new_items()
    wide = with_new_items(model, new)
    model.items.write(torch.tensor([300, 301, 302]), model.items.new_vectors(new))
    written = model.items.vectors()
    assert torch.equal(written[:303], wide.items.vectors())
    assert torch.equal(written[:300], table[:300])
    assert not written[303].any()
    request = Request(12, 5)
    segment = request.segment(candidates=torch.tensor([300, 7, 302]))
    assert torch.equal(model(CPU, [segment])[0], wide(CPU, [segment])[0])
    # NEXT's is behind the spare ones
    at_next = [torch.tensor([one.items.num_rows]) for one in (model, wide)]
    segments = [request.segment(candidates=row, is_next=True) for row in at_next]
    assert torch.equal(model(CPU, segments[:1])[0], wide(CPU, segments[1:])[0])


@pytest.mark.parametrize(
    ("dtype", "norm"), [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float32, "l2")]
)
def test_retrieval_compares_with_the_written_row_too(dtype: torch.dtype, norm: str) -> None:
    """Also where it compares with a copy of the table."""
    model = ranker(dtype, head_item_norm=norm)
    engine = RankEngine(model, CPU, Scheduler(SchedulerConfig()), None)  # type: ignore[arg-type]
    before = engine.weights.table().clone()
    engine.weights.write_items(np.array([303, 300, 302]), new_items())
    assert torch.equal(engine.weights.table(), model.items.vectors())
    changed = (engine.weights.table() != before).any(1).nonzero()[:, 0]
    assert changed.tolist() == [300, 302, 303]


def test_features_of_the_schema_belong_to_a_new_row() -> None:
    model = ranker(features=SCHEMA)
    new = new_items(with_values=True)
    assert new.values is not None
    model.item_feature_codes[5:8] = torch.from_numpy(new.values.codes)
    model.item_feature_numbers[5:8] = torch.from_numpy(new.values.numbers)
    genres = model.get_buffer("feature_ids_0")
    genres[5:8] = torch.from_numpy(new.features[0])
    model.codes.of_item[5:8] = torch.from_numpy(new.codes)
    with torch.no_grad():
        model.item.weight[5:8] = 0
        assert torch.equal(model.items.new_vectors(new), model.items.embed(torch.arange(5, 8)))


def test_a_row_is_written_among_the_spare_ones_alone() -> None:
    model = ranker()
    for row in (299, 304):
        with pytest.raises(AssertionError):
            DeviceWeights(model, CPU).write_items(np.array([row]), new_items(1))


def test_the_start_leaves_every_sum_as_it_was() -> None:
    rows = ItemCodeRows(40, CODES, 8)
    residual = torch.randn(40, 8)
    whole = residual.clone()
    codes = np.stack(
        [np.random.default_rng(0).integers(0, n + 1, 40) for n in CODES], axis=1
    ).astype(np.int32)
    rows.start(codes, residual)
    assert torch.allclose(rows.add(residual, torch.from_numpy(codes)), whole, atol=1e-6)
    weights = list(rows.parameters())
    one = codes[:, 0] == 2
    # what its items have in common
    assert torch.allclose(weights[0][2], whole[one].mean(0), atol=1e-6)
    # nothing in common with items without a code
    assert not any(weight[-1].any() for weight in weights)


def test_a_dropped_item_is_the_rest_of_its_sum_wherever_it_is() -> None:
    model = ranker()
    every = torch.arange(301)
    whole = model.items.embed(every)
    model.items.kept_rows = torch.ones(300, 1)
    model.items.kept_rows[[4, 9]] = 0
    dropped = model.items.embed(every)
    changed = (dropped != whole).any(1).nonzero()[:, 0].tolist()
    assert changed == [4, 9]
    assert torch.allclose(whole[4] - dropped[4], model.item.weight[4], atol=1e-6)
    kept = draw_kept(10_000, 0.2)
    assert kept is not None
    assert 0.78 < float(kept.mean()) < 0.82
    assert draw_kept(10, 0.0) is None


def test_a_checkpoint_keeps_codes_and_names_of_values(tmp_path: Path) -> None:
    genre = ItemFeature(name="genre", num_values=7, max_values=3, values=tuple("abcdefg"))
    model = ranker(item_features=(genre,))
    save(Checkpoint(model=model, item_ids=np.arange(300), name="new"), tmp_path)
    again = load(tmp_path).model
    again.items.freeze(4)
    assert again.config == model.config
    assert torch.equal(again.items.vectors(), model.items.vectors())
    plain = write_keys(tiny_config())
    # what older versions read stays as it was
    assert not {"item_codes", "row_dropout"} & plain.keys()
    assert plain["item_features"] == ({"name": "genre", "num_values": 7, "max_values": 3},)
    with pytest.raises(ValueError, match="item_features genre: values: needs 2 names, each once"):
        ItemFeature(name="genre", num_values=2, values=("a", "a"))
    assert not HSTUConfig(
        num_items=1, actions=("a",), tasks=("t",), row_dropout=0.5
    ).scores_new_items
