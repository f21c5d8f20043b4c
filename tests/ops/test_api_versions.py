"""The kernels parse against what the public headers of each supported CANN declare.

The declarations are tests/ops/declared/kernel_operator.h, spelled as CANN spells them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from npu_gr.backend.npu import versions
from npu_gr.backend.npu.versions import LEAST_CANN, NEWEST_CANN, number
from tests.ops.ascend_emulator import SOURCES

DECLARED = Path(__file__).parent / "declared"
FLOW = {"if", "for", "while", "switch", "__attribute__"}
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here: the kernels cannot be parsed"
)


def errors(cann: str, kernels: Path = SOURCES, declared: Path = DECLARED) -> str:
    """What g++ says of the kernels against the declarations of a CANN; "" = they fit."""
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-I{declared}"]
    command += [f"-DNPU_GR_CANN={number(cann)}", f"{kernels}/kernels/entries.cpp"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def unmarked(kernels: Path, folder: Path) -> set[str]:
    """Functions that lack `__aicore__`: the device compiler would take them for the host's."""
    (folder / "kernel_operator.h").touch()
    command = ["g++", "-E", "-P", f"-DNPU_GR_CANN={number(LEAST_CANN)}", f"-I{folder}"]
    command.append(f"{kernels}/kernels/entries.cpp")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    defined = re.findall(r"(?m)^ *((?:[\w:<>&]+ )+)\*?(\w+)\([^;{}]*\)(?: const)? \{", text)
    return {name for head, name in defined if "__aicore__" not in head and name not in FLOW}


@pytest.mark.parametrize("cann", [each.cann for each in versions.MATRIX])
def test_the_kernels_fit_the_declarations_of_that_cann(cann: str) -> None:
    assert errors(cann) == ""


def test_every_function_of_a_kernel_is_one_of_the_device(tmp_path: Path) -> None:
    assert unmarked(SOURCES, tmp_path) == set()


CHILDREN, DEVICE, CSR = "children.h", "device.h", "csr_gather_topk.h"
HEADER = "kernel_operator.h"
# The file, what stands there, what is planted, and the error. The first one was in a release.
PLANTED = [
    (CHILDREN, "GM_ADDR const (&columns)", "const GM_ADDR (&columns)", "cannot convert"),
    (CSR, "(__gm__ float *)norm", "(float *)norm", "deleted function"),
    (CHILDREN, "GM_ADDR code, GM_ADDR allowed", "uint8_t *code, GM_ADDR allowed", "invalid conv"),
    (CSR, "Adds(x, x, -peak, ", "Adds(x, x, x, ", "no matching function"),
    (CSR, "row.ReinterpretCast<uint32_t>(), 0", "row, 0", "no matching"),
    (CHILDREN, "FreeTensor(code)", "FreeTensor(codes_.AllocTensor<int32_t>())", "cannot convert"),
    (DEVICE, "uint32_t(count * sizeof(T)), 0, 0, 0}", "uint32_t(count)}", "no matching function"),
    (DEVICE, "NPU_GR_CANN >= 90000", "NPU_GR_CANN >= 80500", "Compares. is not a member"),
    (HEADER, "VSEL_TENSOR_SCALAR_MODE, ", "", "VSEL_TENSOR_SCALAR_MODE. is not a member"),
    (HEADER, "  V_S,\n", "", "V_S. is not a member"),
    (HEADER, "bool = false", "bool", "no matching function"),
    (HEADER, "KERNEL_TYPE_AIV_ONLY, ", "", "KERNEL_TYPE_AIV_ONLY. was not declared"),
]


@pytest.mark.parametrize(("file", "stands", "planted", "why"), PLANTED)
def test_a_difference_to_cann_is_found(
    tmp_path: Path, file: str, stands: str, planted: str, why: str
) -> None:
    shutil.copytree(SOURCES / "kernels", tmp_path / "kernels")
    shutil.copy(SOURCES / "hstu_blocks.h", tmp_path)
    shutil.copy(DECLARED / HEADER, tmp_path)
    at = tmp_path / (file if file == HEADER else f"kernels/{file}")
    assert stands in at.read_text()
    at.write_text(at.read_text().replace(stands, planted))
    assert re.search(why, errors(LEAST_CANN, tmp_path, tmp_path)), errors(LEAST_CANN, tmp_path)


def test_a_function_without_its_mark_is_found(tmp_path: Path) -> None:
    shutil.copytree(SOURCES / "kernels", tmp_path / "kernels")
    shutil.copy(SOURCES / "hstu_blocks.h", tmp_path)
    device = tmp_path / "kernels" / DEVICE
    device.write_text(device.read_text().replace("__aicore__ inline void vec", "inline void vec"))
    assert unmarked(tmp_path, tmp_path) == {"vector_done"}


def test_the_name_that_changed_is_the_one_of_the_version() -> None:
    call = (SOURCES / "kernels" / DEVICE).read_text()
    assert "AscendC::CompareScalar(" in call
    assert "AscendC::Compares(" in call
    assert errors(LEAST_CANN) == errors(NEWEST_CANN) == ""
