"""`npu-gr config`: JSON Schema and reference of the settings.

The description of a key is its comment in the YAML files in `configs/` (also of keys that are
commented out); that of a training option is in its annotation. msgspec makes the schema of types.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from npu_gr.core import shipped
from npu_gr.core.secret import Secret
from npu_gr.core.setting_types import (
    BYTES,
    UNIT,
    UNITS,
    Setting,
    bounds,
    choices,
    expected,
    options,
    settings_of,
    unit_of,
)
from npu_gr.route.config import RouterConfig
from npu_gr.service.config import Config
from npu_gr.simulate.config import SimulateConfig

# kind of process -> (settings, files with their comments, shipped schema); later files win
KINDS: Mapping[str, tuple[Any, tuple[str, ...], str]] = {
    "instance": (Config, ("configs/cpu.yaml",), "configs/schema.json"),
    "router": (RouterConfig, ("configs/router.yaml",), "configs/router.schema.json"),
    "simulation": (
        SimulateConfig,
        ("configs/cpu.yaml", "configs/simulate.yaml"),
        "configs/simulate.schema.json",
    ),
}
_KEY = re.compile(
    r"(?P<indent> *)(?P<hash># )?(?P<inner> *)(?P<dash>- )?"
    r"(?P<key>[a-z][a-z0-9_]*):(?P<rest>$| .*)"
)
_COMMENT = re.compile(r"\s#\s+(.*)$")
_TEXT = {"type": "string"}
_SECRET = [
    _TEXT,
    *(
        {
            "type": "object",
            "properties": {key: _TEXT},
            "required": [key],
            "additionalProperties": False,
        }
        for key in ("file", "env")
    ),
]
_HEAD = """# Configuration

<!-- Written by `npu-gr config --reference`: change the comments in configs/ or a trainer's
options, not this page. -->

Every key of a process and of a trainer. `npu-gr check-config --config FILE` checks a file and what
it names, and shows where each value comes from.

- **Precedence.** The file, then the environment, then `--set section.key=value`; the later one
  wins. A key that is in none of them has its default.
- **Environment.** `NPU_GR_`, the section, two underscores, the key: `NPU_GR_SERVER__PORT=9000` is
  `server.port`, `NPU_GR_SERVER__TLS__KEY=tls.key` is `server.tls.key`, `NPU_GR_BACKEND=cpu` is a
  key outside of sections. The value is YAML. An unknown name with two underscores is an error;
  other unknown names that begin with `NPU_GR_` are ignored, with a warning if one resembles a
  setting.
- **Sizes** are bytes: `1073741824`, `1GiB`, `512 MiB`, `64MB` (KiB, MiB, GiB, TiB by 1024; kB, MB,
  GB, TB by 1000).
- **Times** are seconds: `0.05`, `50ms`, `2s`, `10min`, `1h` (us, ms, s, min, h, d).
- **Secrets** are the text itself, `{file: PATH}` or `{env: NAME}`; they are shown as `***`.
- **Editors** complete and check a file whose first line names a schema, as in the files of
  `configs/`. `npu-gr config --schema` prints the schema, and `npu-gr config > serve.yaml` writes
  that line.
"""
_PROCESSES = {
    "instance": (
        "An instance",
        "`npu-gr serve --config FILE`. `configs/cpu.yaml` is a file with every key.",
    ),
    "router": (
        "A router",
        "`npu-gr route --config FILE`. `configs/router.yaml` is a file with every key.",
    ),
    "simulation": (
        "A simulation",
        "`npu-gr simulate run --config FILE`. `configs/simulate.yaml` is a file with its own "
        "keys. The sections `admission`, `scheduler`, `relay`, `trigger`, `brownout`, `kv_cache` "
        "and `calibration` are those of an instance. Variables of the environment are ignored "
        "here.",
    ),
}


def example(kind: str) -> str:
    """Return an example file with every key of a kind of process.

    Its first line names the schema.
    """
    _, files, schema_file = KINDS[kind]
    first, _, text = shipped.path(files[-1]).read_text().partition("\n")
    assert first.startswith("# yaml-language-server")
    text = text.replace(".demo/", "").replace("the demo's checkpoint", "your models")
    return shipped.schema_line(schema_file) + text


@cache
def notes(kind: str) -> dict[str, str]:
    """Return the comment of each key by its path; "" for a key without one."""
    found: dict[str, str] = {}
    for name in KINDS[kind][1]:
        read = read_notes(shipped.path(name).read_text())
        found |= {path: note for path, note in read.items() if note or path not in found}
    return found


def read_notes(text: str) -> dict[str, str]:
    """Read the comment of each key of a YAML text, by path; elements of a list have its path."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # (column, name) of the enclosing sections
    for line in text.splitlines():
        if not (key := _KEY.fullmatch(line)):
            continue
        column = len(key["indent"]) + len(key["inner"]) + len(key["dash"] or "")
        while above and above[-1][0] >= column:
            above.pop()
        above.append((column, key["key"]))
        comment = _COMMENT.search(key["rest"])
        found.setdefault(".".join(name for _, name in above), comment[1] if comment else "")
    return found


def schema_text(kind: str) -> str:
    """Format the schema of a kind of process as in the shipped file."""
    return json.dumps(schema(kind), indent=1, ensure_ascii=False) + "\n"


def schema(kind: str) -> dict[str, Any]:
    """Make the schema of a kind of process, with descriptions and units."""
    made = msgspec.json.schema(KINDS[kind][0], schema_hook=_schema_of)
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"npu_gr: {kind}",
    }
    return about | _in_place(made, made["$defs"], "", _extras(kind))


def _schema_of(kind: type) -> dict[str, Any]:
    if issubclass(kind, Secret):
        return {"anyOf": _SECRET}
    raise NotImplementedError


def _extras(kind: str) -> dict[str, dict[str, Any]]:
    """Return what msgspec's schema lacks by path: descriptions, defaults, names of tables."""
    found: dict[str, dict[str, Any]] = {}
    for path, setting in settings_of(KINDS[kind][0]).items():
        extra = found[path] = {}
        if note := notes(kind).get(path):
            extra["description"] = note
        value = _plain_default(setting.field)
        if value is not msgspec.NODEFAULT:
            extra["default"] = value
        for one in options(setting.field.type):
            if isinstance(one, inspect.DictType) and (names := choices(one.key_type)):
                extra["propertyNames"] = {"enum": names}
    return found


def _in_place(
    node: Mapping[str, Any],
    defs: Mapping[str, Any],
    path: str,
    extras: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Replace references by what they name, and add the extras of each path."""
    made = {key: value for key, value in node.items() if key not in ("$ref", "$defs")}
    if reference := node.get("$ref"):
        made = defs[reference.rpartition("/")[2]] | made
        made["description"] = " ".join(made.get("description", "").partition("\n\n")[0].split())
        made.pop("title", None)
        made.pop("default", None)  # each key of a section has its own
    if unit := made.pop(UNIT, None):
        made |= {"type": [made["type"], "string"], "pattern": UNITS[unit].pattern}
    for key, inner in made.items():
        if key == "anyOf":
            made[key] = [_in_place(one, defs, path, extras) for one in inner]
        elif key in ("items", "additionalProperties") and isinstance(inner, dict):
            made[key] = _in_place(inner, defs, path, extras)
        elif key == "properties":
            under = {name: f"{path}.{name}".removeprefix(".") for name in inner}
            made[key] = {
                name: _in_place(one, defs, under[name], extras) | extras.get(under[name], {})
                for name, one in inner.items()
            }
        elif isinstance(inner, float) and key != "default" and inner.is_integer():
            # Python caches one of the equal annotations 0 and 0.0, depending on the import order
            made[key] = int(inner)
    return made


def reference() -> str:
    """Return `docs/configuration.md`: every key with its type, default and meaning."""
    return "\n".join([_HEAD, *_processes(), *_trainers()])


def _processes() -> Iterator[str]:
    of_instance = {
        path: setting.section and setting.section.cls
        for path, setting in settings_of(KINDS["instance"][0]).items()
    }

    def is_shared(path: str, settings: dict[str, Setting]) -> bool:
        first = path.partition(".")[0]
        section = settings[first].section
        return first in of_instance and of_instance[first] == (section and section.cls)

    for kind, (title, about) in _PROCESSES.items():
        every = settings_of(KINDS[kind][0])
        own = [
            setting
            for path, setting in every.items()
            if kind != "simulation" or not is_shared(path, every)
        ]
        words = notes(kind)
        yield f"## {title}\n\n{_wrapped(about)}\n"
        yield from _table([one for one in own if "." not in one.path and not one.section], words)
        for one in own:
            if one.section is not None:
                said = [" ".join((one.section.cls.__doc__ or "").partition("\n\n")[0].split())]
                said += ["Absent by default."] if one.field.default is None else []
                said += [f"In the file: {_cell(note)}."] if (note := words.get(one.path)) else []
                yield f"### `{one.path}`\n\n{_wrapped(' '.join(filter(None, said)))}\n"
                inner = [
                    key
                    for key in own
                    if key.path.rpartition(".")[0] == one.path and not key.section
                ]
                yield from _table(inner, words)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _trainers() -> Iterator[str]:
    from npu_gr.train.generate.train import GenerateOptions
    from npu_gr.train.match.train import MatchOptions
    from npu_gr.train.rank.options import TrainOptions
    from npu_gr.train.site.configuration import SiteOptions

    trainers: dict[str, type[msgspec.Struct]] = {
        "all": SiteOptions,
        "rank": TrainOptions,
        "generate": GenerateOptions,
        "match": MatchOptions,
    }
    yield "## Training\n"
    for name, cls in trainers.items():
        own = {
            path: one
            for path, one in settings_of(cls).items()
            if path.partition(".")[0] not in trainers
        }
        yield f"### `npu-gr train {name} --set KEY=VALUE`\n"
        if name == "all":
            yield "And `rank.KEY`, `generate.KEY`: the options of the two models, as below.\n"
        yield from _table(
            own.values(), {path: _described(one.field.type) for path, one in own.items()}
        )


def _described(kind: inspect.Type) -> str:
    while isinstance(kind, inspect.Metadata):
        if text := (kind.extra_json_schema or {}).get("description"):
            return str(text)
        kind = kind.type
    return ""


def _table(settings: Iterable[Setting], words: Mapping[str, str]) -> Iterator[str]:
    rows = []
    for one in settings:
        cells = (
            f"`{one.path}`",
            _takes(one.field.type),
            _default(one.field),
            words.get(one.path, ""),
        )
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    if rows:
        yield "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _takes(kind: inspect.Type) -> str:
    unit = unit_of(kind)
    said = " | ".join([*(f"`{one}`" for one in choices(kind)), *([unit.noun] if unit else [])])
    said = said or expected(kind).removesuffix(" or null")
    return ", ".join(filter(None, [said, bounds(kind)]))


def _default(field: inspect.Field) -> str:
    value = _plain_default(field)
    if value is msgspec.NODEFAULT:
        return "required" if field.required else ""
    if value is None:
        return "absent"
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    text = "`" + text.removesuffix("...\n").strip() + "`"
    if unit_of(field.type) is BYTES and value >= 1024:
        power = next(power for power in (4, 3, 2, 1) if value >= 1024**power)
        text += f" ({value / 1024**power:.4g} {'_KMGT'[power]}iB)"
    return text


def _plain_default(field: inspect.Field) -> Any:
    """Return the default of a key as a YAML value; `NODEFAULT` if it is required or a section."""
    is_made = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if is_made else field.default
    if value is msgspec.NODEFAULT or isinstance(value, msgspec.Struct):
        return msgspec.NODEFAULT
    return msgspec.to_builtins(value, enc_hook=str)
