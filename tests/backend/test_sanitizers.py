"""The kernels on random jobs with exactly allocated buffers: no stray access, nothing undefined; aarch64 too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from npu_gr.backend.native import supported

ROOT = Path(__file__).parents[2]
FUZZ = ROOT / "tests/backend/fuzz_topk.cpp"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi"]
SANITIZERS = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TARGETS = {
    "generic": ["-DNPU_GR_VECTOR_BYTES=16"],
    "avx2": ["-DNPU_GR_VECTOR_BYTES=32", "-mavx2", "-mfma"],
    "avx512": ["-DNPU_GR_VECTOR_BYTES=64", "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


def build(compiler: str, into: Path, *flags: str) -> str:
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    out = str(into / "fuzz")
    command = [compiler, *FLAGS, *flags, "-DNPU_GR_BF16_DOT=0", f"-I{ROOT / 'ops/cpu'}", str(FUZZ), "-o", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def choices(*command: str) -> int:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout.split()[0])


@pytest.mark.parametrize("isa", TARGETS)
def test_nothing_undefined(isa: str, tmp_path: Path) -> None:
    if isa not in supported():
        pytest.skip(f"{isa}: not this CPU's, or no library was built")
    assert choices(build("g++", tmp_path, *SANITIZERS, *TARGETS[isa]), "2000") > 0


@pytest.mark.aarch64
def test_neon_chooses_as_many(tmp_path: Path) -> None:
    """The cross-compiled kernels run under qemu and find as much as the host's."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not emulator:
        pytest.skip("there is no qemu-aarch64")
    (tmp_path / "host").mkdir()
    neon = build("aarch64-linux-gnu-g++", tmp_path, "-static", *TARGETS["generic"])
    host = build("g++", tmp_path / "host", *TARGETS["generic"])
    assert choices(emulator, neon, "300") == choices(host, "300")
