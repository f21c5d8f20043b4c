"""All that a monitor lacks is reported at once."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.tools.monitor import check_machine
from tests.ports import free_port
from tests.sources import ROOT


def test_all_that_is_lacking_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigError) as lacking:
            check_machine({"--port": taken, "--admin-port": free_port()})
    printed = (
        "monitor: needs the program prometheus (Debian: apt-get install prometheus); a free "
        "port: --port"
    )
    assert str(lacking.value) == f"{printed} {taken}: Address already in use"
    (tmp_path / "prometheus").touch(mode=0o755)
    check_machine({"--port": free_port()})


def made(folder: Path, *words: str) -> tuple[int, str]:
    """What make says with the programs of a folder, and no others."""
    (folder / "make").symlink_to("/usr/bin/make")
    (folder / "sh").symlink_to("/usr/bin/sh")
    command = ["make", *words, f"VENV={folder}/venv"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not (folder / "venv").exists()
    return done.returncode, done.stdout


def test_make_says_so_before_it_installs_anything(tmp_path: Path) -> None:
    code, printed = made(tmp_path, "monitor")
    assert code != 0
    assert printed.splitlines() == [
        "no Grafana and no Docker: the dashboards are written all the same, to be",
        "  imported into a Grafana of yours; apt-get install docker.io, and monitor says what to "
        "type then",
        "make monitor lacks",
        "  the program prometheus: apt-get install prometheus",
        "  Python 3.11 or newer with venv: apt-get install python3 python3-venv, or PYTHON=...",
    ]


@pytest.mark.parametrize("is_taken", [False, True])
def test_make_goes_on_with_what_is_needed_and_without_grafana(
    tmp_path: Path, is_taken: bool
) -> None:
    (tmp_path / "prometheus").write_text("#!/bin/sh\n")
    # a Python whose port 9090 is in use, or not, whatever this machine's is
    rejects = 'case "$2" in *9090*) exit 1;; esac' if is_taken else ""
    (tmp_path / "python").write_text(f"#!/bin/sh\n{rejects}\n")
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    code, printed = made(tmp_path, "can-monitor", "PYTHON=python")
    says = (
        "make monitor lacks\n  port 9090, which is in use: npu-gr demo --help names the options\n"
    )
    assert (code == 0, printed) == ((False, says) if is_taken else (True, ""))
