"""npu-gr consume: events from topics of Kafka into the history store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from npu_gr.cli.options import API_KEY, FILE, SET, load_config, run_async


@click.command(short_help="Write events from Kafka into the history store, each once.")
@click.option("--brokers", required=True, help="Kafka's: host:port, separated by commas.")
@click.option("--topic", "topics", required=True, multiple=True, help="Repeat it for several.")
@click.option("--group", default="npu_gr", show_default=True, help="The consumer group: its members share the topics.")
@click.option("--config", "config_path", type=FILE, help="YAML configuration: whose store is filled.")
@click.option("--url", help="Write through the service at this address instead.")
@SET
@API_KEY
@click.option("--tenant", default="", help="Of all users.")
@click.option(
    "--user", help="Field with the user, e.g. user_id or payload.user; by default guessed, as the next three."
)
@click.option("--item", help="Field with the item.")
@click.option("--event", help="Field with what was done; needed unless the model has one action.")
@click.option("--time", "time_field", help="Field with the time; without one the broker's time counts.")
@click.option(
    "--feature", "features", multiple=True, help="Feature of events, NAME or NAME=FIELD; repeat it for several."
)
@click.option(
    "--dead-letters", default="dead-letters.jsonl", show_default=True, type=FILE, help="For what is no event."
)
@click.option("--dead-letter-topic", help="For the same, in the place of the file.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Answer Prometheus here.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option(
    "--security",
    default="PLAINTEXT",
    type=click.Choice(["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]),
    show_default=True,
    help="SSL trusts as --ca, --cert and --cert-key say.",
)
@click.option(
    "--sasl-mechanism",
    default="PLAIN",
    type=click.Choice(["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]),
    show_default=True,
)
@click.option("--sasl-username", help="Its password comes from NPU_GR_KAFKA_PASSWORD.")
def consume(
    config_path: Path | None,
    url: str | None,
    overrides: tuple[str, ...],
    api_key: str | None,
    tenant: str,
    user: str | None,
    item: str | None,
    event: str | None,
    time_field: str | None,
    features: tuple[str, ...],
    **kafka: Any,
) -> None:
    """Write events from topics of Kafka into the history store, each once, until SIGTERM.

    A message is a JSON object of one event. Offsets are committed once the store has acknowledged; a message that is
    read again counts once. What is no event goes to the dead letters. While the store has no room it waits.
    """
    from npu_gr.tools.consume.message import Fields
    from npu_gr.tools.consume.run import KafkaConfig, consume

    config = None if config_path is None else load_config(config_path, overrides)
    of_events = {name: field or name for name, _, field in (told.partition("=") for told in features)}
    fields = Fields(user=user, item=item, event=event, time=time_field, features=of_events)
    where = KafkaConfig(**kafka)
    done = run_async(lambda: consume(where, fields, tenant, config, url, api_key))
    click.echo(", ".join(f"{count} {result}" for result, count in done.items()))
