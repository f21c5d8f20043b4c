"""A simulated CANN and torch_npu, which run build.sh, CMake, binding and platform query end to end.

`cann/` is a toolkit: `ascendc.cmake` makes launch functions and headers from the entry points and
merges objects by a script that wants a build type; its device compiler is g++ with the CPU
emulator. `torch_npu/` is a device `npu` whose memory is this machine's: it knows what was freed,
and runs a launch as late as it can. A kernel that the emulator complains about is an error of the
launch. Our own text, after the documented behaviour of both; no file of either is here.

`installed()` compiles it, once: under build/, under its sources' hash. So does `library()` with our
operators; the faults of ops/ascendc/faults.py are in its host code, each switched off until a test
switches it on. What uses them is a process of its own, because the name of a device cannot be taken
back.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import builds
from tests.ops.ascend_emulator import SOURCES

HERE = Path(__file__).parent
CANN = HERE / "cann"
TORCH_NPU = HERE / "torch_npu"
ROOT = HERE.parents[2]
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


def _digest(*folders: Path, more: str = "") -> str:
    """Name a build by its sources; Python files and pages count in the toolkit alone."""
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    counted = (p for p in files if p.is_relative_to(CANN) or p.suffix not in (".py", ".md"))
    kept = (p for p in counted if "__pycache__" not in p.parts)
    return builds.digest(kept, torch.__version__, more)


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
    toolkit = Toolkit(builds.once(f"machine-{_digest(CANN, TORCH_NPU)}", _make))
    for path in TORCH_NPU.glob("*.py"):
        shutil.copyfile(path, toolkit.site / "torch_npu" / path.name)
    return toolkit


@cache
def planted() -> tuple[ModuleType, ModuleType]:
    """Import ops/ascendc/faults.py, and mutate.py, which has their switch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SOURCES)
        return importlib.import_module("faults"), importlib.import_module("mutate")


@cache
def library() -> Path:
    """Run build.sh on the pretended machine, once, by the script that an image runs.

    Returns the folder of the build, with the library in `out`.
    """
    faults, mutate = planted()

    def make(folder: Path) -> None:
        sources = tree(folder)
        faults.plant(faults.HOST_FAULTS, sources)
        binding = sources / "torch" / "binding.cpp"
        binding.write_text(mutate.SWITCH + binding.read_text())
        script = folder / "deploy" / "operators.sh"
        command = ["bash", str(script), sys.executable, str(folder / "out")]
        done = subprocess.run(
            command, env=installed().environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
        assert done.stdout.endswith("/libnpu_gr_ascend_ascend910b.so\n"), "the image has it"

    text = f"{faults.HOST_FAULTS}{mutate.SWITCH}"
    return builds.once(f"library-{_digest(CANN, TORCH_NPU, SOURCES, more=text)}", make)


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
