"""npu-gr keys: create, list and revoke API keys."""

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
PREFIX = "ngr_"  # lets scanners for leaked secrets recognise a key
MAX_CHARACTERS = 512
# a copy: the module of `Scope` loads numpy
SCOPES = ("infer", "ingest", "erase", "observe", "admin")


@click.group()
def keys() -> None:
    """Create, list and revoke API keys.

    Running instances and routers apply changes of the file within a second.
    """


@keys.command("new", short_help="Create a key, add it to the file, and print it.")
@click.argument("name")
@KEY_FILE
@click.option(
    "--tenant",
    required=True,
    help="Tenant that the key is for; '*' = the tenant that each request names.",
)
@click.option(
    "--scope", "scopes", required=True, multiple=True, type=click.Choice(SCOPES), help="Repeatable."
)
@click.option("--rate-per-s", type=float, help="Limit of requests a second; default: no limit.")
@click.option(
    "--expires",
    help="Expiry: a day (UTC) or a time with a zone, e.g. 2027-01-31 or 2027-01-31T12:00:00Z.",
)
@click.option(
    "--from-stdin", is_flag=True, help="Read the key from standard input instead of creating one."
)
def new_key(
    name: str,
    path: Path,
    scopes: tuple[str, ...],
    expires: str | None,
    from_stdin: bool,
    **more: Any,
) -> None:
    """Create a key called NAME, add it to the file, and print it.

    The key is shown only once: the file has its hash.
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
    """List the keys of a file: name, start of the hash, tenant, scopes, rate limit, expiry."""
    from npu_gr.server.auth.keys import in_utc, read_keys

    now_at = datetime.now(UTC)
    rows = [("NAME", "SHA-256", "TENANT", "SCOPES", "PER SECOND", "EXPIRES")]
    for key in read_keys(path).keys:
        rate = "no limit" if key.rate_per_s is None else f"{key.rate_per_s:g}"
        end = in_utc(key) + (
            " (expired)" if key.expires is not None and key.expires <= now_at else ""
        )
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
    """Remove the key NAME from the file."""
    from npu_gr.server.auth.edit import revoke_key

    num_left = revoke_key(path, name)
    click.echo(f"revoked {name!r}; {path} has {num_left} keys left", err=True)
    if num_left == 0:
        click.echo(
            "no key is left: every request is rejected, and no instance starts with this file",
            err=True,
        )


def _from_stdin() -> str:
    """Read a key from standard input.

    Raises:
        ConfigError: The key is too short or too long, or has other than printable ASCII characters.
    """
    from npu_gr.core.errors import ConfigError
    from npu_gr.server.auth.keys import MIN_CHARACTERS

    key = sys.stdin.buffer.read(MAX_CHARACTERS + 3).rstrip(b"\r\n").decode(errors="replace")
    if not MIN_CHARACTERS <= len(key) <= MAX_CHARACTERS:
        raise ConfigError(
            f"the key on standard input must have {MIN_CHARACTERS} to {MAX_CHARACTERS} characters"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "the key on standard input may only have printable ASCII characters without spaces"
        )
    return key


def _future(text: str) -> datetime:
    """Parse the expiry of a key; a day means its first second in UTC.

    Raises:
        ConfigError: The text cannot be parsed, has no time zone, or is in the past.
    """
    from npu_gr.core.errors import ConfigError

    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--expires: {text!r} is neither a day (2027-01-31) nor a time (2027-01-31T12:00:00Z)"
        ) from None
    if len(text) == len("2027-01-31"):
        end = end.replace(tzinfo=UTC)
    if end.tzinfo is None:
        raise ConfigError(f"--expires: {text!r} has no time zone; end it with Z for UTC")
    if end <= datetime.now(UTC):
        raise ConfigError(f"--expires: {text!r} is in the past")
    return end
