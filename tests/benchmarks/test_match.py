"""`bench match`: a small run checks its own answers and gives every line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.match import BATCHES, numpy_top_k
from npu_gr.cli.main import main


def test_a_small_run_has_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.match.HNSW_ITEMS", 500)
    monkeypatch.setattr("benchmarks.match.timed_in_turn", lambda functions, _, clock: [[1.0] for f in functions if f()])
    out = CliRunner().invoke(main, ["match", "--json", "--items", "2000"], env={"OMP_NUM_THREADS": None})
    assert out.exit_code == 0, out.output
    lines = [json.loads(line) for line in out.output.splitlines() if line.startswith("{")]
    exact = [line for line in lines if line.get("case", "").startswith("I=2000")]
    assert len(exact) == len(BATCHES)
    assert all("numpy" in line["baseline"] for line in exact)


def test_a_small_training_has_both_lines() -> None:
    words = ["match-train", "--json", "--edges", "4000", "--steps", "2", "--threads", "1"]
    out = CliRunner().invoke(main, words)
    assert out.exit_code == 0, out.output
    minutes, memory = (json.loads(line) for line in out.output.splitlines() if line.startswith('{"bench": "match'))
    assert (minutes["unit"], memory["unit"]) == ("CPU min", "GB")
    assert all(f"{stage} 0." in minutes["case"] for stage in ("source", "target", "inter"))
    assert memory["ours"] > 0.05


def test_the_baseline_sorts_what_it_finds() -> None:
    import numpy as np

    scores, rows = numpy_top_k(np.eye(3, 4, dtype=np.float32), np.diag([1.0, 2, 3, 4]).astype(np.float32), 2)
    assert scores[2].tolist() == [3, 0]
    assert rows[1, 0] == 1
