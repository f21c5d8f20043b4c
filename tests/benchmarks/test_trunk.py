"""`bench trunk` runs both arms on one instance, and says what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks import trunk
from npu_gr.core.errors import ConfigError
from npu_gr.service.config import to_table
from tests.models import tiny_order
from tests.server.test_recommend_over_http import section
from tests.serving import make_config, write_checkpoint


def written(folder: Path, **sections: object) -> Path:
    table = to_table(make_config(folder, **sections))
    (folder / "serve.yaml").write_text(yaml.safe_dump(table))
    return folder / "serve.yaml"


async def test_the_lines_of_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk, "HALVINGS", 1)
    monkeypatch.setattr(trunk, "LEAST_GOAL_S", 0.5)
    write_checkpoint(tmp_path / "checkpoint", tiny_order(), retrieval=True)
    path = written(tmp_path, **section(tmp_path))
    found = [line async for line in trunk.lines(path, ["recommend.max_candidates=50"], [40], 0.05, 5, 0)]
    assert [line.baseline for line in found] == ["a rank of as many", "two models", "two models"]
    assert all("L=40 M=50" in line.case and line.ours > 0 for line in found)
    assert found[0].target == pytest.approx(1 / 1.5)
    with pytest.raises(ConfigError, match="needs recommend"):
        [_ async for _ in trunk.lines(written(tmp_path), [], [40], 0.05, 5, 0)]
