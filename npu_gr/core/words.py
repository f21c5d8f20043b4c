"""Words of a caller's in a message of ours: never more than a glance of them."""

from __future__ import annotations

MOST = 64  # characters


def cut(text: str, most: int = MOST) -> str:
    """Shorten a text that a caller wrote, and say how long it was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def quoted(value: object, most: int = MOST) -> str:
    """Write a value of a caller's as Python does, shortened before it is written out."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}... ({len(value)} characters)"
    return cut(repr(value), most)
