"""Without a GPU: every kernel compiles to machine code, and its instructions are counted.

ptxas and nvdisasm come with triton. A step of 64 rows, 64 keys and heads of 64 takes the tensor
cores 256 cycles on sm_80 and sm_90, 128 on sm_100; in each cycle a scheduler issues one instruction
of its warps, so a loop's length is a bound too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from npu_gr.backend.base import time_bucket

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parent.parent.parent.parent
# compute capability -> most shared memory of a program (CUDA C++ Programming Guide)
SHARED_BYTES = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# what is compiled for a device besides sm_90: kernel, numbers, and width of a head or `targets`
BEAMS = "shared_kernel"
CAUSAL = ("hstu_kernel", "bf16", False)
ALSO: dict[int, list[tuple[str, str, int]]] = {
    80: [CAUSAL, (BEAMS, "fp32", 128)],
    86: [(BEAMS, "bf16", 128), (BEAMS, "fp32", 256)],
    100: [CAUSAL, ("hstu_kernel", "bf16", True), (BEAMS, "fp32", 128)],
    120: [(BEAMS, "fp32", 256)],
}
# the shortest step of 64 rows and keys in cycles
IDEAL = {80: 256, 90: 256, 100: 128}
POSITIONS = 256
TOKENS = 4096

SCRIPT = """
import json, sys, tempfile
from pathlib import Path
from npu_gr.backend.triton.hstu import DeviceLimits
from tests.backend.triton.sass import compiled, disassemble, disassembler
from tests.backend.triton.variants import variants

tool = disassembler()
for capability, most, wanted in json.loads(sys.argv[1]):
    for v in variants(limits=DeviceLimits(capability // 10, most)):
        what = v.kernel.__name__, v.x, v.constants.get("dim", v.constants.get("targets"))
        if wanted is not None and list(what) not in wanted:
            continue
        made = compiled(v, capability)
        assert made.asm["cubin"][:4] == b"\\x7fELF"
        assert f".target sm_{capability}" in made.asm["ptx"]
        line = {"capability": capability, "kernel": v.kernel.__name__, "x": v.x,
                "constants": v.constants, "shared_bytes": made.metadata.shared}
        if tool is not None:
            with tempfile.TemporaryDirectory() as folder:
                sass = disassemble(made.asm["cubin"], tool, Path(folder))
            steps = [loop.paths() for loop in sass.loops
                     if loop.products and len(loop.instructions) < 2000]
            line |= {"spills": sass.spills, "steps": steps[:4]}
        print(json.dumps(line))
"""


class Compiled(NamedTuple):
    """A kernel as it is launched on a device."""

    capability: int
    kernel: str
    x: str
    constants: dict[str, int]
    shared_bytes: int
    spills: int | None = None  # None = not counted
    # of each loop with products, in order: the lengths of its paths
    steps: list[list[int]] = []  # noqa: RUF012


@pytest.fixture(scope="module")
def kernels_compiled() -> list[Compiled]:
    """In a process of its own: a kernel is either interpreted or compiled."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'npu_gr[triton]'")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    plan = [(at, most, ALSO.get(at)) for at, most in SHARED_BYTES.items()]
    command = [sys.executable, "-c", SCRIPT, json.dumps(plan)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_and_has_the_shared_memory_it_wants(
    kernels_compiled: list[Compiled],
) -> None:
    every = {each.kernel for each in kernels_compiled if each.capability == 90}
    assert every == kernels() - {"hstu_tasks_kernel"}  # of NPUs
    for each in kernels_compiled:
        assert each.shared_bytes <= SHARED_BYTES[each.capability], each


def test_no_kernel_spills(kernels_compiled: list[Compiled]) -> None:
    """But fp32 heads of 256: three products of them want more registers than there are."""
    for each in counted(kernels_compiled):
        assert each.spills is not None
        is_wide = (each.x, each.constants.get("dim")) == ("fp32", 256)
        assert each.spills <= (24 if is_wide else 0), each


def test_the_steps_of_hstu_are_bound_by_its_products(kernels_compiled: list[Compiled]) -> None:
    """Instructions a tensor-core cycle, for a history of 4,096 tokens.

    On sm_100, whose tensor cores are twice as fast, the exponents alone take 4 cycles a cycle: two
    a number, 16 a cycle.
    """
    means = {}
    for each in counted(kernels_compiled):
        if each.kernel != "hstu_kernel":
            continue
        far, near, edge, wide = each.steps
        assert [len(far), len(wide)] == ([1, 1] if each.constants["targets"] else [3, 1])
        if each.x != "bf16":
            continue  # three products each: the instructions are those of their halves
        if each.constants["targets"]:
            assert far[0] <= (2.4 if each.capability == 100 else 1.4) * IDEAL[each.capability]
            continue
        tiles = each.constants["rows"] // 64
        means[each.capability] = float(np.vdot(shares(tiles), [far, near, edge]))
    ratios = {at: mean / IDEAL[at] for at, mean in means.items()}
    limits = {80: 2.2, 90: 1.8, 100: 3.5}
    assert {at for at, ratio in ratios.items() if ratio > limits[at]} == set(), ratios


def shares(tiles: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Share of each kind of step and path, [far, near, edge] x [1, 2, more buckets].

    Of a causal history with one event an hour on average.

    Args:
        tiles: Rows of a step / 64.
    """
    random = np.random.default_rng(0)
    times = torch.from_numpy(random.exponential(3600, TOKENS).cumsum().astype(np.int64))
    counts = np.zeros((3, 3))
    for first in range(0, TOKENS, 64 * tiles):
        rows = times[first : first + 64 * tiles]
        for start in range(0, first + 64 * tiles, 64):
            keys = times[start : start + 64]
            ends = torch.stack([rows[0] - keys[-1], rows[-1] - keys[0]])
            least, most = time_bucket(ends).tolist()
            clear = first // 64 * 64
            kind = 0 if start + 64 <= first - POSITIONS + 2 else 1 if start < clear else 2
            counts[kind, min(most - least, 2)] += tiles
    shared: np.ndarray[tuple[int, int], np.dtype[np.float64]] = counts / counts.sum()
    return shared


def counted(compiled: list[Compiled]) -> list[Compiled]:
    if compiled[0].spills is None:
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
