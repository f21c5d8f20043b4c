"""Every name of `npu_gr.__all__` resolves lazily, and type checkers see the same names."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import assert_type

import numpy as np
import pytest

import npu_gr
from npu_gr import RANK, Events, HistoryRef, Kind, RankAnswer, RankRequest, Service, UserKey

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", npu_gr.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(npu_gr, name)
    home = getattr(value, "__module__", None)
    if isinstance(value, ModuleType):
        assert sys.modules[value.__name__] is value
    elif home is not None and home.startswith("npu_gr."):
        assert getattr(sys.modules[home], name) is value, "another thing of the same name"
    assert name in dir(npu_gr)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "npu_gr" / "__init__.py").read_text())
    [typed] = [
        node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    ]
    imported = [
        alias.asname or alias.name
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(imported) == sorted(npu_gr.__all__)


def test_other_names_are_rejected() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Relay'"):
        npu_gr.Relay  # type: ignore[attr-defined]  # noqa: B018  the access is what is tested


def test_a_public_name_loads_no_more_than_it_needs() -> None:
    code = (
        "import sys, npu_gr; npu_gr.errors; print([m for m in ('torch', 'aiohttp', 'numpy') if "
        "m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version", "readme"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "npu_gr.__version__"}
    assert importlib.metadata.version("npu_gr") == npu_gr.__version__
    assert f"## [{npu_gr.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


async def typed_use(service: Service) -> None:
    """Never called: mypy checks that a user of the package gets types."""
    history = HistoryRef(events=Events.make([1], [0], [0]))
    request = RankRequest(user=UserKey("", "me"), candidates=np.array([1]), history=history)
    assert_type(RANK, Kind[RankRequest, RankAnswer])
    assert_type(await service.serve(RANK, request, budget_s=0.2), RankAnswer)
