"""What every setting means: the comments of the YAML files in `configs/`, the one place where that is written.

A key that is commented out counts as well, e.g. one of a section that may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from npu_gr.core import shipped
from npu_gr.router.config import RouterConfig
from npu_gr.service.config import Config
from npu_gr.simulate.config import SimulateConfig

# name of a kind of process -> its settings, the files that explain them, and the schema that ships; later files win
KINDS: Mapping[str, tuple[Any, tuple[str, ...], str]] = {
    "instance": (Config, ("configs/cpu.yaml",), "configs/schema.json"),
    "router": (RouterConfig, ("configs/router.yaml",), "configs/router.schema.json"),
    "simulation": (SimulateConfig, ("configs/cpu.yaml", "configs/simulate.yaml"), "configs/simulate.schema.json"),
}
_KEY = re.compile(r"(?P<indent> *)(?P<hash># )?(?P<inner> *)(?P<dash>- )?(?P<key>[a-z][a-z0-9_]*):(?P<rest>$| .*)")
_COMMENT = re.compile(r"\s#\s+(.*)$")


@cache
def notes(kind: str) -> dict[str, str]:
    """Return the comment behind each key, by its path; a key without one has an empty text."""
    found: dict[str, str] = {}
    for name in KINDS[kind][1]:
        told = read(shipped.path(name).read_text())
        found |= {path: note for path, note in told.items() if note or path not in found}
    return found


def read(text: str) -> dict[str, str]:
    """Read the comment behind each key of a YAML text: by path, elements of lists as their list."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # columns and names of the sections that a line may be in
    for line in text.splitlines():
        if not (key := _KEY.fullmatch(line)):
            continue
        column = len(key["indent"]) + len(key["inner"]) + len(key["dash"] or "")
        while above and above[-1][0] >= column:
            above.pop()
        above.append((column, key["key"]))
        comment = _COMMENT.search(key["rest"])
        found.setdefault(".".join(name for _, name in above), comment[1] if comment else "")
    return found
