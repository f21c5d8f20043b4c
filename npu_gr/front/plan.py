"""What `npu-gr serve` must know before it starts anything: the section `server`, read without the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from npu_gr.core import settings
from npu_gr.core.settings import PREFIX
from npu_gr.server.config import ServerConfig


class _Front(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a configuration that the supervisor reads; the engine checks the whole."""

    server: ServerConfig = ServerConfig()


def read_server(path: Path, overrides: Sequence[str] = ()) -> ServerConfig:
    """Read the section `server` of an instance's configuration.

    Args:
        path: YAML.
        overrides: `section.key=value`, as for the whole configuration.

    Raises:
        ConfigError: names the file, the field and the limit.
    """
    ours = f"{PREFIX}SERVER"
    variables = {name: value for name, value in os.environ.items() if name == ours or name.startswith(f"{ours}__")}
    own = [text for text in overrides if text.partition("=")[0].split(".")[0].strip() == "server"]
    gathered = settings.gather(path, _Front, own, variables)
    table = {name: value for name, value in gathered.table.items() if name == "server"}
    return settings.from_table(table, _Front, f"config {path}").server
