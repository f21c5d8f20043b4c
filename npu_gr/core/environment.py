"""Settings from variables of the environment: `NPU_GR_SERVER__PORT=9000` is `server.port: 9000`.

A section, two underscores, a key; the value is YAML. A key outside of sections stands alone: `NPU_GR_BACKEND=npu`.

Which variables are settings:
  two underscores, or the exact name of a key outside of sections     one; unknown = an error with the nearest name
  anything else that begins with NPU_GR_                              none: NPU_GR_API_KEY, what Kubernetes writes for a
                                                                      Service named npu-gr-..., or another program's; a
                                                                      name that is nearly one of ours is a warning
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from npu_gr.core.errors import ConfigError
from npu_gr.core.setting_types import settings_of

log = logging.getLogger(__name__)

PREFIX = "NPU_GR_"
BETWEEN = "__"
OTHERS = ("NPU_GR_API_KEY", "NPU_GR_CA", "NPU_GR_CERT", "NPU_GR_CERT_KEY")  # of commands that call an instance
# What Kubernetes writes for a Service named npu-gr or npu-gr-...: NPU_GR_PORT=tcp://..., NPU_GR_SERVICE_HOST.
_OF_KUBERNETES = ("tcp://", "udp://", "sctp://")
_NAMED_BY_KUBERNETES = re.compile(r"NPU_GR_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


class Variable(NamedTuple):
    """A setting that the environment gives."""

    name: str
    path: str  # section.key
    value: str  # YAML


def variable(path: str) -> str:
    """Return the name of a setting's variable."""
    return PREFIX + path.replace(".", BETWEEN).upper()


def read(
    variables: Mapping[str, str], cls: type[msgspec.Struct], gone: Mapping[str, str] | None = None
) -> list[Variable]:
    """Find the settings in an environment: outer ones first, because a whole section may be given as YAML.

    Args:
        variables: by name.
        cls: what may be set.
        gone: paths of settings that went -> what takes their place.

    Raises:
        ConfigError: a name is that of a setting, and there is no such setting. It names the nearest, or what takes its
            place.
    """
    known = {variable(path): path for path, setting in settings_of(cls).items() if not setting.in_list}
    went = {variable(path): words for path, words in (gone or {}).items()}
    found = []
    for name, value in variables.items():
        if not name.startswith(PREFIX) or value.startswith(_OF_KUBERNETES):
            continue
        if name in known:
            found.append(Variable(name, known[name], value))
        elif words := next((words for one, words in went.items() if f"{name}{BETWEEN}".startswith(one + BETWEEN)), ""):
            raise ConfigError(f"environment: {name} went: {words}")
        elif BETWEEN in name.removeprefix(PREFIX).strip("_"):
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"environment: {name} is no setting" + (f"; did you mean {near[0]}?" if near else ""))
        elif name in OTHERS or _NAMED_BY_KUBERNETES.fullmatch(name):
            continue
        elif meant := _meant(name, list(known)):
            log.warning("environment: %s is no setting, and is ignored; %s is one", name, meant)
    return sorted(found, key=lambda one: one.path.count("."))


def _meant(name: str, known: list[str]) -> str | None:
    """The setting of which a name without two underscores is nearly the name."""
    single = {one.replace(BETWEEN, "_"): one for one in known}
    near = difflib.get_close_matches(name, single, n=1, cutoff=0.9)
    return single[near[0]] if near else None
