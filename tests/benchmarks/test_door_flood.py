"""The flood of `python -m benchmarks door` runs over HTTP, and its lines say whether the other tenant kept its hits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import door_flood
from benchmarks.door_flood import OVERRIDES, Flooded, run_flood
from benchmarks.door_lines import of_flood
from benchmarks.door_servers import Traffic, make_checkpoint, our_server
from npu_gr.model.weights import load

CONFIG = Path(__file__).parent.parent.parent / "configs" / "cpu.yaml"


@pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator is in C, and there is no cc here")
def test_the_flood_runs_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_flood, "FLOOD_USERS", 50)
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint(checkpoint, 1, 64, 0)
    with our_server("flood", CONFIG, checkpoint, tmp_path, OVERRIDES) as server:
        quiet, beside = run_flood(server, load(checkpoint), Traffic(num_candidates=10), tmp_path, 1.0, 0)
    assert quiet.num_ranks > 5
    assert beside.num_ranks > 0
    assert quiet.signals_per_s == 0.0
    assert beside.signals_per_s > 10
    assert 0.0 <= beside.hit_ratio <= 1.0


@pytest.mark.parametrize(("hit_ratio", "p99_ms", "ok"), [(0.94, 11.0, [True, True]), (0.9, 13.0, [False, False])])
def test_the_lines_have_the_targets_of_the_promise(hit_ratio: float, p99_ms: float, ok: list[bool]) -> None:
    quiet = Flooded(hit_ratio=0.98, p99_ms=10.0, num_ranks=100, signals_per_s=0.0)
    beside = Flooded(hit_ratio=hit_ratio, p99_ms=p99_ms, num_ranks=100, signals_per_s=300.0)
    assert [line.ok for line in of_flood(quiet, beside)] == ok
