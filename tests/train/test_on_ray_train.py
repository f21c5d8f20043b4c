"""The script of docs/engines.md trains on the ranks that Ray Train starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.synthetic import planted

ROOT = Path(__file__).parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None


def script() -> str:
    page = (ROOT / "docs" / "engines.md").read_text()
    return page.partition("```python\n")[2].partition("```")[0]


@pytest.mark.ray
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
def test_ray_train_starts_the_ranks(tmp_path: Path) -> None:
    log = planted(num_users=80, num_events=12)
    rows = zip(log.users, log.items, log.values, log.timestamps, strict=True)
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    lines = "".join(f"u{user}\t{item}\t{value}\t{time}\n" for user, item, value, time in rows)
    (tmp_path / "log.inter").write_text(head + lines)
    (tmp_path / "on_ray.py").write_text(script())
    command = [sys.executable, "on_ray.py", "rank", str(tmp_path / "log.inter")]
    command += ["--out", str(tmp_path / "ranker"), "--threads", "1", "--preset", "quick"]
    command += ["--set", "epochs=2", "--set", "refit=false", "--set", "sasrec=false"]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    said = found.stdout + found.stderr
    assert found.returncode == 0, said[-3000:]
    assert "rank 1 of 2: " in said
    assert (tmp_path / "ranker" / "model.safetensors").is_file()
