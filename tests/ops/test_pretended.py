"""build.sh, CMake, the binding and the platform query run end to end on a simulated machine.

The kernels are the real ones, compiled through our CMakeLists.txt by a toolkit of our own with the
CPU emulator; the tensors are on a device `npu`, and what `npu-gr doctor` runs there is run here.
See `tests/ops/pretended/toolkit.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from npu_gr.backend.npu import ops
from tests.ops.pretended import toolkit

SMALL = """#include "kernel_operator.h"
extern "C" __global__ __aicore__ void nothing(GM_ADDR x, uint32_t n) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
}
"""


def on_device(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = toolkit.installed().environment(**variables)
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def on_faults(*asked: str, **variables: str) -> list[dict[str, dict[str, str]]]:
    """What goes wrong with each of some faults: see `pretended/on_device.py`."""
    done = on_device("tests.ops.pretended.on_device", str(built()), *asked, **variables)
    results: list[dict[str, dict[str, str]]] = json.loads(done.stdout.splitlines()[-1])
    return results


def built() -> Path:
    return toolkit.library() / "out" / "libnpu_gr_ascend_ascend910b.so"


def test_build_sh_builds_a_library_whose_operators_are_right() -> None:
    what = str(built()), "results:-1"
    done = on_device("tests.ops.pretended.on_device", *what, NPU_GR_TRACE_LAUNCHES="1")
    assert json.loads(done.stdout.splitlines()[-1]) == [{"wrong": {}, "not_rejected": {}}]
    note = json.loads(built().with_suffix(".json").read_text())
    assert (note["cann"], note["torch_npu"], note["soc"]) == (90100, toolkit.VERSION, toolkit.SOC)
    for kernel in (
        "csr_norm_bf16",
        "csr_select_f16",
        "csr_merge",
        "beam_fork",
        "masked_topk_f32",
        "merge_rows",
    ):
        assert f"npu_gr: {kernel} on " in done.stderr
        assert f"npu_gr: {kernel} ended with 0" in done.stderr


def test_the_doctor_is_well_and_the_backend_runs_the_operators() -> None:
    """`NPUBackend` with torch_npu's names: each op, through the binding, equals its definition."""
    libraries = {"PRETENDED_LIBRARIES": str(built().parent)}
    answer = json.loads(
        on_device("npu_gr", "doctor", "--backend", "npu", "--json", **libraries).stdout
    )
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["ok"]
    assert checks["NPU: device"]["found"] == "Ascend910B3, npu:0"
    assert checks["NPU: CANN"]["found"].startswith("9.1.0, at ")
    assert "names no torch_npu" in checks["Ascend C versions"]["found"]
    assert checks["Ascend C csr_gather_topk"]["found"] == "as defined"
    assert checks["npu: beam_topk"]["found"].startswith("ascend_c; ")
    assert {check["state"] for check in checks.values()} == {"ok", "missing"}
    missing = {name for name, check in checks.items() if check["state"] == "missing"}
    assert missing - {"CUDA: torch", "CUDA: device"} == {"Ascend driver"}  # a GPU is no matter here


def test_each_mistake_of_the_host_code_is_seen() -> None:
    """Detect swapped arguments, memory freed early, unchecked strides, use of Select's memory.

    A launch that fails is raised, also where its operator launches more kernels after it.
    """
    # the platform is asked once a process
    results = [*on_faults("results:0,1,2"), *on_faults("results:3")]
    results += on_faults("results:4,5,6,7,8,9,10,11,12", "launches:-1,13,14,15,16")
    names = [fault.name for fault in toolkit.planted()[0].HOST_FAULTS]
    seen = {
        name: [*found["wrong"].values(), *found["not_rejected"].values()]
        for name, found in zip(names[:13], results, strict=False)
    }
    assert (
        "csr_" in seen["lo and degree swapped"][0] or "differs" in seen["lo and degree swapped"][0]
    )
    assert "GM that is no longer allocated" in seen["the workspace is not kept until the launch"][0]
    assert "taken" in seen["any strides are taken"]
    assert "UB overflow" in seen["the 8 KB of Select are planned with"][0]
    assert all(seen.values()), seen

    right, all_dropped, *one_dropped = (found["wrong"] for found in results[13:])
    assert right == {}
    of_each_op = {name.partition(",")[0] for name in all_dropped}
    assert of_each_op == set(ops.names())
    assert [set(found) for found in one_dropped] == [
        {"masked_topk, case 0, launch 0"},
        {"csr_gather_topk, case 1, launch 0"},
        {"csr_gather_topk, case 0, launch 0", "csr_gather_topk, case 1, launch 1"},
    ]


def test_a_workspace_of_more_than_4_gib_is_whole() -> None:
    faults = toolkit.planted()[0].HOST_FAULTS
    assert faults[17].name == "the size of a workspace has 32 bits"
    right, wrong = on_faults("far:-1,17", PRETENDED_CORES=str(1 << 19))
    assert right["wrong"] == {}
    assert "GM that is no longer allocated" in wrong["wrong"]["masked_topk"]


def small(tmp_path: Path, kernel: str = SMALL) -> tuple[Path, dict[str, str]]:
    """Our CMakeLists.txt with one empty kernel shows in a second what the toolkit does with it."""
    sources = toolkit.tree(tmp_path)
    (sources / "kernels" / "entries.cpp").write_text(kernel)
    home = toolkit.installed().home
    defines = {
        "SOC_VERSION": toolkit.SOC,
        "VARIANT": "ascend910b",
        "TORCH_PATH": "/t",
        "TORCH_NPU_PATH": "/n",
    }
    return sources, defines | {"CANN": "90100", "ASCEND_HOME_PATH": str(home)}


def make(sources: Path, defines: dict[str, str]) -> subprocess.CompletedProcess[str]:
    build = sources / "b"
    configure = [
        "cmake",
        "-S",
        str(sources),
        "-B",
        str(build),
        *(f"-D{k}={v}" for k, v in defines.items()),
    ]
    compile_ = ["cmake", "--build", str(build), "--target", "npu_gr_kernels"]
    done = subprocess.run(configure, capture_output=True, text=True, check=False)
    return (
        done
        if done.returncode
        else subprocess.run(compile_, capture_output=True, text=True, check=False)
    )


def test_the_merge_wants_a_build_type_which_our_cmake_sets(tmp_path: Path) -> None:
    sources, defines = small(tmp_path)
    done = make(sources, defines)
    assert done.returncode == 0, done.stderr
    header = sources / "b" / "include" / "npu_gr_kernels" / "aclrtlaunch_nothing.h"
    assert (
        "uint32_t aclrtlaunch_nothing(uint32_t blockDim, aclrtStream stream, void *x, uint32_t n);"
    ) in (header.read_text())
    lists = sources / "CMakeLists.txt"
    text = lists.read_text()
    assert "if(NOT CMAKE_BUILD_TYPE)" in text
    lists.write_text(text.replace("if(NOT CMAKE_BUILD_TYPE)", "if(FALSE)"))
    (sources / "b" / "CMakeCache.txt").unlink()  # the objects stay
    assert make(sources, defines).returncode != 0


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (
            SMALL.replace("KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);", ""),
            "nothing: kernel type not declared",
        ),
        (SMALL.replace("uint32_t n", "uint64_t n"), "a launch takes addresses and uint32_t"),
    ],
)
def test_entry_points_that_cannot_be_launched(tmp_path: Path, kernel: str, why: str) -> None:
    assert why in make(*small(tmp_path, kernel)).stderr


@pytest.mark.parametrize(
    ("version", "why"),
    [("8.3.RC1", "CANN 8.3.RC1: the kernels need 8.5.0 or later"), ("", "says which CANN it is")],
)
def test_build_sh_stops_at_a_toolkit_that_is_too_old(
    tmp_path: Path, version: str, why: str
) -> None:
    home = tmp_path / "cann"
    home.mkdir()
    (home / "version.info").write_text(f"Version={version}\n")
    done = toolkit.installed().build(
        toolkit.tree(tmp_path / "tree"), tmp_path / "out", ASCEND_HOME_PATH=str(home)
    )
    assert done.returncode == 2
    assert done.stderr.startswith("build.sh: ")
    assert why in done.stderr
    assert not (tmp_path / "out").exists()
