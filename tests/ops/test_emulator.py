"""The CPU emulator itself: each call as its page says, each misuse reported.

The kernels again under the sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError
from tests.ops import ascend_emulator

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here: the CPU emulator cannot be built"
)


@needs_compiler
def test_each_call_and_each_misuse() -> None:
    program = ascend_emulator.build(
        flags=("-std=c++17", "-O0", "-pthread"), file="emulator/test_api.cpp"
    )
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("checks, 0 failed\n")


@needs_compiler
def test_kernels_under_the_sanitizers() -> None:
    """Run fixed and Hypothesis cases in a separate process that loads the sanitizers first."""
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip("g++ has no sanitizer libraries here")
    environment = os.environ | {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        library = ascend_emulator.build(flags=(*ascend_emulator.SANITIZED_FLAGS, *flags))
        command = [sys.executable, "-m", "tests.ops.sanitized", str(library)]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    # the texts that name what is undefined are a third of a build: only a failure needs them
    done = run("-fsanitize-undefined-trap-on-error")
    if done.returncode:
        pytest.fail(done.stderr[-4000:] + run().stderr[-4000:])
    assert done.stdout == "clean\n"


def test_a_build_is_made_once(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    source, flags = tmp_path / "source", ("-shared", "-fPIC")
    source.mkdir()
    (source / "a.cpp").write_text('extern "C" int one() { return 1; }')
    first = ascend_emulator.build(source, tmp_path / "out", flags, "a.cpp")
    made = first.stat().st_mtime_ns
    assert ascend_emulator.build(source, tmp_path / "out", flags, "a.cpp") == first
    assert first.stat().st_mtime_ns == made
    (source / "a.cpp").write_text('extern "C" int one() { return 2; }')
    assert ascend_emulator.build(source, tmp_path / "out", flags, "a.cpp") != first
    (source / "a.cpp").write_text("nonsense")
    with pytest.raises(ConfigError, match="does not compile"):
        ascend_emulator.build(source, tmp_path / "out", flags, "a.cpp")
    assert len(list((tmp_path / "out").iterdir())) == 2, "nothing half made is left"


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="run from a checkout"):
        ascend_emulator.build(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs g\+\+"):
        ascend_emulator.build(folder=tmp_path)
