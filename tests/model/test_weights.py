"""A checkpoint round trip changes nothing, and a damaged one is rejected in words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_gr.core.errors import CheckpointError
from npu_gr.model.blend import WEIGHTS, ScoreBlend, save_blend
from npu_gr.model.weights import Checkpoint, digest, load, save
from tests.models import Request, full, tiny_model


def saved(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Checkpoint, str]:
    ids = np.random.default_rng(0).permutation(10_000)[:300]
    checkpoint = Checkpoint(
        model=tiny_model(dtype), item_ids=ids, name="tiny", metrics={"auc": 0.5}
    )
    return checkpoint, save(checkpoint, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint, version = saved(tmp_path / "deep" / "er", dtype)
    again = load(tmp_path / "deep" / "er")
    assert (again.version, again.name, again.metrics) == (version, "tiny", {"auc": 0.5})
    assert np.array_equal(again.item_ids, checkpoint.item_ids)
    again.model.items.freeze()
    assert torch.equal(full(again.model, Request(50, 5)), full(checkpoint.model, Request(50, 5)))


def test_a_ranker_without_relative_bias_has_no_tables(tmp_path: Path) -> None:
    """In its checkpoint; loaded it computes the same."""
    model = tiny_model(relative_bias="none")
    save(Checkpoint(model=model, item_ids=np.arange(300), name="tiny"), tmp_path)
    assert not [
        name for name in load_file(tmp_path / "model.safetensors") if name.endswith("_bias")
    ]
    again = load(tmp_path).model
    again.items.freeze()
    assert again.config.relative_bias == "none"
    assert torch.equal(full(again, Request(50, 5)), full(model, Request(50, 5)))


def test_other_weights_are_another_version(tmp_path: Path) -> None:
    _, first = saved(tmp_path)
    assert saved(tmp_path)[1] == first
    other = Checkpoint(model=tiny_model(seed=1), item_ids=np.arange(300), name="tiny")
    assert save(other, tmp_path) != first


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="not the one that"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "name": "x", "version": "y"}'])
def test_a_broken_manifest_is_rejected(tmp_path: Path, text: str) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_weights_of_another_shape_are_rejected(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest = tmp_path / "config.json"
    manifest.write_text(manifest.read_text().replace('"num_layers": 3', '"num_layers": 2'))
    with pytest.raises(CheckpointError, match="do not fit"):
        load(tmp_path)


def test_an_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        saved(tmp_path / "file" / "under")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_items": 10**12}, r"shape .* config\.json asks for \[1000000000000, "),
        ({"num_items": 10**18, "dim": 10**9}, "do not fit"),
        ({"num_items": 10**30}, "do not fit"),
        ({"num_layers": 10**7}, "num_layers: 10000000, and there are"),
        ({"num_layers": 4}, "no tensor layers.3"),
        ({"tasks": [f"t{index}" for index in range(1000)]}, r"head\.2\.\w+: shape"),
        ({"head_dim": 10**13}, r"head\.0\.\w+: shape"),
        ({"max_history_tokens": 10**12, "positions": "start"}, "no tensor position"),
    ],
)
def test_a_configuration_that_asks_for_too_much_is_rejected_before_it_is_built(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """The model would take memory that there is not, or hours."""
    saved(tmp_path)
    manifest = tmp_path / "config.json"
    keys = json.loads(manifest.read_text())
    keys["model"] |= change
    manifest.write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_weights_that_are_whole_numbers_are_rejected(tmp_path: Path) -> None:
    saved(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["item.weight"] = tensors["item.weight"].to(torch.int32)
    save_file(tensors, weights)
    manifest = tmp_path / "config.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": digest(weights)}))
    with pytest.raises(CheckpointError, match=r"item\.weight: dtype torch\.int32"):
        load(tmp_path)


def with_order(num_items: int = 300, **changes: Any) -> Checkpoint:
    empty = np.empty((num_items, 0))
    order = ScoreBlend(
        task=str(changes.pop("task", "click")),
        weights=dict.fromkeys(WEIGHTS, 1.0),
        successors=empty.astype(np.int32),
        log_prob=empty.astype(np.float32),
        popularity=np.full(num_items, -5.0, np.float32),
    )
    model = tiny_model(**({"retrieval": True} | changes))
    return Checkpoint(model=model, item_ids=np.arange(300), name="tiny", order=order)


def test_the_order_is_part_of_the_version_and_goes_with_its_model(tmp_path: Path) -> None:
    checkpoint = with_order()
    version = save(checkpoint, tmp_path)
    again = load(tmp_path)
    assert again.version == version
    assert again.order is not None
    save_blend(dataclasses.replace(again.order, weights=dict.fromkeys(WEIGHTS, 0.5)), tmp_path)
    refitted = load(tmp_path)
    assert refitted.version != version
    assert refitted.order is not None
    assert refitted.order.weights["seen"] == 0.5
    alone = dataclasses.replace(checkpoint, order=None)
    assert save(alone, tmp_path) not in (version, refitted.version)
    assert load(tmp_path).order is None


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (with_order(retrieval=False), "the model does not retrieve"),
        (with_order(299), "transitions of 299 items, the model has 300"),
        (with_order(task="buy"), "no task 'buy' among click"),
    ],
)
def test_an_order_that_does_not_fit_is_rejected(
    tmp_path: Path, checkpoint: Checkpoint, words: str
) -> None:
    save(checkpoint, tmp_path)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)
