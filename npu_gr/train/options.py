"""Constrained types that the options of several trainers share, and how the options of a trainer are listed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from npu_gr.core.settings import to_table

Seed = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]  # of a whole, which may be nothing or all of it
Weight = Annotated[float, Meta(ge=0.0)]  # of a term of the loss; 0 leaves the term out
DropoutRatio = Annotated[float, Meta(ge=0.0, lt=1.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]  # of a moving average; 0 = no average


def list_options(presets: Mapping[str, msgspec.Struct]) -> str:
    """List every option with its default, what it may be, and its meaning; options in a section as `section.key`.

    Args:
        presets: of one kind of options, by name; the first one has the defaults.
    """
    default = next(iter(presets))
    tables = {name: to_table(preset) for name, preset in presets.items()}
    return "\n".join(
        [f"--set KEY=VALUE, with the values of the preset {default}:", *_option_lines(type(presets[default]), tables)]
    )


def _option_lines(options: type[msgspec.Struct], tables: dict[str, Any], section: str = "") -> list[str]:
    default, *others = tables
    hints = get_type_hints(options, include_extras=True)
    lines = []
    for field in msgspec.structs.fields(options):
        key = field.encode_name
        kind = hints[field.name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            inner = {name: table[key] for name, table in tables.items()}
            lines += _option_lines(kind, inner, f"{section}{key}.")
            continue
        shown = f"{section}{key}={_yaml(tables[default][key])}"
        differing = [
            f"{name}: {_yaml(tables[name][key])}" for name in others if tables[name][key] != tables[default][key]
        ]
        words = [description(kind), *differing]
        lines.append(f"  {shown:<32} {'; '.join(word for word in words if word)}".rstrip())
    return lines


def description(kind: Any) -> str:
    """Say what an option means, and its values if it has few: what its annotations say."""
    if get_origin(kind) is not Annotated:
        return " | ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    bare, *notes = get_args(kind)
    said = [note.description for note in notes if isinstance(note, Meta) and note.description]
    return ". ".join(text for text in (description(bare), *said) if text)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
