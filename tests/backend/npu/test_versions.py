"""build.sh, the doctor, the extra `npu` and the docs share one table of CANN and torch_npu."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from npu_gr.backend import checks
from npu_gr.backend.checks import FindingState
from npu_gr.backend.npu import versions
from npu_gr.backend.npu.versions import VersionError, cann_at, check, number, requirement, table

ROOT = Path(__file__).parents[3]


def test_the_extra_and_the_docs_say_what_the_table_says() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert requirement() in extras["npu"]
    assert table() in (ROOT / "docs" / "ascend.md").read_text()


def test_rows_rise() -> None:
    numbers = [number(each.cann) for each in versions.MATRIX]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 80500


@pytest.mark.parametrize(
    ("file", "text", "want"),
    [
        (
            "include/version/asc_devkit_version.h",
            '#define ASC_DEVKIT_VERSION_STR "9.1.0-beta.3"',
            "9.1.0-beta.3",
        ),
        ("include/ascendc/asc_devkit_version.h", '#define ASC_DEVKIT_VERSION_STR "8.5.0"', "8.5.0"),
        (
            "aarch64-linux/ascend_toolkit_install.info",
            "package_name=x\nversion=8.2.RC1\ninnerversion=V1\n",
            "8.2.RC1",
        ),
        ("version.cfg", "# a\nruntime_running_version=[7.3.0.1.231:8.0.RC3]\n", "8.0.RC3"),
        ("version.cfg", "toolkit_running_version=[8.5.0]\n", "8.5.0"),
        ("compiler/version.info", "Version=7.6.0.1.220\nversion_dir=8.3.RC1\n", "8.3.RC1"),
        ("compiler/version.info", "Version=8.5.0-beta.1\nversion_dir=cann\n", "8.5.0-beta.1"),
        ("version.info", "Version=9.0.0\n", "9.0.0"),
        ("version.info", "Version=unknown\n", None),
        ("readme", "9.0.0", None),
    ],
)
def test_a_toolkit_says_its_version(tmp_path: Path, file: str, text: str, want: str | None) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert cann_at(tmp_path) == want


@pytest.mark.parametrize("each", versions.MATRIX, ids=lambda each: each.cann)
def test_every_pair_of_the_table_passes(each: versions.Release) -> None:
    assert not any(check(each.cann, torch_npu) for torch_npu in each.torch_npu)


def test_only_what_is_known_to_be_wrong_is_rejected() -> None:
    for pair, why in {
        ("8.3.RC1", "2.8.0"): "CANN 8.3.RC1: the kernels need 8.5.0 or later",
        ("nine", "2.9.0"): "'nine' is no version",
    }.items():
        with pytest.raises(VersionError, match=why):
            check(*pair)
    assert check("9.0.0", "2.10.0.post2") == "", "the pair of Huawei's own quick start"
    assert check("9.0.1", "2.9.0.post2") == "", "a patch release is its minor's"


@pytest.mark.parametrize(
    ("cann", "torch_npu", "says"),
    [
        ("9.3.0", "2.9.0", "CANN 9.3.0 is newer than"),
        (
            "9.1.0",
            "2.13.0+x",
            "no torch_npu 2.13.0\\+x for CANN 9.1.0, but 2.7.1.post8",
        ),
        ("9.0.0", "2.6.0.post5", "no torch_npu 2.6.0.post5 for CANN 9.0.0, but 2.7.1.post4"),
        ("8.5.0", "2.12.0", "no torch_npu 2.12.0 for CANN 8.5.0"),
        ("9.2.0-beta.1", "2.12.0", "for CANN 9.2.0-beta.1: an untested pair"),
    ],
)
def test_an_unknown_pair_is_a_warning(cann: str, torch_npu: str, says: str) -> None:
    assert re.search(says, check(cann, torch_npu))


def test_the_command_prints_the_number(tmp_path: Path) -> None:
    def run(torch_npu: str, *more: str) -> subprocess.CompletedProcess[str]:
        # no package but Python's own
        command = [sys.executable, "-S", versions.__file__, str(tmp_path), torch_npu, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("2.9.0").returncode == 2
    assert "says which CANN it is" in run("2.9.0").stderr
    assert run("2.9.0", "--force").stdout == f"{number(versions.NEWEST_CANN)}\n"
    (tmp_path / "version.info").write_text("Version=8.3.RC1\n")
    assert "--force builds all the same" in run("2.8.0").stderr
    forced = run("2.8.0", "--force")
    assert forced.stdout == "80300\n"
    assert forced.stderr.startswith("warning: CANN 8.3.RC1")
    (tmp_path / "version.info").write_text("Version=9.1.0\n")
    assert run("2.12.0").stdout == "90100\n"
    other = run("2.14.0")
    assert other.stdout == "90100\n"
    assert other.stderr.startswith("warning: Huawei names no torch_npu 2.14.0")


def test_the_doctor_names_the_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert checks._versions("2.9.0").state is FindingState.MISSING
    (tmp_path / "version.info").write_text("Version=8.5.0\n")
    assert checks._versions("2.9.0").found == "CANN 8.5.0 with torch_npu 2.9.0"
    assert checks._cann() == f"8.5.0, at {tmp_path}"
    assert "Huawei names no torch_npu 2.10.0" in checks._versions("2.10.0").found
    (tmp_path / "version.info").write_text("Version=8.3.RC1\n")
    rejected = checks._versions("2.8.0")
    assert rejected.state is FindingState.MISSING
    assert "docs/ascend.md" in rejected.remedy
