"""The two rules of the house that a machine can hold: imports point down, only the backend names a device."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "npu_gr"
FILES = sorted(ROOT.rglob("*.py"))
ORDER = [  # top first: a folder or file may import what stands below it
    "__main__",
    "cli",
    "monitor",
    "demo",
    "showcase",
    "judge",
    "bench",
    "acceptance",
    "calibrate",
    "fleet",
    "app",
    "opening",
    "reload",
    "config",
    "service",
    "versions",
    "recommend",
    "generation",
    "served_catalogue",
    "match",
    "ranking",
    "simulate",
    "router",
    "server",
    "replay",
    "train",
    "matching",
    "relay",
    "admission",
    "engine",
    "catalog",
    "features",
    "kv",
    "model",
    "backend",
    "metrics",
    "process",
    "use",
    "request",
    "settings",
    "errors",
    "__init__",
]
RANK = {name: -index for index, name in enumerate(ORDER)}


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "npu_gr":
                yield from (f"npu_gr.{alias.name}" for alias in node.names)
            else:
                yield node.module


def folder(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    for name in imported(ast.parse(path.read_text())):
        if name.startswith("npu_gr.") and not name.endswith("__version__"):
            there = name.split(".")[1]
            assert RANK[there] <= RANK[folder(path)], f"{folder(path)} imports {there}"


def test_only_the_backend_names_a_device() -> None:
    devices = ("torch_npu", "torch.npu", "torch.cuda", '"npu"', '"cuda"')
    for path in FILES:
        if folder(path) != "backend":
            assert not any(word in path.read_text() for word in devices), path


def test_importing_the_package_does_nothing_slow() -> None:
    code = "import sys, npu_gr, npu_gr.cli; print(sorted(m for m in ('torch', 'aiohttp', 'numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
