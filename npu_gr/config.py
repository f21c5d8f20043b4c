"""One YAML file -> one frozen, typed, validated `Config`. Each concept owns its section, next to its code.

Nothing is converted: `1e-5` is a string in YAML (write `1.0e-5`), a repeated key and an unknown key are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args

import msgspec
import yaml

from npu_gr.admission.brownout import BrownoutConfig
from npu_gr.backend.choose import BackendName
from npu_gr.backend.cpu import NativeMode
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.errors import ConfigError
from npu_gr.features.store import HistoryConfig
from npu_gr.generation import GenerateConfig
from npu_gr.kv.config import KVConfig
from npu_gr.match import MatchConfig
from npu_gr.relay.relay import RelayConfig
from npu_gr.relay.trigger import TriggerConfig
from npu_gr.replay.recorder import RecordConfig
from npu_gr.server.config import ServerConfig
from npu_gr.service import ServiceConfig

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class SLOConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency objectives; each is a bucket edge of its histogram, so attainment is exact."""

    rank_s: Seconds = 0.05
    signal_s: Seconds = 0.02
    generate_s: Seconds = 0.2
    match_s: Seconds = 0.05


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an instance is started with."""

    checkpoint: str | None = None  # the ranker's folder: config.json, model.safetensors; None: does not rank
    backend: BackendName = "cpu"
    native: NativeMode = "auto"  # the CPU's own kernels: auto = if they were built, require = or do not start, off
    dtype: Literal["float32", "bfloat16", "checkpoint"] = "checkpoint"  # of the matrix products
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1  # intra-op threads of the device thread (CPU)
    slo: SLOConfig = SLOConfig()
    server: ServerConfig = ServerConfig()
    service: ServiceConfig = ServiceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    relay: RelayConfig = RelayConfig()
    trigger: TriggerConfig = TriggerConfig()
    brownout: BrownoutConfig = BrownoutConfig()
    kv: KVConfig = KVConfig()
    features: HistoryConfig = HistoryConfig()
    generate: GenerateConfig | None = None  # absent: the instance does not generate
    match: MatchConfig | None = None  # absent: the instance does not match
    record: RecordConfig | None = None  # absent: requests cannot be recorded

    def __post_init__(self) -> None:
        if self.checkpoint is None and self.generate is None:
            raise ValueError("checkpoint: needed, unless there is a section generate; an instance does something")


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent repetition."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader, but a repeated key is an error."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: YAML.
        overrides: `section.key=value` with a YAML value, later ones win.

    Raises:
        ConfigError: names the file, the field and the limit or the nearest known key.
    """
    try:
        table = yaml.load(path.read_text(), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not YAML: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"config {path}: needs `key: value` lines, got {type(table).__name__}")
    for override in overrides:
        _apply(table, override)
    return from_table(table, f"config {path}")


def from_table(table: dict[str, Any], where: str = "config") -> Config:
    """Validate what YAML gave."""
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error))}") from error


def to_table(config: Config) -> dict[str, Any]:
    """The whole configuration as plain types; holds paths, never secrets."""
    table: dict[str, Any] = msgspec.to_builtins(config)
    return table


def _apply(table: dict[str, Any], override: str) -> None:
    name, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: expected section.key=value")
    *sections, key = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    table[key] = yaml.safe_load(value)


def _explain(message: str) -> str:
    """Msgspec's message with the path in front and, for an unknown key, the nearest known one."""
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        key = unknown.group(1)
        near = difflib.get_close_matches(key, _keys(path), n=1)
        full = f"{path}.{key}" if path else key
        return f"unknown key {full}" + (f"; did you mean {near[0]}?" if near else "")
    return f"{path}: {text}" if path else text


def _keys(path: str) -> list[str]:
    cls: Any = Config
    for part in filter(None, path.split(".")):
        cls = next(f.type for f in msgspec.structs.fields(cls) if f.encode_name == part)
        if isinstance(cls, UnionType):  # a section that may be absent
            cls = next(kind for kind in get_args(cls) if kind is not NoneType)
    return [f.encode_name for f in msgspec.structs.fields(cls)]
