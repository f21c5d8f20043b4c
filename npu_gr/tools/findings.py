"""What a check found, as lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


def table(findings: Sequence[tuple[str, StrEnum, str, str]]) -> str:
    """Format findings for people: a line each, and under one that is not well what to do about it.

    Args:
        findings: name, state, what was found, remedy or "".
    """
    width = max(len(name) for name, *_ in findings)
    lines = []
    for name, state, found, remedy in findings:
        lines.append(f"{state.value:8}{name:{width}}  {found}")
        if remedy:
            lines.append(f"{'':8}{'':{width}}  -> {remedy}")
    return "\n".join(lines)
