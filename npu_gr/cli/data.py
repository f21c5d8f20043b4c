"""npu-gr load, kafka-ingest, store and erase-check: fill, check and search the history store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from npu_gr.cli.options import (
    API_KEY,
    AS_JSON,
    CONFIG,
    FILE,
    SET,
    VALUE_COLUMN,
    load_config,
    run_async,
)

if TYPE_CHECKING:
    from npu_gr.history_store.checksum import Found
    from npu_gr.history_store.load import Loaded
    from npu_gr.tools.erase_check import Searched

PATIENCE_S = 60.0  # retry a busy or restarting service for so long
CALL_PATIENCE_S = 5.0  # the same for one call of a consumer, which repeats a batch until it is done
SHOWN = 20  # lines about damage without --verbose


@click.command(short_help="Load a log into the history store.")
@click.option(
    "--config",
    "config_path",
    type=FILE,
    help="YAML configuration of the instance whose store is filled.",
)
@click.option("--url", help="Load through the service at this address instead.")
@SET
@click.argument("log", type=FILE)
@click.option("--tenant", default="", show_default=True, help="Tenant of all users in the log.")
@click.option(
    "--replace",
    is_flag=True,
    help="Replace all stored events of the log's users; other users stay.",
)
@VALUE_COLUMN
@API_KEY
def load(
    config_path: Path | None,
    url: str | None,
    overrides: tuple[str, ...],
    log: Path,
    tenant: str,
    replace: bool,
    value_column: str,
    api_key: str | None,
    files: Sequence[str] | None = None,
) -> None:
    """Load an interaction LOG into the history store; stored events are not added again.

    LOG is a file (.inter, .jsonl, .json) or a folder of npu-gr prepare. The model defines the
    actions and the features of events to load; stored events gain the features that they lack. If
    a running service has the embedded store open, the events are sent to it, at the address of the
    configuration. After an interruption, repeat the command.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from npu_gr.core.history import Mode
    from npu_gr.core.names import is_hashed
    from npu_gr.dataset import read_log
    from npu_gr.dataset.files import read_dataset
    from npu_gr.history_store.load import features_loaded, load_interactions
    from npu_gr.tools.ingest import open_target

    config = None if config_path is None else load_config(config_path, overrides)
    interactions = (
        read_log(log, value_column=value_column)
        if files is None  # else some files of a dataset: the caller knows that the others are there
        else read_dataset(log).interactions(files)
    )
    mode = Mode.REPLACE if replace else Mode.MERGE

    async def work(stack: ExitStack) -> Loaded:
        key = interactions.item_key if is_hashed(interactions.items).any() else None
        async with open_target(config, url, api_key, PATIENCE_S, key) as target:
            found = ", ".join(features_loaded(interactions, target.model.features))
            click.echo(
                f"loading into {target.about}{found and f'; features of events: {found}'}", err=True
            )
            columns = (
                TextColumn("events"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            console = Console(stderr=True)
            bars = stack.enter_context(
                Progress(*columns, console=console, disable=not console.is_terminal)
            )
            task = bars.add_task("", total=len(interactions))
            return await load_interactions(
                target.store,
                interactions,
                target.model.actions,
                tenant,
                mode,
                lambda num_events: bars.advance(task, num_events),
                target.model.features,
            )

    with ExitStack() as stack:
        done = asyncio.run(work(stack))
    rest = (
        f"{done.num_replaced} replaced"
        if replace
        else f"{done.num_known} events were already stored"
    )
    if done.num_filled:
        rest += f", of which {done.num_filled} gained features"
    click.echo(f"{done.num_users} users: {done.num_added} events added, {rest}")


@click.command(
    "kafka-ingest", short_help="Write events from Kafka into the history store, each once."
)
@click.option("--brokers", required=True, help="Brokers of Kafka, host:port, separated by commas.")
@click.option("--topic", "topics", required=True, multiple=True, help="Topic to read; repeatable.")
@click.option(
    "--group",
    default="npu_gr",
    show_default=True,
    help="Consumer group; its members share the partitions.",
)
@click.option(
    "--config",
    "config_path",
    type=FILE,
    help="YAML configuration of the instance whose store is filled.",
)
@click.option("--url", help="Write through the service at this address instead.")
@SET
@API_KEY
@click.option("--tenant", default="", help="Tenant of all users.")
@click.option(
    "--user",
    help="Field with the user, e.g. user_id or payload.user; default of this and the next three: "
    "guessed by name.",
)
@click.option("--item", help="Field with the item.")
@click.option("--event", help="Field with the action; required unless the model has one action.")
@click.option("--time", help="Field with the time; default: the broker's time.")
@click.option(
    "--feature",
    "features",
    multiple=True,
    help="Feature of events, NAME or NAME=FIELD; repeatable.",
)
@click.option(
    "--dead-letters",
    default="dead-letters.jsonl",
    show_default=True,
    type=FILE,
    help="File for messages that are not events.",
)
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Port for Prometheus.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option(
    "--security",
    default="PLAINTEXT",
    type=click.Choice(["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]),
    show_default=True,
    help="Security protocol of Kafka; SSL uses --ca, --cert and --cert-key.",
)
@click.option(
    "--sasl-mechanism",
    default="PLAIN",
    type=click.Choice(["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]),
    show_default=True,
)
@click.option("--sasl-username", help="User name; the password is read from NPU_GR_KAFKA_PASSWORD.")
def kafka_ingest(
    config_path: Path | None,
    url: str | None,
    overrides: tuple[str, ...],
    api_key: str | None,
    features: tuple[str, ...],
    **kafka: Any,
) -> None:
    """Write events from topics of Kafka into the history store, each once, until SIGTERM.

    A message is a JSON object of one event. Offsets are committed after the store has acknowledged;
    a message that is read twice is stored once. Messages that are not events go to the file of
    --dead-letters. While the store is busy, the command waits.
    """
    from npu_gr.tools.consume_message import Fields
    from npu_gr.tools.ingest import open_target
    from npu_gr.tools.kafka_ingest import ConsumeConfig, consume

    config = None if config_path is None else load_config(config_path, overrides)
    of_events = {
        name: field or name for name, _, field in (text.partition("=") for text in features)
    }
    fields = Fields(
        **{name: kafka.pop(name) for name in ("user", "item", "event", "time")}, features=of_events
    )
    where = ConsumeConfig(fields=fields, **kafka)
    done = run_async(
        lambda: consume(where, lambda: open_target(config, url, api_key, CALL_PATIENCE_S))
    )
    click.echo(", ".join(f"{count} {result}" for result, count in done.items()))


@click.command(short_help="Find damage in a history store, and save the intact entries.")
@click.argument("where")
@click.option(
    "--repair",
    "out",
    type=FILE,
    metavar="NEW",
    help="Save every intact entry into this new file.",
)
@click.option("--verbose", is_flag=True, help="Show user ids, and all lines.")
def store(where: str, out: Path | None, verbose: bool) -> None:
    """Compare every entry of WHERE, a file or redis://..., with its checksum.

    An embedded store must not be in use. With --repair the intact entries are saved into a new file
    and WHERE is not changed; a user with damaged events keeps the others, and idempotency keys are
    not saved. Exit code: 0 = no damage, 1 = damage, 2 = the store cannot be read. Users are shown
    by a hash, or with --verbose by their ids.
    """
    from npu_gr.core.calling import calling_files
    from npu_gr.history_store.embedded_check import check, repair
    from npu_gr.history_store.redis import check_redis

    is_url = "://" in where
    if out is not None:
        if is_url:
            raise click.UsageError("--repair takes a file; for Redis restore a replica or a backup")
        done = repair(Path(where), out)
        click.echo(
            f"saved {done.num_users} users with {done.num_events} events into {out}; "
            f"{done.num_lost} events are lost"
        )
        _show(done.bad_users, done.damage, verbose)
        sys.exit(1 if done.num_lost or done.bad_users or done.damage else 0)
    found: Found = (
        run_async(lambda: check_redis(where, calling_files())) if is_url else check(Path(where))
    )
    click.echo(
        f"{found.num_entries} entries: {found.num_users} users are intact, with "
        f"{found.num_events} events; {found.num_unchecked} entries have no checksum (older version)"
    )
    _show(found.bad_users, found.damage, verbose)
    sys.exit(1 if found.num_damaged else 0)


def _show(bad_users: set[bytes], damage: list[str], verbose: bool) -> None:
    from npu_gr.history_store.checksum import hashed

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
    return [
        part.decode("utf-8", "backslashreplace")
        for part in (key[4 : 4 + length], key[4 + length :])
    ]


@click.command("erase-check", short_help="Search all stores for an erased user.")
@click.argument("user")
@click.option("--tenant", default="", help="Tenant of the user.")
@CONFIG
@SET
@click.option("--logs", multiple=True, type=FILE, help="File with log lines; repeatable.")
@click.option("--url", "urls", multiple=True, help="Admin URL of an instance; repeatable.")
@AS_JSON
@API_KEY
def erase_check(
    user: str,
    tenant: str,
    config_path: Path,
    overrides: tuple[str, ...],
    logs: tuple[Path, ...],
    urls: tuple[str, ...],
    as_json: bool,
    api_key: str | None,
) -> None:
    """Search an instance's files, logs and processes for data of USER, who was erased.

    Run it on the machine with the files. It prints where data is left, never the data. Exit code:
    0 = nothing was found, 1 = something was found, 2 = nothing was found, but a place could not be
    searched.
    """
    import msgspec

    from npu_gr.core.history import UserKey
    from npu_gr.tools.erase_check import exit_code, search_files, search_memory, search_redis

    config = load_config(config_path, overrides)
    key = UserKey(tenant, user)

    async def search() -> list[Searched]:
        found = await asyncio.to_thread(search_files, config, key, logs)
        if config.history_store.kind == "redis":
            found += await search_redis(config.history_store, key)
        return found + await search_memory(key, urls, api_key)

    found = asyncio.run(search())
    code = exit_code(found)
    if as_json:
        click.echo(msgspec.json.encode({"exit_code": code, "places": found}))
    else:
        for one in found:
            click.echo(
                f"{one.verdict:<12}  {one.place:<10}  "
                f"{one.what}" + (f"  ({one.note})" if one.note else "")
            )
    sys.exit(code)
