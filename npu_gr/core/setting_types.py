"""What a settings Struct takes: its keys by path, a value in its plain form, a refusal in words of YAML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from npu_gr.core.redact import redacted
from npu_gr.core.units import KEY, UNITS, Unit, number
from npu_gr.core.words import quoted

_NUMBERS = (inspect.IntType, inspect.FloatType)
_SECTIONS = (inspect.StructType, inspect.DataclassType)
_Section = inspect.StructType | inspect.DataclassType
_LISTS = (inspect.ListType, inspect.VarTupleType, inspect.SetType, inspect.FrozenSetType)
_SWITCHES = {True: ("on", "yes"), False: ("off", "no")}  # which YAML 1.1 reads as true and false


class Setting(NamedTuple):
    """One key of a Struct, at any depth."""

    path: str  # section.key; an element of a list has the list's path
    field: inspect.Field
    is_section: bool  # holds keys of its own, which follow
    in_list: bool  # one of a section that stands in a list, once for each element


@cache
def settings_of(cls: type[msgspec.Struct]) -> dict[str, Setting]:
    """All keys of a Struct by path: each section before what is in it."""
    return {setting.path: setting for setting in _walk(_struct(inspect.type_info(cls)), "", False)}


def _walk(struct: _Section | None, at: str, in_list: bool) -> Iterator[Setting]:
    for field in struct.fields if struct is not None else ():
        path = f"{at}{field.encode_name}"
        inner = _struct(field.type)
        yield Setting(path, field, inner is not None, in_list)
        is_list = in_list or any(isinstance(one, _LISTS) for one in options(field.type))
        yield from _walk(inner, f"{path}.", is_list)


def options(kind: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have, without annotations: more than one where a key may be null."""
    kind = _bare(kind)
    return [one for each in kind.types for one in options(each)] if isinstance(kind, inspect.UnionType) else [kind]


def unit_of(kind: inspect.Type) -> Unit | None:
    """The unit in which a value is counted, if its type names one."""
    if isinstance(kind, inspect.Metadata):
        name = (kind.extra_json_schema or {}).get(KEY)
        return UNITS[name] if name else unit_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next((unit for one in kind.types if (unit := unit_of(one))), None)
    return None


def choices(kind: inspect.Type) -> list[str]:
    """The values of an enumeration, as YAML has them; empty: it is none."""
    found: list[str] = []
    for one in options(kind):
        if isinstance(one, inspect.LiteralType):
            found += [str(value) for value in one.values]
        elif isinstance(one, inspect.EnumType):
            found += [str(member.value) for member in one.cls]
    return found


def _bare(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def _struct(kind: inspect.Type) -> _Section | None:
    """The Struct that is in a value: it itself, or each element of a list."""
    for one in options(kind):
        if isinstance(one, _SECTIONS):
            return one
        if isinstance(one, _LISTS) and (inner := _struct(one.item_type)):
            return inner
    return None


def plain(table: dict[str, Any], cls: type[msgspec.Struct]) -> Any:
    """Return a copy with plain numbers where a text means one, and with texts where YAML saw a switch.

    What is no such text stays as it is, to be refused later.
    """
    return _plain(table, inspect.type_info(cls))


def _plain(value: Any, kind: inspect.Type) -> Any:
    unit = unit_of(kind)
    for one in options(kind):
        match value:
            case dict() if isinstance(one, _SECTIONS):
                types = {field.encode_name: field.type for field in one.fields}
                return {key: _plain(v, types[key]) if key in types else v for key, v in value.items()}
            case dict() if isinstance(one, inspect.DictType):
                return {key: _plain(v, one.value_type) for key, v in value.items()}
            case list() if isinstance(one, _LISTS):
                return [_plain(v, one.item_type) for v in value]
            case str() if isinstance(one, _NUMBERS) and not any(isinstance(o, inspect.StrType) for o in options(kind)):
                found = number(value, unit, isinstance(one, inspect.IntType))
                return value if found is None else found
            case bool() if words := set(_SWITCHES[value]) & set(choices(one)):
                return words.pop()
    return value


def explain(message: str, table: Any, cls: type[msgspec.Struct]) -> str:
    """Say what msgspec refused: path, what was expected in words of YAML, what is there.

    Args:
        message: of a `msgspec.ValidationError`.
        table: that was refused.
        cls: for what.
    """
    text, _, path = message.partition(" - at `")
    if path.startswith("key` in `"):
        return _refused_key(text, path.removeprefix("key` in `"), table, cls)
    at = _shown_path(path)
    kind, value, is_known = _look_up(path, inspect.type_info(cls), table)
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        struct = _struct(kind)
        keys = [field.encode_name for field in struct.fields] if struct else []
        return f"unknown key {f'{at}.' if at else ''}{unknown[1]}{near(unknown[1], keys)}"
    if missing := re.match(r"Object missing required field `(.+)`", text):
        return f"{at}: {missing[1]} is missing" if at else f"{missing[1]} is missing"
    if text.startswith(("Expected `", "Invalid enum value")):
        text = _refusal(text, kind, value, is_known)
    return f"{at}: {text}" if at else text


def _refused_key(text: str, path: str, table: Any, cls: type[msgspec.Struct]) -> str:
    kind, _, _ = _look_up(path, inspect.type_info(cls), table)
    known = [name for one in options(kind) if isinstance(one, inspect.DictType) for name in choices(one.key_type)]
    if known and (named := re.match(r"Invalid enum value '(.+)'", text)):
        return f"{_shown_path(path)}: {quoted(named[1])} is none of {', '.join(known)}{near(named[1], known)}"
    return f"{_shown_path(path)}: every key must be a text: write a number in quotes"


def near(word: str, known: list[str]) -> str:
    """Return `; did you mean ...?`, or nothing if nothing is near."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def expected(kind: inspect.Type) -> str:
    """Say in words of YAML what a value of this type looks like."""
    if values := choices(kind):
        return " | ".join(values)
    unit = unit_of(kind)
    of = f" of {unit.noun} ({unit.forms}, or the plain number)" if unit else ""
    said = {_noun(one) + (of if isinstance(one, _NUMBERS) else "") for one in options(kind)}
    return " or ".join(sorted(said - {"null"}) + sorted(said & {"null"}))


def _noun(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number"
        case inspect.FloatType():
            return "a number"
        case inspect.StrType():
            return "a text"
        case inspect.NoneType():
            return "null"
        case inspect.StructType() | inspect.DataclassType():
            return "a section (`key: value` lines)"
        case inspect.DictType():
            return "a table (`name: value` lines)"
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return f"a list, [{expected(kind.item_type)}, ...]"
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)} values"
        case inspect.DateTimeType():
            return "a time (2027-01-31T12:00:00Z)"
        case inspect.CustomType():
            return "a text, {file: PATH} or {env: NAME}"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def bounds(kind: inspect.Type) -> str:
    """Say the limits of a number, e.g. `>= 1, <= 65535`; empty: it has none."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return ", ".join(
        f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
        for one in options(kind)
        if isinstance(one, _NUMBERS)
        for name, sign in signs.items()
        if (limit := getattr(one, name)) is not None
    )


def _refusal(text: str, kind: inspect.Type, value: Any, is_known: bool) -> str:
    limit = bounds(kind)
    if not is_known:
        return f"expected {expected(kind)}{f', {limit}' if limit else ''}"
    if values := choices(kind):
        hint = "; write it in quotes" if str(value) in values else near(str(value), values)
        return f"{_shown(value)} is none of {', '.join(values)}{hint}"
    if isinstance(value, str) and any(isinstance(one, inspect.StrType) for one in options(kind)):
        return text  # too long, or not of the pattern; what a text of the caller's holds is not shown
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if limit and is_number and ", got" not in text:
        return f"{_shown(value)} is out of range: expected {expected(kind)}, {limit}"
    hint = "; write it in quotes" if _is_text(kind) and not isinstance(value, dict | list | None) else ""
    return f"expected {expected(kind)}, got {_shown(value)}{hint}"


def _is_text(kind: inspect.Type) -> bool:
    return any(isinstance(one, inspect.StrType) for one in options(kind))


def _shown(value: Any) -> str:
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {quoted(value)}"
        case str():
            return quoted(redacted(value))
        case list():
            return "a list"
        case dict():
            return "a section"
        case _:
            return f"a {type(value).__name__}"


def _shown_path(path: str) -> str:
    return path.rstrip("`").removeprefix("$").lstrip(".")


def _look_up(path: str, kind: inspect.Type, value: Any) -> tuple[inspect.Type, Any, bool]:
    """Follow msgspec's path. The value is not known behind `[...]`, where msgspec does not say which key it was."""
    is_known = True
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        inner = _inner(kind, key, value)
        if inner is None:
            return kind, value, False
        kind = inner
        try:
            value = value[key] if key else value[int(index)]
        except (LookupError, TypeError, ValueError):
            value, is_known = None, False
    return kind, value, is_known


def _inner(kind: inspect.Type, key: str, value: Any) -> inspect.Type | None:
    for one in options(kind):
        if key and isinstance(one, _SECTIONS):
            return next((field.type for field in one.fields if field.encode_name == key), None)
        if not key and isinstance(one, _LISTS) and isinstance(value, list):
            return one.item_type
        if not key and isinstance(one, inspect.DictType) and isinstance(value, dict):
            return one.value_type
    return None
