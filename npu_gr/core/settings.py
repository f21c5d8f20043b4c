"""YAML -> a frozen, typed, validated msgspec Struct; errors name the file, the field and the limit.

Nothing is converted: `1e-5` is a string in YAML (write `1.0e-5`), a repeated key and an unknown key are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import yaml

from npu_gr.core.errors import ConfigError
from npu_gr.core.redact import redacted
from npu_gr.core.secret import Secret

S = TypeVar("S", bound=msgspec.Struct)

# Bounds that many sections share; a setting with another bound writes it out.
Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Ratio = Annotated[float, msgspec.Meta(gt=0, lt=1)]


# What PyYAML raises for a value that is not of the type that it looks like or claims: too deep, a key that is a list,
# the day 2027-13-45, `!!int x`, `!!bool x`, `!!timestamp x`.
_OF_VALUES = (RecursionError, TypeError, ValueError, LookupError, AttributeError)


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent repetition."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a repeated key is an error."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path, cls: type[S], overrides: Sequence[str] = ()) -> S:
    """Read a settings file.

    Args:
        path: YAML.
        cls: what it holds.
        overrides: `section.key=value` with a YAML value, later ones win.

    Raises:
        ConfigError: names the file, the field and the limit or the nearest known key.
    """
    table = read_table(path)
    for text in overrides:
        _apply(table, text)
    return from_table(table, cls, f"config {path}")


def read_table(path: Path) -> dict[str, Any]:
    """Read a settings file without checking what is in it.

    Raises:
        ConfigError: it cannot be read, or is no YAML mapping.
    """
    where = f"config {path}"
    try:
        return _table(path.read_text(), where)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not YAML: {error}") from error


def parse(text: str, cls: type[S], where: str) -> S:
    """Read settings from text.

    Args:
        text: YAML.
        cls: what it holds.
        where: names the text in errors.

    Raises:
        ConfigError: names the field and the limit or the nearest known key.
    """
    return from_table(_table(text, where), cls, where)


def _table(text: str, where: str) -> dict[str, Any]:
    try:
        table = yaml.load(text, _StrictLoader)  # it is a SafeLoader  # noqa: S506  # nosec B506
    except (yaml.YAMLError, *_OF_VALUES) as error:
        raise ConfigError(redacted(f"{where}: not YAML that we read: {error}")) from None  # it quotes the line
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: needs `key: value` lines, got {type(table).__name__}")
    return table


def from_table(table: dict[str, Any], cls: type[S], where: str = "config") -> S:
    """Validate what YAML gave."""
    try:
        return msgspec.convert(table, cls, dec_hook=_decoded)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error), cls)}") from error


def override(preset: S, overrides: Sequence[str]) -> S:
    """Replace some values of a preset.

    Args:
        preset: whose other values stay.
        overrides: `key=value` with a YAML value, later ones win.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range.
    """
    table = to_table(preset)
    for text in overrides:
        _apply(table, text)
    return from_table(table, type(preset), "--set")


def to_table(settings: msgspec.Struct) -> dict[str, Any]:
    """All of it as plain types, to be shown: a secret is what it shows of itself."""
    table: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=_encoded)
    return table


def _decoded(cls: type[Any], given: object) -> Any:
    if issubclass(cls, Secret):
        return cls.read(given)
    raise NotImplementedError(f"{cls.__name__} is no type of a setting")


def _encoded(value: object) -> str:
    if isinstance(value, Secret):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is no type of a setting")


def _apply(table: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(redacted(f"--set {text}: expected section.key=value"))
    *sections, key = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {name}: {section} is not a section")
    try:
        table[key] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {name}: the value is not YAML") from None


def _explain(message: str, cls: type[msgspec.Struct]) -> str:
    """Msgspec's message with the path in front and, for an unknown key, the nearest known one."""
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        key = unknown.group(1)
        near = difflib.get_close_matches(key, _keys(path, cls), n=1)
        full = f"{path}.{key}" if path else key
        return f"unknown key {full}" + (f"; did you mean {near[0]}?" if near else "")
    return f"{path}: {text}" if path else text


def _keys(path: str, cls: type[msgspec.Struct]) -> list[str]:
    kind: Any = cls
    for part in filter(None, path.split(".")):
        name, _, element = part.partition("[")
        kind = next(f.type for f in msgspec.structs.fields(kind) if f.encode_name == name)
        if isinstance(kind, UnionType):  # a section that may be absent
            kind = next(one for one in get_args(kind) if one is not NoneType)
        if element:
            kind = get_args(kind)[0]
    return [f.encode_name for f in msgspec.structs.fields(kind)]
