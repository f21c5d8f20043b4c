"""What several command groups share: options, argument types, and how a command loads and runs things.

Nothing here imports torch, numpy or aiohttp: `npu-gr --help` must be quick. Commands import what
they need, late.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

    from npu_gr.service.config import Config

T = TypeVar("T")

FILE = click.Path(path_type=Path)
THREAD_COUNT = click.IntRange(1)

API_KEY = click.option("--api-key", envvar="NPU_GR_API_KEY", help="Also from NPU_GR_API_KEY.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
CONFIG = click.option(
    "--config", "config_path", required=True, type=FILE, help="YAML configuration."
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one setting, e.g. kv_cache.hbm_bytes=1000000.",
)
_CALLING_TLS = (
    (
        "--ca",
        "NPU_GR_CA",
        "PEM: whom calls to https and rediss trust; by default whom the system trusts.",
    ),
    ("--cert", "NPU_GR_CERT", "PEM: the certificate that they show."),
    ("--cert-key", "NPU_GR_CERT_KEY", "PEM: its key."),
)
VALUE_COLUMN = click.option(
    "--value-column", default="rating", show_default=True, help="Column with the action's value."
)


def CALLING_TLS(command: Callable[..., None]) -> Callable[..., None]:  # noqa: N802  (an option, as the others are)
    """Add the options of commands that call an instance at https; `npu_gr.core.calling` reads them."""
    for name, variable, text in reversed(_CALLING_TLS):
        command = click.option(
            name, variable.lower(), type=click.Path(), help=f"{text} Also from {variable}."
        )(command)
    return command


def names_of(_: click.Context, __: click.Parameter, given: str | None) -> tuple[str, ...] | None:
    """Split the value of an option at commas; None = it is not given."""
    return (
        None if given is None else tuple(name.strip() for name in given.split(",") if name.strip())
    )


class RunByDefault(click.Group):
    """A group whose first command is `run`: `replay LOG ...` is `replay run LOG ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` if no command is named."""
        if not args or args[0] not in (*self.commands, "--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def wide_console(least: int = 110) -> Console:
    """A console for tables, which are not squeezed where the width is unknown."""
    from rich.console import Console

    return Console(width=max(least, Console().width))


def run_async(work: Callable[[], Any]) -> Any:
    """Run the coroutine that `work` returns, on uvloop."""
    import uvloop

    return uvloop.run(work())


def load_config(config_path: Path, overrides: tuple[str, ...]) -> Config:
    """Read an instance's configuration.

    Raises:
        ConfigError: names the file, the field and the limit.
    """
    from npu_gr.service.config import load

    return load(config_path, overrides)
