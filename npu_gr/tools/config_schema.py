"""JSON Schema of a configuration, for editors and for CI: `npu-gr config schema`.

msgspec's own generator does not make it: a default that is a secret stops it, and it does not know the path of a key,
by which the words about it are found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from npu_gr.core.setting_types import unit_of
from npu_gr.tools.config_notes import KINDS, notes

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string"}
_SECRET = [
    _TEXT,
    *(
        {"type": "object", "properties": {key: _TEXT}, "required": [key], "additionalProperties": False}
        for key in ("file", "env")
    ),
]
_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "pattern": "pattern",
    "min_length": "minLength",
    "max_length": "maxLength",
}
_OF_LISTS = _LIMITS | {"min_length": "minItems", "max_length": "maxItems"}


def text(kind: str) -> str:
    """Write the schema of a kind of process as the file that ships has it."""
    return json.dumps(schema(kind), indent=1, ensure_ascii=False) + "\n"


def schema(kind: str) -> dict[str, Any]:
    """Make the schema of a kind of process: every key with what it means, sizes and times with their units.

    Args:
        kind: of `npu_gr.tools.config_notes.KINDS`.
    """
    made = _of(inspect.type_info(KINDS[kind][0]), "", notes(kind))
    return {"$schema": _DIALECT, "title": f"npu_gr: {kind}"} | made


def _of(kind: inspect.Type, path: str, words: Mapping[str, str]) -> dict[str, Any]:
    """The schema of a value of some type at some path."""
    match kind:
        case inspect.Metadata():
            return _of(kind.type, path, words) | _with_unit(kind)
        case inspect.UnionType():
            return {"anyOf": [_of(one, path, words) for one in kind.types]}
        case inspect.StructType() | inspect.DataclassType():
            return _section(kind, path, words)
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType():
            return {"type": "integer"} | _limits(kind, _LIMITS)
        case inspect.FloatType():
            return {"type": "number"} | _limits(kind, _LIMITS)
        case inspect.StrType():
            return _TEXT | _limits(kind, _LIMITS)
        case inspect.NoneType():
            return {"type": "null"}
        case inspect.LiteralType():
            return {"enum": list(kind.values)}
        case inspect.EnumType():
            return {"enum": [member.value for member in kind.cls]}
        case inspect.ListType() | inspect.VarTupleType():
            return {"type": "array", "items": _of(kind.item_type, path, words)} | _limits(kind, _OF_LISTS)
        case inspect.DictType():
            keys = {"propertyNames": found} if (found := _of(kind.key_type, path, words)) != _TEXT else {}
            return {"type": "object", "additionalProperties": _of(kind.value_type, path, words)} | keys
        case inspect.CustomType():
            return {"anyOf": _SECRET}
        case _:
            raise NotImplementedError(f"{path}: {kind} is no type of a setting")


def _with_unit(kind: inspect.Metadata) -> dict[str, Any]:
    if (unit := unit_of(kind)) is None:
        return {}
    number = _of(kind.type, "", {})["type"]
    return {"type": [number, "string"], "pattern": unit.pattern}


def _limits(kind: Any, names: Mapping[str, str]) -> dict[str, Any]:
    limits = ((name, getattr(kind, ours, None)) for ours, name in names.items())
    return {name: _as_written(limit) for name, limit in limits if limit is not None}


def _as_written(limit: Any) -> Any:
    """Python keeps one of two equal annotations: whether a limit is 0 or 0.0 hangs on what was imported first."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _section(kind: inspect.StructType | inspect.DataclassType, path: str, words: Mapping[str, str]) -> dict[str, Any]:
    properties = {}
    for field in kind.fields:
        at = f"{path}.{field.encode_name}" if path else field.encode_name
        found = _of(field.type, at, words)
        if note := words.get(at):
            found["description"] = note
        if (value := plain_default(field)) is not msgspec.NODEFAULT:
            found["default"] = value
        properties[field.encode_name] = found
    return {
        "type": "object",
        "description": first_lines(kind.cls),
        "properties": properties,
        "required": [field.encode_name for field in kind.fields if field.required],
        "additionalProperties": False,
    }


def first_lines(cls: type) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())


def plain_default(field: inspect.Field) -> Any:
    """The default of a key as YAML has it; `msgspec.NODEFAULT` for one that must be given, and for a section."""
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is msgspec.NODEFAULT or isinstance(value, msgspec.Struct):
        return msgspec.NODEFAULT
    return msgspec.to_builtins(value, enc_hook=str)
