"""A checkpoint round trip changes nothing, and a damaged one is refused in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npu_gr.core.errors import CheckpointError
from npu_gr.model.weights import Checkpoint, load, save
from tests.models import Request, full, tiny_model


def saved(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Checkpoint, str]:
    ids = np.random.default_rng(0).permutation(10_000)[:300]
    checkpoint = Checkpoint(model=tiny_model(dtype), item_ids=ids, name="tiny", metrics={"auc": 0.5})
    return checkpoint, save(checkpoint, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint, version = saved(tmp_path / "deep" / "er", dtype)
    again = load(tmp_path / "deep" / "er")
    assert (again.version, again.name, again.metrics) == (version, "tiny", {"auc": 0.5})
    assert np.array_equal(again.item_ids, checkpoint.item_ids)
    again.model.freeze_items()
    assert torch.equal(full(again.model, Request(50, 5)), full(checkpoint.model, Request(50, 5)))


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
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest = tmp_path / "config.json"
    manifest.write_text(manifest.read_text().replace('"num_layers": 3', '"num_layers": 2'))
    with pytest.raises(CheckpointError, match="do not fit"):
        load(tmp_path)


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        saved(tmp_path / "file" / "under")
