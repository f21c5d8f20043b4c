"""Every kernel compiles to machine code of sm_90, which needs no GPU: ptxas comes with triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.triton

SCRIPT = """
import inspect, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from npu_gr.backend.triton_ops import beams, fork, hstu, topk

INTS = "num_ first_ buckets heads group query_ ancestry_slot".split()
STRIDES = "_row _head _stride own_row own_slot own_head q_row".split()
TYPES = {"times": "*i64", "out": "*fp32", "position_bias": "*{x}", "time_bias": "*{x}", "lo": "*i64", "degree": "*i64",
         "code": "*i32", "allowed": "*u8", "acc": "*fp32", "norm_out": "*fp32", "norm": "*fp32", "bad_out": "*i32",
         "key_out": "*i64", "key": "*i64", "chosen": "*i64", "score_out": "*fp32", "parent_out": "*i64",
         "edge_out": "*i64", "parent": "*i64", "ancestry": "*i64", "alpha": "fp32", "scale": "fp32",
         "query_time": "i64", "peaks": "*fp32", "totals": "*fp32", "outputs": "*fp32", "peak_out": "*fp32",
         "total_out": "*fp32", "output_out": "*fp32"}

def compiled(kernel, x, constants, **own):
    signature = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            signature[name] = "constexpr"
        elif name in TYPES | own:
            signature[name] = (TYPES | own)[name].format(x=x)
        elif name.startswith(tuple(INTS)) or name.endswith(tuple(STRIDES)):
            signature[name] = "i32"
        else:
            signature[name] = "*" + x
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32)
    )
    assert made.asm["cubin"][:4] == b"\\x7fELF"
    assert ".target sm_90" in made.asm["ptx"]
    print(kernel.__name__, x, len(made.asm["cubin"]), "bytes", made.metadata.shared, "shared")

for x in ("bf16", "fp32"):
    keys = hstu.KEYS if x == "bf16" else hstu.KEYS // 2
    for targets, begins in ((False, True), (True, True)) if x == "bf16" else ((False, True),):
        compiled(hstu.hstu_kernel, x, dict(
            targets=targets, begins=begins, qk_dim=64, v_dim=64, qk_wide=64, v_wide=64, rows=hstu.ROWS, keys=keys,
            time_buckets=64))
    compiled(beams.shared_kernel, x, dict(dim=128, dim_wide=128, rows=beams.ROWS, keys=keys, span=beams.SPAN))
    compiled(beams.merge_kernel, x, dict(by_ancestry=True, dim=128, dim_wide=128, rows=beams.MERGE_ROWS), out="*{x}")
    for over_valid in (False, True):
        compiled(topk.rows_kernel, x, dict(
            over_valid=over_valid, filtered=True, columns=topk.COLUMNS, blocks=topk.BLOCKS, edges=topk.EDGES))
    compiled(topk.blocks_kernel, x, dict(filtered=True, edges=topk.EDGES))
    compiled(fork.fork_kernel, x, dict(rows=512, numbers=fork.NUMBERS))
compiled(topk.choices_kernel, "fp32", dict(edges=topk.EDGES, lanes=256))
"""


def test_every_kernel_compiles_for_sm_90() -> None:
    """In a process of its own: a kernel is either interpreted or compiled."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'npu_gr[triton]'")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 16
