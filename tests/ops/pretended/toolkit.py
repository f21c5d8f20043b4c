"""A simulated CANN and torch_npu, which run build.sh, CMake, binding and platform query end to end.

`cann/` is a toolkit: `ascendc.cmake` makes launch functions and headers from the entry points and
merges objects by a script that wants a build type; its device compiler is g++ with the CPU
emulator. `torch_npu/` is a device `npu` whose memory is this machine's: it knows what was freed,
and runs a launch as late as it can. A kernel that the emulator complains about is an error of the
launch. Our own text, after the documented behaviour of both; no file of either is here.

`installed()` compiles it, once: under build/, under its sources' hash. What uses it is a process of
its own, because the name of a device cannot be taken back.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.ops.ascend_emulator import SOURCES

HERE = Path(__file__).parent
CANN = HERE / "cann"
TORCH_NPU = HERE / "torch_npu"
ROOT = HERE.parents[2]
BUILDS = ROOT / "build" / "pretended"
SOC = "ascend910b3"
VERSION = "2.13.0"  # of the pretended torch_npu
TORCH = Path(torch.__file__).parent
ABI = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"


@dataclass(frozen=True)
class Toolkit:
    """Where the pretended machine is."""

    folder: Path

    @property
    def home(self) -> Path:
        """ASCEND_HOME_PATH."""
        return self.folder / "cann"

    @property
    def site(self) -> Path:
        """The folder on Python's path that has torch_npu."""
        return self.folder / "site"

    def environment(self, **more: str) -> dict[str, str]:
        """Variables of a process on the machine."""
        libraries = (self.home / "lib64", self.site / "torch_npu" / "lib", TORCH / "lib")
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": f"{self.site}:{ROOT}",
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "ASCEND_HOME_PATH": str(self.home),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "SOC_VERSION": SOC,
            "PYTHON": sys.executable,
        } | more

    def build(self, sources: Path, out: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a copy's build.sh; `sources` is .../ops/ascendc of a tree of its own."""
        command = ["bash", str(sources / "build.sh"), str(out)]
        return subprocess.run(
            command, env=self.environment(**more), capture_output=True, text=True, check=False
        )


def tree(folder: Path) -> Path:
    """Copy what build.sh needs into a folder of its own, where it may write.

    Returns the sources in it.
    """
    sources = folder / "ops" / "ascendc"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "build"))
    for name in ("npu_gr/backend/npu/versions.py", "deploy/operators.sh"):
        (folder / name).parent.mkdir(parents=True)
        shutil.copyfile(ROOT / name, folder / name)
    return sources


def _digest(*folders: Path) -> str:
    """Name a build by the hash of its sources; Python files and pages do not count."""
    made = hashlib.sha256(torch.__version__.encode())
    for folder in folders:
        for path in sorted(
            path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ):
            if folder == CANN or path.suffix not in (".py", ".md"):
                made.update(
                    path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes()
                )
    return made.hexdigest()[:16]


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder if it is not there; another worker may be at it."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            part = target.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.replace(target)
    return target


def _library(path: Path, source: Path | None, flags: Sequence[str] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    given = [str(source)] if source else ["-x", "c++", "/dev/null"]
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-w",
        "-shared",
        "-fPIC",
        ABI,
        *given,
        *flags,
        "-o",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


@cache
def installed() -> Toolkit:
    """Compile the pretended machine, or find it compiled.

    Skips where the tools for it are missing.
    """
    missing = [tool for tool in ("g++", "cmake", "make") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: the pretended toolkit cannot be made")
    toolkit = Toolkit(_once(BUILDS / f"machine-{_digest(CANN, TORCH_NPU)}", _make))
    for path in TORCH_NPU.glob("*.py"):
        shutil.copyfile(path, toolkit.site / "torch_npu" / path.name)
    return toolkit


@cache
def library() -> Path:
    """Run build.sh on the pretended machine, once, by the script that an image runs.

    Returns the folder of the build, with the library in `out`.
    """

    def make(folder: Path) -> None:
        script = tree(folder).parents[1] / "deploy" / "operators.sh"
        command = ["bash", str(script), sys.executable, str(folder / "out")]
        done = subprocess.run(
            command, env=installed().environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
        assert done.stdout.endswith("/libnpu_gr_ascend_ascend910b.so\n"), "the image has it"

    return _once(BUILDS / f"library-{_digest(CANN, TORCH_NPU, SOURCES)}", make)


def headers(folder: Path) -> None:
    """Write the launch headers of our kernels into a folder, as the toolkit's build does."""
    text = folder / "entries.i"
    flags = ("-E", "-P", "-DPRETENDED_PREPROCESS", "-DNPU_GR_CANN=90000", f"-I{CANN}/include")
    subprocess.run(["g++", *flags, f"{SOURCES}/kernels/entries.cpp", "-o", str(text)], check=True)
    script = CANN / "compiler/tikcpp/ascendc_kernel_cmake/launches.py"
    subprocess.run(
        [sys.executable, str(script), str(text), "", str(folder / "stub.cpp"), str(folder)],
        check=True,
    )


def bind(sources: Path, out: Path, *flags: str) -> None:
    """Compile the binding of a copy of the sources alone, with the kernels of `library()`."""
    built = library() / "build" / "npu-ascend910b"
    toolkit = installed()
    package = toolkit.site / "torch_npu"
    folders = [built / "include/npu_gr_kernels", *_torch_headers(package), toolkit.home / "include"]
    linked = [built / "auto_gen/npu_gr_kernels/merged.o", package / "lib/libtorch_npu.so"]
    linked += [toolkit.home / "lib64/libascendcl.so"]
    _library(
        out,
        sources / "torch" / "binding.cpp",
        [*flags, *(f"-I{path}" for path in folders), *map(str, linked)],
    )


def _torch_headers(package: Path) -> list[Path]:
    given = [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    return [*given, package / "include", package / "include/third_party/acl/inc"]


def _make(folder: Path) -> None:
    made = Toolkit(folder)
    shutil.copytree(CANN, made.home)
    shutil.copytree(
        TORCH_NPU, made.site / "torch_npu", ignore=shutil.ignore_patterns("__pycache__")
    )
    about = made.site / f"torch_npu-{VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {VERSION}\n")
    ours = [f"-I{made.home}/include"]
    _library(made.home / "lib64" / "libascendcl.so", made.home / "src" / "runtime.cpp", ours)
    for name in ("tiling_api", "platform"):
        _library(made.home / "lib64" / f"lib{name}.so", None)
    package = made.site / "torch_npu"
    linked = [
        f"-L{made.home}/lib64",
        "-lascendcl",
        f"-L{TORCH}/lib",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    flags = [*ours, *(f"-I{path}" for path in _torch_headers(package)), *linked]
    _library(package / "lib" / "libtorch_npu.so", package / "src" / "device.cpp", flags)
