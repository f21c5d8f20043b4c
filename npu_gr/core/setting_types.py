"""Types of settings: keys by path, sizes and times with units, validation errors in terms of YAML.

Sizes and times may have units: `1GiB` is 1073741824 bytes, `50ms` is 0.05 seconds. A setting whose
type has a unit accepts such texts and plain numbers; its value is the number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from npu_gr.core.secret import redacted
from npu_gr.core.text_format import near, quoted

UNIT = "x-unit"  # key in the JSON schema of a type, where msgspec stores the unit


class Unit(NamedTuple):
    """A unit of numbers, and the suffixes of its texts."""

    noun: str
    forms: str  # examples, for messages and for the reference
    factors: dict[str, Fraction]  # suffix -> factor

    @property
    def pattern(self) -> str:
        """Regular expression (Python and JSON Schema) of a number with a suffix."""
        return rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(self.factors)})\s*$"


BYTES = Unit(
    "bytes",
    "1GiB, 512 MiB, 64MB",
    {"B": Fraction(1)}
    | {f"{letter}iB": Fraction(1024**power) for power, letter in enumerate("KMGT", 1)}
    | {f"{letter}B": Fraction(1000**power) for power, letter in enumerate("kMGT", 1)},
)
_SECONDS_OF = {"us": Fraction(1, 1_000_000), "ms": Fraction(1, 1000), "s": Fraction(1)}
_SECONDS_OF |= {"min": Fraction(60), "h": Fraction(3600), "d": Fraction(86_400)}
SECONDS = Unit("seconds", "50ms, 2s, 10min, 1h", _SECONDS_OF)
UNITS = {unit.noun: unit for unit in (BYTES, SECONDS)}
IN_BYTES, IN_SECONDS = ({UNIT: noun} for noun in UNITS)  # Meta(extra_json_schema=IN_BYTES)

# Numbers that YAML 1.1 reads as texts, since the point or the sign is missing: 1e-5, 1.0e5.
_SCIENTIFIC = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}")
_SWITCHES = {True: ("on", "yes"), False: ("off", "no")}  # words that YAML 1.1 reads as booleans
_NUMBERS = (inspect.IntType, inspect.FloatType)
_SECTIONS = (inspect.StructType, inspect.DataclassType)
_Section = inspect.StructType | inspect.DataclassType
_LISTS = (inspect.ListType, inspect.VarTupleType, inspect.SetType, inspect.FrozenSetType)
_UNKNOWN = object()  # a value that cannot be found by msgspec's path


class Setting(NamedTuple):
    """One key of a Struct, at any depth."""

    path: str  # section.key; elements of a list have the list's path
    field: inspect.Field
    section: _Section | None  # if it is a section, whose keys follow
    in_list: bool  # whether its section is an element of a list


@cache
def settings_of(cls: type[msgspec.Struct]) -> dict[str, Setting]:
    """Return all keys of a Struct by path, sections before their keys."""
    return {setting.path: setting for setting in _walk(_section(inspect.type_info(cls)), "", False)}


def _walk(struct: _Section | None, at: str, in_list: bool) -> Iterator[Setting]:
    for field in struct.fields if struct is not None else ():
        setting = Setting(f"{at}{field.encode_name}", field, _section(field.type), in_list)
        yield setting
        is_list = in_list or any(isinstance(one, _LISTS) for one in options(field.type))
        yield from _walk(setting.section, f"{setting.path}.", is_list)


def options(kind: inspect.Type) -> list[inspect.Type]:
    """Return the alternatives of a type, without annotations."""
    if isinstance(kind, inspect.Metadata):
        return options(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [one for each in kind.types for one in options(each)]
    return [kind]


def unit_of(kind: inspect.Type) -> Unit | None:
    """Return the unit of a type, if it has one."""
    if isinstance(kind, inspect.Metadata):
        name = (kind.extra_json_schema or {}).get(UNIT)
        return UNITS[name] if name else unit_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next((unit for one in kind.types if (unit := unit_of(one))), None)
    return None


def choices(kind: inspect.Type) -> list[str]:
    """Return the values of an enumeration as in YAML; empty for other types."""
    found: list[str] = []
    for one in options(kind):
        if isinstance(one, inspect.LiteralType):
            found += [str(value) for value in one.values]
        elif isinstance(one, inspect.EnumType):
            found += [str(member.value) for member in one.cls]
    return found


def _section(kind: inspect.Type) -> _Section | None:
    """Return the Struct of a value, or of the elements of a list."""
    for one in options(kind):
        if isinstance(one, _SECTIONS):
            return one
        if isinstance(one, _LISTS) and (inner := _section(one.item_type)):
            return inner
    return None


def _is_text(kind: inspect.Type) -> bool:
    return any(isinstance(one, inspect.StrType) for one in options(kind))


def number(text: str, unit: Unit | None, whole: bool) -> int | float | None:
    """Parse a number that YAML reads as a text.

    Args:
        text: `1e-5`, or a number with a suffix of the unit.
        unit: Unit of the setting, if it has one.
        whole: Whether only whole numbers are accepted.

    Returns:
        The number in the setting's unit; None if the text is not such a number.
    """
    if len(text) > 40:
        return None
    if _SCIENTIFIC.fullmatch(text):
        value = Fraction(text)
    elif unit is not None and (found := re.match(unit.pattern, text)):
        value = Fraction(text[: found.start(2)].strip()) * unit.factors[found[2]]
    else:
        return None
    if whole:
        return int(value) if value.denominator == 1 else None
    try:
        return float(value)
    except OverflowError:
        return None


def plain(value: Any, kind: inspect.Type) -> Any:
    """Return a copy with texts of numbers converted, and booleans that mean a word restored.

    Invalid values are unchanged, to be rejected later.
    """
    for one in options(kind):
        match value:
            case dict() if isinstance(one, _SECTIONS):
                types = {field.encode_name: field.type for field in one.fields}
                return {
                    key: plain(v, types[key]) if key in types else v for key, v in value.items()
                }
            case dict() if isinstance(one, inspect.DictType):
                return {key: plain(v, one.value_type) for key, v in value.items()}
            case list() if isinstance(one, _LISTS):
                return [plain(v, one.item_type) for v in value]
            case str() if isinstance(one, _NUMBERS) and not _is_text(kind):
                found = number(value, unit_of(kind), isinstance(one, inspect.IntType))
                return value if found is None else found
            case bool() if words := set(_SWITCHES[value]) & set(choices(one)):
                return words.pop()
    return value


def explain(message: str, table: Any, kind: inspect.Type) -> str:
    """Translate a validation error to path, expected type in terms of YAML, and value.

    Args:
        message: Message of a `msgspec.ValidationError`.
        table: The rejected table.
        kind: Type that the table should have.
    """
    text, _, path = message.partition(" - at `")
    is_of_key = path.startswith("key` in `")  # the error is about a key of a table
    path = path.removeprefix("key` in `").rstrip("`")
    at = path.removeprefix("$").lstrip(".")
    kind, value = _look_up(path, kind, table)
    before = f"{at}: " if at else ""
    if is_of_key:
        known = [
            name
            for one in options(kind)
            if isinstance(one, inspect.DictType)
            for name in choices(one.key_type)
        ]
        if known and (named := re.match(r"Invalid enum value '(.+)'", text)):
            hint = near(named[1], known)
            return f"{before}{quoted(named[1])} must be one of {', '.join(known)}{hint}"
        return f"{before}every key must be a text; write numbers in quotes"
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        struct = _section(kind)
        keys = [field.encode_name for field in struct.fields] if struct else []
        return f"unknown key {f'{at}.' if at else ''}{unknown[1]}{near(unknown[1], keys)}"
    if missing := re.match(r"Object missing required field `(.+)`", text):
        return f"{before}{missing[1]} is missing"
    if text.startswith(("Expected `", "Invalid enum value")):
        text = _rejection(text, kind, value)
    return f"{before}{text}"


def _look_up(path: str, kind: inspect.Type, value: Any) -> tuple[inspect.Type, Any]:
    """Follow msgspec's path; `[...]` is a value of a table with an unknown key."""
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        inner = _inner(kind, key, value)
        if inner is None:
            return kind, _UNKNOWN
        kind = inner
        try:
            value = value[key] if key else value[int(index)]
        except (LookupError, TypeError, ValueError):
            value = _UNKNOWN
    return kind, value


def _inner(kind: inspect.Type, key: str, value: Any) -> inspect.Type | None:
    for one in options(kind):
        if key and isinstance(one, _SECTIONS):
            return next((field.type for field in one.fields if field.encode_name == key), None)
        if not key and isinstance(one, _LISTS) and isinstance(value, list):
            return one.item_type
        if not key and isinstance(one, inspect.DictType) and isinstance(value, dict):
            return one.value_type
    return None


def _rejection(text: str, kind: inspect.Type, value: Any) -> str:
    limit = bounds(kind)
    if value is _UNKNOWN:
        return f"expected {expected(kind)}{f', {limit}' if limit else ''}"
    named = inspect.LiteralType, inspect.EnumType, inspect.NoneType
    if (values := choices(kind)) and all(isinstance(one, named) for one in options(kind)):
        hint = "; write it in quotes" if str(value) in values else near(str(value), values)
        return f"{_shown(value)} must be one of {', '.join(values)}{hint}"
    if isinstance(value, str) and _is_text(kind):
        # too long, or not of the pattern; the text itself is not shown
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if limit and is_number and ", got" not in text:
        return f"{_shown(value)} is out of range: expected {expected(kind)}, {limit}"
    hint = (
        "; write it in quotes"
        if _is_text(kind) and not isinstance(value, dict | list | None)
        else ""
    )
    return f"expected {expected(kind)}, got {_shown(value)}{hint}"


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


def expected(kind: inspect.Type) -> str:
    """Describe the values of a type in terms of YAML."""
    unit = unit_of(kind)
    of = f" of {unit.noun} ({unit.forms}, or the plain number)" if unit else ""
    named = inspect.LiteralType, inspect.EnumType
    said = {
        _noun(one) + (of if isinstance(one, _NUMBERS) else "")
        for one in options(kind)
        if not isinstance(one, named)
    }
    if values := choices(kind):
        return " | ".join([*values, *sorted(said - {"null"})])
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
        case (
            inspect.ListType()
            | inspect.VarTupleType()
            | inspect.SetType()
            | inspect.FrozenSetType()
        ):
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
    """Describe the limits of a number, e.g. `>= 1, <= 65535`; empty if it has none."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return ", ".join(
        f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
        for one in options(kind)
        if isinstance(one, _NUMBERS)
        for name, sign in signs.items()
        if (limit := getattr(one, name)) is not None
    )
