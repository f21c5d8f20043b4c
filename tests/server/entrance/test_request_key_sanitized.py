"""The key of a request is made from a stranger's bytes, in C++: no stray access, nothing undefined."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_no_bytes_lead_astray(tmp_path: Path) -> None:
    source = ROOT / "tests/server/entrance/fuzz/main.cpp"
    built = subprocess.run(["g++", *FLAGS, source, "-o", tmp_path / "fuzz"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    done = subprocess.run([tmp_path / "fuzz", "1", "100000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith(" keys\n")
