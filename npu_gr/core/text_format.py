"""Format texts of clients in messages, shortened, and other words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 64  # characters


def full_match(pattern: str) -> str:
    r"""Anchor a pattern to match a full text, in Python and in JSON Schema.

    In Python `$` also matches before a final newline, and JSON Schema does not have `\Z`.
    """
    return rf"^(?:{pattern})(?!\n)$"


def cut(text: str, most: int = MOST) -> str:
    """Shorten a text, and append its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def counted(count: int, one: str) -> str:
    """Format a number with a noun whose plural has an s: "1 row", "2,000 rows"."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def near(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean X?" with the nearest word, or "".

    Long words are not compared, since it takes quadratic time.
    """
    found = difflib.get_close_matches(word, list(words), n=1) if len(word) < MOST else []
    return f"; did you mean {found[0]}?" if found else ""


def quoted(value: object, most: int = MOST) -> str:
    """Return the `repr` of a value, shortened."""
    if isinstance(value, str):
        return (
            repr(value) if len(value) <= most else f"{value[:most]!r}... ({len(value)} characters)"
        )
    return cut(repr(value), most)
