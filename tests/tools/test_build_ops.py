"""The kernels are built from what ships, into a folder of one's choice.

A compiler that fails leaves nothing behind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from npu_gr.backend.cpu.library import load
from npu_gr.core.errors import ConfigError
from npu_gr.tools.build_ops import build_ascend, build_cpu


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_cpu_kernels_are_built_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    # -O3 takes a minute of the processor
    flags = "-O0 -Dalways_inline=unused"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@" {flags}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"env {compiler}")  # as `ccache g++`
    assert load(library=build_cpu(tmp_path / "lib")).isa


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        build_cpu(tmp_path)
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 3\n")
    compiler.chmod(0o755)
    with pytest.raises(ConfigError, match="the compiler ended with 3: no such header"):
        build_cpu(tmp_path / "lib")
    assert list((tmp_path / "lib").iterdir()) == []
    with pytest.raises(ConfigError, match="--out: /proc/none cannot be written"):
        build_cpu(Path("/proc/none"))


@pytest.mark.parametrize(("force", "given"), [(False, "build.sh /"), (True, "build.sh --force /")])
def test_force_reaches_build_sh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool, given: str
) -> None:
    bash = tmp_path / "bash"
    bash.write_text('#!/bin/sh\necho "$SOC_VERSION: $*" >&2\nexit 4\n')
    bash.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="build.sh ended with 4: ascend910b1: .*" + given):
        build_ascend(tmp_path, "ascend910b1", force)
