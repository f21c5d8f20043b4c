"""Without a GPU: every kernel compiles to sm_90 machine code, and its instructions are counted.

ptxas and nvdisasm come with triton. A tensor core step of 64 rows, 64 keys and heads of 64 takes
256 cycles at best; in each cycle a multiprocessor's scheduler issues one instruction of its one
warp, so a loop's length is a bound too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parent.parent.parent.parent

SCRIPT = """
import json, sys, tempfile
from pathlib import Path
from tests.backend.triton.sass import compiled, disassemble, disassembler
from tests.backend.triton.variants import variants

tool = disassembler()
for v in variants():
    made = compiled(v)
    assert made.asm["cubin"][:4] == b"\\x7fELF"
    assert ".target sm_90" in made.asm["ptx"]
    line = {"kernel": v.kernel.__name__, "x": v.x, "constants": v.constants}
    if tool is not None:
        with tempfile.TemporaryDirectory() as folder:
            sass = disassemble(made.asm["cubin"], tool, Path(folder))
        loops = [(len(loop.instructions), loop.count("HGMMA")) for loop in sass.loops]
        line |= {"spills": sass.spills, "steps": [length for length, products in loops if products]}
    print(json.dumps(line))
"""
IDEAL = 4 * 64 * 64 * 64 / 4096  # cycles of a step: 4096 multiplications and additions each in bf16
POSITIONS = 256
TOKENS = 4096


@pytest.fixture(scope="module")
def kernels_compiled() -> list[dict[str, object]]:
    """In a process of its own: a kernel is either interpreted or compiled."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'npu_gr[triton]'")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_sm_90(kernels_compiled: list[dict[str, object]]) -> None:
    # of NPUs
    assert {each["kernel"] for each in kernels_compiled} == kernels() - {"hstu_tasks_kernel"}


def test_no_kernel_spills(kernels_compiled: list[dict[str, object]]) -> None:
    """But one: three products of fp32 heads of 128 want a few registers more than there are."""
    for each in counted(kernels_compiled):
        is_wide = (each["kernel"], each["x"]) == ("shared_kernel", "fp32")
        assert each["spills"] in (range(1, 65) if is_wide else (0,)), each


def test_the_steps_of_hstu_are_bound_by_its_products(
    kernels_compiled: list[dict[str, object]],
) -> None:
    """At most 2.5 instructions a tensor-core cycle for a history of 4,096 tokens; 8 before."""
    for each in counted(kernels_compiled):
        constants = each["constants"]
        assert isinstance(constants, dict)
        if each["kernel"] != "hstu_kernel":
            continue
        steps = each["steps"]
        assert isinstance(steps, list)
        # the fallback for times that are 68 years apart is the longest
        far, near, edge, wide = sorted(steps)
        assert len(steps) == 4, "each multiplies on the tensor cores"
        if each["x"] != "bf16":
            continue  # three products each: the instructions are those of their halves
        assert far <= (1.6 if constants["targets"] else 2.5) * IDEAL
        counts = steps_of(TOKENS)
        mean = sum(n * length for n, length in zip(counts, (far, near, edge), strict=True)) / sum(
            counts
        )
        assert mean <= 2.5 * IDEAL, f"{far} far, {near} near, {edge} at an edge"
        assert wide >= edge


def steps_of(tokens: int) -> tuple[int, int, int]:
    """How many steps of 64 rows and keys are far from the diagonal, near, and on it."""
    far = near = 0
    for first in range(0, tokens, 64):
        beyond = max(0, first - POSITIONS + 2) // 64
        far += beyond
        near += (first + 1) // 64 - beyond
    return far, near, tokens // 64


def counted(compiled: list[dict[str, object]]) -> list[dict[str, object]]:
    if "spills" not in compiled[0]:
        pytest.skip("this triton comes without nvdisasm: machine code cannot be counted")
    return compiled


def kernels() -> set[str]:
    """Names of all there are."""
    sources = (ROOT / "npu_gr" / "backend" / "triton").glob("*.py")
    return {
        name
        for source in sources
        for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)
    }
