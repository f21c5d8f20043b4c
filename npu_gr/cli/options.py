"""Options, argument types and helpers that several command groups share.

Nothing here imports torch, numpy or aiohttp, so that `npu-gr --help` is fast.
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

API_KEY = click.option(
    "--api-key",
    envvar="NPU_GR_API_KEY",
    help="API key; default: environment variable NPU_GR_API_KEY.",
)
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
        "PEM file of trusted certificate authorities for https and rediss; default: the system's.",
    ),
    ("--cert", "NPU_GR_CERT", "PEM file of the client certificate."),
    ("--cert-key", "NPU_GR_CERT_KEY", "PEM file of the client certificate's key."),
)
VALUE_COLUMN = click.option(
    "--value-column",
    default="rating",
    show_default=True,
    help="Column with the value of the action.",
)


def CALLING_TLS(command: Callable[..., None]) -> Callable[..., None]:  # noqa: N802  (an option like the others)
    """Add the TLS options of commands that call an instance; `npu_gr.core.calling` reads them."""
    for name, variable, text in reversed(_CALLING_TLS):
        command = click.option(
            name, variable.lower(), type=click.Path(), help=f"{text} Also: {variable}."
        )(command)
    return command


def names_of(_: click.Context, __: click.Parameter, given: str | None) -> tuple[str, ...] | None:
    """Split the value of an option at commas; None = the option is not given."""
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
    """Make a console for tables of at least `least` columns, also where the width is unknown."""
    from rich.console import Console

    return Console(width=max(least, Console().width))


def run_async(work: Callable[[], Any]) -> Any:
    """Run the coroutine that `work` returns, on uvloop."""
    import uvloop

    return uvloop.run(work())


def load_config(config_path: Path, overrides: tuple[str, ...]) -> Config:
    """Read an instance's configuration.

    Raises:
        ConfigError: The file or a field is invalid; the message names the field and the limit.
    """
    from npu_gr.service.config import load

    return load(config_path, overrides)
