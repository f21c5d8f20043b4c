"""Words of a caller's: what they may be, and never more than a glance of them in a message of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 64  # characters


def whole(pattern: str) -> str:
    r"""Return the pattern that a whole text has to match, for Python and for JSON Schema alike.

    To Python `$` alone is also the place before a final newline, and `\Z`, which is not, means
    nothing elsewhere.
    """
    return rf"^(?:{pattern})(?!\n)$"


def cut(text: str, most: int = MOST) -> str:
    """Shorten a text that a caller wrote, and say how long it was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def counted(count: int, one: str) -> str:
    """Write a number with a word for one of them, whose plural has an s: "1 row", "2,000 rows"."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def near(word: str, words: Iterable[str]) -> str:
    """Suggest the nearest of some words, to end a message; "" where none is near.

    To compare takes a length squared.
    """
    found = difflib.get_close_matches(word, list(words), n=1) if len(word) < MOST else []
    return f"; did you mean {found[0]}?" if found else ""


def quoted(value: object, most: int = MOST) -> str:
    """Write a value of a caller's as Python does, shortened before it is written out."""
    if isinstance(value, str):
        return (
            repr(value)
            if len(value) <= most
            else (f"{value[:most]!r}... ({len(value)} characters)")
        )
    return cut(repr(value), most)
