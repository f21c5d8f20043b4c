"""Without a GPU: every kernel compiles to sm_90 machine code, as it is launched. ptxas comes with triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parent.parent.parent.parent

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.backend.triton.variants import variants

for v in variants():
    signature = v.types | dict.fromkeys(v.constants, "constexpr")
    source = ASTSource(fn=v.kernel, signature=signature, constexprs=v.constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"][:4] == b"\\x7fELF"
    assert ".target sm_90" in made.asm["ptx"]
    print(v.label, len(made.asm["cubin"]), "bytes", made.metadata.shared, "shared")
"""


def test_every_kernel_compiles_for_sm_90() -> None:
    """In a process of its own: a kernel is either interpreted or compiled."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'npu_gr[triton]'")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.split("-")[0] for line in done.stdout.splitlines()} == kernels()


def kernels() -> set[str]:
    """Names of all there are."""
    sources = (ROOT / "npu_gr" / "backend" / "triton").glob("*.py")
    return {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)}
