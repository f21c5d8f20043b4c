"""Protocol-buffer messages in text form, as configuration files have them, read without their definitions.

Without them nobody knows whether a field is there once or many times, so every field is a list here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*) | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*') | (?P<word>[^\s\#{}<>\[\]:,;"']+)
    | (?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_MOST_DEEP = 64
_WORDS: Mapping[str, Any] = {"true": True, "false": False}
_CLOSING = {"{": "}", "<": ">"}


class TextMessage:
    """One message: its fields by name, in the order of the text."""

    def __init__(self, fields: Mapping[str, list[Any]] | None = None) -> None:
        self.fields: dict[str, list[Any]] = dict(fields or {})

    def many(self, name: str) -> list[Any]:
        """Return all values of a field."""
        return list(self.fields.get(name, ()))

    def one(self, name: str, default: Any = None) -> Any:
        """Return the value of a field that is there once: the last one."""
        found = self.fields.get(name)
        return found[-1] if found else default

    def messages(self, name: str) -> list[TextMessage]:
        """Return the messages in a field."""
        return [value for value in self.many(name) if isinstance(value, TextMessage)]

    def message(self, name: str) -> TextMessage:
        """Return the message in a field that is there once, or one without fields."""
        return [TextMessage(), *self.messages(name)][-1]

    def put(self, path: str, value: Any) -> None:
        """Replace the field at `message.message.field` by a value, or by those of a list."""
        first, _, rest = path.partition(".")
        if rest:
            inner = self.message(first)
            self.fields[first] = [inner]
            inner.put(rest, value)
        else:
            self.fields[first] = list(value) if isinstance(value, list | tuple) else [value]


def parse_text(text: str) -> TextMessage:
    """Read a message.

    Raises:
        ValueError: it is none; the message has the line.
    """
    return _fields(_Tokens(text), "", 0)


class _Tokens:
    """The tokens of a text, with one of them in sight."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rest = self._all()
        self.place = 0
        self.kind, self.word = next(self._rest)

    def _all(self) -> Iterator[tuple[str, str]]:
        place = 0
        while place < len(self._text):
            match = _TOKEN.match(self._text, place)
            if match is None:
                self.place = place
                raise self.error(f"unexpected {self._text[place]!r}")
            if match.lastgroup != "skip":
                self.place = place
                yield str(match.lastgroup), match.group()
            place = match.end()
        self.place = place
        while True:
            yield "end", ""

    def take(self) -> str:
        """Return the token in sight, and go on."""
        word = self.word
        self.kind, self.word = next(self._rest)
        return word

    def skip(self, marks: str) -> bool:
        """Go past a mark, if it is one of these."""
        is_one = self.kind == "mark" and self.word in marks
        if is_one:
            self.take()
        return is_one

    def error(self, what: str) -> ValueError:
        return ValueError(f"line {self._text.count(chr(10), 0, self.place) + 1}: {what}")


def _fields(tokens: _Tokens, closing: str, depth: int) -> TextMessage:
    """Read fields up to `closing`; "" = the end of the text."""
    if depth > _MOST_DEEP:
        raise tokens.error(f"messages in more than {_MOST_DEEP} messages")
    found = TextMessage()
    while tokens.kind != "end" if not closing else not tokens.skip(closing):
        if tokens.kind != "word":
            raise tokens.error(f"a name was expected, there is {tokens.word or 'the end'!r}")
        name = tokens.take()
        has_colon = tokens.skip(":")
        if not has_colon and (tokens.kind != "mark" or tokens.word not in _CLOSING):
            raise tokens.error(f"{name}: neither ':' nor a message follows")
        found.fields.setdefault(name, []).extend(_values(tokens, depth))
        tokens.skip(",;")
    return found


def _values(tokens: _Tokens, depth: int) -> list[Any]:
    """Read a value, or the values of a list."""
    if not tokens.skip("["):
        return [_value(tokens, depth)]
    found: list[Any] = []
    while not tokens.skip("]"):
        found.append(_value(tokens, depth))
        tokens.skip(",")
    return found


def _value(tokens: _Tokens, depth: int) -> Any:
    if tokens.kind == "mark" and tokens.word in _CLOSING:
        return _fields(tokens, _CLOSING[tokens.take()], depth + 1)
    if tokens.kind == "text":
        text = ""
        while tokens.kind == "text":  # adjacent ones are one
            text += ast.literal_eval(tokens.take())
        return text
    if tokens.kind != "word":
        raise tokens.error(f"a value was expected, there is {tokens.word or 'the end'!r}")
    word = tokens.take()
    if word in _WORDS:
        return _WORDS[word]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word  # of an enumeration
