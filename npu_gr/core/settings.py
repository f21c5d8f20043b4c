"""YAML -> a frozen, typed, validated msgspec Struct; errors name the file, the field and the limit.

A value comes from the file, from a variable of the environment, or from `--set`; the later one
wins. Sizes and times may have a unit (`1GiB`, `50ms`), and inside are plain numbers. A repeated key
and an unknown key are errors.

`NPU_GR_SERVER__PORT=9000` is `server.port: 9000`: a section, two underscores, a key; the value is
YAML. A key outside of sections stands alone: `NPU_GR_BACKEND=npu`. Which variables are settings:
  two underscores, or the exact name of a key outside of sections     one; unknown = an error with the nearest name
  anything else that begins with NPU_GR_                              none: NPU_GR_API_KEY, what Kubernetes writes for a
                                                                      Service named npu-gr-..., or
                                                                      another program's; a name that
                                                                      is nearly one of ours is a
                                                                      warning
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import yaml
from msgspec import inspect

from npu_gr.core import renamed
from npu_gr.core.errors import ConfigError
from npu_gr.core.secret import Secret, redacted
from npu_gr.core.setting_types import IN_BYTES, IN_SECONDS, explain, plain, settings_of
from npu_gr.core.text_format import near

log = logging.getLogger(__name__)
S = TypeVar("S", bound=msgspec.Struct)

PREFIX = "NPU_GR_"
BETWEEN = "__"
# of commands that call an instance
OTHERS = ("NPU_GR_API_KEY", "NPU_GR_CA", "NPU_GR_CERT", "NPU_GR_CERT_KEY")
# What Kubernetes writes for a Service named npu-gr or npu-gr-...: NPU_GR_PORT=tcp://...,
# NPU_GR_SERVICE_HOST.
_OF_KUBERNETES = ("tcp://", "udp://", "sctp://")
_NAMED_BY_KUBERNETES = re.compile(
    r"NPU_GR_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)

# Bounds that many sections share; a setting with another bound writes it out.
Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0, extra_json_schema=IN_BYTES)]
SomeBytes = Annotated[int, msgspec.Meta(ge=1, extra_json_schema=IN_BYTES)]
Seconds = Annotated[float, msgspec.Meta(gt=0, extra_json_schema=IN_SECONDS)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, extra_json_schema=IN_SECONDS)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Ratio = Annotated[float, msgspec.Meta(gt=0, lt=1)]


# Keys that went, by path (an element of a list has the list's path) -> what takes their place.
# docs/upgrading.md has the same rows with more words. A section that went whole has one row.
GONE: dict[str, str] = {
    # the router (`npu-gr route`), which is HAProxy
    "tenant_header": "nothing: users are placed by name alone, and instances read the tenant "
    "themselves",
    "default_budget_s": "nothing: the instance has server.default_budget_s",
    "connect_timeout_s": "nothing: it is 250 ms",
    "instance_idle_s": "nothing: HAProxy keeps idle connections for 5 s",
    "health.path": "nothing: it is /readyz",
    "health.panic_ratio": "nothing: without an instance that is up the answer is 503",
    "breaker": "health.failures and health.slow_start_s; instances are not compared by speed",
    "retry": "nothing: a rank without an answer after 5 times its objective goes to another "
    "instance, at most twice",
    "limits.max_inflight": "limits.instance_queue and limits.instance_inflight, of each instance",
    "limits.instance_idle": "nothing: HAProxy decides",
    "limits.max_kept_bytes": "limits.buffer_bytes, of each connection",
    "limits.stream_over_bytes": "limits.buffer_bytes",
    "limits.max_header_bytes": "limits.buffer_bytes",
    "limits.max_headers": "nothing: HAProxy takes 101",
    "server.workers": "the process with the models serves HTTP; more cores: more instances behind "
    "`npu-gr route`",
    "server.max_connections": "the limit of a proxy: `npu-gr route`, or the system's limit of "
    "open files",
    "server.header_timeout_s": "the proxy closes connections that send their headers slowly "
    "(`npu-gr route`)",
    "server.write_timeout_s": "the proxy closes connections that do not read their answer (`npu-gr "
    "route`)",
    # `npu-gr train match`
    "users": "nothing: each domain has user embeddings of its own",
    "initialise": "nothing: the target's users start at their source vectors",
    "aligned": "schedule: initialised has no inter-domain loss, separated has both",
    "neighbour": "schedule: initialised has no inter-domain loss, separated has both",
    "prior": "nothing: each item's popularity is added to its logits",
    "encoder": "nothing: it is GraphSAGE, which starts as LightGCN",
    "norm": "nothing: neighbours count by the roots of both degrees",
    "activation": "nothing: the encoder is linear",
    "negative_power": "nothing: negatives are drawn evenly",
    "export": "nothing: what is served joins the joint SVD, SCCDR and popularity",
}


class LiveConfig(Generic[S]):
    """The configuration in force: a reload replaces it, and whatever shows a setting reads it here."""

    def __init__(self, config: S) -> None:
        self.config = config


class Gathered(NamedTuple):
    """The values that a process is started with, before they are validated."""

    table: dict[str, Any]
    origins: dict[str, str]  # where each value came from, by path: the file, a variable, `--set`


# What PyYAML raises for a value that is not of the type that it looks like or claims: too deep, a
# key that is a list, the day 2027-13-45, `!!int x`, `!!bool x`, `!!timestamp x`.
_OF_VALUES = (RecursionError, TypeError, ValueError, LookupError, AttributeError)


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent repetition."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a repeated key is an error."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(
                    f"line {key_node.start_mark.line + 1}: key {key!r} is given twice"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(
    path: Path,
    cls: type[S],
    overrides: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> S:
    """Read a settings file.

    Args:
        path: YAML.
        cls: what it holds.
        overrides: `section.key=value` with a YAML value, later ones win.
        variables: of the environment, which win over the file (`npu_gr.core.environment`); None =
            none.

    Raises:
        ConfigError: names the file, the field and the limit or the nearest known key.
    """
    return from_table(gather(path, cls, overrides, variables).table, cls, f"config {path}")


def gather(
    path: Path,
    cls: type[msgspec.Struct],
    overrides: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Gathered:
    """Read what `load` reads, and say where each value came from.

    Raises:
        ConfigError: as `load`, but for what only validation finds.
    """
    known = settings_of(cls)
    table = renamed.with_new_names(read_table(path), known, f"config {path}")
    origins = dict.fromkeys(_leaves(table), str(path))
    given = read_environment(variables or {}, cls)
    for text in overrides:
        name, value = _parted(text)
        given.append((renamed.new_path(name, known, "--set"), value, "--set"))
    for name, value, origin in given:
        _put(table, name, _yaml(value, name, origin), origin)
        origins = {
            at: where for at, where in origins.items() if not f"{at}.".startswith(f"{name}.")
        }
        origins |= dict.fromkeys(_leaves(_at(table, name), name), origin)
    return Gathered(renamed.with_new_names(table, known, "config"), origins)


def variable(path: str) -> str:
    """Return the name of a setting's variable."""
    return PREFIX + path.replace(".", BETWEEN).upper()


def read_environment(
    variables: Mapping[str, str], cls: type[msgspec.Struct]
) -> list[tuple[str, str, str]]:
    """Find the settings in an environment: outer ones first, because a whole section may be given as YAML.

    Args:
        variables: by name.
        cls: what may be set.

    Returns:
        Path, value (YAML) and name of each.

    Raises:
        ConfigError: a name is that of a setting, and there is no such setting. It names the
            nearest, or what takes its place.
    """
    paths = {path for path, setting in settings_of(cls).items() if not setting.in_list}
    known = {variable(path): path for path in paths}
    before = {variable(path): path for path in renamed.old_paths(paths)}
    went = {variable(path): now for path, now in GONE.items()}
    single = {name.replace(BETWEEN, "_"): name for name in known}
    found = []
    for name, value in variables.items():
        if not name.startswith(PREFIX) or value.startswith(_OF_KUBERNETES):
            continue
        if name in known:
            found.append((known[name], value, name))
        elif name in before:
            path = renamed.new_path(before[name], paths, "environment")
            if variable(path) in variables:
                raise ConfigError(
                    f"environment: {name} is now {variable(path)}, and both are set: unset {name}"
                )
            found.append((path, value, name))
        elif now := next(
            (now for one, now in went.items() if f"{name}{BETWEEN}".startswith(one + BETWEEN)), ""
        ):
            raise ConfigError(f"environment: {name} went: {now}")
        elif BETWEEN in name.removeprefix(PREFIX).strip("_"):
            raise ConfigError(f"environment: {name} is no setting{near(name, known)}")
        elif name in OTHERS or _NAMED_BY_KUBERNETES.fullmatch(name):
            continue
        elif meant := difflib.get_close_matches(name, single, n=1, cutoff=0.9):
            log.warning(
                "environment: %s is no setting, and is ignored; %s is one", name, single[meant[0]]
            )
    return sorted(found, key=lambda one: one[0].count("."))


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
        # it quotes the line
        raise ConfigError(redacted(f"{where}: not YAML that we read: {error}")) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: needs `key: value` lines, got {type(table).__name__}")
    return table


def from_table(table: dict[str, Any], cls: type[S], where: str = "config") -> S:
    """Validate what YAML gave.

    Raises:
        ConfigError: names the field and the limit or the nearest known key.
    """
    known = settings_of(cls)
    table = renamed.with_new_names(table, known, where)
    try:
        return msgspec.convert(plain(table, inspect.type_info(cls)), cls, dec_hook=_decoded)
    except msgspec.ValidationError as error:
        went = [
            f"{path} went: {now}"
            for path, now in GONE.items()
            if path not in known and _has(table, path)
        ]
        wrong = "; ".join(went) or explain(str(error), table, inspect.type_info(cls))
        raise ConfigError(f"{where}: {wrong}") from error


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
        name, value = _parted(text)
        name = renamed.new_path(name, settings_of(type(preset)), "--set")
        _put(table, name, _yaml(value, name, "--set"), "--set")
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


def _parted(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(redacted(f"--set {text}: expected section.key=value"))
    return name, value


def _yaml(text: str, name: str, origin: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)  # it is a SafeLoader  # noqa: S506  # nosec B506
    except (yaml.YAMLError, *_OF_VALUES):
        raise ConfigError(f"{origin} {name}: the value is not YAML") from None


def _put(table: dict[str, Any], name: str, value: Any, origin: str) -> None:
    *sections, key = name.split(".")
    for section in sections:
        inner = table.setdefault(section, {})
        if inner is None:  # `section:` without a line, or a section that may be absent
            inner = table[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{origin} {name}: {section} is not a section")
        table = inner
    table[key] = value


def _at(table: dict[str, Any], name: str) -> Any:
    value: Any = table
    for key in name.split("."):
        value = value[key]
    return value


def _leaves(value: Any, at: str = "") -> list[str]:
    """Paths of all values that are no sections."""
    if not isinstance(value, dict):
        return [at]
    return [
        leaf
        for key, inner in value.items()
        for leaf in _leaves(inner, f"{at}.{key}" if at else str(key))
    ]


def _has(value: object, path: str) -> bool:
    """Whether a key is given, in a section or in any section of a list."""
    if isinstance(value, list):
        return any(_has(one, path) for one in value if isinstance(one, dict))
    key, _, inner = path.partition(".")
    return isinstance(value, dict) and key in value and (not inner or _has(value[key], inner))
