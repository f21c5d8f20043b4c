"""What a monitor lacks is told at once, and all of it."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.tools.monitor import check_machine
from tests.cli.test_main import free_port
from tests.sources import ROOT


def test_all_that_is_lacking_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigError) as lacking:
            check_machine({"--port": taken, "--admin-port": free_port()})
    told = "monitor: needs the program prometheus (Debian: apt-get install prometheus); a free port: --port"
    assert str(lacking.value) == f"{told} {taken}: Address already in use"
    (tmp_path / "prometheus").touch(mode=0o755)
    check_machine({"--port": free_port()})


def test_make_says_so_before_it_installs_anything(tmp_path: Path) -> None:
    for name in ("make", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = subprocess.run(
        ["make", "monitor", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stdout == "make monitor needs the program prometheus: apt-get install prometheus\n"
    assert not (tmp_path / "venv").exists()
