"""npu-gr keys: make, list and revoke API keys."""

from __future__ import annotations

import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from npu_gr.cli.options import FILE

KEY_FILE = click.option(
    "--file", "path", required=True, type=FILE, help="The key file: server.api_keys_file."
)
PREFIX = "ngr_"  # by which scanners for leaked secrets know a key
MAX_CHARACTERS = 512
SCOPES = ("infer", "ingest", "erase", "observe", "admin")  # of `Scope`, whose module loads numpy


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    Who reads the file has new keys, and forgets revoked ones, within a second.
    """


@keys.command("new", short_help="Make a key, add it to the file, and print it.")
@click.argument("name")
@KEY_FILE
@click.option(
    "--tenant",
    required=True,
    help="Whose data it is for; '*' = the tenant that each request names.",
)
@click.option(
    "--scope", "scopes", required=True, multiple=True, type=click.Choice(SCOPES), help="Repeatable."
)
@click.option("--rate-per-s", type=float, help="Requests a second; without it there is no limit.")
@click.option(
    "--expires", help="Day (UTC) or time with a zone, e.g. 2027-01-31 or 2027-01-31T12:00:00Z."
)
@click.option(
    "--from-stdin", is_flag=True, help="Read the key from standard input instead of making one."
)
def new_key(
    name: str,
    path: Path,
    scopes: tuple[str, ...],
    expires: str | None,
    from_stdin: bool,
    **more: Any,
) -> None:
    """Make a key called NAME, add it to the file, and print it.

    It is shown this once: the file has its hash alone.
    """
    from npu_gr.core.settings import from_table
    from npu_gr.server.auth.edit import add_key
    from npu_gr.server.auth.keys import KeyEntry, hash_of

    key = _from_stdin() if from_stdin else PREFIX + secrets.token_urlsafe(32)
    table = {
        "name": name,
        "sha256": hash_of(key.encode()),
        "scopes": list(dict.fromkeys(scopes)),
        "expires": None if expires is None else _future(expires),
        **more,
    }
    add_key(path, from_table(table, KeyEntry, "the new key"))
    click.echo(f"added to {path}: {name!r}", err=True)
    if not from_stdin:
        click.echo(key)


@keys.command("list", short_help="List the keys of a file.")
@KEY_FILE
def list_keys(path: Path) -> None:
    """List the keys of a file: name, beginning of the hash, tenant, scopes, rate, end."""
    from npu_gr.server.auth.keys import in_utc, read_keys

    now_at = datetime.now(UTC)
    rows = [("NAME", "SHA-256", "TENANT", "SCOPES", "PER SECOND", "EXPIRES")]
    for key in read_keys(path).keys:
        rate = "no limit" if key.rate_per_s is None else f"{key.rate_per_s:g}"
        end = in_utc(key) + (" (over)" if key.expires is not None and key.expires <= now_at else "")
        tenant = key.tenant if key.tenant.isprintable() and key.tenant else repr(key.tenant)
        rows.append((key.name, f"{key.sha256[:8]}...", tenant, ",".join(key.scopes), rate, end))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


@keys.command("revoke")
@click.argument("name")
@KEY_FILE
def revoke(name: str, path: Path) -> None:
    """Take the key NAME out of the file."""
    from npu_gr.server.auth.edit import revoke_key

    num_left = revoke_key(path, name)
    click.echo(f"revoked {name!r}; {path} has {num_left} more", err=True)
    if num_left == 0:
        click.echo(
            "no key is left: every call is rejected, and no instance starts with this file",
            err=True,
        )


def _from_stdin() -> str:
    """Read a key.

    Raises:
        ConfigError: it is too short, too long, or no header could carry it.
    """
    from npu_gr.core.errors import ConfigError
    from npu_gr.server.auth.keys import MIN_CHARACTERS

    key = sys.stdin.buffer.read(MAX_CHARACTERS + 3).rstrip(b"\r\n").decode(errors="replace")
    if not MIN_CHARACTERS <= len(key) <= MAX_CHARACTERS:
        raise ConfigError(
            f"the key on standard input needs {MIN_CHARACTERS} to {MAX_CHARACTERS} characters"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "the key on standard input may have printable ASCII characters alone, and no blank"
        )
    return key


def _future(text: str) -> datetime:
    """Read the end of a key; a day means its first second.

    Raises:
        ConfigError: it cannot be read, has no time zone, or is over.
    """
    from npu_gr.core.errors import ConfigError

    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--expires: {text!r} is neither 2027-01-31 nor 2027-01-31T12:00:00Z"
        ) from None
    if len(text) == len("2027-01-31"):
        end = end.replace(tzinfo=UTC)
    if end.tzinfo is None:
        raise ConfigError(f"--expires: {text!r} has no time zone; end it with Z for UTC")
    if end <= datetime.now(UTC):
        raise ConfigError(f"--expires: {text!r} is over")
    return end
