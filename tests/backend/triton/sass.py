"""Machine code of a kernel, taken apart by nvdisasm, which comes with triton."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;")
_BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")


class Loop(NamedTuple):
    """What lies between a branch backwards and its target: one step of a warp."""

    instructions: tuple[str, ...]

    def count(self, opcode: str) -> int:
        return sum(x.startswith(opcode) for x in self.instructions)


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
    loops: list[Loop] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            found.append(instruction[1])
            branch = _BRANCH.search(instruction[1])
            if branch and branch[1] in labels and len(found) - labels[branch[1]] > 1:
                loops.append(Loop(tuple(found[labels[branch[1]] :])))
    return Sass(tuple(found), tuple(loops))


def compiled(variant: Any) -> Any:
    """Compile for sm_90 as a launch does: addresses and strides are multiples of 16."""
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
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))
