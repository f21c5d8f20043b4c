"""npu-gr store: look for damage in a history store, and save what is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from npu_gr.cli.options import FILE, run_async

if TYPE_CHECKING:
    from npu_gr.features.damage import Found

SHOWN = 20  # lines about damage


@click.group()
def store() -> None:
    """Check and repair history stores. An embedded store must not be in use."""


@store.command("check")
@click.argument("where")
@click.option("--verbose", is_flag=True, help="Name the users, and every place.")
def check_store(where: str, verbose: bool) -> None:
    """Read every entry of WHERE, a file or redis://..., and compare it with its checksum.

    Exit code: 0 = no damage, 1 = damage, 2 = cannot be read at all. Users are named by a hash, or with --verbose.
    """
    from npu_gr.core.calling import calling_files
    from npu_gr.features.base import RedisTlsConfig
    from npu_gr.features.embedded_check import check
    from npu_gr.features.redis_check import check_redis

    is_url = where.startswith(("redis://", "rediss://", "unix://"))
    files = calling_files()
    tls = RedisTlsConfig(ca=files.ca, certificate=files.certificate, key=files.key)
    found: Found = run_async(lambda: check_redis(where, tls)) if is_url else check(Path(where))
    click.echo(
        f"{found.num_entries} entries: {found.num_users} users are whole, with {found.num_events} events; "
        f"{found.num_unchecked} entries are older than the checksums"
    )
    _show(found.bad_users, found.damage, verbose)
    sys.exit(1 if found.num_damaged else 0)


@store.command("repair")
@click.argument("path", type=FILE)
@click.option("--out", required=True, type=FILE, help="The new file; must not exist.")
@click.option("--verbose", is_flag=True, help="Name the users, and every place.")
def repair_store(path: Path, out: Path, verbose: bool) -> None:
    """Save every whole entry of the embedded store PATH into a new file. PATH itself is only read.

    A user who lost events keeps the others. Idempotency keys are not saved. Exit code: 0 = nothing was lost, 1 =
    something was, 2 = nothing can be saved.
    """
    from npu_gr.features.embedded_check import repair

    done = repair(path, out)
    click.echo(f"saved {done.num_users} users with {done.num_events} events into {out}; lost {done.num_lost} events")
    _show(done.bad_users, done.damage, verbose)
    sys.exit(1 if done.num_lost or done.bad_users or done.damage else 0)


def _show(bad_users: set[bytes], damage: list[str], verbose: bool) -> None:
    from npu_gr.features.damage import hashed

    if bad_users:
        click.echo(f"{len(bad_users)} users have damaged entries:")
    names = [str(tuple(_user(key))) if verbose else hashed(key) for key in sorted(bad_users)]
    for lines in (names, damage):
        shown = lines if verbose else lines[:SHOWN]
        for line in shown:
            click.echo(f"  {line}")
        if len(shown) < len(lines):
            click.echo(f"  and {len(lines) - len(shown)} more")


def _user(key: bytes) -> list[str]:
    length = int.from_bytes(key[:4], "big")
    return [part.decode("utf-8", "backslashreplace") for part in (key[4 : 4 + length], key[4 + length :])]
