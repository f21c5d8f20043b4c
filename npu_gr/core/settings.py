"""Read YAML into validated msgspec Structs; errors name the file, the field and the limit.

A value comes from the file, an environment variable, or `--set`; the later one wins. Sizes and
times may have a unit (`1GiB`, `50ms`). Repeated and unknown keys are errors.

`NPU_GR_SERVER__PORT=9000` is `server.port: 9000`: section, two underscores, key; the value is YAML.
A key outside of sections has only its name: `NPU_GR_BACKEND=npu`. Variables that are settings:
  two underscores, or the exact name of a key outside of sections: yes; an unknown one is an error
  other names that begin with NPU_GR_: no (NPU_GR_API_KEY, variables that Kubernetes sets for a
      Service named npu-gr-..., other programs); a name that resembles a setting causes a warning
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
# variables of commands that call an instance
OTHERS = ("NPU_GR_API_KEY", "NPU_GR_CA", "NPU_GR_CERT", "NPU_GR_CERT_KEY")
# Variables that Kubernetes sets for a Service named npu-gr or npu-gr-...: NPU_GR_PORT=tcp://...,
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


# Removed keys, by path (elements of a list have the list's path) -> what to do instead.
# docs/upgrading.md has the same rows in more words. A removed section has one row.
GONE: dict[str, str] = {
    # the router (`npu-gr route`), which is HAProxy
    "tenant_header": "users are placed by name alone, and instances read the tenant themselves",
    "default_budget_s": "the instance has server.default_budget_s",
    "connect_timeout_s": "it is 250 ms",
    "instance_idle_s": "HAProxy keeps idle connections for 5 s",
    "health.path": "it is /readyz",
    "health.panic_ratio": "without an instance that is up the answer is 503",
    "breaker": "use health.failures and health.slow_start_s; instances are not compared by speed",
    "retry": "a rank without an answer after 5 times its objective goes to another "
    "instance, at most twice",
    "limits.max_inflight": "use limits.instance_queue and limits.instance_inflight",
    "limits.instance_idle": "HAProxy decides",
    "limits.max_kept_bytes": "use limits.buffer_bytes, of each connection",
    "limits.stream_over_bytes": "use limits.buffer_bytes",
    "limits.max_header_bytes": "use limits.buffer_bytes",
    "limits.max_headers": "HAProxy takes 101",
    "server.workers": "the process with the models serves HTTP; more cores: more instances behind "
    "`npu-gr route`",
    "server.max_connections": "use the limit of a proxy: `npu-gr route`, or the system's limit of "
    "open files",
    "server.header_timeout_s": "the proxy closes connections that send their headers slowly "
    "(`npu-gr route`)",
    "server.write_timeout_s": "the proxy closes connections that do not read their answer (`npu-gr "
    "route`)",
    # `npu-gr train match`
    "users": "each domain has user embeddings of its own",
    "initialise": "the target's users start at their source vectors",
    "aligned": "use schedule: initialised has no inter-domain loss, separated has both",
    "neighbour": "use schedule: initialised has no inter-domain loss, separated has both",
    "prior": "each item's popularity is added to its logits",
    "encoder": "it is GraphSAGE, which starts as LightGCN",
    "norm": "neighbours count by the roots of both degrees",
    "activation": "the encoder is linear",
    "negative_power": "negatives are drawn evenly",
    "export": "what is served joins the joint SVD, SCCDR and popularity",
}


class LiveConfig(Generic[S]):
    """The current configuration, which a reload replaces."""

    def __init__(self, config: S) -> None:
        self.config = config


class Gathered(NamedTuple):
    """The values of all origins, before validation."""

    table: dict[str, Any]
    origins: dict[str, str]  # path -> origin of the value: the file, a variable, `--set`


# Errors of PyYAML for invalid values: too deep, a key that is a list, the day 2027-13-45,
# `!!int x`, `!!bool x`, `!!timestamp x`.
_OF_VALUES = (RecursionError, TypeError, ValueError, LookupError, AttributeError)
_OF_YAML_1_1 = re.compile(r"[-+]?0[0-9_]|.*:")  # numbers with the base 8 or 60


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that rejects repeated keys, and reads numbers as YAML 1.2 does.

    YAML 1.1 reads `1:30` as 90 and `0100` as 64; here they are texts, which no number accepts.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Choose the type of a value without a tag."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        return "tag:yaml.org,2002:str" if is_number and _OF_YAML_1_1.match(value) else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping without repeated keys."""
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
        path: YAML file.
        cls: Type of the settings.
        overrides: Settings as `section.key=value` with a YAML value; later ones win.
        variables: Environment variables, which override the file.

    Raises:
        ConfigError: a value is invalid; the message names the file, the field, and the limit or
            the nearest known key.
    """
    return from_table(gather(path, cls, overrides, variables).table, cls, f"config {path}")


def gather(
    path: Path,
    cls: type[msgspec.Struct],
    overrides: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Gathered:
    """Collect values as `load` does, with the origin of each, without validation.

    Raises:
        ConfigError: the file, a variable or an override cannot be parsed.
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
    """Return the name of the environment variable of a setting."""
    return PREFIX + path.replace(".", BETWEEN).upper()


def read_environment(
    variables: Mapping[str, str], cls: type[msgspec.Struct]
) -> list[tuple[str, str, str]]:
    """Find the settings in an environment, sections before their keys.

    Args:
        variables: Environment variables by name.
        cls: Type of the settings.

    Returns:
        (path, YAML value, name of the variable) of each setting.

    Raises:
        ConfigError: a variable names an unknown or removed setting; the message has the nearest
            name, or the replacement.
    """
    paths = {path for path, setting in settings_of(cls).items() if not setting.in_list}
    known = {variable(path): path for path in paths}
    before = {variable(path): path for path in renamed.old_paths(paths)}
    removed = {variable(path): now for path, now in GONE.items()}
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
            (now for one, now in removed.items() if f"{name}{BETWEEN}".startswith(one + BETWEEN)),
            "",
        ):
            raise ConfigError(f"environment: {name} was removed: {now}")
        elif BETWEEN in name.removeprefix(PREFIX).strip("_"):
            raise ConfigError(f"environment: {name} is not a setting{near(name, known)}")
        elif name in OTHERS or _NAMED_BY_KUBERNETES.fullmatch(name):
            continue
        elif meant := difflib.get_close_matches(name, single, n=1, cutoff=0.9):
            log.warning(
                "environment: %s is not a setting and is ignored; did you mean %s?",
                name,
                single[meant[0]],
            )
    return sorted(found, key=lambda one: one[0].count("."))


def read_table(path: Path) -> dict[str, Any]:
    """Read a settings file without validation.

    Raises:
        ConfigError: the file cannot be read, or is not a YAML mapping.
    """
    where = f"config {path}"
    try:
        return _table(path.read_text(), where)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not YAML: {error}") from error


def parse(text: str, cls: type[S], where: str) -> S:
    """Read settings from a text.

    Args:
        text: YAML.
        cls: Type of the settings.
        where: Description of the text in errors.

    Raises:
        ConfigError: a value is invalid; the message names the field, and the limit or the nearest
            known key.
    """
    return from_table(_table(text, where), cls, where)


def _table(text: str, where: str) -> dict[str, Any]:
    try:
        table = yaml.load(text, _StrictLoader)  # it is a SafeLoader  # noqa: S506  # nosec B506
    except (yaml.YAMLError, *_OF_VALUES) as error:
        # redacted, since the error quotes the line
        raise ConfigError(redacted(f"{where}: invalid YAML: {error}")) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected `key: value` lines, got {type(table).__name__}")
    return table


def from_table(table: dict[str, Any], cls: type[S], where: str = "config") -> S:
    """Validate a table.

    Raises:
        ConfigError: a value is invalid; the message names the field, and the limit or the nearest
            known key.
    """
    known = settings_of(cls)
    table = renamed.with_new_names(table, known, where)
    for path, value in _numbers(table, "", set()):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {path}: expected a finite number, got {value}")
    try:
        return msgspec.convert(plain(table, inspect.type_info(cls)), cls, dec_hook=_decoded)
    except msgspec.ValidationError as error:
        known = settings_of(cls)
        removed = [
            f"{path} was removed: {now}"
            for path, now in GONE.items()
            if path not in known and _has(table, path)
        ]
        wrong = "; ".join(removed) or explain(str(error), table, inspect.type_info(cls))
        raise ConfigError(f"{where}: {wrong}") from error


def override(preset: S, overrides: Sequence[str]) -> S:
    """Replace values of a preset.

    Args:
        preset: Settings with the other values.
        overrides: Settings as `key=value` with a YAML value; later ones win.

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
    """Convert settings to plain types for display, with secrets hidden."""
    table: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=_encoded)
    return table


def _decoded(cls: type[Any], given: object) -> Any:
    if issubclass(cls, Secret):
        return cls.read(given)
    raise NotImplementedError(f"{cls.__name__} is not a type of settings")


def _encoded(value: object) -> str:
    if isinstance(value, Secret):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is not a type of settings")


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
        if inner is None:  # `section:` without a value, or an absent section
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
    """Return the paths of all values that are not sections."""
    if not isinstance(value, dict):
        return [at]
    return [
        leaf
        for key, inner in value.items()
        for leaf in _leaves(inner, f"{at}.{key}" if at else str(key))
    ]


def _numbers(value: Any, at: str, seen: set[int]) -> Iterator[tuple[str, float]]:
    """Yield path and value of all numbers with a point.

    Aliases of YAML can repeat a list, even within itself; each is read once (`seen` has their ids).
    """
    if isinstance(value, float):
        yield at, value
    if not isinstance(value, dict | list) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{at}.{key}" if at else str(key), seen)
    else:
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{at}[{index}]", seen)


def _has(value: object, path: str) -> bool:
    """Whether a table has a key, also in a section of a list."""
    if isinstance(value, list):
        return any(_has(one, path) for one in value if isinstance(one, dict))
    key, _, inner = path.partition(".")
    return isinstance(value, dict) and key in value and (not inner or _has(value[key], inner))
