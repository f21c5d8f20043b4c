"""build.sh stops early and says what is missing.

The binding fits torch's and torch_npu's headers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from npu_gr.backend.npu.ops import SCHEMAS
from tests.builds import once
from tests.ops.ascend_emulator import SOURCES
from tests.ops.pretended import toolkit

pytestmark = pytest.mark.skipif(not SOURCES.is_dir(), reason="the Ascend C sources are not here")


def build(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable} | variables
    command = ["bash", str(SOURCES / "build.sh"), str(tmp_path / "out")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("variables", "status", "says"),
    [
        ({}, 2, "SOC_VERSION is not set"),
        ({"SOC_VERSION": "ascend310p3"}, 3, "310P has no Sort32"),
        ({"SOC_VERSION": "Ascend910A"}, 3, "no native ops for ascend910a"),
        ({"SOC_VERSION": "ascend910b1"}, 2, "ASCEND_HOME_PATH is not set"),
        (
            {"SOC_VERSION": "Ascend910_9392", "ASCEND_HOME_PATH": "/nowhere"},
            2,
            "/nowhere, which is no folder",
        ),
    ],
)
def test_stops_early(tmp_path: Path, variables: dict[str, str], status: int, says: str) -> None:
    done = build(tmp_path, **variables)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("build.sh: ")
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_stops_without_torch_npu(tmp_path: Path) -> None:
    (tmp_path / "cmake").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "cmake").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = build(
        tmp_path,
        SOC_VERSION="ascend910b1",
        ASCEND_HOME_PATH=str(tmp_path),
        PATH=path,
        PYTHON=sys.executable,
    )
    assert done.returncode == 2
    assert "has no torch_npu: pip install 'npu_gr[npu]'" in done.stderr


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
def test_cmake_stops_without_the_toolkit(tmp_path: Path) -> None:
    def configure(**defines: str) -> str:
        command = [
            "cmake",
            "-S",
            str(SOURCES),
            "-B",
            str(tmp_path / "b"),
            *(f"-D{k}={v}" for k, v in defines.items()),
        ]
        environment = {
            name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        return " ".join(done.stderr.split())

    assert "ASCEND_HOME_PATH is not set: source CANN's set_env.sh first" in configure()
    assert "SOC_VERSION is not set: run build.sh" in configure(ASCEND_HOME_PATH=str(tmp_path))
    known = {
        "SOC_VERSION": "ascend910b1",
        "VARIANT": "ascend910b",
        "TORCH_PATH": "/t",
        "TORCH_NPU_PATH": "/n",
        "CANN": "80500",
    }
    assert ("install the CANN toolkit, not only its runtime") in configure(
        ASCEND_HOME_PATH=str(tmp_path), **known
    )


def test_every_kernel_is_launched_and_every_op_is_bound() -> None:
    """Entry points, launches and Python ops have the same names; no compiler here can link them."""
    entries = (SOURCES / "kernels" / "entries.h").read_text()
    launched = (SOURCES / "op_host" / "run.h").read_text()
    declared = (SOURCES / "torch" / "launches.h").read_text()
    bound = (SOURCES / "torch" / "binding.cpp").read_text()
    plain = set(re.findall(r"NPU_GR_KERNEL (\w+)\(", entries))
    typed = set(re.findall(r"NPU_GR_KERNEL (\w+)_##dtype\(", entries))
    assert set(re.findall(r"NPU_GR_LAUNCH\((\w+), ", launched)) - {"kernel"} == plain
    assert set(re.findall(r"NPU_GR_LAUNCH_OF\([cs]\.dtype, (\w+),", launched)) == typed
    names = plain | {f"{name}_{dtype}" for name in typed for dtype in ("f32", "f16", "bf16")}
    assert set(re.findall(r'"aclrtlaunch_(\w+)\.h"', declared)) == names
    assert set(re.findall(r'm\.impl\("(\w+)"', bound)) == {
        schema.split("(")[0] for schema in SCHEMAS
    }


@pytest.mark.npu_headers
def test_binding_type_checks(tmp_path: Path) -> None:
    """Compile against the real headers of torch and torch_npu; torch_npu is never imported.

    What is CANN's own, launch headers and the platform query, is the pretended toolkit's.
    """
    headers = npu_headers()
    toolkit.headers(tmp_path)
    here = Path(torch.__file__).parent / "include"
    folders = [here, here / "torch/csrc/api/include", headers, headers / "third_party/acl/inc"]
    folders += [tmp_path, toolkit.CANN / "include"]
    command = [
        "g++",
        "-std=c++17",
        "-w",
        "-fsyntax-only",
        *(f"-I{folder}" for folder in folders),
    ]
    done = subprocess.run(
        [*command, str(SOURCES / "torch/binding.cpp")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:3000]


def npu_headers() -> Path:
    """The include folder of the torch_npu wheel for this torch; `npu` is in the same folder."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    minor = ".".join(torch.__version__.split("+")[0].split(".")[:2])

    def get(folder: Path) -> None:
        folder.mkdir()
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        wanted = ["--only-binary", ":all:", "-d", str(folder), f"torch-npu=={minor}.*"]
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            why = done.stderr.strip()[-200:]
            pytest.skip(f"no torch_npu {minor} wheel can be had here: {why}")
        parts = ("torch_npu/include/", "torch_npu/npu/")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(parts)])
        wheels[0].unlink()

    return once(f"headers-{minor}", get) / "torch_npu" / "include"
