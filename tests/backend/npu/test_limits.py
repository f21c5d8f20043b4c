"""The limits in Python equal ops/ascendc/tiling.h: its constants, and its plan for each size."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch

from npu_gr.backend.calls import Continuations, TopkCall
from npu_gr.backend.npu import limits
from npu_gr.backend.npu.limits import (
    LEAST,
    VectorUnits,
    csr_limit,
    fork_limit,
    items_limit,
    topk_limit,
)

HEADER = Path(__file__).parents[3] / "ops" / "ascendc" / "tiling.h"
PROGRAM = """
#include <cstdio>
#include "tiling.h"
using namespace npu_gr;
int main() {
  unsigned op, a, b, c, d, cores, ub;
  while (std::scanf("%u %u %u %u %u %u %u", &op, &a, &b, &c, &d, &cores, &ub) == 7) {
    Dtype dtype = d == 4 ? Dtype::F32 : Dtype::F16;
    const char *reason = op == 0 ? plan_csr_gather_topk(a, b, c, dtype, Device{cores, ub}).reason
                         : op == 2 ? plan_masked_topk(a, b, c, dtype, Device{cores, ub}).reason
                                 : plan_beam_fork(a, b, c, d, Device{cores, ub}).reason;
    std::puts(reason ? reason : "");
  }
}
"""
ROWS = (0, 1, 2, 60, 128, 512, 2048, 2049)
CODES = (0, 1, 300, 8192, 12_000, 20_000, 36_000, 1 << 20, 1 << 21)
KS = (0, 1, 33, 512, 2048, 2049)
UNITS = (LEAST, VectorUnits(48, 192 * 1024), VectorUnits(1, 64 * 1024))


def test_the_constants_are_the_headers() -> None:
    in_header = dict(re.findall(r"constexpr uint32_t (\w+) = ([^;]+);", HEADER.read_text()))
    for name in ("MAX_K", "MIN_TILE", "MAX_TILE", "MAX_ROWS", "MAX_PAIRS"):
        in_cpp = "k" + name.title().replace("_", "")
        number = in_header[in_cpp].replace("1u", "1")
        assert _number(number) == getattr(limits, name), name


def _number(text: str) -> int:
    """A literal, or a shift of two."""
    base, _, shift = text.partition(" << ")
    return int(base) << int(shift or 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_planner_finds_a_plan_where_python_says_so(tmp_path: Path) -> None:
    """The header's own planner, compiled: the same rejections, word for word."""
    (tmp_path / "plan.cpp").write_text(PROGRAM)
    command = [
        "g++",
        "-std=c++17",
        f"-I{HEADER.parent}",
        str(tmp_path / "plan.cpp"),
        "-o",
        str(tmp_path / "plan"),
    ]
    subprocess.run(command, check=True)
    cases = [(0, *case) for case in product(ROWS, CODES, KS, (2, 4))]
    cases += [
        (1, 2, held, rows, 64)
        for held, rows in product((1, 128, 2048, 2049, 4000), (0, 1, 128, 129, 2048))
    ]
    cases += [(2, 3, 70_000, k, 4) for k in (0, 1, 300, 1000, 2047, 2048, 2049)]
    for units in (*UNITS, VectorUnits(40, 32 * 1024)):
        asked = "\n".join(
            f"{' '.join(map(str, case))} {units.cores} {units.ub_bytes}" for case in cases
        )
        done = subprocess.run(
            [str(tmp_path / "plan")], input=asked, capture_output=True, text=True, check=True
        )
        reasons = done.stdout.split("\n")[: len(cases)]
        for case, reason in zip(cases, reasons, strict=True):
            op, a, b, c, d = case
            if op == 0:
                got = csr_limit(a, b, c, d, units)
            elif op == 2:
                got = items_limit(c, units)
            else:
                got = fork_limit(
                    torch.empty(a, b, 1, 1, 1, device="meta"), torch.empty(c, device="meta"), units
                )
            assert (got or "") == reason, (case, units)


def test_a_call_is_asked_about_with_the_columns_and_the_dtype_that_it_selects_from() -> None:
    every = torch.zeros(4, dtype=torch.int32)
    follow = Continuations(
        torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), every
    )

    def limit(columns: int, dtype: torch.dtype, **how: object) -> str | None:
        logits = torch.empty(3, columns, dtype=dtype, device="meta")
        return topk_limit(TopkCall(logits, torch.zeros(3), follow, 512)._replace(**how))  # type: ignore[arg-type]

    assert limit(8192, torch.float32) is None
    assert limit(8192, torch.bfloat16, scale=0.5) is None
    assert "do not fit" in str(limit(40_000, torch.float32))
    assert limit(40_000, torch.float32, codes=slice(0, 8192)) is None
    assert "float64" in str(limit(8192, torch.float64))
    assert "int64" in str(limit(8192, torch.float32, follow=follow._replace(code=every.long())))
