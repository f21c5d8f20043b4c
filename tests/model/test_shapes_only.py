"""A model on the meta device has the usual names and shapes; reading one imports no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_gr.model.config import ItemFeature
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, save, shapes_only
from tests import decoders, encoder_decoders
from tests.models import tiny_config, tiny_model

CODE = """
import sys
from pathlib import Path
import torch
from npu_gr.model import generators, weights
ranker, *others = map(Path, sys.argv[1:])
before = {*sys.modules}
weights.load(ranker)
for folder in others:
    generators.load(folder, torch.float32)
new = {*sys.modules} - before
print(*sorted(name for name in new if name.partition(".")[0] in ("torch", "sympy")))
"""


@pytest.mark.parametrize("retrieval", [False, True])
def test_names_shapes_and_dtypes_are_those_of_the_model(retrieval: bool) -> None:
    features = (ItemFeature(name="genre", num_values=7, max_values=3),)
    config = tiny_config(retrieval=retrieval, item_features=features)
    with shapes_only():
        found = HSTU(config).state_dict()
    wanted = HSTU(config).state_dict()
    assert {tensor.device.type for tensor in found.values()} == {"meta"}
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in wanted.items()
    }
    assert torch.ones(2).device.type == "cpu"  # the block is over
    assert float(torch.nn.init.ones_(torch.zeros(1))) == 1


def test_reading_checkpoints_imports_nothing_more_of_torch(tmp_path: Path) -> None:
    model = tiny_model(retrieval=True)
    save(Checkpoint(model=model, item_ids=np.arange(300), name="tiny"), tmp_path / "ranker")
    folders = [tmp_path / "ranker"]
    for module in (decoders, encoder_decoders):
        for name, settings in module.VARIANTS.items():
            folders.append(tmp_path / f"{module.__name__} {name}")
            module.saved(folders[-1], **settings)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *folders], capture_output=True, text=True, check=True
    )
    assert {*done.stdout.split()} <= {"torch.utils._device"}  # a device as a context
