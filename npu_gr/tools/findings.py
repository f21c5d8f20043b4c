"""What a check found, as lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


def table(findings: Sequence[tuple[str, StrEnum, str, str] | tuple[str, StrEnum, str, str, str]]) -> str:
    """Format findings for people: a line each, and under one that is not well what to do about it.

    Args:
        findings: name, state, what was found, remedy or "", and the section of the report or nothing.
    """
    width = max(len(name) for name, *_ in findings)
    lines: list[str] = []
    last = ""
    for name, state, found, remedy, *of_section in findings:
        section = of_section[0] if of_section else ""
        if section != last:
            lines.append(f"\n{section}".rstrip() if lines else section)
            last = section
        lines.append(f"{state.value:8}{name:{width}}  {found}")
        if remedy:
            lines.append(f"{'':8}{'':{width}}  -> {remedy}")
    return "\n".join(lines)
