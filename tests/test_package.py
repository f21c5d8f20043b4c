"""An installed wheel has what its commands need, outside of any clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path

import pytest

from npu_gr.core import shipped
from tests.sources import ROOT, files

PAPERS = [
    f"https://arxiv.org/abs/{number}"
    for number in ("2402.17152", "2601.01712", "2512.11529", "2502.16239")
]
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_make_installs_the_torch_that_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = project["optional-dependencies"]["serve"]
    assert f"TORCH := {torch}\n" in (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files."""
    folder = tmp_path_factory.mktemp("sources")
    for path in files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without the kernels: a compiler takes a minute."""
    out = tmp_path_factory.mktemp("wheel")
    words = [
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--wheel-dir",
        str(out),
        str(sources),
    ]
    none = shutil.which("false") or "false"
    subprocess.run(
        [sys.executable, "-m", "pip", *words],
        check=True,
        env={**os.environ, "CC": none, "CXX": none},
    )
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `npu-gr` of the installed wheel, from a folder of nobody's."""
    target, elsewhere = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("elsewhere")
    words = ["install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *(words if words[0] == "-c" else ("-m", "npu_gr", *words))]
        environ = {**os.environ, "PYTHONPATH": str(target), **variables}
        return subprocess.run(
            command, cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=120
        )

    return run


def test_the_wheel_has_what_ships(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for room in ("configs", "dashboards", "docs/runbooks", "deploy", "ops/ascendc", "ops/cpu"):
        ours = [path for path in files() if path.is_relative_to(room)]
        assert ours
        for path in ours:
            skipped = "preview" in path.parts or path.name == "mutate.py"
            assert (f"npu_gr/_data/{path}" in names) is not skipped, path


def test_the_page_of_a_package_index_leads_nowhere_that_is_not_there(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = message_from_string(archive.read(name).decode())
    page = about.get_payload()
    assert isinstance(page, str)
    readme = (ROOT / "README.md").read_text()
    assert about["Description-Content-Type"] == "text/markdown"
    assert page.startswith("# npu_gr")
    assert re.findall(r"!?\[[^\]]*\]\((?!https?:)[^)]*\)", readme)
    assert not re.findall(r"!?\[[^\]]*\]\((?!https?:)[^)]*\)", page)
    links = r"\]\((https?:[^)]*)\)"
    assert re.findall(links, page) == re.findall(links, readme)
    assert page.count("```") == readme.count("```")
    assert re.findall(r"(?m)^\*[^*]", readme), "a picture has a line in italics below it"
    assert not re.findall(r"(?m)^\*[^*]|^!", page)
    assert re.findall(r"(?m)^## More$", readme)
    assert "## More" not in page
    assert {one.partition(", ")[2] for one in about.get_all("Project-URL") or ()} == set(PAPERS)
    assert about.get_all("Classifier")
    assert about["Keywords"]


def test_the_sdist_has_what_ships(sources: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=sources, check=True, capture_output=True, text=True
    )
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for room in (
        "npu_gr",
        "configs",
        "dashboards",
        "docs/runbooks",
        "deploy",
        "ops/ascendc",
        "ops/cpu",
    ):
        ours = {
            str(path)
            for path in files()
            if path.is_relative_to(room) and "preview" not in path.parts
        }
        assert ours
        assert not ours - names, sorted(ours - names)


def test_it_writes_a_configuration_that_is_right(installed: Run, tmp_path: Path) -> None:
    serve = tmp_path / "serve.yaml"
    serve.write_text(installed("config").stdout)
    done = installed("check-config", "--config", str(serve), "--syntax-only")
    assert done.returncode == 0, done.stderr
    line = serve.read_text().partition("\n")[0]
    assert Path(line.partition("$schema=file://")[2]).is_file()
    assert "/target" in line  # the installation's own


def test_its_schema_and_reference_are_those_of_the_clone(installed: Run) -> None:
    assert installed("config", "--schema").stdout == (ROOT / "configs/schema.json").read_text()
    assert installed("config", "--reference").stdout == (ROOT / "docs/configuration.md").read_text()


def test_dashboards_and_configurations_are_found(installed: Run, tmp_path: Path) -> None:
    done = installed("dashboards", "--out", str(tmp_path / "boards"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "boards" / "slo.json").exists()
    code = (
        "from npu_gr.core import shipped; "
        "print(shipped.found(shipped.Path('configs/cpu.yaml')).read_text())"
    )
    done = installed("-c", code)
    assert done.stdout.strip() == (ROOT / "configs/cpu.yaml").read_text().strip(), done.stderr


def test_the_ops_of_an_npu_are_built_from_it(installed: Run, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "lib"))
    assert "--ascend" in installed("build-ops", "--help").stdout
    done = installed("build-ops", "--ascend", *out, SOC_VERSION="", ASCEND_HOME_PATH="")
    assert done.returncode == 2
    assert "SOC_VERSION is not set" in done.stderr
    done = installed("build-ops", "--ascend", *out, "--soc", "ascend910b1", ASCEND_HOME_PATH="")
    assert "source CANN's set_env.sh first" in done.stderr
    done = installed("build-ops", "--ascend", *out, "--soc", "ascend310p3")
    assert "no native ops there" in done.stderr
    done = installed("build-ops", "--cpu", *out, CXX="/nowhere/c++")
    assert "/nowhere/c++: No such file" in done.stderr
    assert list((tmp_path / "lib").iterdir()) == []
    assert installed("build-ops").returncode == 2


def test_in_a_clone_the_repository_itself_is_found() -> None:
    assert shipped.path("configs/cpu.yaml") == ROOT / "configs/cpu.yaml"
    assert shipped.found(Path("configs/none.yaml")) == Path("configs/none.yaml")
