"""Machine code of a kernel, taken apart by nvdisasm, which comes with triton."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;")
_BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
_ALWAYS = re.compile(r"BRA(\.U)? `")
_PREDICATE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+@")
PRODUCTS = ("HGMMA", "HMMA", "UTCHMMA")


class Loop(NamedTuple):
    """What lies between a branch backwards and its target: one step of a warp."""

    instructions: tuple[str, ...]
    # instruction that ends in a branch -> where it leads in the loop, and whether it always does
    branches: dict[int, tuple[int, bool]]

    @property
    def products(self) -> int:
        return sum(x.startswith(PRODUCTS) for x in self.instructions)

    def paths(self) -> list[int]:
        """Lengths of the ways through a step, short to long: one for each place of its exponents.

        Of ways that differ in other branches, such as who starts a product, the longest. What lies
        outside of the loop is a wait that repeats.
        """
        longest: dict[int, int] = {}

        def walk(at: int, length: int, exponents: int) -> None:
            while at < len(self.instructions):
                length += 1
                if exponents < 0 and self.instructions[at].startswith("MUFU.EX2"):
                    exponents = at
                to, always = self.branches.get(at, (-1, False))
                if to > at and always:
                    at = to
                    continue
                if to > at:
                    walk(to, length, exponents)
                at += 1
            longest[exponents] = max(length, longest.get(exponents, 0))

        walk(0, 0, -1)
        return sorted(longest.values())


class Sass(NamedTuple):
    instructions: tuple[str, ...]
    loops: tuple[Loop, ...]  # as they stand

    @property
    def spills(self) -> int:
        """Instructions that move registers to memory and back."""
        return sum(x.startswith(("LDL", "STL")) for x in self.instructions)


def disassembler() -> Path | None:
    """None = this triton has none."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return path if path.is_file() else None


def disassemble(cubin: bytes, tool: Path, folder: Path) -> Sass:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    found: list[str] = []
    branches: list[tuple[int, str, bool]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            if branch := _BRANCH.search(instruction[1]):
                always = bool(_ALWAYS.match(instruction[1])) and not _PREDICATE.search(line)
                branches.append((len(found), branch[1], always))
            found.append(instruction[1])
    loops = []
    for end, back_to, _ in branches:
        begin = labels[back_to]
        if begin < end:
            inside = {
                at - begin: (labels[to] - begin, always)
                for at, to, always in branches
                if begin <= at < end and labels[to] <= end
            }
            loops.append(Loop(tuple(found[begin : end + 1]), inside))
    return Sass(tuple(found), tuple(loops))


def compiled(variant: Any, capability: int) -> Any:
    """Compile as a launch does: addresses and strides are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = variant.types | dict.fromkeys(variant.constants, "constexpr")
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(variant.kernel.arg_names)
        if variant.types.get(name, "").startswith("*")
        or name.endswith(("_row", "_head", "_stride", "_slot"))
    }
    source = ASTSource(
        fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=variant.options)
