"""Every line of the NPU backend has run: no line goes to a device untried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PARTS = (
    "npu/backend",
    "npu/device",
    "npu/hstu_paged",
    "npu/hstu_pass",
    "npu/hstu_triton",
    "npu/items",
    "npu/softmax",
    "graphs",
)
TESTS = (
    "npu/test_attention_ways.py",
    "npu/test_backend.py",
    "npu/test_hstu_paged.py",
    "npu/test_hstu_pass.py",
    "npu/test_items.py",
    "npu/test_softmax.py",
    "npu/test_device.py",
    "test_graphs.py",
)
SLOW = (
    "served",
    "without_cann",
    "used_of_torch_npu",
    "any_slabs",
    "by_the_kernels",
    "planner",
    "waits_once",
    "cuda",
    "emulator",
    "paper",
    "few_launches",
    "by_definition",
    "made_in_blocks",
    "ends_the_search",
)  # and no line of these files more


def test_every_line_of_the_npu_backend_has_run(tmp_path: Path) -> None:
    """And every branch, both ways."""
    files = [f"npu_gr/backend/{part}.py" for part in PARTS]
    coverage = [sys.executable, "-m", "coverage"]
    environment = {
        **os.environ,
        "COVERAGE_FILE": str(tmp_path / "data"),
        "COVERAGE_RCFILE": os.devnull,
    }
    fast = " and ".join(f"not {name}" for name in SLOW)
    tests = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        fast,
        *(f"tests/backend/{test}" for test in TESTS),
    ]
    for command in (
        [*coverage, "run", "--branch", f"--include={','.join(files)}", *tests],
        [*coverage, "json", "-q", "-o", str(tmp_path / "report.json")],
    ):
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads((tmp_path / "report.json").read_text())["files"]
    assert set(found) == set(files)
    untried = {name: (f["missing_lines"], f["missing_branches"]) for name, f in found.items()}
    assert all(not lines and not branches for lines, branches in untried.values()), untried
