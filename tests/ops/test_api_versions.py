"""No kernel calls an API that the oldest supported CANN lacks: see ops/ascendc/emulator/api.txt."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from npu_gr.backend.npu import versions
from npu_gr.backend.npu.versions import LEAST_CANN, NEWEST_CANN, number
from tests.ops.ascend_emulator import SOURCES

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here: the kernels cannot be preprocessed"
)


def table() -> dict[str, int]:
    """First CANN of each name, as a number."""
    lines = (SOURCES / "emulator" / "api.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: number(first) for name, first in rows}


def kernels(tmp_path: Path, cann: str) -> str:
    """What the device compiler of a CANN sees of our sources, without its own header."""
    (tmp_path / "kernel_operator.h").touch()
    command = [
        "g++",
        "-E",
        "-P",
        f"-DNPU_GR_CANN={number(cann)}",
        f"-I{tmp_path}",
        f"{SOURCES}/kernels/entries.cpp",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wrong(text: str, cann: str) -> set[str]:
    """Names that this CANN does not have, or that the table lacks."""
    known = table()
    used = set(re.findall(r"\bAscendC::(\w+)", text)) - {"emulator"}
    newer = {name for name, first in known.items() if first > number(cann)}
    return {name for name in used if name not in known} | {
        name for name in newer if re.search(rf"\b{name}\b", text)
    }


def declared() -> set[str]:
    """The names of Ascend C that the emulator has."""
    names: set[str] = set()
    for header in (SOURCES / "emulator").glob("*.h"):
        text = re.sub(
            r"(?s)\nnamespace emulator \{.*?\n\}  // namespace "
            r"emulator\n",
            "\n",
            header.read_text(),
        )
        text = text.partition("namespace AscendC {")[2]
        names |= set(re.findall(r"(?m)^(?:inline )?(?:void|bool|u?int\w*_t) (\w+)\(", text))
        names |= set(re.findall(r"(?m)^(?:struct|class|enum class|using) (\w+)\b", text))
    return names


@pytest.mark.parametrize("cann", [each.cann for each in versions.MATRIX])
def test_every_call_is_in_that_cann(tmp_path: Path, cann: str) -> None:
    text = kernels(tmp_path, cann)
    assert "AscendC::DataCopyPad(" in text
    assert not wrong(text, cann)


def test_the_name_that_changed_is_the_one_of_the_version(tmp_path: Path) -> None:
    assert "AscendC::CompareScalar(" in kernels(tmp_path, LEAST_CANN)
    assert "AscendC::Compares(" in kernels(tmp_path, NEWEST_CANN)


def test_a_call_that_is_too_new_or_unknown_is_found() -> None:
    assert wrong("AscendC::Compares(to, from);", LEAST_CANN) == {"Compares"}
    assert wrong("using namespace AscendC; Compares(to, from);", LEAST_CANN) == {"Compares"}
    assert wrong("AscendC::Compares(to, from);", NEWEST_CANN) == set()
    assert wrong("AscendC::Fixpipe(to, from);", NEWEST_CANN) == {"Fixpipe"}


def test_the_table_knows_what_the_emulator_has() -> None:
    found = declared()
    assert {
        "Adds",
        "Compares",
        "LocalTensor",
        "MrgSort4Info",
        "SetFlag",
        "GetBlockIdx",
        "TPosition",
    } <= found
    assert found <= set(table())
