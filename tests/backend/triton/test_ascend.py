"""Without CANN: every kernel lowers to HIVM for 910B, the last IR that public compilers produce.

triton-ascend goes from Triton to linalg, bishengir-compile (ascendnpu-ir) from there: tiling, a
plan of every on-chip buffer, synchronisation between the pipes. Then comes `hivmc`, which is
closed; what stands in for it here keeps what it was given. So: *lowers to HIVM*, never *compiles*.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backend.triton.test_ahead import ROOT, kernels

pytestmark = pytest.mark.triton_ascend

PACKAGES = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11")
SOC = "Ascend910B1"

# triton-ascend owns the import name `triton`, so it is on the path of this process alone
TO_LINALG = """
import sys
from pathlib import Path
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import (
    AscendBackend,
    _parse_linalg_metadata,
    make_ttir,
    ttir_to_linalg,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.backend.triton.variants import Variant, variants

folder, soc = Path(sys.argv[1]), sys.argv[2]
too_large = next(v for v in variants("npu") if v.kernel.__name__ == "rows_kernel")
too_large = too_large._replace(constants=too_large.constants | {"columns": 32768})
for v in (*variants("npu"), too_large):
    target = GPUTarget("npu", soc, 0)
    backend, context = AscendBackend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    source = ASTSource(fn=v.kernel, signature=v.types, constants=v.constants)
    about = dict(options.__dict__, hash=v.label, target=target)
    module = source.make_ir(
        options,
        backend.get_codegen_implementation(),
        backend.get_module_map(),
        context,
    )
    linalg = ttir_to_linalg(make_ttir(module, about, options), about, options, named_ops=True)
    (folder / f"{v.label}.mlir").write_text(_parse_linalg_metadata(linalg, about)[0])
"""

HIVMC = """#!/bin/sh
[ "$1" = --version ] && echo "hivmc 1.2.0"
for argument in "$@"; do case $argument in *.mlir) cp "$argument" "$HIVM";; esac; done
exit 0
"""


@pytest.fixture(scope="module")
def packages() -> Path:
    """Their folder; downloaded once (215 MB), 700 MB unpacked."""
    folder = ROOT / "build" / "-".join(PACKAGES[:2]).replace("==", "-")
    if not folder.is_dir():
        begun = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        done = subprocess.run(
            [*command, "--target", begun, *PACKAGES], capture_output=True, text=True, check=False
        )
        if done.returncode:
            shutil.rmtree(begun, ignore_errors=True)
            pytest.skip(
                f"{' and '.join(PACKAGES[:2])} cannot be had here: {done.stderr.strip()[-200:]}"
            )
        begun.rename(folder)
    return folder


def run(packages: Path, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(packages), "TRITON_INTERPRET": "0", **more}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def to_hivm(
    packages: Path, linalg: Path, hivmc: Path
) -> tuple[subprocess.CompletedProcess[str], Path]:
    hivm = linalg.with_suffix(".hivm")
    done = run(
        packages,
        packages / "ascendnpuir" / "bin" / "bishengir-compile",
        linalg,
        f"--target={SOC}",
        *(
            "--enable-auto-multi-buffer=true",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
        ),
        *("--enable-triton-kernel-compile=true", "-o", linalg.with_suffix(".o")),
        PATH=f"{hivmc.parent}:{os.environ['PATH']}",
        HIVM=str(hivm),
    )
    return done, hivm


def test_every_kernel_lowers_to_hivm_for_910b(packages: Path, tmp_path: Path) -> None:
    done = run(packages, sys.executable, "-c", TO_LINALG, tmp_path, SOC)
    assert done.returncode == 0, done.stderr[-3000:]
    hivmc = tmp_path / "hivmc"
    hivmc.write_text(HIVMC)
    hivmc.chmod(0o755)
    lowered, rejected = [], []
    for linalg in sorted(tmp_path.glob("*.mlir")):
        done, hivm = to_hivm(packages, linalg, hivmc)
        if done.returncode:
            rejected.append((linalg.name, done.stderr))
            continue
        text = hivm.read_text()
        assert "hivm.hir.pipe_barrier" in text
        assert "address_space<ub>" in text, "buffers are placed on the chip"
        assert not re.findall(r"\b(?:linalg|hfusion|tt)\.\w+\(", text), (
            "nothing is left of the levels above"
        )
        lowered.append(linalg.name)
    assert [name for name, _ in rejected] == ["rows_kernel-bf16-False-True-32768-8-64.mlir"]
    # of CUDA alone: the form of rankers' attention with branches in its steps
    assert {name.split("-")[0] for name in lowered} == kernels() - {"hstu_kernel", "bounds_kernel"}
    assert "overflow" in rejected[0][1], (
        "a tile that no buffer holds is rejected: the compiler does look"
    )
