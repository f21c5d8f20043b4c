"""What a line of an access log holds: the values of its fields by their names, whatever server wrote it.

A format is `json` (an object a line), the name of a known one, or the format itself as the server's configuration has
it: nginx's `log_format` with its `$variables`, or Envoy's `text_format` with its `%OPERATORS%`. A text is taken apart
from left to right, each value ending where the next fixed piece begins, so no line takes longer than its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from npu_gr.core.errors import ConfigError
from npu_gr.core.words import near, quoted

JSON = "json"
KNOWN = {
    "common": '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent',
    "combined": '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent '
    '"$http_referer" "$http_user_agent"',
    "envoy": '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%" %RESPONSE_CODE% '
    "%RESPONSE_FLAGS% %BYTES_RECEIVED% %BYTES_SENT% %DURATION% %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% "
    '"%REQ(X-FORWARDED-FOR)%" "%REQ(USER-AGENT)%" "%REQ(X-REQUEST-ID)%" "%REQ(:AUTHORITY)%" "%UPSTREAM_HOST%"',
}
# Where the servers' own variables have what a record needs, so that nobody must name it: the first that the format has.
USUAL: dict[str, tuple[str, ...]] = {
    "ts": ("msec", "time_iso8601", "time_local", "START_TIME"),
    "status": ("status", "RESPONSE_CODE"),
    "latency_s": ("request_time",),
    "latency_ms": ("DURATION",),
    "method": ("request_method", "request.method", "REQ(:METHOD)"),
    "path": ("request_uri.path", "uri", "request.path", "REQ(X-ENVOY-ORIGINAL-PATH?:PATH).path", "REQ(:PATH).path"),
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_OPERATOR = re.compile(r"%([A-Z][A-Z0-9_]*(?:\([^()]*\))?)(?::\d+)?%")
_ESCAPED = re.compile(rb"\\x([0-9A-Fa-f]{2})")
_REQUEST = re.compile(r"([A-Z]+) (\S+)(?: HTTP/[0-9.]+)?")
_MOST_LISTED = 12  # names of a line's fields in a message


class NoField(Exception):
    """A line has no such field; the message names those that it has."""


class LineFormat(NamedTuple):
    """How lines are read."""

    parse: Callable[[bytes], dict[str, Any]]  # raises ValueError: what is wrong with the line
    is_stamped_at_end: bool  # its time is that of the answer, as nginx's is
    names: tuple[str, ...]  # of its fields; none: each line has its own

    def usual(self, name: str) -> str | None:
        """Return where this format has what a record needs; None = it must be named."""
        fields = (source for source in USUAL.get(name, ()) if _first(source) in self.names)
        return next(fields, None)


def line_format(text: str) -> LineFormat:
    """Read a format: `json`, a name of `KNOWN`, or a server's own.

    Raises:
        ConfigError: it is none of them, or two fields stand side by side with nothing between.
    """
    if text == JSON:
        return LineFormat(_json, is_stamped_at_end=False, names=())
    text = KNOWN.get(text, text)
    for token, is_nginx in ((_OPERATOR, False), (_VARIABLE, True)):
        if token.search(text):
            pieces = token.split(text)
            step = token.groups + 1
            fixed = pieces[::step]
            names = tuple(next(filter(None, pieces[at + 1 : at + step])) for at in range(0, len(pieces) - 1, step))
            if "" in fixed[1:-1]:
                at = fixed.index("", 1)
                raise ConfigError(f"--format: nothing stands between {names[at - 1]} and {names[at]}")
            return LineFormat(_Taken(fixed, names, is_nginx), is_stamped_at_end=is_nginx, names=names)
    raise ConfigError(
        f"--format: {quoted(text)} is none of {JSON}, {', '.join(KNOWN)}, and has no $variable or %OPERATOR% "
        f"of a server's own format{near(text, (JSON, *KNOWN))}"
    )


class _Taken:
    """Takes a line apart at the fixed pieces of its format."""

    def __init__(self, fixed: list[str], names: tuple[str, ...], is_nginx: bool) -> None:
        self._fixed = fixed  # one more than names
        self._names = names
        self._is_nginx = is_nginx

    def __call__(self, raw: bytes) -> dict[str, Any]:
        line = raw.decode(errors="replace").rstrip("\r")
        if not line.startswith(self._fixed[0]):
            raise ValueError(f"not of the format: it begins with {quoted(line[:20])}, not {self._fixed[0]!r}")
        at = len(self._fixed[0])
        values: dict[str, Any] = {}
        for name, behind in zip(self._names, self._fixed[1:], strict=True):
            end = line.find(behind, at) if behind else len(line)
            if end < 0:
                raise ValueError(f"not of the format: {behind!r} does not come behind {name}")
            text = line[at:end]
            values[name] = _unescaped(text) if self._is_nginx and "\\x" in text else text
            at = end + len(behind)
        if at < len(line):
            raise ValueError(f"not of the format, which ends before {quoted(line[at:])}")
        return values


def _unescaped(text: str) -> str:
    """Read nginx's own escapes: it writes quotes and all bytes that are not ASCII so."""
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), text.encode()).decode(errors="replace")


def _json(raw: bytes) -> dict[str, Any]:
    try:
        values = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def look_up(values: Mapping[str, Any], source: str) -> Any:
    """Return a value of a line by its name, which goes on behind dots.

        payload.user.id     a value inside of an object, and of a text that is one itself, such as a body
        items.0, items.*    one place of a list, or each
        request.query.u     a parameter of a URL or a request line; also `request.path`, `request.method`

    Returns:
        The value; None where the server wrote that there is none: null, an empty text or "-".

    Raises:
        NoField: the line has nothing there.
    """
    try:
        found = _inside(values, source)
    except (KeyError, IndexError, ValueError):
        raise NoField(_lacks(values, source)) from None
    return None if found in ("", "-") else found


def _inside(value: Any, rest: str) -> Any:
    if not rest or value is None or value == "-":
        return value
    if isinstance(value, Mapping):
        if rest in value:  # names may have dots themselves
            return value[rest]
        first = _first(rest)
        return _inside(value[first], rest[len(first) + 1 :])
    first, _, behind = rest.partition(".")
    if isinstance(value, list):
        return [_inside(one, behind) for one in value] if first == "*" else _inside(value[int(first)], behind)
    if isinstance(value, str):
        return _inside(_taken_apart(value), rest)
    raise KeyError(first)


def _first(source: str) -> str:
    """Return the name before the first dot; the dots of an operator's own brackets are no such."""
    brackets = source.find(")")
    dot = source.find(".", brackets if "(" in source.partition(".")[0] else 0)
    return source if dot < 0 else source[:dot]


def _taken_apart(text: str) -> Any:
    """Look into a text: a JSON value, or else a request line or a URL.

    Raises:
        ValueError: it is neither.
    """
    if text[:1] in "{[":
        try:
            return msgspec.json.decode(text.encode())
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
    match = _REQUEST.fullmatch(text)
    method, url = (match[1], match[2]) if match else (None, text)
    parts = urlsplit(url)
    query = {name: found if len(found) > 1 else found[0] for name, found in parse_qs(parts.query).items()}
    return {"path": parts.path, "query": query, **({} if method is None else {"method": method})}


def _lacks(values: Mapping[str, Any], source: str) -> str:
    names = list(values)
    shown = ", ".join(map(str, names[:_MOST_LISTED])) + (", ..." if len(names) > _MOST_LISTED else "")
    first = _first(source)
    if first in values:
        return f"{first} has no {source[len(first) + 1 :]!r}: it is {quoted(values[first])}"
    return f"there is no {first!r}; the line has {shown}{near(first, map(str, names))}"
