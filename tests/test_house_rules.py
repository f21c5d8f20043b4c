"""The rules of the house that a machine can hold.

Which room may import which is in pyproject.toml (import-linter).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent / "npu_gr"
FILES = sorted(ROOT.rglob("*.py"))


def folder(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_only_the_backend_names_a_device() -> None:
    devices = ("torch_npu", "torch.npu", "torch.cuda", '"npu"', '"cuda"')
    for path in FILES:
        if folder(path) != "backend":
            assert not any(word in path.read_text() for word in devices), path


def test_importing_the_package_does_nothing_slow() -> None:
    slow = "('torch', 'aiohttp', 'numpy')"
    code = (
        f"import sys, npu_gr, npu_gr.cli.main; print(sorted(m for m in {slow} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
