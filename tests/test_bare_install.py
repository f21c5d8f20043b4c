"""The wheel with its own dependencies alone, in an empty environment.

It has a client, a router, replay and keys, but no torch.
Needs the package index: `python -m pytest -m bare tests/test_bare_install.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sources import ROOT, files

pytestmark = pytest.mark.bare


def run(*words: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # the kernels are left out, as where there is no compiler
    environment |= {"CC": "false", "CXX": "false"}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("bare")
    source = folder / "source"
    for name in files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder,
        source,
        cwd=folder,
    )
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    [wheel] = folder.glob("*.whl")
    run(binaries / "pip", "install", "--quiet", f"{wheel}[client]", cwd=folder)
    return binaries


def test_there_is_no_torch_and_nothing_is_missing(bare: Path, tmp_path: Path) -> None:
    run(bare / "pip", "check", cwd=tmp_path)
    installed = run(bare / "pip", "list", "--format", "freeze", cwd=tmp_path)
    assert "torch" not in installed
    assert "aiohttp==" in installed


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("keys", "list", "--help"),
        ("route", "--help"),
        ("replay", "--help"),
        ("fleet", "erase", "--help"),
    ],
    ids=" ".join,
)
def test_commands_answer(bare: Path, tmp_path: Path, words: Sequence[str]) -> None:
    assert "Usage:" in run(bare / "npu-gr", *words, cwd=tmp_path)


def test_the_client_is_imported(bare: Path, tmp_path: Path) -> None:
    code = (
        "from npu_gr.client import AsyncClient, Behaviours, Client; import npu_gr; "
        "print(npu_gr.RANK.path)"
    )
    assert run(bare / "python", "-W", "error", "-c", code, cwd=tmp_path) == "/v1/rank\n"


def test_a_server_says_what_it_needs(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("backend: cpu\n")
    done = subprocess.run(
        [bare / "npu-gr", "serve", "--config", "serve.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "npu-gr: serve needs torch: pip install 'npu_gr[serve]'\n",
    )
