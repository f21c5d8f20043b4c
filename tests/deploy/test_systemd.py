"""The units are read by systemd's own checker where it is installed; their commands exist."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from npu_gr.cli.main import main
from tests.sources import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").iterdir())
VENV = "/opt/npu_gr/.venv/bin/npu-gr"


def read(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_read_and_its_command_exists(path: Path) -> None:
    unit = read(path)
    kind = "Timer" if path.suffix == ".timer" else "Service"
    assert unit.sections()[:2] == ["Unit", kind]
    if kind == "Timer":
        assert path.with_suffix(".service") in UNITS
        return
    service = unit["Service"]
    assert service["User"] == "npu-gr"
    command, _, words = service["ExecStart"].partition(f"{VENV} ")
    assert command in ("", "/bin/sh -c 'exec ")
    found = main.commands[words.split()[0]]
    known = {name for one in found.params if isinstance(one, click.Option) for name in one.opts}
    assert {word for word in words.split() if word.startswith("--")} - {"--date=yesterday"} <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace(VENV, "/bin/true"))
    for other in UNITS:
        (tmp_path / other.name).write_text(other.read_text().replace(VENV, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    told = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert not told
