"""Every kernel on random jobs under sanitizers: no access outside its buffers, and correct results.

`fuzz/` compares with sums in doubles. The kernels are compiled from the real sources, with
sanitizers for this CPU's instruction sets, and by the cross compiler for aarch64, where an emulator
runs them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from npu_gr.backend.cpu.library import supported
from tests.builds import digest, once

ROOT = Path(__file__).parents[3]
FLAGS = [
    "-std=c++17",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
# -O0 and small helpers as calls: a compiler that does more takes longer than it saves
SANITIZERS = [
    "-O0",
    "-Dalways_inline=unused",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]
# What is undefined ends the process by a signal: the texts that name it are a third of a build
SILENT = [*SANITIZERS, "-fsanitize-undefined-trap-on-error"]
ROUNDS = {"neon": 84}  # emulated; 240 elsewhere
CROSS = "aarch64-linux-gnu-g++"


def compiled(compiler: str, into: Path, *command: str) -> str:
    done = subprocess.run(
        [compiler, *FLAGS, f"-I{ROOT / 'ops/cpu'}", *command, "-o", into],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return str(into)


def driver(compiler: str) -> str:
    """The object of the driver, without sanitizers: one for all instruction sets and workers."""
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    source = ROOT / "tests/backend/cpu/fuzz"

    def make(into: Path) -> None:
        compiled(compiler, into, "-O1", "-c", str(source / "main.cpp"))

    files = [*(ROOT / "ops/cpu").glob("*.h"), *source.iterdir()]
    return str(once(f"fuzz-{compiler}-{digest(files, *FLAGS)}", make))


def linked(compiler: str, into: Path, isa: str, driver: str, *flags: str) -> str:
    name = isa.replace("neon", "generic")
    table = f"-Wl,--defsym,fuzzed_table=npu_gr_table_{name}"
    return compiled(
        compiler, into / "fuzz", *flags, str(ROOT / f"ops/cpu/isa_{name}.cpp"), driver, table
    )


def fuzz(isa: str, *command: str) -> str:
    """What was found, in words; nothing if nothing was."""
    rounds = ROUNDS.get(isa, 240)
    done = subprocess.run([*command, str(rounds)], capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-4000:] or f"ended with {done.returncode}"
    assert done.stdout == f"{isa}: {rounds} rounds\n"
    return ""


def widths() -> list[str]:
    """Use one instruction set for each vector width: avx512 is avx512_bf16 without its products."""
    return ["generic", "avx2", "avx512_bf16" if "avx512_bf16" in supported() else "avx512", "neon"]


@pytest.mark.parametrize("isa", widths())
def test_nothing_stray_or_undefined(isa: str, tmp_path: Path) -> None:
    if isa not in supported():
        pytest.skip(f"{isa}: not this CPU's, or no library was built")
    if fuzz(isa, linked("g++", tmp_path, isa, driver("g++"), *SILENT)):
        pytest.fail(fuzz(isa, linked("g++", tmp_path, isa, driver("g++"), *SANITIZERS)))


@pytest.mark.aarch64
def test_neon_by_emulator(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not emulator:
        pytest.skip("there is no qemu-aarch64")
    # -O1 fuses products, as -O3 does
    program = linked(CROSS, tmp_path, "neon", driver(CROSS), "-O1", "-static")
    assert not fuzz("neon", emulator, program)
