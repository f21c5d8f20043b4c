"""One checkpoint and one set of bodies for all scenes; both are made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.servers import make_checkpoint
from tests.chaos.rig import Bodies


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker of the demo's shape."""
    if shutil.which("cc") is None:
        pytest.skip("the load generator is in C and there is no C compiler")
    folder = tmp_path_factory.mktemp("ranker")
    make_checkpoint(folder, num_layers=2, max_history_tokens=256, seed=0)
    return folder


@pytest.fixture(scope="session")
def bodies(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bodies:
    return Bodies.make(checkpoint, tmp_path_factory.mktemp("bodies") / "ranks")
