"""`docs/configuration.md`: every key with what it takes, its default and its meaning. `npu-gr config reference`.

The words are the comments of the YAML files in `configs/`; those of training options stand at the options.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from npu_gr.core.setting_types import Setting, bounds, choices, expected, options, settings_of, unit_of
from npu_gr.core.units import BYTES
from npu_gr.tools.config_notes import KINDS, notes
from npu_gr.tools.config_schema import first_lines, plain_default
from npu_gr.train.generate.train import GenerateOptions
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.site.options import SiteOptions

_HEAD = """# Configuration

<!-- Written by `npu-gr config reference`: change the comments in configs/ or a trainer's options, not this page. -->

Every key of a process and of a trainer. `npu-gr check-config --config FILE` says what is wrong with a file, opens what
it names, and shows where each value came from.

- **Order.** The file, then the environment, then `--set section.key=value`; the later one wins. A key that is in none
  of them has its default.
- **Environment.** `NPU_GR_`, the section, two underscores, the key: `NPU_GR_SERVER__PORT=9000` is `server.port`,
  `NPU_GR_SERVER__TLS__KEY=tls.key` is `server.tls.key`, `NPU_GR_BACKEND=cpu` is a key outside of sections. The value is
  YAML. A name with two underscores that is no setting stops the start; any other name that begins with `NPU_GR_` is no
  setting, and one that is nearly the name of a setting is a warning.
- **Sizes** are bytes: `1073741824`, `1GiB`, `512 MiB`, `64MB` (KiB, MiB, GiB, TiB by 1024; kB, MB, GB, TB by 1000).
- **Times** are seconds: `0.05`, `50ms`, `2s`, `10min`, `1h` (us, ms, s, min, h, d).
- **Secrets** are the text itself, `{file: PATH}` or `{env: NAME}`; they are shown as `***`.
- **Editors** complete and check a file whose first line names a schema, as the files in `configs/` do. `npu-gr config
  schema` prints it, `npu-gr init` writes that line.
"""
_PROCESSES = {
    "instance": ("An instance", "`npu-gr serve --config FILE`. `configs/cpu.yaml` is a file with all of it."),
    "router": ("A router", "`npu-gr route --config FILE`. `configs/router.yaml` is a file with all of it."),
    "simulation": (
        "A simulation",
        "`npu-gr simulate run --config FILE`. `configs/simulate.yaml` is a file with its own keys. The sections "
        "`admission`, `scheduler`, `relay`, `trigger`, `brownout`, `kv` and `calibration` are those of an instance. No "
        "variable of the environment is a setting here.",
    ),
}
_TRAINERS: dict[str, type[msgspec.Struct]] = {
    "all": SiteOptions,
    "rank": TrainOptions,
    "generate": GenerateOptions,
    "match": MatchOptions,
}


def reference() -> str:
    """Write the page."""
    return "\n".join([_HEAD, *_processes(), *_trainers()])


def _processes() -> Iterator[str]:
    of_instance = settings_of(KINDS["instance"][0])
    for kind, (title, about) in _PROCESSES.items():
        own = {
            path: setting
            for path, setting in settings_of(KINDS[kind][0]).items()
            if kind != "simulation" or path.partition(".")[0] not in of_instance
        }
        yield f"## {title}\n\n{about}\n"
        outside = [one for one in own.values() if "." not in one.path and not one.is_section]
        yield from _table(outside, notes(kind))
        for path, section in own.items():
            if section.is_section:
                inner = [one for one in own.values() if one.path.rpartition(".")[0] == path and not one.is_section]
                yield f"### `{path}`\n\n{_about(section, notes(kind))}\n"
                yield from _table(inner, notes(kind))


def _trainers() -> Iterator[str]:
    yield "## Training\n"
    for name, cls in _TRAINERS.items():
        own = {path: one for path, one in settings_of(cls).items() if path.partition(".")[0] not in _TRAINERS}
        words = {path: _description(setting.field.type) for path, setting in own.items()}
        yield f"### `npu-gr train {name} --set KEY=VALUE`\n"
        if name == "all":
            yield "And `rank.KEY`, `generate.KEY`: the options of the two models, as below.\n"
        yield from _table(own.values(), words)


def _about(section: Setting, words: dict[str, str]) -> str:
    struct = next(one for one in _structs(section.field.type))
    absent = "Absent by default." if section.field.default is None else ""
    note = words.get(section.path, "")
    said = (first_lines(struct.cls), absent, f"In the file: {_cell(note)}." if note else "")
    return " ".join(filter(None, said))


def _structs(kind: inspect.Type) -> Iterator[inspect.StructType | inspect.DataclassType]:
    for one in options(kind):
        if isinstance(one, inspect.StructType | inspect.DataclassType):
            yield one
        elif isinstance(one, inspect.ListType | inspect.VarTupleType):
            yield from _structs(one.item_type)


def _table(settings: Iterable[Setting], words: dict[str, str]) -> Iterator[str]:
    rows = []
    for one in settings:
        cells = (f"`{one.path}`", _takes(one.field.type), _default(one.field), words.get(one.path, ""))
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    if rows:
        yield "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _takes(kind: inspect.Type) -> str:
    unit = unit_of(kind)
    said = " | ".join(f"`{one}`" for one in choices(kind)) or (unit.noun if unit else expected(kind))
    limits = bounds(kind)
    return said.removesuffix(" or null") + (f", {limits}" if limits else "")


def _default(field: inspect.Field) -> str:
    value: Any = plain_default(field)
    if value is msgspec.NODEFAULT:
        return "required" if field.required else ""
    if value is None:
        return "absent"
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()
    is_size = unit_of(field.type) is BYTES and value >= 1024
    return f"`{text}`" + (f" ({_in_binary(value)})" if is_size else "")


def _in_binary(value: int) -> str:
    for power, word in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:.4g} {word}"
    return str(value)


def _description(kind: inspect.Type) -> str:
    while isinstance(kind, inspect.Metadata):
        if text := (kind.extra_json_schema or {}).get("description"):
            return str(text)
        kind = kind.type
    return ""
