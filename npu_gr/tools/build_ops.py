"""`npu-gr build-ops`: build the native code in the package, for a CPU or an Ascend NPU."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from npu_gr.backend.cpu import library as cpu_library
from npu_gr.backend.npu import ops as npu_ops
from npu_gr.backend.npu import versions as npu_versions
from npu_gr.core import shipped
from npu_gr.core.errors import ConfigError

COMPILERS = ("c++", "g++", "clang++")


def build_cpu(out: Path | None = None) -> Path:
    """Compile the CPU kernels with the machine's C++ compiler.

    Args:
        out: Folder of the library; None for the one where the backend looks.

    Returns:
        The path of the library.

    Raises:
        ConfigError: there is no compiler, or it fails; the message has its output.
    """
    return _compile("ops/cpu", (out or cpu_library.LIBRARY.parent) / cpu_library.LIBRARY.name)


def _compile(folder: str, target: Path) -> Path:
    compiler = (
        shlex.split(os.environ.get("CXX", ""))
        or [found for found in map(shutil.which, COMPILERS) if found][:1]
    )
    if not compiler:
        raise ConfigError(
            "no C++ compiler: CXX is not set, and none of c++, g++, clang++ is in PATH"
        )
    flags = (shipped.path("ops/cpu") / "flags.txt").read_text().split()
    files = sorted(str(path) for path in shipped.path(folder).glob("*.cpp"))
    made = target.with_suffix(".tmp")
    _make_folder(target.parent)
    linked = ["-shared", "-fPIC", "-pthread", "-static-libgcc", "-static-libstdc++"]
    try:
        _run([*compiler, *flags, *linked, *files, "-o", str(made)], "the compiler")
        made.replace(target)  # rename, so that a process that has loaded the old library keeps it
    finally:
        made.unlink(missing_ok=True)
    return target


def build_ascend(out: Path | None = None, soc: str | None = None, force: bool = False) -> Path:
    """Run `ops/ascendc/build.sh`, on a machine with CANN and its torch.

    Args:
        out: Folder of the library; None for the one where the backend looks.
        soc: The chip, e.g. ascend910b1; None for the value of SOC_VERSION.
        force: Whether to build with a CANN that is older than the kernels need.

    Returns:
        The folder.

    Raises:
        ConfigError: something is missing, or the build fails; the message has its output.
    """
    folder = out or npu_ops.LIBRARIES
    _make_folder(folder)
    # build outside of the installation, which may be read-only
    with tempfile.TemporaryDirectory(prefix="npu_gr-ops-") as temporary:
        sources = Path(temporary) / "ops" / "ascendc"
        shutil.copytree(shipped.path("ops/ascendc"), sources)
        table = Path(temporary) / "npu_gr/backend/npu/versions.py"  # where build.sh looks for it
        table.parent.mkdir(parents=True)
        shutil.copyfile(npu_versions.__file__, table)
        variables = {"PYTHON": sys.executable, **os.environ}
        if soc is not None:
            variables["SOC_VERSION"] = soc
        flags = ["--force"] if force else []
        command = ["bash", str(sources / "build.sh"), *flags, str(folder.absolute())]
        _run(command, "build.sh", variables)
    return folder


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror}") from error


def _run(command: Sequence[str], name: str, variables: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise ConfigError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ConfigError(f"{name} ended with {done.returncode}: {said[-4000:]}")
